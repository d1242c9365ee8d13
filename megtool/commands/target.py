"""The target of a reshard: format and dialect, tensors, their cuts, and what lies beside them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import Catalogue, Destination
from megtool.checkpoint.formats import named
from megtool.checkpoint.formats.safetensors import lay_out as lay_out_safetensors
from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.formats.torch_dist_layout import lay_out as lay_out_ranks
from megtool.checkpoint.plan import Dropped, Fill
from megtool.commands.megatron_state import (
    EMPTY,
    carried_objects,
    common_state,
    divisible_by,
    extra_states,
    is_empty_state,
    lost_state,
    source_layout,
)
from megtool.commands.names import renamed
from megtool.commands.opened import Opened
from megtool.commands.small_files import files_beside_ranks, hugging_face_files
from megtool.config import ParallelConfig
from megtool.convert.dialects import TargetSide, detect_dialect, is_optimizer_state, write_side
from megtool.convert.megatron import is_megatron
from megtool.convert.megatron_args import megatron_limits
from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import MappingError, UsageError
from megtool.tensors.sharded import GlobalTensor, Shards, widest

_LOG = logging.getLogger(__name__)
_CUT_BY_RANKS = ("torch_dist", "dcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; sizes of parallel axes are None where nothing was said."""

    to: str | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    dp: int | None = None
    dtype: DType | None = None
    max_shard_bytes: int = 5_000_000_000
    renames: Sequence[str] = ()
    destination: Path = Path()


@dataclass(slots=True, kw_only=True)
class Target:
    """A destination laid out, and how it relates to the canonical tensors."""

    format: str
    dialect: str
    parallel: ParallelConfig | None
    side: TargetSide
    destination: Destination
    fills: list[Fill]
    dropped: list[Dropped] = field(default_factory=list)
    is_file: bool = False
    sidecar_folder: str = ""


def choose_format(source: Catalogue, to: str | None) -> str:
    """The format to write: the one asked for, or the source's own (`hf` for GGUF).

    Raises:
        UsageError: the format is unknown, or megtool only reads it.
    """
    name = to or ("hf" if source.format == "gguf" else source.format)
    if not named(name).writable:
        raise UsageError(f"format {name!r} can be read but not written", hint="--to hf")
    return name


def make_target(source: Opened, request: Request) -> Target:
    """Decide what to write, down to the last byte that is not tensor data.

    Raises:
        UsageError: options that make no sense together.
        LayoutError: the layout does not divide the model.
        MappingError: the target needs a family that is not known.
    """
    kind = choose_format(source.catalogue, request.to)
    dialect = _dialect(source, kind)
    parallel = _parallel(source, request, kind)
    dtype = request.dtype
    if dtype is None and any(t.packing for t in source.catalogue.tensors):
        dtype = named_dtype("bfloat16")
    cut = parallel if dialect == "megatron" or _is_megatron(source) else None
    side = write_side(
        source.side,
        dialect=dialect,
        family=source.model.family if source.model else None,
        config=source.model.config if source.model else None,
        dtype=dtype,
        parallel=cut,
        divisible_by=divisible_by(source.catalogue),
    )
    if request.renames:
        side = _renamed(side, request.renames)
    if source.model is not None and kind == "torch_dist" and source.side.dialect != "megatron":
        for limit in megatron_limits(source.model.config):
            _LOG.warning("%s", limit)
    out = Target(
        format=kind,
        dialect=dialect,
        parallel=parallel,
        side=side,
        destination=Destination(catalogue=source.catalogue, fragments=[]),
        fills=[_fill(f.placement.stored, f.placement, f.value) for f in side.fills],
        dropped=_dropped_tensors(source, side),
    )
    if kind in ("hf", "safetensors"):
        _lay_out_safetensors(source, request, out, dtype)
    else:
        _lay_out_ranks(source, out, dtype)
    return out


def _dialect(source: Opened, kind: str) -> str:
    """How the target's tensors are named."""
    own = source.side.dialect
    if kind == "torch_dist":
        wanted = "megatron"
    elif kind == "hf":
        wanted = "hf"
    else:
        wanted = "hf" if own == "gguf" else own
    if own != "identity":
        return wanted
    named_so = detect_dialect([t.name for t in source.catalogue.tensors])
    if kind in ("dcp", "safetensors") or named_so == wanted:
        return "identity"
    reason = source.reason
    raise MappingError(
        f"writing {kind!r} needs the model's family: "
        + (reason.message if reason else "nothing says which it is"),
        file=source.path,
        hint=(reason.hint if reason and reason.hint else None)
        or "--family NAME and --like HF_FOLDER supply it",
    )


def _is_megatron(source: Opened) -> bool:
    return is_megatron(t.name for t in source.catalogue.tensors)


