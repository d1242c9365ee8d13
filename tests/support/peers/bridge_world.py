"""A world of gloo processes in which Megatron-Bridge's adapters are on a GPT of megatron-core.

    PYTHONPATH=BRIDGE python bridge_world.py save|load FOLDER [options as JSON]

`save` writes `base`, a checkpoint of the model, `adapter`, one of adapters alone with the settings
in run_config.yaml, and `logits.pt`, what both compute of `TOKENS`. `load` reads `adapter` and
`base` and compares what they compute with `logits.pt`. Adapters are those of Megatron-Bridge's own
code; Transformer Engine, which its modules import, is a stand-in without a function.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import types
from dataclasses import fields
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
WORLD = runpy.run_path(str(HERE / "megatron_world.py"), run_name="world")
LAYERS, HIDDEN, HEADS, GROUPS = (WORLD[k] for k in ("LAYERS", "HIDDEN", "HEADS", "GROUPS"))
FFN, VOCAB, ITERATION = (WORLD[k] for k in ("FFN", "VOCAB", "ITERATION"))
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def import_adapters() -> dict[str, Any]:
    """Megatron-Bridge's classes of adapters, without the rest of the package."""
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401  # finds no stand-in

    engine = types.ModuleType("transformer_engine")
    inner = types.ModuleType("transformer_engine.pytorch")
    for module in (engine, inner):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    parts = {
        "Linear": type("Linear", (torch.nn.Linear,), {}),
        "LayerNormLinear": type("LayerNormLinear", (torch.nn.Linear,), {}),
        "ops": types.SimpleNamespace(Sequential=torch.nn.Sequential),
    }
    vars(inner).update(parts)
    vars(engine).update(pytorch=inner)
    import megatron

    package = types.ModuleType("megatron.bridge")
    package.__path__ = [f"{path}/bridge" for path in megatron.__path__]
    sys.modules["megatron.bridge"] = package
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.transformer.moe import moe_utils

    utils.HAVE_TE = False  # megatron-core has placeholders of its layers
    moe_utils.te_general_gemm = None
    return {"LoRA": LoRA, "CanonicalLoRA": CanonicalLoRA}


def main() -> None:
    action, folder = sys.argv[1:3]
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    sys.path.insert(0, str(HERE))
    from gloo_ranks import run_ranks

    run_ranks(work, options.get("tp", 1), action, folder, options)


def work(rank: int, action: str, folder: str, options: dict[str, Any]) -> None:
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import parallel_state

    layout = {"tp": options.get("tp", 1)}
    parallel_state.initialize_model_parallel(layout["tp"])
    adapters = import_adapters()
    chunk = WORLD["build"](layout, {**options, "dropout": 0.0})[0]
    (save if action == "save" else load)(rank, Path(folder), chunk, adapters, options)
    dist.barrier()
    dist.destroy_process_group()


