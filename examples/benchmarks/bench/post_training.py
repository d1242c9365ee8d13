"""Post-training: jobs that quantize, distill or train a draft head, ours and ModelOpt's."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import rows_of_tokens, silence_transformers
from phases import Options, Phases

REPOSITORY = Path(__file__).resolve().parents[3]


def quantize_megatron(options: Options, phase: Phases) -> Options:
    """Quantize a Megatron checkpoint by a recipe, and write one that ModelOpt restores."""
    return _quantize(options, phase, to="torch_dist")


def quantize_folder(options: Options, phase: Phases) -> Options:
    """Quantize a Hugging Face folder by a recipe, with ModelOpt or megtool as the backend."""
    return _quantize(options, phase, to="hf", backend=options["backend"])


def _quantize(options: Options, phase: Phases, **how: Any) -> Options:
    import torch

    import megtool.commands.quantize
    import megtool.quant.calibration.calibrate
    import megtool.quant.modelopt.unit_solver
    import megtool.quantize.finalize
    import megtool.quantize.pipeline
    import megtool.quantize.verification.verify_folder  # noqa: F401  # peers' are imported before
    from megtool import quantize
    from megtool.quant.modelopt.load import import_modelopt

    if how.get("backend") == "modelopt":
        import_modelopt()

    torch.set_num_threads(options["threads"])
    with phase("job"):
        report = quantize(
            options["source"],
            options["destination"],
            recipe=options["recipe"],
            synthetic=True,
            samples=options["samples"],
            seq_length=options["length"],
            dtype=options["dtype"],
            fsync=False,
            **how,
        )
    return {"num_bytes": report.num_bytes}


def peer_quantize_megatron(options: Options, phase: Phases) -> Options:
    """The same by ModelOpt in Megatron-Core: a model that loads, is quantized and saved."""
    _silence()
    import torch
    import torch.distributed as dist

    own = sys.path[0]  # has a module `megatron`, too; saving starts processes that import this one
    sys.path[0] = str(REPOSITORY / "tests/support/peers")
    from trained_world import pretend_cuda

    torch.set_num_threads(options["threads"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pretend_cuda()
    import modelopt.torch.quantization as mtq
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state

    sys.path[0] = own
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.initialize_model_parallel()
    target = Path(options["destination"])
    with phase("job"):
        model = _megatron_model(options)
        state = {"model": model.sharded_state_dict()}
        model.load_state_dict(dist_checkpointing.load(state, options["source"])["model"])
        mtq.quantize(model, getattr(mtq, options["config"]), lambda m: _show(m, options))
        target.mkdir(parents=True)
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(target))
        save_sharded_modelopt_state([model], str(target), ("torch_dist", 1))
    return {}


def _megatron_model(options: Options) -> Any:
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes, dtype = options["sizes"], getattr(torch, options["dtype"])
    config = TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        ffn_hidden_size=sizes["ffn"],
        num_attention_heads=sizes["heads"],
        num_query_groups=sizes["kv_heads"],
        use_cpu_initialization=True,
        perform_initialization=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=sizes["vocab"],
        max_sequence_length=options["length"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return model.to(dtype).eval()


def _show(model: Any, options: Options) -> None:
    """A pass of a Megatron model over all rows."""
    import torch

    length = options["length"]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    with torch.inference_mode():
        for tokens in rows_of_tokens(options, options["sizes"]["vocab"]):
            model(tokens, torch.arange(length).expand_as(tokens), mask)


def peer_quantize_folder(options: Options, phase: Phases) -> Options:
    """The same by ModelOpt on transformers' model, and its export of a Hugging Face folder."""
    _silence()
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])

    def show(model: Any) -> None:
        with torch.inference_mode():
            for tokens in rows_of_tokens(options, options["sizes"]["vocab"]):
                model(tokens, use_cache=False)

    with phase("job"):
        dtype = getattr(torch, options["dtype"])
        model = AutoModelForCausalLM.from_pretrained(options["source"], dtype=dtype)
        mtq.quantize(model, getattr(mtq, options["config"]), show)
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=options["destination"])
    return {}


