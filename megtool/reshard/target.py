"""The target of a reshard: which format, which names, which layout."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megtool.checkpoint.catalogue import Catalogue, Destination
from megtool.checkpoint.formats import ARRAYS, CUT_BY_RANKS, named
from megtool.checkpoint.megatron_metadata import args_of, divisible_by
from megtool.checkpoint.numeric_values import numbers
from megtool.checkpoint.param_groups import BY_DP, FULLY
from megtool.checkpoint.plan import Dropped
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.config import ParallelConfig
from megtool.convert.dialects import (
    STATE_FIRST,
    STATE_LAST,
    CanonicalView,
    TargetView,
    detect_dialect,
    is_optimizer_state,
    write_side,
)
from megtool.convert.megatron import is_megatron
from megtool.convert.megatron_args import megatron_limits
from megtool.convert.parallel_args import layout_fields, merged_layout
from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import LayoutError, UnknownFamilyError, UsageError
from megtool.reshard.megatron.amax_report import AmaxWish
from megtool.reshard.megatron.master_weight_check import (
    box_of,
    check_masters,
    index_of,
    parts,
    probes,
)
from megtool.reshard.megatron.optimizer import LEGACY, choose_optimizer, has_own_layers
from megtool.reshard.open_source import CheckpointSource, unknown_model
from megtool.reshard.writers import hf, megatron_legacy, torch_dist, zarr
from megtool.reshard.writers.target_spec import Request, Target, fill_of
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement

__all__ = ["Request", "Target", "choose_format", "make_target"]

MEGATRON = ("torch_dist", "megatron")
"""Formats whose tensors have Megatron's names."""

_READ_ONLY = ("gguf", "deepspeed")

_LOG = logging.getLogger(__name__)


def choose_format(source: Catalogue, to: str | None) -> str:
    """The format to write: the one asked for, or the source's own (`hf` where that is read only).

    Raises:
        UsageError: the format is unknown, or megtool only reads it.
    """
    name = to or ("hf" if source.format in _READ_ONLY else source.format)
    if not named(name).writable:
        raise UsageError(f"format {name!r} can be read but not written", hint="--to hf")
    return name


def make_target(source: CheckpointSource, request: Request) -> Target:
    """Decide what to write, down to the last byte that is not tensor data.

    Raises:
        UsageError: options that make no sense together.
        LayoutError: the layout does not divide the model.
        MappingError: the target needs a family that is not known.
    """
    kind = choose_format(source.catalogue, request.to)
    if request.max_shard_bytes is not None and kind not in ("hf", *ARRAYS):
        files = "whose files are one a rank" if kind in CUT_BY_RANKS else "which is one file"
        raise UsageError(
            f"--max-shard-size means nothing for --to {kind}, {files}",
            hint="--to hf writes a folder of shards",
        )
    if request.compress is not None and kind not in ARRAYS:
        raise UsageError(
            f"--compress means nothing for --to {kind}", hint=f"--to {' or '.join(ARRAYS)}"
        )
    for flag, asked in (("bridge", request.bridge), ("core-version", request.core_version)):
        if asked and kind != "torch_dist":
            raise UsageError(f"--{flag} means nothing for --to {kind}", hint="--to torch_dist")
    if request.amax != AmaxWish() and kind not in MEGATRON:
        raise UsageError(
            f"--amax, --te and --amax-history mean nothing for --to {kind}",
            hint=f"--to {' or '.join(MEGATRON)}",
        )
    dialect = _dialect(source, kind)
    parallel = _parallel(source, request, kind)
    dtype = request.dtype
    held = source.catalogue
    if dtype is None and any(t.packing and t.name not in held.packed for t in held.tensors):
        dtype = named_dtype("bfloat16")
    optimizer = choose_optimizer(request.optimizer, source.catalogue, source.side, kind)
    if optimizer in (BY_DP, LEGACY):  # read again, their masters have to be the weights
        check_masters(source.catalogue, source.side)
    side = _write(source, kind, dialect, parallel, dtype, optimizer)
    if source.side.canonical and not side.tensors:
        raise UsageError(
            f"nothing that was selected has a place in {kind!r}: {side.dropped[0][1]}",
            hint="--to torch_dist holds everything",
        )
    if request.renames:
        side = _renamed(side, request.renames)
    if source.model is not None and kind in MEGATRON and source.side.dialect != "megatron":
        for limit in megatron_limits(source.model.config, source.model.family):
            _LOG.warning("%s", limit)
    out = Target(
        format=kind,
        dialect=dialect,
        parallel=parallel,
        side=side,
        destination=Destination(catalogue=source.catalogue, fragments=[]),
        fills=[fill_of(f.placement, f.value) for f in side.fills],
        dropped=_dropped_tensors(source, side, whole=request.prove_all),
    )
    lay_out = {
        "hf": hf.lay_out,
        "safetensors": hf.lay_out,
        "megatron": megatron_legacy.lay_out,
        **dict.fromkeys(ARRAYS, zarr.lay_out),
    }.get(kind, torch_dist.lay_out)
    lay_out(source, replace(request, optimizer=optimizer), out, dtype)
    return out