def _parallel(source: Opened, request: Request, kind: str) -> ParallelConfig | None:
    """The layout asked for; what was not said stays as the source's args have it, else 1."""
    asked = {k: getattr(request, k) for k in ("tp", "pp", "vpp", "ep", "dp")}
    if kind not in _CUT_BY_RANKS:
        if said := [k for k, v in asked.items() if v is not None and v != 1]:
            raise UsageError(
                f"--{said[0]} means nothing for --to {kind}, whose files hold whole tensors",
                hint="--max-shard-size sets how many files there are",
            )
        return None
    if (
        kind == "dcp"
        and not _is_megatron(source)
        and (said := [k for k in ("tp", "pp", "vpp", "ep") if asked[k] not in (None, 1)])
    ):
        raise UsageError(
            f"--{said[0]} needs Megatron's names", hint="--dp N cuts tensors into N ranks' rows"
        )
    known = source_layout(source.catalogue)
    merged = {k: v if v is not None else known.get(k) for k, v in asked.items()}
    if merged["vpp"] is not None and merged["vpp"] > 1 and asked["vpp"] is None and asked["pp"]:
        merged["vpp"] = None
    if asked["dp"] is None:
        merged["dp"] = None
    return ParallelConfig(**{k: v for k, v in merged.items() if v is not None})


def _renamed(side: TargetSide, renames: Sequence[str]) -> TargetSide:
    """The same tensors under the names the user gives them."""
    new = dict(
        zip(
            (t.name for t in side.tensors),
            renamed([t.name for t in side.tensors], renames),
            strict=True,
        )
    )
    return replace(
        side,
        tensors=[replace(t, name=new[t.name]) for t in side.tensors],
        placements={n: replace(p, stored=new[p.stored]) for n, p in side.placements.items()},
        fills=[
            replace(f, placement=replace(f.placement, stored=new[f.placement.stored]))
            for f in side.fills
        ],
    )


def _fill(stored: str, placement: Any, value: float) -> Fill:
    lo = tuple(placement.base)
    hi = tuple(b + n for b, n in zip(placement.base, placement.shape, strict=True))
    return Fill(stored=stored, lo=lo, hi=hi, value=value)


def _dropped_tensors(source: Opened, side: TargetSide) -> list[Dropped]:
    """Stored tensors that the target does not hold, each with its reason.

    What a family's table leaves out (a tied copy, rotary frequencies) is no loss.
    """
    catalogue = source.catalogue
    out = [
        Dropped(
            name=name,
            reason=reason,
            num_bytes=catalogue[name].num_bytes,
            is_lost=is_optimizer_state(name),
        )
        for name, reason in source.side.dropped
    ]
    used = {source.side.placements[c].stored for c in side.placements}
    for canonical, reason in side.dropped:
        stored = source.side.placements[canonical].stored
        if stored not in used:
            used.add(stored)
            out.append(Dropped(name=stored, reason=reason, num_bytes=catalogue[stored].num_bytes))
    return out


# ---- Hugging Face folders and bare safetensors files


def _lay_out_safetensors(
    source: Opened, request: Request, out: Target, dtype: DType | None
) -> None:
    single = request.destination.name if out.format == "safetensors" else None
    small = {} if single else hugging_face_files(source, dtype)
    out.is_file = single is not None
    out.destination = lay_out_safetensors(
        out.side.tensors,
        max_shard_bytes=request.max_shard_bytes,
        small=small,
        single_file=single,
    )
    for name in source.catalogue.objects:
        empty = is_empty_state(source.catalogue, name)
        reason = EMPTY if empty else f"{out.format!r} holds tensors and small files alone"
        out.dropped.append(Dropped(name=name, reason=reason, is_lost=not empty))
    out.dropped += lost_state(source.catalogue, out.format)


# ---- torch.distributed checkpoints, Megatron's and plain ones


def _lay_out_ranks(source: Opened, out: Target, dtype: DType | None) -> None:
    parallel = out.parallel or ParallelConfig()
    megatron = out.format == "torch_dist"
    shards = out.side.shards
    if shards is None:
        shards = rows_over_ranks(out.side.tensors, parallel.dp)
    num_files = max(parallel.world_size, int(shards.owner.max(initial=0)) + 1)
    small = files_beside_ranks(source, dtype)
    carried, lost = carried_objects(source.catalogue, parallel)
    out.dropped += lost
    objects: dict[str, Any] = dict(carried)
    if megatron and source.catalogue.format != "torch_dist":
        objects |= extra_states(out.side.tensors, objects)
    iteration = source.catalogue.metadata.get("iteration")
    if not isinstance(iteration, int) or source.catalogue.root.name == folder_name(None):
        iteration = None
    common = common_state(source, parallel, out.side.tensors, dtype) if megatron else None
    if not megatron:
        out.dropped += lost_state(source.catalogue, out.format)
    out.destination = lay_out_ranks(
        out.side.tensors,
        shards,
        num_files=num_files,
        objects=objects,
        common=common,
        iteration=iteration,
        small=small,
        key_paths=source.catalogue.metadata.get("planner_data"),
        megatron=megatron,
    )
    if megatron:
        out.sidecar_folder = folder_name(iteration)


def rows_over_ranks(tensors: Sequence[GlobalTensor], ranks: int) -> Shards:
    """Cut each tensor's first dimension as torch's fully sharded data parallel does: `ranks` near
    equal chunks, the last ones possibly empty; 0-d tensors belong to rank 0."""
    rows = []
    for number, t in enumerate(tensors):
        zeros = [0] * len(t.shape)
        if not t.shape or not t.numel:
            rows.append((number, zeros, list(t.shape), 0))
            continue
        step = math.ceil(t.shape[0] / ranks)
        for rank, start in enumerate(range(0, t.shape[0], step)):
            end = min(start + step, t.shape[0])
            rows.append((number, [start, *zeros[1:]], [end, *t.shape[1:]], rank))
    return Shards.build(rows, widest(tensors))
