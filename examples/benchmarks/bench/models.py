"""Models: jobs that run one, ours or a peer's; see `job.py`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from phases import Options, Phases


def forward(options: Options, phase: Phases) -> Options:
    """Load a decoder, whole or on demand, and run one forward pass over so many tokens."""
    import torch

    from megtool.inference.load import load
    from megtool.model.batch import Batch
    from megtool.source.open import open_source

    torch.set_num_threads(options["threads"])
    with phase("load"):
        opened = open_source(Path(options["source"]), optimizer=False)
        source = opened
        decoder = load(source, stream_layers=options["stream_layers"], threads=options["threads"])
    tokens = torch.arange(options["tokens"]).unsqueeze(0)
    with phase("forward"), torch.inference_mode():
        decoder(Batch(tokens_BS=tokens), last_only=True)
    return {"num_bytes": opened.catalogue.num_bytes}


def peer_forward(options: Options, phase: Phases) -> Options:
    """The same by transformers, whose weights stay mapped from the files, or `copied` from them."""
    import torch
    from transformers import LlamaForCausalLM

    silence_transformers()
    torch.set_num_threads(options["threads"])
    with phase("load"):
        model = LlamaForCausalLM.from_pretrained(options["source"], dtype="auto")
        for parameter in model.parameters() if options["copied"] else ():
            parameter.data = parameter.data.clone()
    tokens = torch.arange(options["tokens"]).unsqueeze(0)
    with phase("forward"), torch.inference_mode():
        model(tokens, logits_to_keep=1)
    return {}


def calibrate(options: Options, phase: Phases) -> Options:
    """Show a model random tokens, layer by layer, and settle what becomes of it."""
    import torch

    from megtool.model.batch import Batch
    from megtool.quant.calibration.calibrate import calibrate
    from megtool.quant.calibration.fingerprint import Fingerprint
    from megtool.quant.calibration.settings import CalibrationMethod
    from megtool.quant.resolve import resolve_recipe
    from megtool.quant.statistics.activation_sites import list_activation_sites

    torch.set_num_threads(options["threads"])
    with phase("load"):
        decided = resolve_recipe(options["source"], options["recipe"])
        config = decided.source.known_config
        if config is None:
            raise SystemExit("no model")
        source = decided.source
        points = list_activation_sites(decided.modules.modules, config)
    batches = [Batch(tokens_BS=t) for t in rows_of_tokens(options, config.embedding.vocab_size)]
    with phase("calibrate"):
        found = calibrate(
            source,
            decided.matched.decisions,
            decided.recipe,
            points,
            batches,
            fingerprint=Fingerprint(model="", recipe="", data=""),
            settings=CalibrationMethod(dtype=options["dtype"], threads=options["threads"]),
        )
    amax = {
        name: float(s.amax.max())
        for name, s in found.statistics.items()
        if name.startswith("layers.0.") and not name.endswith(".kv")
    }
    return {"num_tokens": found.num_tokens, "amax": amax}


def peer_calibrate(options: Options, phase: Phases) -> Options:
    """The same by NVIDIA ModelOpt on transformers' model, its scales of FP8."""
    import warnings

    warnings.simplefilter("ignore")
    import modelopt.torch.quantization as mtq
    import torch
    from transformers import LlamaForCausalLM

    silence_transformers()
    torch.set_num_threads(options["threads"])
    with phase("load"):
        kind = getattr(torch, options["dtype"])
        model = LlamaForCausalLM.from_pretrained(options["source"], dtype=kind)
    batches = rows_of_tokens(options, model.config.vocab_size)

    def show(model: torch.nn.Module) -> None:
        with torch.inference_mode():
            for tokens in batches:
                model(tokens, use_cache=False)

    with phase("calibrate"):
        mtq.quantize(model, mtq.FP8_DEFAULT_CFG, show)
    layer = model.model.layers[0]
    named = {
        "layers.0.attn.qkv": layer.self_attn.q_proj,
        "layers.0.attn.o": layer.self_attn.o_proj,
        "layers.0.mlp.fc1": layer.mlp.gate_proj,
        "layers.0.mlp.down": layer.mlp.down_proj,
    }
    amax = {name: float(module.input_quantizer.amax) for name, module in named.items()}
    return {"num_tokens": sum(t.numel() for t in batches), "amax": amax}


