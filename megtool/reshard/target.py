"""Plan the target of a reshard: its format, names and layout."""

from __future__ import annotations

import importlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

from megtool.convert.config.hybrid import HYBRID
from megtool.convert.dialects import (
    STATE_FIRST,
    STATE_LAST,
    CanonicalView,
    DialectNaming,
    TargetView,
    detect_dialect,
    is_optimizer_state,
    write_side,
)
from megtool.convert.families.nested import MEGATRON_PREFIX
from megtool.convert.families.read_back import suggest_families
from megtool.convert.megatron.args import megatron_limits
from megtool.convert.megatron.names import is_megatron
from megtool.convert.megatron.parallel_args import OWN_SPLIT, layout_fields, merged_layout
from megtool.convert.megatron.sections import has_parts
from megtool.dtypes import DTYPES, DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, LayoutError, MappingError, UnknownFamilyError, UsageError
from megtool.formats import (
    ARRAY_FORMATS,
    RANK_SHARDED_FORMATS,
    STATE_DICT_FORMATS,
    find_format,
)
from megtool.fp8_state.transfer import resolve_amax
from megtool.megatron_state.optimizer.master_weight_check import (
    check_masters,
)
from megtool.megatron_state.param_groups import DP_RESHARDABLE, FULLY_RESHARDABLE
from megtool.megatron_state.saved_objects import saved_args, vocab_divisor
from megtool.options.effects import without_effect
from megtool.options.layout import LayoutOptions, ParallelConfig
from megtool.options.target import TargetOptions
from megtool.plan.copies import DroppedItem
from megtool.reshard.foreign_objects import screen_renamed, screen_source
from megtool.reshard.writers.target_spec import AddedState, Target, make_fill
from megtool.run_state.optimizer import LEGACY, choose_optimizer, uses_local_layers
from megtool.source.checkpoint import CheckpointSource, unknown_model
from megtool.source.held_settings import find_fitting_families
from megtool.source.open import tensor_blocks
from megtool.source.repeated_tensors import refuse_false_copies
from megtool.tensors.catalogue import Catalogue, Destination

MEGATRON = ("torch_dist", "megatron")
"""Formats whose tensors have Megatron's names."""

WRITERS = {
    "hf": "hf",
    "safetensors": "hf",
    "megatron": "megatron_legacy",
    "torch_dist": "torch_dist",
    "dcp": "torch_dist",
    "torch_checkpointing": "torch_checkpointing",
    **dict.fromkeys(ARRAY_FORMATS, "zarr"),
}
"""The module of `reshard/writers/` for each format that can be written."""

_WITHOUT_PICKLES = ("hf", "safetensors")

_LOG = logging.getLogger(__name__)


def choose_format(source: Catalogue, to: str | None) -> str:
    """The format to write: `to`, or the source's own (`hf` where that can only be read).

    Raises:
        UsageError: the format is unknown, or megtool only reads it.
    """
    name = to or (source.format if find_format(source.format).writable else "hf")
    if not find_format(name).writable:
        raise UsageError(f"format {name!r} can be read but not written", hint="--to hf")
    return name


class WriterModule(Protocol):
    """The function of a writer's module."""

    def plan_layout(
        self, source: CheckpointSource, options: TargetOptions, out: Target, dtype: DType | None
    ) -> None:
        """Plan the files of the format, and record what they cannot hold."""


def load_writer(kind: str) -> WriterModule:
    """The module that plans a format's files; imported at first use."""
    module = importlib.import_module(f"megtool.reshard.writers.{WRITERS[kind]}")
    return cast(WriterModule, module)


def check_target(options: TargetOptions) -> None:
    """Refuse values that can be nothing, before anything is read.

    Raises:
        UsageError: there is one.
    """
    parse_weight_dtype(options.dtype)
    _ = options.max_shard_bytes
    resolve_amax(options)


def parse_weight_dtype(text: str | None) -> DType | None:
    """Return the dtype that weights are cast to.

    Raises:
        UsageError: there is no such dtype, or a cast to it needs scales.
    """
    if text is None:
        return None
    try:
        dtype = named_dtype(text)
    except FormatError as e:
        known = ", ".join(d.name for d in DTYPES if d.is_float and d.itemsize > 1)
        raise UsageError(f"--dtype is {text!r}, which is no dtype", hint=f"one of {known}") from e
    if not dtype.is_float:
        raise UsageError(f"dtype {text!r} is not floating point", hint="for example bfloat16")
    if dtype.itemsize == 1:
        raise UsageError(
            f"dtype {text!r} has 8 bits: it needs scales, and a cast has none",
            hint="for example --dtype bfloat16; megtool quantize makes FP8 with scales",
        )
    return dtype


