"""Leave out channels, neurons, heads, experts and layers of an open checkpoint, and record it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megtool.convert.layer_subset import parse_layers
from megtool.convert.pruning_scores import (
    BY_LAYER,
    MEASURED,
    KeptParts,
    PruningScores,
    choose_parts,
    model_sizes,
    read_scores,
)
from megtool.convert.width_subset import WidthCuts, pruned_config, pruned_hf_config
from megtool.digests.crc32c import SIDECAR
from megtool.errors import FormatError, UsageError
from megtool.megatron_state.extra_states.names import is_empty_state
from megtool.options.selection import Pruning
from megtool.source.checkpoint import CheckpointSource, require_model
from megtool.source.computed.gathered import GatheredTensor, expand, with_gathered
from megtool.source.edited_identity import changed_args, edit_identity, edit_metadata
from megtool.source.subset.layers import keep_layers, set_modelopt_aside
from megtool.spec.model_config import MOST_LAYERS, ModelConfig
from megtool.tensors.catalogue import Catalogue, IgnoredTensor
from megtool.tensors.placement import Placement

_EXPERT_STATE = re.compile(r".*\.experts\..*_extra_state.*")
_PURPOSE = "leaving out parts of a model"
_SIZE_OF = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_heads",
    "groups": "num_kv_heads",
    "experts": "num_experts",
}
_WORDS = {
    "layers": "layers",
    "hidden": "channels of hidden states",
    "ffn": "neurons of each MLP",
    "heads": "query heads of each layer",
    "groups": "query groups of each layer",
    "experts": "experts of each layer",
}


def prune_as_asked(source: CheckpointSource, options: Pruning) -> CheckpointSource:
    """Return the checkpoint of what stays, with a record of it.

    Raises:
        UsageError: sizes that the model cannot have.
        FormatError: the file holds no scores of this model.
        MappingError: the model is not known, or cannot be described without the other parts.
    """
    if not options.is_given:
        return source
    config = require_model(source, _PURPOSE)[1]
    parts, scores = KeptParts(), None
    if options.has_sizes and options.pruning_scores is not None:
        scores = read_scores(options.pruning_scores)
        parts = choose_parts(scores, options, config, options.pruning_scores)
    if options.layers is not None:
        if parts.layers is not None:
            raise UsageError(
                "--layers and --num-layers exclude each other", hint="give one of them"
            )
        parts = replace(parts, layers=parse_layers(options.layers, config.num_layers))
    return prune(source, parts, scores)


def prune(
    source: CheckpointSource, parts: KeptParts, scores: PruningScores | None = None
) -> CheckpointSource:
    """The checkpoint as if it had only these parts, with their optimizer state, and the record.

    Rows and columns are gathered when they are read; only small files are read here.

    Raises:
        MappingError: the model is not known, or cannot be described without the other parts.
    """
    config = require_model(source, _PURPOSE)[1]
    record = encode_record(parts, config, scores)
    if parts.cuts_width:
        source = _cut_width(source, parts)
    if parts.layers is not None:
        source = keep_layers(source, parts.layers)
    return replace(source, pruning=record)


def _cut_width(source: CheckpointSource, parts: KeptParts) -> CheckpointSource:
    side, (model, config) = source.view, require_model(source, _PURPOSE)
    vocabulary = model.family.vocabulary if model.family else {}
    cuts = WidthCuts(config, parts, vocabulary)
    cut_of = {name: cuts.of(name, t.shape) for name, t in side.canonical.items()}
    touched = {
        side.placements[name].stored
        for name, cut in cut_of.items()
        if cut is None or cut.name != name or not cut.is_whole
    }
    gathered: list[GatheredTensor] = []
    placements, canonical = dict[str, Placement](), {}
    for name, cut in cut_of.items():
        if cut is None:
            continue
        place, tensor = side.placements[name], side.canonical[name]
        shape = cut.shape(tensor.shape)
        canonical[cut.name] = replace(tensor, name=cut.name, shape=shape)
        if place.stored not in touched:
            placements[cut.name] = place
            continue
        indices = [expand(*pair) for pair in zip(cut.indices, cut.blocks, strict=True)]
        gathered.append(
            GatheredTensor(
                name=cut.name, placement=place, shape=tensor.shape, indices=tuple(indices)
            )
        )
        placements[cut.name] = replace(Placement.identity(cut.name, shape), shift=place.shift)
    copies = {n: of for n, of in side.copies.items() if _original(of, side.placements) in touched}
    catalogue = source.catalogue
    catalogue.check_unchanged()
    smaller = with_gathered(catalogue, frozenset(touched | copies.keys()), gathered)
    smaller.ignored = smaller.ignored + [
        IgnoredTensor(name=n, reason=reason, num_bytes=catalogue[n].num_bytes)
        for n, reason in side.dropped
        if n in copies
    ]
    new = pruned_config(config, parts)
    changed = changed_args(config, new)
    smaller.metadata = edit_metadata(catalogue, changed)
    set_modelopt_aside(smaller)
    if parts.experts is not None:
        _leave_out_expert_states(smaller)
    hf_config = None
    if model.hf_config is not None and model.family is not None:
        hf_config = pruned_hf_config(model.hf_config, model.family, config, new)
    model, edited = edit_identity(source, model, config, new, changed, hf_config)
    return replace(
        source,
        catalogue=smaller,
        model=model,
        view=replace(
            side,
            tensors=tuple(smaller.tensors),
            placements=placements,
            canonical=canonical,
            dropped=[(n, reason) for n, reason in side.dropped if n not in copies],
            copies={n: of for n, of in side.copies.items() if n not in copies},
            padding={n: rows for n, rows in side.padding.items() if n not in touched},
            config=new,
        ),
        sidecar=None,
        edited=edited,
    )


def _original(name: str, placements: Mapping[str, Placement]) -> str | None:
    """The stored tensor of a canonical one that others repeat."""
    if name == "head.weight" and name not in placements:
        name = "embed.weight"
    return placements[name].stored if name in placements else None


def _leave_out_expert_states(catalogue: Catalogue) -> None:
    """Leave out the FP8 state of experts, whose numbers change; it is computed again."""
    names = {n for n in catalogue.objects if _EXPERT_STATE.fullmatch(n)}
    lost = [n for n in sorted(names) if not is_empty_state(catalogue, n)]
    catalogue.objects = {n: o for n, o in catalogue.objects.items() if n not in names}
    catalogue.ignored = catalogue.ignored + [
        IgnoredTensor(name=n, reason="FP8 state of all experts", num_bytes=0) for n in lost
    ]


def encode_record(
    parts: KeptParts, config: ModelConfig, scores: PruningScores | None
) -> dict[str, Any]:
    """What `megtool.json` says of the parts that stay: their numbers in the whole model, and the
    scores of all parts of each kind that is cut."""
    out: dict[str, Any] = {"sizes": model_sizes(config)}
    for name in _SIZE_OF:
        value = getattr(parts, name)
        if isinstance(value, Mapping):
            out[name] = {str(layer): list(numbers) for layer, numbers in value.items()}
        elif value is not None:
            out[name] = list(value)
    if scores is not None:
        out["measured"] = {n: scores.about[n] for n in MEASURED if n in scores.about}
        of = {n: getattr(scores, n) for n in ("layers", "hidden", "ffn", "heads", "experts")}
        out["scores"] = {
            n: {str(layer): list(row) for layer, row in v.items()}
            if isinstance(v, Mapping)
            else list(v)
            for n, v in of.items()
            if v and n in out
        }
    return out


def decode_record(record: Mapping[str, Any], config: ModelConfig, file: Path) -> KeptParts:
    """The parts that a record lists.

    Raises:
        FormatError: it is damaged, or of a model of other sizes than `config`.
    """
    try:
        sizes = {str(k): int(v) for k, v in record["sizes"].items()}
        if sizes != model_sizes(config):
            raise ValueError(f"it is of a model of the sizes {sizes}")
        lists: dict[str, Any] = {}
        for f in fields(KeptParts):
            value = record.get(f.name)
            if value is None:
                continue
            whole = config.get(_SIZE_OF[f.name])
            if f.name in BY_LAYER:
                lists[f.name] = {
                    int(layer): _ascending(numbers, whole) for layer, numbers in value.items()
                }
            else:
                lists[f.name] = _ascending(value, whole, is_listed=f.name == "layers")
        return KeptParts(**lists)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise FormatError(
            f"the record of what was pruned cannot be used: {e}",
            file=file / SIDECAR,
            hint="compare with the checkpoint that it was made of",
            error_id="damaged-digests",
        ) from e


def _ascending(numbers: Any, whole: int, *, is_listed: bool = False) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
        raise TypeError("a part is no list of numbers")
    is_sorted = is_listed or numbers == sorted(set(numbers))
    if not numbers or not is_sorted or min(numbers) < 0 or max(numbers) >= whole:
        raise ValueError(f"a list is not of ascending numbers below {whole}")
    if len(numbers) > max(whole, MOST_LAYERS):
        raise ValueError("a list is too long")
    return tuple(numbers)


def describe_kept(record: Mapping[str, Any]) -> list[str]:
    """What a record keeps, in words: `32 of 48 neurons of each MLP`; last, by whose scores."""
    out = []
    for name, words in _WORDS.items():
        value: Any = record.get(name)
        if value is None:
            continue
        numbers: Sequence[int] = value
        if isinstance(value, Mapping):
            numbers = next(iter(value.values()), ())
        whole = record["sizes"][_SIZE_OF[name]]
        text = f"{len(set(numbers)):,} of {whole:,} {words}"
        if len(numbers) > len(set(numbers)):
            text += f", some several times: {len(numbers):,} in all"
        out.append(text)
    if isinstance(about := record.get("measured"), Mapping):
        source, data, tokens = (str(about.get(key, "?"))[:200] for key in MEASURED)
        out.append(f"by scores of {source} on {data}, {tokens} tokens")
    return out


def _is_mtp(name: str) -> bool:
    """Whether a canonical tensor, or its state, is of multi-token prediction."""
    return name.rpartition(":")[2].startswith("mtp.")


def _without_mtp(source: CheckpointSource) -> CheckpointSource:
    """The checkpoint without the layers that predict further tokens, which have no scores."""
    view = source.view
    return replace(
        source,
        view=replace(
            view,
            placements={n: p for n, p in view.placements.items() if not _is_mtp(n)},
            canonical={n: t for n, t in view.canonical.items() if not _is_mtp(n)},
        ),
    )


def as_pruned(
    a: CheckpointSource, b: CheckpointSource
) -> tuple[CheckpointSource, CheckpointSource, str | None]:
    """Two checkpoints to compare: of one that the other was pruned from, only what stayed.

    Also what was left out, in words, or that one was pruned from a model of other sizes than the
    other has; None where neither has a record that says so. A record that fits both, or none,
    changes nothing.

    Raises:
        FormatError: a record is damaged.
    """
    records = [s.sidecar.pruning if s.sidecar else None for s in (a, b)]
    if records[0] == records[1]:
        return a, b, None
    others: list[str] = []
    for whole, small, record in ((a, b, records[1]), (b, a, records[0])):
        if record is None or whole.model is None or not whole.is_canonical:
            continue
        if record.get("sizes") != (sizes := model_sizes(whole.config)):
            if small.is_canonical and sizes != model_sizes(small.config):
                others.append(_describe_other_whole(small, whole, record, sizes))
            continue
        parts = decode_record(record, whole.config, small.catalogue.root)
        text = (
            f"{small.path} is compared with the parts of {whole.path} that its record lists: "
            + ", ".join(describe_kept(record))
        )
        if not any(map(_is_mtp, small.view.canonical)) and any(map(_is_mtp, whole.view.canonical)):
            whole_view = _without_mtp(whole)
            text += "; layers of multi-token prediction, which it lacks, are not compared"
        else:
            whole_view = whole
        pruned = prune(whole_view, parts)
        return (pruned, b, text) if whole is a else (a, pruned, text)
    return a, b, "; ".join(others) or None


def _describe_other_whole(
    small: CheckpointSource,
    whole: CheckpointSource,
    record: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> str:
    """That a checkpoint was pruned from a model of other sizes than another one."""
    stated: Any = record.get("sizes")
    of = stated if isinstance(stated, Mapping) else {}
    differing = [f"{n} {of.get(n)}, not {size}" for n, size in sizes.items() if of.get(n) != size]
    return (
        f"{small.path} was pruned from another model than {whole.path}: its record says "
        + ", ".join(differing)
    )