def finetune(options: Options, phase: Phases) -> Options:
    """Some steps of megtool's training, and what they leave."""
    import megtool.converters.llama
    import torch

    import megtool.commands.finetune
    import megtool.optim.distributed
    import megtool.optim.replicated
    import megtool.reshard.writers.torch_dist
    import megtool.train.loss_plot
    import megtool.train.resume_point
    import megtool.train.run  # noqa: F401  # what peers import is imported before
    from megtool import finetune

    if "eagle" in options["more"]:
        import modelopt.torch.speculative.plugins.hf_eagle  # noqa: F401
        import transformers  # noqa: F401
    torch.set_num_threads(options["threads"])
    with phase("job"):
        report = finetune(
            options["source"],
            options["destination"],
            data=[options["data"]],
            seq_length=options["length"],
            train_iters=options["steps"],
            global_batch_size=options["samples"],
            micro_batch_size=options["samples"],
            lr=1e-4,
            packing=False,
            threads=options["threads"],
            fsync=False,
            **options["more"],
        )
    return {"loss": report.last_loss}


def peer_draft_head(options: Options, phase: Phases) -> Options:
    """The same steps of ModelOpt's EAGLE-3 head on transformers' model, and its export."""
    _silence()
    import modelopt.torch.speculative as mtsp
    import modelopt.torch.speculative.plugins.hf_eagle  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from megtool.source.open import open_decoder
    from megtool.train.features.eagle_head import make_eagle_config

    torch.set_num_threads(options["threads"])
    known = open_decoder(options["source"]).config
    config = make_eagle_config({}, known, torch.float32, file="default")
    with phase("job"):
        base = AutoModelForCausalLM.from_pretrained(options["source"], dtype=torch.float32)
        model = mtsp.convert(base, [("eagle", config | {"eagle_offline": False})])
        # ModelOpt 0.47 calls a constructor that transformers 5 no longer has.
        model.eagle_module.rotary_emb = LlamaRotaryEmbedding(config=model.eagle_config)
        model.train()
        loss = _train(model.eagle_module, options, lambda tokens: model(input_ids=tokens).loss)
        model.get_exporter().export(options["destination"])
    return {"loss": loss}


def peer_distillation(options: Options, phase: Phases) -> Options:
    """The same steps of ModelOpt's distillation between transformers' models."""
    _silence()
    import modelopt.torch.distill as mtd
    import torch
    from transformers import AutoModelForCausalLM

    class LogitsLoss(mtd.LogitsDistillationLoss):  # type: ignore[misc]
        def forward(self, student: Any, teacher: Any) -> Any:
            return super().forward(student.logits, teacher.logits)

    torch.set_num_threads(options["threads"])
    with phase("job"):
        student, teacher = (
            AutoModelForCausalLM.from_pretrained(options[n], dtype=torch.float32)
            for n in ("source", "teacher")
        )
        model = mtd.convert(
            student,
            mode=[
                (
                    "kd_loss",
                    {
                        "teacher_model": teacher,
                        "criterion": LogitsLoss(),
                        "loss_balancer": None,
                    },
                )
            ],
        )
        model.train()

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            model(tokens, use_cache=False)
            return model.compute_kd_loss()

        loss = _train(model, options, loss_of)
        mtd.export(model).save_pretrained(options["destination"])
    return {"loss": loss}


def _train(module: Any, options: Options, loss_of: Callable[[Any], Any]) -> float:
    """Steps of AdamW over the parameters of a module that want gradients."""
    import torch

    wanted = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=1e-4, fused=True)
    loss = torch.zeros(())
    made = torch.Generator().manual_seed(0)
    size = options["samples"], options["length"]
    for _ in range(options["steps"]):
        tokens = torch.randint(0, options["sizes"]["vocab"], size, generator=made)
        loss = loss_of(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    target = Path(options["destination"])
    target.mkdir(parents=True)
    torch.save(optimizer.state_dict(), target / "optimizer.pt")  # as transformers' Trainer does
    return float(loss)


def _silence() -> None:
    warnings.simplefilter("ignore")
    silence_transformers()