def make_target(
    source: CheckpointSource,
    options: TargetOptions,
    *,
    add: Callable[[TargetView, ParallelConfig], AddedState] | None = None,
) -> Target:
    """Plan the target, with the contents of everything that is not tensor data.

    `add` says what is stored beside the tensors that are planned; then single experts have names of
    their own, and gate and up rows apart.

    Raises:
        FormatError: an object would be written that names what no checkpoint needs.
        UsageError: options that do not fit the format or each other.
        LayoutError: the layout does not divide the model.
        MappingError: the target needs a family that is not known, or a tensor that should be a copy
            of another is none.
    """
    kind = choose_format(source.catalogue, options.to)
    refuse_false_copies(source)
    source, foreign = screen_source(
        source, drop=options.drop_objects, only_tensors=kind in _WITHOUT_PICKLES
    )
    dialect = _target_dialect(source, kind)
    parallel = _choose_layout(source, options.layout, kind, options.model_class)
    dtype, catalogue = parse_weight_dtype(options.dtype), source.catalogue
    if dtype is None and any(
        t.packing and t.name not in catalogue.packed for t in catalogue.tensors
    ):
        dtype = named_dtype("bfloat16")
    optimizer = choose_optimizer(options.optimizer_format, source.catalogue, source.view, kind)
    if optimizer in (DP_RESHARDABLE, LEGACY):  # they are read by their master weights
        check_masters(source.catalogue, source.view)
    if options.model_class is not None and source.view.dialect == "identity":
        raise source.reason or unknown_model(source, "a class of models needs the model's family")
    try:
        side = _bind_target(
            source,
            kind,
            dialect,
            parallel,
            optimizer,
            dtype=dtype,
            model_class=options.model_class,
            singletons=add is not None,
        )
    except MappingError as e:
        if dialect == "hf" and source.view.dialect == "megatron" and source.known_config:
            fitting = find_fitting_families(source.view, source.known_config)
            e.hint = f"{suggest_families(fitting)}{e.hint or ''}" or None
        raise
    if source.view.canonical and not side.tensors:
        raise UsageError(
            f"{kind!r} holds none of the selected tensors: {side.dropped[0][1]}",
            hint="--to torch_dist holds everything",
        )
    if options.rename:
        side = screen_renamed(
            source,
            _rename_tensors(side, options.rename, [t.name for t in source.catalogue.tensors]),
            drop=options.drop_objects,
        )
    if source.model is not None and kind in MEGATRON and source.view.dialect != "megatron":
        for limit in megatron_limits(source.model.config, source.model.family):
            _LOG.warning("%s", limit)
    target = Target(
        format=kind,
        dialect=dialect,
        parallel=parallel,
        side=side,
        destination=Destination(catalogue=source.catalogue, fragments=[]),
        fills=[make_fill(f.placement, f.value) for f in side.fills],
        dropped=_dropped_tensors(source, side) + foreign,
        optimizer_format=optimizer,
    )
    if add is not None:
        target.added = add(side, parallel or ParallelConfig())
    try:
        load_writer(kind).plan_layout(source, options, target, dtype)
    except FormatError as e:
        if e.file is not None:
            raise
        raise FormatError(e.message, file=source.path, hint=e.hint, error_id=e.error_id) from e
    return target