def _write(
    source: CheckpointSource,
    kind: str,
    dialect: str,
    parallel: ParallelConfig | None,
    dtype: DType | None,
    optimizer: str | None,
) -> TargetView:
    """The target's tensors. What follows ranks or buckets is named layer by layer."""

    def write(
        part: CanonicalView, *, per_layer: bool | None, main: str | None = None
    ) -> TargetView:
        return write_side(
            part,
            dialect=dialect,
            family=source.model.family if source.model else None,
            config=source.model.config if source.model else None,
            dtype=dtype,
            parallel=parallel if dialect == "megatron" or _is_megatron(source) else None,
            per_layer=per_layer,
            divisible_by=divisible_by(source.catalogue),
            main=main,
            own_layers=has_own_layers(source.catalogue),
            state_names=_state_names(kind, dialect),
        )

    if optimizer == FULLY:
        return write(source.side, per_layer=None, main="param")
    if kind == "megatron":
        return write(source.side, per_layer=True, main="param")
    if optimizer != BY_DP:
        return write(source.side, per_layer=None)
    held = source.side.canonical
    weights = {n: t for n, t in held.items() if ":" not in n}
    states = {n: t for n, t in held.items() if ":" in n}
    a = write(replace(source.side, canonical=weights), per_layer=None)
    b = write(replace(source.side, canonical=states), per_layer=True, main="param")
    return TargetView(
        tensors=a.tensors + b.tensors,
        placements=a.placements | b.placements,
        shards=None,
        fills=a.fills + b.fills,
        dropped=a.dropped + b.dropped,
    )


def _state_names(kind: str, dialect: str) -> str | None:
    """How optimizer state is called; None for what the dialect is used to."""
    if dialect != "hf" or kind == "hf":
        return None
    return STATE_LAST if kind == "dcp" else STATE_FIRST


def _dialect(source: CheckpointSource, kind: str) -> str:
    """How the target's tensors are named."""
    own = source.side.dialect
    if kind in MEGATRON:
        wanted = "megatron"
    elif kind == "hf":
        wanted = "hf"
    else:
        wanted = "hf" if own == "gguf" else own
    if own != "identity":
        return wanted
    named_so = detect_dialect([t.name for t in source.catalogue.tensors])
    if kind in ("dcp", "safetensors", *ARRAYS) or named_so == wanted:
        return "identity"
    reason = source.reason
    if reason is not None and not isinstance(reason, UnknownFamilyError):
        raise reason
    raise unknown_model(source, f"writing {kind!r} needs the model's family")


def _is_megatron(source: CheckpointSource) -> bool:
    return is_megatron(t.name for t in source.catalogue.tensors)


def _parallel(source: CheckpointSource, request: Request, kind: str) -> ParallelConfig | None:
    """The layout asked for; what was not said stays as the source's args have it, else 1."""
    said = [k for k, v in request.layout.items() if v not in (None, False, 1)]
    if kind not in CUT_BY_RANKS:
        if said:
            raise UsageError(
                f"--{_flag(said[0])} means nothing for --to {kind}, whose files hold whole tensors",
                hint="--max-shard-size sets how many files there are"
                if kind == "hf"
                else "leave it out",
            )
        return None
    if kind == "dcp" and not _is_megatron(source) and (cut := [k for k in said if k != "dp"]):
        raise UsageError(
            f"--{_flag(cut[0])} needs Megatron's names",
            hint="--dp N cuts tensors into N ranks' rows",
        )
    config = source.model.config if source.model else None
    etp = request.layout.get("etp") or 1
    if config and not config.num_experts and etp not in (1, request.layout.get("tp")):
        raise LayoutError(f"etp={etp}, but the model has no experts", hint="leave --etp out")
    args = args_of(source.catalogue)
    known = layout_fields(args) if args else {}
    return merged_layout(known, request.layout)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _renamed(side: TargetView, renames: Sequence[str]) -> TargetView:
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


