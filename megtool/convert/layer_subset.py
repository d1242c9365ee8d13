"""A model of selected layers, renumbered: its configuration and its tensor names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megtool.convert.config.hybrid import kinds_of
from megtool.convert.config.moe import EitherKey
from megtool.convert.config.windows import skip_flags
from megtool.convert.families.family import Family
from megtool.convert.families.nested import TEXT_CONFIG
from megtool.errors import MappingError, UsageError
from megtool.spec import layer_sets
from megtool.spec.model_config import MOST_LAYERS, ModelConfig

_PART = re.compile(r"(\d+)(?:-(\d+))?")
_LAYER = re.compile(r"((?:[^:]+:)?)layers\.(\d+)(\..+)")
_LISTS = (
    "block_configs",
    "compress_ratios",
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "no_rope_layers",
)
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers named by `0-15` or `0-3,8`, in that order; a layer may occur twice.

    Raises:
        UsageError: no such list, or a layer that the model does not have.
    """
    out: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = _PART.fullmatch(part)
        if match is None or len(part) > 20:
            raise UsageError(
                f"--layers is {text!r}, which is no list of layers",
                hint="for example 0-15, or 0-3,8",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(
                f"layers {part!r} end before they begin", hint=f"{last}-{first}, or {first},{last}"
            )
        if last >= num_layers:
            raise UsageError(
                f"layers {part!r} of a model that has {num_layers}",
                hint=f"the first is 0, the last {num_layers - 1}",
            )
        out += range(first, last + 1)
        if len(out) > MOST_LAYERS:
            raise UsageError(f"layers {text[:60]!r} are more than {MOST_LAYERS:,}")
    return tuple(out)


def renumbered(names: Iterable[str], layers: Sequence[int]) -> dict[str, str]:
    """Canonical names of the smaller (or deeper) model, each with the name it has in the larger.

    In order: where the first layer was, all layers are.
    """
    by_layer: dict[tuple[str, int], list[str]] = defaultdict(list)
    listed = list(names)
    for name in listed:
        if match := _LAYER.fullmatch(name):
            by_layer[match[1], int(match[2])].append(name)
    out: dict[str, str] = {}
    done: set[str] = set()
    for name in listed:
        match = _LAYER.fullmatch(name)
        if match is None:
            out[name] = name
        elif match[1] not in done:
            done.add(match[1])
            for new, old in enumerate(layers):
                out |= {_moved(n, new): n for n in by_layer[match[1], old]}
    return out


def _moved(name: str, layer: int) -> str:
    return _LAYER.sub(rf"\g<1>layers.{layer}\g<3>", name)


def of_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The configuration of a model of these layers: their number, and all per-layer fields.

    Raises:
        MappingError: the layers that predict further tokens are like the last one, which would be
            another.
    """
    positions = config.positions
    indexer = config.indexer
    if config.residual.layer_input_size:
        raise MappingError(
            "layers get vectors from one embedding of all layers, which is not cut",
            hint="--layers is for models without embeddings per layer",
            error_id="unsupported-model",
        )
    lent = layer_sets.shared_kv_layers(config) & set(layers)
    if lent and tuple(layers) != tuple(range(config.num_layers)):
        raise MappingError(
            f"layer {min(lent)} attends to keys and values of an earlier layer",
            hint="choose layers with keys and values of their own",
            error_id="unsupported-model",
        )
    experts, n = layer_sets.moe_layers(config), len(layers)
    last = config.num_layers - 1
    like_last = config.mtp.num_mtp_layers and not config.mtp.mtp_kind
    all_kinds = kinds_of(config)
    if like_last and all_kinds[layers[-1]] != all_kinds[last]:
        raise MappingError(
            f"multi-token prediction is like layer {last}, and layer {layers[-1]} is not",
            hint=f"choose layers of which the last is like layer {last}",
        )
    kinds = tuple(int(i in experts) for i in layers)
    freq, of_layer = config.moe.moe_layer_freq, config.layer_kinds
    if isinstance(freq, tuple) or kinds != tuple(int(i % freq == 0) for i in range(n)):
        freq = kinds if config.moe.num_experts else 1
    flags = window_flags(config)
    windows = tuple(flags[i] for i in layers)
    skip = config.window.window_skip_freq
    if isinstance(skip, tuple) or windows != skip_flags(skip, n):
        skip = None if all(windows) else windows
    is_windowed = bool(config.window.window_size) and any(windows)
    rope = tuple(positions.no_rope_layers[i] for i in layers) if positions.no_rope_layers else ()
    ratios, hashed = config.compression.compress_ratios, layer_sets.hash_layers(config)
    is_hashed = [i in hashed for i in layers]
    if is_hashed != sorted(is_hashed, reverse=True):
        raise MappingError(
            f"of these layers {is_hashed.index(False)} comes before layers in which a table "
            "chooses the experts",
            hint="such layers are the first ones",
        )
    shared = (
        tuple(indexer.shared_index_layers[i] for i in layers) if indexer.shared_index_layers else ()
    )
    return config.with_fields(
        num_layers=n,
        layer_kinds=tuple(of_layer[i] for i in layers) if of_layer else None,
        tied_values=tuple(config.attention.tied_values[i] for i in layers)
        if config.attention.tied_values
        else None,
        shared_kv=config.attention.shared_kv if lent else None,
        layer_sizes=None
        if config.layer_sizes is None
        else {name: tuple(sizes[i] for i in layers) for name, sizes in config.layer_sizes.items()},
        moe_layer_freq=freq,
        compress_ratios=None if ratios is None else tuple(ratios[i] for i in layers),
        num_hash_layers=sum(is_hashed),
        window_size=config.window.window_size if is_windowed else 0,
        window_skip_freq=skip if is_windowed else None,
        no_rope_layers=rope if any(rope) else None,
        shared_index_layers=shared if any(shared) else None,
        extra=_extra(config, layers, windows),
    )


def window_flags(config: ModelConfig) -> tuple[int, ...]:
    """A 1 for every layer with a window."""
    if not config.window.window_size:
        return (0,) * config.num_layers
    return skip_flags(config.window.window_skip_freq, config.num_layers)


def _extra(config: ModelConfig, layers: Sequence[int], windows: Sequence[int]) -> dict[str, Any]:
    """The keys preserved verbatim; those with one entry per layer are reduced to the selected
    layers.
    """
    if isinstance(config.extra.get(TEXT_CONFIG), Mapping):  # of a nested text model
        inner = config.with_fields(extra=config.extra[TEXT_CONFIG])
        return {**config.extra, TEXT_CONFIG: _extra(inner, layers, windows)}
    extra = dict(config.extra)
    for key in _LISTS:
        value = extra.get(key)
        if isinstance(value, list | tuple) and len(value) == config.num_layers:
            extra[key] = [value[i] for i in layers]
    if not extra:
        return extra
    by_rule = config.window.window_size and not isinstance(extra.get("layer_types"), list)
    if by_rule and not (all(windows) and all(window_flags(config))):  # it counts from layer 0
        extra["layer_types"] = [_WINDOWED if w else _FULL for w in windows]
    if config.positions.no_rope_layers and not extra.get("no_rope_layers"):
        extra["no_rope_layers"] = [1 - config.positions.no_rope_layers[i] for i in layers]
    return extra


def edited_config(
    stored: Mapping[str, Any], family: Family, old: ModelConfig, new: ModelConfig
) -> dict[str, Any]:
    """The keys of a config.json for a changed model: only the keys that differ change.

    Raises:
        MappingError: a family whose config.json cannot say the new model.
    """
    out = dict(stored)
    out |= {k: v for k, v in new.extra.items() if old.extra.get(k) != v}
    for setting in family.config:
        before: dict[str, Any] = {}
        after: dict[str, Any] = {}
        setting.write(old, before)
        setting.write(new, after)
        if before != after or setting.counts_layers:
            other_keys = setting.keys if isinstance(setting, EitherKey) else ()
            replaced = {*before, *other_keys}
            out = {k: v for k, v in out.items() if k not in replaced} | after
    config = family.read_config(out)
    values: tuple[tuple[str, Callable[[ModelConfig], object]], ...] = (
        ("num_layers", lambda c: c.num_layers),
        ("moe_layers", lambda c: sorted(layer_sets.moe_layers(c))),
        ("layer_kinds", lambda c: c.layer_kinds),
        ("compress_ratios", lambda c: c.compression.compress_ratios),
        ("num_hash_layers", lambda c: c.router.num_hash_layers),
        ("layers with a window", window_flags),
        ("no_rope_layers", lambda c: c.positions.no_rope_layers or ()),
        ("layers with an indexer", lambda c: sorted(layer_sets.index_layers(c))),
        ("layers that share keys", layer_sets.shared_kv_layers),
        ("num_experts", lambda c: c.moe.num_experts),
        ("vocab_size", lambda c: c.embedding.vocab_size),
    )
    for name, value in values:
        if (a := value(config)) != (b := value(new)):
            raise MappingError(
                f"a config.json of {family.name!r} says {name} {a!r}, and they are {b!r}",
                hint="choose layers that it can describe",
            )
    return out