def _bind_target(
    source: CheckpointSource,
    kind: str,
    dialect: str,
    parallel: ParallelConfig | None,
    optimizer: str | None,
    *,
    dtype: DType | None,
    model_class: str | None,
    singletons: bool,
) -> TargetView:
    """The target's tensors. State in rank files or buckets is named layer by layer."""

    def write(
        part: CanonicalView,
        *,
        per_layer: bool | None,
        main: str | None = None,
        in_parts: bool = kind != "megatron",
    ) -> TargetView:
        return write_side(
            part,
            dialect=dialect,
            family=source.model.family if source.model else None,
            config=source.known_config,
            dtype=dtype,
            parallel=parallel if dialect == "megatron" or _is_megatron(source) else None,
            per_layer=per_layer,
            options=DialectNaming(
                divisible_by=vocab_divisor(source.catalogue),
                main=main,
                own_layers=uses_local_layers(source.catalogue),
                model_class=model_class,
                in_parts=in_parts,
                singletons=singletons,
                text_prefix=_text_prefix(source) if in_parts else "",
                tower_names=in_parts,
                state_names=_state_names(kind, dialect),
            ),
        )

    if optimizer == FULLY_RESHARDABLE:
        return write(source.view, per_layer=None, main="param")
    if kind == "megatron":
        return write(source.view, per_layer=True, main="param")
    if singletons:
        return write(source.view, per_layer=True)
    if optimizer != DP_RESHARDABLE:
        return write(source.view, per_layer=None)
    canonical = source.view.canonical
    weights = {n: t for n, t in canonical.items() if ":" not in n}
    states = {n: t for n, t in canonical.items() if ":" in n}
    a = write(replace(source.view, canonical=weights), per_layer=None)
    b = write(replace(source.view, canonical=states), per_layer=True, main="param", in_parts=False)
    return TargetView(
        tensors=a.tensors + b.tensors,
        placements=a.placements | b.placements,
        shards=None,
        fills=a.fills + b.fills,
        dropped=a.dropped + b.dropped,
        config=a.config,
    )


def _text_prefix(source: CheckpointSource) -> str:
    """What Megatron's names of the text model begin with, if a larger model nests it.

    In files per rank and buckets, which have names of a rank's own modules, writers add it.
    """
    family = source.model.family if source.model else None
    return MEGATRON_PREFIX if family and family.nested else ""


def _state_names(kind: str, dialect: str) -> str | None:
    """How optimizer state is named; None for the dialect's usual names."""
    if dialect != "hf" or kind == "hf":
        return None
    return STATE_LAST if kind in STATE_DICT_FORMATS else STATE_FIRST


def _target_dialect(source: CheckpointSource, kind: str) -> str:
    """The dialect of the target's tensor names.

    Raises:
        MappingError: other names are needed, and the model is not known.
    """
    source_dialect = source.view.dialect
    if kind in MEGATRON:
        dialect = "megatron"
    elif kind == "hf":
        dialect = "hf"
    else:
        dialect = "hf" if source_dialect == "gguf" else source_dialect
    if source_dialect != "identity":
        return dialect
    stored_dialect = detect_dialect([t.name for t in source.catalogue.tensors])
    if kind in (*STATE_DICT_FORMATS, "safetensors", *ARRAY_FORMATS) or stored_dialect == dialect:
        return "identity"
    reason = source.reason
    if reason is not None and not isinstance(reason, UnknownFamilyError):
        raise reason
    raise unknown_model(source, f"writing {kind!r} needs the model's family")


def _is_megatron(source: CheckpointSource) -> bool:
    return is_megatron(t.name for t in source.catalogue.tensors)


def _choose_layout(
    source: CheckpointSource, layout: LayoutOptions, kind: str, model_class: str | None
) -> ParallelConfig | None:
    """The layout to write: the options, else the source's args, else 1.

    Another class of model counts other layers, so it is not split as the source is.

    Raises:
        UsageError: the format has no such layout.
        LayoutError: the options do not fit the model or each other.
    """
    explicit = [k for k, v in layout.explicit().items() if v not in (0, 1)]
    if kind not in RANK_SHARDED_FORMATS:
        if explicit:
            raise without_effect(
                f"--{_flag(explicit[0])} has no effect with --to {kind}: it has no files per rank",
                "--max-shard-size sets how many files there are"
                if kind == "hf"
                else "leave it out",
            )
        return None
    by_rows = kind == "torch_checkpointing" or (kind == "dcp" and not _is_megatron(source))
    if by_rows and (axes := [k for k in explicit if k != "dp"]):
        needs = "needs Megatron's names" if kind == "dcp" else f"has no effect with --to {kind}"
        raise UsageError(
            f"--{_flag(axes[0])} {needs}", hint="--dp N cuts tensors into N ranks' rows"
        )
    if kind == "torch_checkpointing":
        return ParallelConfig(dp=layout.dp or 1)
    config = source.known_config
    if source.view.dialect == "identity" and layout.tp not in (
        None,
        tensor_blocks(source.catalogue),
    ):
        _check_blocks(source)
    etp = layout.etp or 1
    if config and not config.moe.num_experts and etp not in (1, layout.tp):
        raise LayoutError(f"etp={etp}, but the model has no experts", hint="leave --etp out")
    args = saved_args(source.catalogue)
    known = layout_fields(args) if args else {}
    if model_class is not None and (model_class == HYBRID) != source.view.is_hybrid:
        known = {k: v for k, v in known.items() if k not in OWN_SPLIT}
    return merged_layout(known, layout)