def _dropped_tensors(source: CheckpointSource, side: TargetView, *, whole: bool) -> list[Dropped]:
    """Stored tensors that the target does not hold, each with its reason.

    What a family's table leaves out (a tied copy, rotary frequencies) is no loss, unless it is no
    copy: some elements are compared, or the `whole`.
    """
    catalogue = source.catalogue
    differ = no_copies(source, whole=whole)
    out = [
        Dropped(
            name=name,
            reason=differ.get(name, reason),
            num_bytes=catalogue[name].num_bytes,
            is_lost=name in differ or is_optimizer_state(name),
        )
        for name, reason in source.side.dropped
    ]
    out += [
        Dropped(name=s.name, reason=s.reason, num_bytes=s.num_bytes, is_lost=False)
        for s in catalogue.set_aside
    ]
    used = {source.side.placements[c].stored for c in side.placements}
    for canonical, reason in side.dropped:
        stored = source.side.placements[canonical].stored
        if stored not in used:
            used.add(stored)
            out.append(Dropped(name=stored, reason=reason, num_bytes=catalogue[stored].num_bytes))
    return out


def renamed(names: Sequence[str], renames: Sequence[str]) -> list[str]:
    """Names after `OLD=NEW` patterns, in order: each `*` of OLD is put for the same `*` of NEW.

    Raises:
        UsageError: a pattern is none, matches nothing, or gives two tensors one name.
    """
    names = list(names)
    for text in renames:
        old, equals, new = text.partition("=")
        if not equals or not old or not new or new.count("*") > old.count("*"):
            raise UsageError(f"rename {text!r}", hint="OLD=NEW, with no more * in NEW than in OLD")
        pattern = re.compile("(.*)".join(re.escape(part) for part in old.split("*")))
        hits = [(i, m) for i, n in enumerate(names) if (m := pattern.fullmatch(n))]
        if not hits:
            raise UsageError(f"rename {text!r} matches no tensor")
        for i, m in hits:
            parts, out = new.split("*"), ""
            for k, part in enumerate(parts):
                out += part + (m[k + 1] if k + 1 < len(parts) else "")
            names[i] = out
    twice = {n for n in names if names.count(n) > 1} if len(set(names)) != len(names) else set()
    if twice:
        raise UsageError(f"renaming gives two tensors the name {min(twice)!r}")
    return names


_SAME_AS = {"head.weight": "embed.weight"}
"""Where embeddings are tied the one is not there, and is the other."""


def no_copies(source: CheckpointSource, *, whole: bool = False) -> dict[str, str]:
    """Stored tensors that are said to repeat another one and do not, each with what differs.

    Some elements of each are compared, all with `whole`. What they repeat may not have been
    selected: then there is nothing to compare.
    """
    side = source.side
    out: dict[str, str] = {}
    if not side.copies:
        return out
    with Reader(source.catalogue, Files()) as reader:
        for name, canonical in side.copies.items():
            if canonical not in side.placements:
                canonical = _SAME_AS.get(canonical, canonical)
            original = side.placements.get(canonical)
            if original is None:
                continue
            found = _difference(reader, name, original, whole=whole)
            if found is not None:
                out[name] = f"no copy of {original.stored}, though it should be: {found}"
    return out


def _difference(reader: Reader, name: str, original: Placement, *, whole: bool) -> str | None:
    """How a stored tensor differs from a canonical one (which may be the longer by padding)."""
    stored = reader.catalogue[name]
    if not original.is_identity:
        return f"{original.stored} is laid out in another way"
    shape = original.shape
    if len(stored.shape) != len(shape) or any(
        n < m if d == 0 else n != m
        for d, (n, m) in enumerate(zip(stored.shape, shape, strict=True))
    ):
        return f"its shape is {list(stored.shape)}, not {list(shape)}"
    if not numel(shape):
        return None
    one, other = reader.catalogue[original.stored].dtype, stored.dtype
    lo, hi = [0] * len(shape), list(shape)
    for box in parts(lo, hi) if whole else probes(lo, hi, (0.0, 0.5, 1.0)):
        a, b = (
            reader.canonical(box_of(held, *box)).read().reshape(-1)
            for held in (original.stored, name)
        )
        x, y = numbers(a, one), numbers(b, other)
        differ = np.flatnonzero(~np.isclose(x, y, rtol=0.0, atol=0.0, equal_nan=True))
        if len(differ):
            at = int(differ[0])
            there = list(index_of(at, *box))
            return f"{float(y[at]):g} where that has {float(x[at]):g}, at {there}"
    return None