def adapted(chunk: Any, adapters: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """The model with adapters, and their settings."""
    settings = adapters[options["kind"]](**options["peft"])
    model = settings(chunk, training=False)
    settings.set_params_to_save(model)
    return model, settings


def group_experts(chunk: Any) -> None:
    """Give every layer megatron-core's `TEGroupedMLP` with the weights of its experts.

    The products of Transformer Engine's `GroupedLinear` are torch's, in a layer of the classes that
    Megatron-Bridge has adapters for.
    """
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    class Grouped:
        def __init__(self, count: int, inner: int, out: int, *, config: Any, **_: Any) -> None:
            torch.nn.Module.__init__(self)
            self.config, self.input_size, self.output_size = config, inner, out
            self.num_gemms = count

        def forward(self, x: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
            weights = (getattr(self, f"weight{n}") for n in range(self.num_gemms))
            parts = zip(x.split(counts), weights, strict=True)
            return torch.cat([torch.nn.functional.linear(*pair) for pair in parts]), None

        def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {}

    column = type("Column", (Grouped, ColumnParallelLinear), {})
    row = type("Row", (Grouped, RowParallelLinear), {})
    for layer in chunk.decoder.layers:
        experts = layer.mlp.experts
        groups = SimpleNamespace(ep=experts.ep_group, expt_tp=experts.tp_group)
        parts = MLPSubmodules(linear_fc1=column, linear_fc2=row)
        layer.mlp.experts = TEGroupedMLP(
            experts.num_local_experts, layer.config, parts, pg_collection=groups
        )
        for number, expert in enumerate(experts.local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                weight = getattr(expert, name).weight
                setattr(getattr(layer.mlp.experts, name), f"weight{number}", weight)


def logits(model: Any) -> torch.Tensor:
    """What all ranks compute of `TOKENS`, in their order."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, random

    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # nothing is dropped
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    mask = torch.ones(TOKENS.shape[1], TOKENS.shape[1], dtype=torch.bool).triu(1)[None, None]
    model.eval()
    with torch.no_grad():
        return gather_from_tensor_model_parallel_region(model(TOKENS, positions, mask))


def save_tensors(
    rank: int, into: Path, state: dict[str, Any], tp: int, experts: int | None
) -> None:
    from megatron.core import dist_checkpointing

    if rank == 0:
        into.mkdir(parents=True)
        (into.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    args = argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        swiglu=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        make_vocab_size_divisible_by=VOCAB // tp,
        position_embedding_type="rope",
        transformer_impl="local",
        tensor_model_parallel_size=tp,
        params_dtype=torch.float32,
        num_experts=experts,
        moe_ffn_hidden_size=24 if experts else None,
        moe_router_topk=2,
    )
    common = {"iteration": ITERATION, "args": args, "checkpoint_version": 3.0}
    dist_checkpointing.save({"model": state, **common}, str(into))


def of_adapters(state: dict[str, Any], settings: Any) -> dict[str, Any]:
    """What Megatron-Bridge's `apply_peft_adapter_filter_to_state_dict` leaves."""
    return {
        name: value
        for name, value in state.items()
        if settings.adapter_key_filter(name) and "_extra_state" not in name
    }


def save(
    rank: int, folder: Path, chunk: Any, adapters: dict[str, Any], options: dict[str, Any]
) -> None:
    WORLD["fill"]({"model": chunk.sharded_state_dict()})
    tp, experts, name = options.get("tp", 1), options.get("experts"), f"iter_{ITERATION:07d}"
    save_tensors(rank, folder / "base" / name, chunk.sharded_state_dict(), tp, experts)
    if options.get("grouped"):
        group_experts(chunk)
    model, settings = adapted(chunk, adapters, options)
    for n, (key, parameter) in enumerate(model.named_parameters()):
        if ".adapter." in key:
            generator = torch.Generator().manual_seed(100 * n + rank)
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    into = folder / "adapter" / name
    save_tensors(rank, into, of_adapters(model.sharded_state_dict(), settings), tp, experts)
    out = logits(model)
    if rank == 0:
        torch.save(out, folder / "logits.pt")
        kind = type(settings)
        values = {f.name: getattr(settings, f.name) for f in fields(kind) if f.init}
        content = {
            "peft": {"_target_": f"{kind.__module__}.{kind.__qualname__}", **values},
            "model": {"tensor_model_parallel_size": tp},
        }
        (into / "run_config.yaml").write_text(json.dumps(content, default=repr))


def load(
    rank: int, folder: Path, chunk: Any, adapters: dict[str, Any], options: dict[str, Any]
) -> None:
    import yaml
    from megatron.core import dist_checkpointing

    base = {"model": chunk.sharded_state_dict()}
    where = str(folder / f"base/iter_{ITERATION:07d}")
    chunk.load_state_dict(dist_checkpointing.load(base, where)["model"])
    (into,) = (folder / "adapter").glob("iter_*")
    settings = yaml.safe_load((into / "run_config.yaml").read_text())
    if settings["model"].get("moe_grouped_gemm"):
        group_experts(chunk)
    section = settings["peft"]
    kind = section.pop("_target_").rpartition(".")[2]
    model, settings = adapted(chunk, adapters, {"kind": kind, "peft": section})
    state = {"model": of_adapters(model.sharded_state_dict(), settings)}
    loaded = dist_checkpointing.load(state, str(into))["model"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    if unexpected or [n for n in missing if ".adapter." in n and "_extra_state" not in n]:
        raise AssertionError((missing, unexpected))
    out = logits(model)
    wanted = torch.load(folder / "logits.pt")
    torch.testing.assert_close(out, wanted, atol=1e-2, rtol=1e-3)
    if rank == 0:
        print(f"loaded {len(loaded)} tensors")


if __name__ == "__main__":
    main()
