"""A training state of a few thousand parameters, as Megatron's save folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megtool.convert.config.hybrid import needs_hybrid, to_hybrid
from megtool.convert.language.binding import Binding
from megtool.convert.language.canonical import CanonicalModel
from megtool.convert.megatron.args import args_from_config
from megtool.convert.megatron.names import IN_PARTS, STACKED
from megtool.convert.megatron.sharding import shard
from megtool.dtypes import dtype
from megtool.formats.torch_dist.layout import MegatronSave, plan_torch_dist_layout
from megtool.options.layout import ParallelConfig
from megtool.pickles.reader import inert_global
from megtool.pickles.writer import make_namespace
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor

GROUPS = {
    "param_groups": [
        {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "lr": 1e-3, "step": 7},
        {"wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "lr": 1e-3, "step": 7},
    ]
}


def config(**more: Any) -> ModelConfig:
    """A small decoder; `more` replaces fields."""
    known: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 37,
        "max_positions": 32,
    }
    return ModelConfig.from_fields(**known | more)


def canonical_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of all tensors of a configuration."""
    view = CanonicalModel(model)
    out = {}
    for pattern, entry in view.vocabulary.items():
        if entry.flag is not None and not view.value(entry.flag):
            continue
        out |= {name: view.shape(pattern) for name in view.names(pattern)}
    return out


def write(
    folder: Path,
    model: ModelConfig,
    parallel: ParallelConfig,
    materialize: Callable[[Any, Path, dict[str, Any]], None],
    *,
    seed: int = 0,
    args: dict[str, Any] | None = None,
    objects: Mapping[str, bytes] | None = None,
    beside: Mapping[str, bytes] | None = None,
    small_state: Mapping[str, Any] | None = None,
) -> None:
    """Save weights, master weights and moments of random numbers, fully reshardable.

    `objects` are saved lists of one, `beside` small files, `small_state` more of the common state.
    """
    rng = np.random.default_rng(seed)
    shapes = canonical_tensors(model)
    canonical = {
        n: GlobalTensor(name=n, shape=s, dtype=dtype("bfloat16")) for n, s in shapes.items()
    }
    table = STACKED if layer_sets.is_homogeneous(model) else IN_PARTS
    stored = Binding(table, CanonicalModel(model)).write(canonical, pad_to=8 * parallel.tp).tensors
    if needs_hybrid(model):
        stored = [replace(t, name=to_hybrid(model)(t.name)) for t in stored]
    tensors: list[GlobalTensor] = []
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for t in stored:
        main = rng.standard_normal(t.shape, np.float32)
        if t.name.endswith(("word_embeddings.weight", "output_layer.weight")):
            main[..., model.embedding.vocab_size :, :] = 0
        main = (main.view("<u4") & 0xFFFFFFF0).view("<f4")
        kinds = {"": "bfloat16"} | dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), "float32")
        if t.name.endswith("expert_bias"):
            kinds = {"": "float32"}
        for state, kind in kinds.items():
            name = f"optimizer.state.{state}.{t.name}" if state else t.name
            tensors.append(GlobalTensor(name=name, shape=t.shape, dtype=dtype(kind)))
            if state in ("", "param"):
                value = main
            else:
                value = np.where(main == 0, 0, rng.standard_normal(t.shape)).astype("<f4")
            arrays[name] = value if kind == "float32" else to_bfloat16(value)
    more = {
        "transformer_impl": "transformer_engine",
        "make_vocab_size_divisible_by": 8,
        "params_dtype": inert_global("torch", "bfloat16"),
    }
    known = args_from_config(model, parallel, divisible_by=8, base_args=more | (args or {}))
    common = {
        "args": make_namespace(known),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {"optimizer": GROUPS, "param_state_sharding_type": "fully_reshardable"},
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }
    shards = shard(tensors, parallel, config=model)
    out = plan_torch_dist_layout(
        tensors,
        shards,
        num_files=parallel.world_size,
        objects=objects,
        small_files=beside,
        megatron=MegatronSave(common=common | dict(small_state or {}), iteration=7),
    )
    materialize(out, folder, arrays)


def to_bfloat16(value: Any) -> Any:
    """Bits of float32 numbers rounded to nearest even."""
    bits = value.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
