"""Checkpoints as other versions of Megatron lay them out, made from one that megtool wrote."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megtool.formats import open_checkpoint
from megtool.formats.torch_dist.layout import MegatronSave, plan_torch_dist_layout
from megtool.run_state.checkpoint_objects import encode_stored_object
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from megtool.transport.reading.reader import CheckpointReader

Materialize = Callable[[Any, Path, dict[str, Any]], None]

_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_BUCKET = re.compile(r"(.*\.dp_group_idx_\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)")


@dataclasses.dataclass
class MCoreMetadata(Metadata):
    """Megatron's own metadata, of cores 0.15 and before."""

    mcore_data: dict[str, dict[str, Any]] | None = None


def stored_arrays(c: Catalogue) -> dict[str, np.ndarray[Any, Any]]:
    """All stored tensors."""
    with CheckpointReader(c, Files()) as reader:
        return {t.name: np.array(reader.open_stored(t.name).read()) for t in c.tensors}


def as_fragments(
    source: Path,
    target: Path,
    materialize: Materialize,
    *,
    seed: int = 0,
    prefix: str = "",
    own_class: bool = True,
) -> None:
    """State as `fully_sharded_model_space` has it: flattened cells, one for each shard of the
    source, cut anywhere; the metadata is of core 0.15 (`own_class`) or before."""
    rng = random.Random(seed)
    c = open_checkpoint(source)
    tensors, rows, data = [], [], {}
    arrays = stored_arrays(c)
    for number, t in enumerate(c.tensors):
        own = c.shards.of(number)
        lo = c.shards.boxes.lo[own, : len(t.shape)]
        hi = c.shards.boxes.hi[own, : len(t.shape)]
        match = _STATE.fullmatch(t.name)
        if match is None:
            tensors.append(t)
            rows += [(number, a, b, 0) for a, b in zip(lo.tolist(), hi.tolist(), strict=True)]
            continue
        state = {"param": "fp32_param"}.get(match[1], match[1])
        name = f"{prefix}optimizer.state.{state}.{match[2]}"
        grid = [len(set(column)) for column in lo.T.tolist()]
        cell = [n // g for n, g in zip(t.shape, grid, strict=True)]
        size = int(np.prod(cell))
        split = [x for pair in zip(grid, cell, strict=True) for x in pair]
        dims = [*range(0, len(split), 2), *range(1, len(split), 2)]
        arrays[name] = arrays.pop(t.name).reshape(split).transpose(dims).reshape(*grid, size)
        tensors.append(GlobalTensor(name=name, shape=(*grid, size), dtype=t.dtype))
        data[name] = {"nd_reformulated_orig_global_shape": torch.Size(t.shape)}
        for at in np.ndindex(*grid):
            cuts = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 2)))})
            rows += [
                (number, [*at, a], [*(x + 1 for x in at), b], rng.randrange(2))
                for a, b in pairwise(cuts)
            ]
    common = dict(c.metadata["common"])
    kind = {"param_state_sharding_type": "fully_sharded_model_space"}
    common["optimizer"] = {**common["optimizer"], **kind}
    common["content_metadata"] = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
    laid = plan_torch_dist_layout(
        tensors,
        Shards.build(rows, widest(tensors)),
        num_files=2,
        megatron=MegatronSave(common=common, iteration=7),
    )
    materialize(laid, target, arrays)
    give_mcore_data(target / "iter_0000007", data, own_class)


def give_mcore_data(folder: Path, data: dict[str, Any], own_class: bool) -> None:
    """Add what old cores know of tensors to `.metadata`."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    if own_class:
        with importable():
            path.write_bytes(pickle.dumps(MCoreMetadata(**vars(found), mcore_data=data)))
    else:
        found.mcore_data = data
        path.write_bytes(pickle.dumps(found))


@contextmanager
def importable() -> Iterator[None]:
    """Let pickle find our stand-in for Megatron's class under its name."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    there = sys.modules.get(name)
    own = MCoreMetadata.__module__
    sys.modules[name] = fake = ModuleType(name)
    fake.MCoreMetadata = MCoreMetadata  # type: ignore[attr-defined]
    MCoreMetadata.__module__ = name
    try:
        yield
    finally:
        MCoreMetadata.__module__ = own
        del sys.modules[name]
        if there is not None:
            sys.modules[name] = there


def as_gathered(source: Path, target: Path, materialize: Materialize, *, tree: Any = None) -> None:
    """State in buckets (`dp_reshardable`) as `dp_zero_gather_scatter` has it: one object for each
    data-parallel group, which holds its buckets one after the other, or `tree` if given."""
    c = open_checkpoint(source)
    arrays = stored_arrays(c)
    groups: dict[str, dict[int, dict[str, list[Any]]]] = {}
    for t in sorted(c.tensors, key=lambda t: int((_BUCKET.fullmatch(t.name) or "0000")[3])):
        if match := _BUCKET.fullmatch(t.name):
            states = groups.setdefault(match[1], {}).setdefault(int(match[2]), {})
            states.setdefault(match[4], []).append(torch.from_numpy(arrays[t.name]))
    objects: dict[str, Any] = {
        name: encode_stored_object(c, o)
        for name, o in c.objects.items()
        if "per_bucket" not in name
    }
    for group, buffers in groups.items():
        held: dict[Any, Any] = {"buckets_coalesced": True}
        for number, states in buffers.items():
            joined: dict[str, Any] = {k: torch.cat(v) for k, v in states.items()}
            joined["numel_unpadded"] = len(joined["param"])
            held[number] = {(torch.bfloat16, torch.float32): joined}
        item = io.BytesIO()
        torch.save([held if tree is None else tree], item)
        objects[f"{group}.param_state/shard_0_1"] = item.getvalue()
    weights = [t for t in c.tensors if not _BUCKET.fullmatch(t.name)]
    number = {t.name: i for i, t in enumerate(weights)}
    rows = []
    for i, old in enumerate(c.shards.tensor.tolist()):
        name = c.tensors[old].name
        if name in number:
            ndim = len(c.tensors[old].shape)
            lo, hi = c.shards.boxes.lo[i, :ndim], c.shards.boxes.hi[i, :ndim]
            rows.append((number[name], lo.tolist(), hi.tolist(), 0))
    common = dict(c.metadata["common"])
    common["optimizer"] = {"param_state_sharding_type": "dp_zero_gather_scatter"}
    common["content_metadata"] = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
    laid = plan_torch_dist_layout(
        weights,
        Shards.build(rows, widest(weights)),
        num_files=1,
        objects=objects,
        megatron=MegatronSave(common=common, iteration=7),
    )
    materialize(laid, target, arrays)


def rename_tensors(
    source: Path, target: Path, materialize: Materialize, rename: Callable[[str], str]
) -> None:
    """The same checkpoint with other names of tensors."""
    c = open_checkpoint(source)
    tensors = [dataclasses.replace(t, name=rename(t.name)) for t in c.tensors]
    laid = plan_torch_dist_layout(
        tensors,
        Shards(c.shards.tensor, c.shards.boxes, np.zeros_like(c.shards.owner)),
        num_files=1,
        megatron=MegatronSave(common=c.metadata["common"], iteration=7),
    )
    materialize(laid, target, {rename(n): a for n, a in stored_arrays(c).items()})
