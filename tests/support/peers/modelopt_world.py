"""A world of gloo processes in which real ModelOpt quantizes, restores and saves a Megatron model.

    python modelopt_world.py OPTIONS-AS-JSON

`restore` is a folder that ModelOpt restores (`restore_sharded_modelopt_state`) and Megatron loads;
`quantize` names a configuration of ModelOpt's, `lora` is one of its adapters, `adapter` a folder
with one alone, and `load` the folder of the model's weights. `save` is the folder that ModelOpt and
Megatron save to. Rank 0 writes what quantizers have to `dump`, as a file of torch:
`{module.buffer: tensor}` of this rank, each weight as it is fake-quantized (`module.fake`), and
what the model computes (`logits`).
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import megatron_world
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from trained_world import pretend_cuda

SIZES = {"HIDDEN": 128, "HEADS": 4, "GROUPS": 2, "FFN": 256, "VOCAB": 384, "LAYERS": 2}
TOKENS = torch.arange(16).view(2, 8) * 7 % 256


def main() -> None:
    options = json.loads(sys.argv[1])
    for name, size in SIZES.items():
        setattr(megatron_world, name, size)
    run_ranks(work, options.get("world", 1), options)


def work(rank: int, options: dict[str, Any]) -> None:
    """One process."""
    pretend_cuda()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    layout = options.get("layout", {})
    parallel_state.initialize_model_parallel(
        layout.get("tp", 1),
        layout.get("pp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
    )
    torch.manual_seed(0)
    built = {"dtype": "bfloat16", "layers": SIZES["LAYERS"], "dropout": 0.0, **options}
    (model,) = megatron_world.build(layout, built)
    model = model.eval()
    prepare(model, options)
    if rank == 0 and "dump" in options:
        torch.save(collect(model, options), options["dump"])
    if "save" in options:
        save(rank, model, Path(options["save"]))
    dist.barrier()
    dist.destroy_process_group()


def prepare(model: Any, options: dict[str, Any]) -> None:
    """Restore a quantized checkpoint, or load a plain one and quantize it."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import restore_sharded_modelopt_state

    if "restore" in options:
        restore_sharded_modelopt_state([model], options["restore"])
        load(model, options["restore"])
        return
    if "load" in options:
        load(model, options["load"])
    if "adapter" in options:
        restore_sharded_modelopt_state([model], options["adapter"])
        load_adapter(model, options["adapter"])
        return
    if "lora" in options:
        add_lora(model, options["lora"])
        return
    config = getattr(mtq, options["quantize"])
    mtq.quantize(model, config, None if options.get("experts") else run)


def add_lora(model: Any, config: dict[str, Any]) -> None:
    """Adapters of ModelOpt's own, with random matrices."""
    import modelopt.torch.peft as mtpf

    mtpf.update_model(model, config)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def load_adapter(model: Any, folder: str) -> None:
    """Megatron's own load of the matrices of adapters alone."""
    from megatron.core import dist_checkpointing

    whole = model.sharded_state_dict()
    state = {n: t for n, t in whole.items() if ".lora_" in n and n.endswith(".weight")}
    loaded = dist_checkpointing.load({"model": state}, folder)["model"]
    missing, _ = model.load_state_dict(loaded, strict=False)
    if not state or [n for n in missing if ".lora_" in n and n.endswith(".weight")]:
        raise AssertionError(missing)


def load(model: Any, folder: str) -> None:
    """Megatron's own load, with its default strictness."""
    from megatron.core import dist_checkpointing

    state = {"model": model.sharded_state_dict()}
    model.load_state_dict(dist_checkpointing.load(state, folder)["model"])


def run(model: Any) -> torch.Tensor:
    """A pass over a few tokens."""
    positions = torch.arange(8).expand(2, 8)
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        return model(TOKENS, positions, mask)


def collect(model: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Buffers of quantizers and fake-quantized weights, as this rank has them."""
    out = {n: b.detach().float() for n, b in model.state_dict().items() if "_quantizer." in n}
    for name, module in model.named_modules():
        if not hasattr(module, "weight_quantizer"):
            continue
        out[f"{name}.weight"] = module.weight.detach().float()
        with contextlib.suppress(AssertionError, RuntimeError):  # FP4 needs a GPU
            out[f"{name}.fake"] = module.weight_quantizer(module.weight).detach().float()
    if options.get("world", 1) == 1 and not options.get("experts"):
        with contextlib.suppress(AssertionError, RuntimeError):
            out["logits"] = run(model).float()
    return out


def save(rank: int, model: Any, folder: Path) -> None:
    """As Megatron-LM saves: the model's state dict, and ModelOpt's state beside it."""
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state

    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 3}, str(folder))
    save_sharded_modelopt_state([model], str(folder), ("torch_dist", 1))


if __name__ == "__main__":
    main()