def _check_blocks(source: CheckpointSource) -> None:
    """Refuse another layout for tensors whose parts lie in a block for each tensor rank.

    Raises:
        LayoutError: there are some, and they keep their names and so their order.
    """
    blocks = tensor_blocks(source.catalogue)
    name = next((t.name for t in source.catalogue.tensors if has_parts(t.name)), None)
    if blocks > 1 and name is not None:
        raise LayoutError(
            f"its rows lie in blocks of tp={blocks} ranks, as Megatron-FSDP saved them",
            file=source.path,
            tensor=name,
            hint=f"--tp {blocks}, or --to torch_dist, which every layout loads",
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _rename_tensors(side: TargetView, renames: Sequence[str], stored: Sequence[str]) -> TargetView:
    """The same tensors under the names that `--rename` patterns give them.

    A pattern that takes off the name of a part, which reading a model of `stored` names takes off
    by itself, is done already.
    """
    names = [t.name for t in side.tensors]
    renames = [r for r in renames if not _is_done(r, names, stored)]
    new = dict(zip(names, apply_renames(names, renames), strict=True))
    return replace(
        side,
        tensors=[replace(t, name=new[t.name]) for t in side.tensors],
        placements={n: replace(p, stored=new[p.stored]) for n, p in side.placements.items()},
        fills=[
            replace(f, placement=replace(f.placement, stored=new[f.placement.stored]))
            for f in side.fills
        ],
    )


def _is_done(rename: str, names: Sequence[str], stored: Sequence[str]) -> bool:
    """Whether a pattern matches stored names alone, and gives them names that are there already."""
    try:
        apply_renames(names, [rename])
    except UsageError:
        try:
            new = apply_renames(stored, [rename])
        except UsageError:
            return False
        changed = {b for a, b in zip(stored, new, strict=True) if a != b}
        return bool(changed) and changed <= {*names}
    return False


def _dropped_tensors(source: CheckpointSource, side: TargetView) -> list[DroppedItem]:
    """Stored tensors that the target does not have, each with its reason.

    What a family's table leaves out (a tied copy, rotary frequencies) is not lost: copies were
    compared when the source was opened.
    """
    catalogue = source.catalogue
    out = [
        DroppedItem(
            name=name,
            reason=reason,
            num_bytes=catalogue[name].num_bytes,
            is_lost=is_optimizer_state(name),
        )
        for name, reason in source.view.dropped
    ]
    out += [
        DroppedItem(name=s.name, reason=s.reason, num_bytes=s.num_bytes, is_lost=False)
        for s in catalogue.ignored
    ]
    used = {source.view.placements[c].stored for c in side.placements}
    for canonical, reason in side.dropped:
        stored = source.view.placements[canonical].stored
        if stored not in used:
            used.add(stored)
            out.append(
                DroppedItem(name=stored, reason=reason, num_bytes=catalogue[stored].num_bytes)
            )
    return out


def apply_renames(names: Sequence[str], renames: Sequence[str]) -> list[str]:
    """Apply `OLD=NEW` patterns to names, in order: what a `*` of OLD matches replaces that of NEW.

    Raises:
        UsageError: an invalid pattern, one that matches nothing, or two tensors of one name.
    """
    names = list(names)
    for text in renames:
        old, equals, new = text.partition("=")
        if not equals or not old or not new or new.count("*") > old.count("*"):
            raise UsageError(
                f"--rename is {text!r}, which is no pattern",
                hint="OLD=NEW, with no more * in NEW than in OLD",
            )
        pattern = re.compile("(.*)".join(re.escape(part) for part in old.split("*")))
        hits = [(i, m) for i, n in enumerate(names) if (m := pattern.fullmatch(n))]
        if not hits:
            raise UsageError(f"rename {text!r} matches no tensor")
        for i, m in hits:
            parts, out = new.split("*"), ""
            for k, part in enumerate(parts):
                out += part + (m[k + 1] if k + 1 < len(parts) else "")
            names[i] = out
    duplicates = {n for n, count in Counter(names).items() if count > 1}
    if duplicates:
        raise UsageError(f"renaming gives two tensors the name {min(duplicates)!r}")
    return names