def silence_transformers() -> None:
    """Have transformers show errors alone, and no progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def rows_of_tokens(options: Options, vocab: int) -> list[Any]:
    """Random tokens, about 2048 at a time."""
    import torch

    made = torch.Generator().manual_seed(0)
    samples, length = options["samples"], options["length"]
    tokens = torch.randint(0, vocab, (samples, length), generator=made)
    return list(tokens.split(max(1, 2048 // length)))


def cross_entropy(options: Options, phase: Phases) -> Options:
    """The mean loss of a linear head with its gradients, some times over, by `options["way"]`."""
    import torch
    import torch.nn.functional as F

    from megtool.kernels.vocabulary.cross_entropy import linear_cross_entropy

    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    device, size = torch.device(options["device"]), options["vocab"]
    made = {"dtype": getattr(torch, options["dtype"]), "device": device}
    x = torch.randn(options["tokens"], options["hidden"], **made).requires_grad_()
    weight = torch.randn(size, options["hidden"], **made).mul_(0.02).requires_grad_()
    labels = torch.randint(0, size, (options["tokens"],), device=device)

    def loss() -> torch.Tensor:
        if options["way"] == "megtool":
            return linear_cross_entropy(x, weight, labels, vocab_size=size).mean()
        if options["way"] == "torch in chunks":
            chunked = torch.nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(x, weight, labels, options=chunked)
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    # On a CPU its own time: a busy machine would be measured otherwise.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    with phase("job"):
        for _ in range(options["repeat"]):
            x.grad = weight.grad = None
            began = clock()
            found = loss()
            found.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - began)
    on_device = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    norms = [float(t.grad.float().norm()) for t in (x, weight) if t.grad is not None]
    facts = {"loss": float(found), "norms": norms, "seconds": min(seconds), "on_device": on_device}
    return facts


def gradient_accumulation(options: Options, phase: Phases) -> Options:
    """Backward passes of a decoder's micro-batches, with the optimizer's fusion or without."""
    import torch

    from megtool.convert.families.detection import family
    from megtool.model.batch import Batch
    from megtool.model.stacks.decoder import Decoder
    from megtool.optim.config import OptimizerConfig
    from megtool.optim.distributed import DistributedOptimizer
    from megtool.parallel.process_groups import ProcessGroups

    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    hidden = options["hidden"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": options["layers"],
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 8 * hidden,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    made = family("llama").read_config(config)
    decoder = Decoder(made, device="cpu", dtype=getattr(torch, options["dtype"]))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
    optimizer = DistributedOptimizer(
        decoder.named_parameters(),
        OptimizerConfig(gradient_accumulation_fusion=options["fuse"]),
        ProcessGroups.alone(),
        chunks=[decoder],
    )
    for buffer in optimizer.buffers:
        buffer.grads.fill_(1.0)  # its memory is there before the passes
    seconds = []
    with phase("job"):
        for _ in range(options["repeat"]):
            optimizer.zero_grad()
            optimizer.begin(options["passes"])
            spent = 0.0
            for n in range(options["passes"]):
                generator = torch.Generator().manual_seed(n)
                shape = (1, options["tokens"])
                tokens_BS = torch.randint(0, 8 * hidden, shape, generator=generator)
                loss, _ = decoder.loss(Batch(tokens_BS=tokens_BS), tokens_BS)
                began = time.process_time()
                loss.backward()  # type: ignore[no-untyped-call]
                spent += time.process_time() - began
            seconds.append(spent)
    sums = [
        float(m.grad.double().sum())
        for b in optimizer.buffers
        for k in b.buckets
        for m in k.members
    ]
    return {"seconds": min(seconds), "sums": sums}
