"""Scores of a model's parts, the file that holds them, and the choice of what stays.

`megtool evaluate --pruning-scores` measures them and writes the file, and `megtool reshard` reads
it to leave out the parts with the lowest scores. The formulas are Minitron's (arXiv 2407.14679,
section 2.2), with its aggregation "(L2, mean)": activations are averaged by size over the tokens of
a window, and these means have an L2 norm over windows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool.errors import FormatError, UsageError
from megtool.options.selection import Pruning
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files

FORMAT = "megtool pruning scores"
VERSION = 1
MAX_BYTES = 1 << 28
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads"),
    *("head_dim", "num_experts"),
)
MEASURED = ("source", "data", "tokens")
"""What a file of scores says of the measurement: the model, the text and its tokens."""

_LAYERS_WITH = {"ffn": "an MLP without experts", "heads": "attention", "experts": "experts"}
_HINT = "`megtool evaluate SRC --data FILE --pruning-scores FILE` writes it"

Scores = tuple[float, ...]
ByLayer = Mapping[int, Scores]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningScores:
    """How much each part of a model matters; a part without scores has an empty tuple or mapping.

    `layers` are block influences (ShortGPT), `hidden` the scores of the channels between layers,
    and by layer `ffn` those of an MLP's neurons, `heads` of query heads, `experts` of experts.
    `sizes` are those of the model, and `about` says what was measured.
    """

    sizes: Mapping[str, int]
    layers: Scores = ()
    hidden: Scores = ()
    ffn: ByLayer = field(default_factory=dict)
    heads: ByLayer = field(default_factory=dict)
    experts: ByLayer = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptParts:
    """Indices of what stays, in the numbers of the whole model, ascending; None: all.

    `ffn`, `heads`, `groups` (heads of keys and values) and `experts` are by layer of the whole
    model, with as many in each. `layers` may repeat one, as `--layers` does.
    """

    layers: tuple[int, ...] | None = None
    hidden: tuple[int, ...] | None = None
    ffn: Mapping[int, tuple[int, ...]] | None = None
    heads: Mapping[int, tuple[int, ...]] | None = None
    groups: Mapping[int, tuple[int, ...]] | None = None
    experts: Mapping[int, tuple[int, ...]] | None = None

    @property
    def cuts_width(self) -> bool:
        """Whether anything but layers is left out."""
        axes = (self.hidden, self.ffn, self.heads, self.groups, self.experts)
        return any(axis is not None for axis in axes)


BY_LAYER = ("ffn", "heads", "groups", "experts")
"""The parts that are chosen for each layer by itself."""


def model_sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes that scores and indices count in."""
    return {name: config.get(name) for name in _SIZES}


def encode_scores(scores: PruningScores) -> bytes:
    """The contents of a file of scores: JSON with 7 significant digits."""
    value: dict[str, Any] = {"format": FORMAT, "version": VERSION, **scores.about}
    value["sizes"] = dict(scores.sizes)
    for name in ("layers", "hidden"):
        value[name] = _rounded(getattr(scores, name))
    for name in ("ffn", "heads", "experts"):
        by_layer: ByLayer = getattr(scores, name)
        value[name] = {str(layer): _rounded(by_layer[layer]) for layer in sorted(by_layer)}
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()


def read_scores(path: Path) -> PruningScores:
    """Read a file of scores.

    Raises:
        FormatError: there is none, or it holds something else.
    """
    data = Files().read_whole(path, at_most=MAX_BYTES)
    if data is None:
        raise FormatError("the file does not exist", file=path, hint=_HINT)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"the JSON is invalid: {e}", file=path, hint=_HINT) from e
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError("it holds no scores of a model's parts", file=path, hint=_HINT)
    if value.get("version") != VERSION:
        raise FormatError(
            f"its version is {value.get('version')!r}, and this megtool reads {VERSION}",
            file=path,
            hint="update megtool, or measure the scores again",
        )
    try:
        sizes = {str(k): int(v) for k, v in value["sizes"].items()}
        by_layer = {
            name: {int(layer): _numbers(row) for layer, row in value[name].items()}
            for name in ("ffn", "heads", "experts")
        }
        return PruningScores(
            sizes=sizes,
            layers=_numbers(value["layers"]),
            hidden=_numbers(value["hidden"]),
            ffn=by_layer["ffn"],
            heads=by_layer["heads"],
            experts=by_layer["experts"],
            about={name: value[name] for name in MEASURED if name in value},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise FormatError(f"its scores are damaged: {e}", file=path, hint=_HINT) from e


def choose_parts(
    scores: PruningScores, sizes: Pruning, config: ModelConfig, file: Path
) -> KeptParts:
    """The parts with the highest scores; of equal ones, the first.

    Every layer chooses neurons, heads and experts of its own, all layers share the channels of
    hidden states. Query heads are chosen within their group, as many in each, and groups by the
    norm of their heads' scores.

    Raises:
        UsageError: a size that the model cannot have.
        FormatError: the scores are those of another model, or lack what is asked for.
    """
    if dict(scores.sizes) != model_sizes(config):
        differing = next(
            n for n, v in model_sizes(config).items() if scores.sizes.get(n, None) != v
        )
        raise FormatError(
            f"the scores are those of a model with {differing} {scores.sizes.get(differing)}, and "
            f"this one has {config.get(differing)}",
            file=file,
            hint="measure the scores of this model",
        )

    def by_layer(name: str, count: int, flag: str, layers: frozenset[int]) -> ByLayer:
        rows_of: ByLayer = getattr(scores, name)
        if not layers:
            raise UsageError(
                f"{flag} is given, and the model has no layer that it is for: none of its layers "
                f"has {_LAYERS_WITH[name]}",
                hint=f"leave out {flag}",
            )
        for layer in sorted(layers):
            _check_count(rows_of.get(layer, ()), count, f"{name} of layer {layer}", file)
        return {layer: rows_of[layer] for layer in sorted(layers)}

    layers = hidden = ffn = heads = groups = experts = None
    if (n := sizes.num_layers) is not None:
        _check_size("--num-layers", n, config.num_layers)
        _check_count(scores.layers, config.num_layers, "layers", file)
        layers = _best(scores.layers, n)
    if (n := sizes.hidden_size) is not None:
        _check_size("--hidden-size", n, config.hidden_size)
        _check_count(scores.hidden, config.hidden_size, "hidden", file)
        hidden = _best(scores.hidden, n)
    if (n := sizes.ffn_hidden_size) is not None:
        flag = "--ffn-hidden-size"
        _check_size(flag, n, config.mlp.ffn_hidden_size)
        rows = by_layer(
            "ffn", config.mlp.ffn_hidden_size, flag, frozenset(layer_sets.dense_layers(config))
        )
        ffn = {layer: _best(row, n) for layer, row in rows.items()}
    if sizes.num_attention_heads is not None or sizes.num_query_groups is not None:
        num_heads, num_groups = _head_counts(sizes, config)
        rows = by_layer(
            "heads",
            config.attention.num_heads,
            "--num-attention-heads",
            layer_sets.attn_layers(config),
        )
        chosen = {
            layer: _best_heads(
                row, config.attention.num_kv_heads, num_groups, num_heads // num_groups
            )
            for layer, row in rows.items()
        }
        heads = {layer: both[0] for layer, both in chosen.items()}
        groups = {layer: both[1] for layer, both in chosen.items()}
    if (n := sizes.num_experts) is not None:
        _check_size("--num-experts", n, config.moe.num_experts)
        if n < config.moe.num_experts_per_token:
            raise UsageError(
                f"--num-experts is {n}, and each token chooses {config.moe.num_experts_per_token}",
                hint="keep at least as many",
            )
        rows = by_layer(
            "experts", config.moe.num_experts, "--num-experts", layer_sets.moe_layers(config)
        )
        experts = {layer: _best(row, n) for layer, row in rows.items()}
    return KeptParts(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, groups=groups, experts=experts
    )


def _head_counts(sizes: Pruning, config: ModelConfig) -> tuple[int, int]:
    """Query heads and groups of the smaller model."""
    each = config.attention.num_heads // config.attention.num_kv_heads
    num_heads, num_groups = sizes.num_attention_heads, sizes.num_query_groups
    if num_groups is None:  # without groups of several heads, a head goes with its keys
        num_groups = config.attention.num_kv_heads if each > 1 else num_heads or 0
    if num_heads is None:
        num_heads = num_groups * each
    _check_size("--num-query-groups", num_groups, config.attention.num_kv_heads)
    _check_size("--num-attention-heads", num_heads, config.attention.num_heads)
    if num_heads % num_groups or num_heads // num_groups > each:
        raise UsageError(
            f"{num_heads} query heads in {num_groups} groups, and a group of the model has {each}",
            hint=f"as many heads in each group, 1 to {each}; --num-query-groups leaves out groups",
        )
    return num_heads, num_groups


def _best_heads(
    scores: Scores, num_groups: int, keep_groups: int, keep_each: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The heads and groups that stay, in order: heads belong to groups one after the other."""
    each = len(scores) // num_groups
    rows = [scores[g * each : (g + 1) * each] for g in range(num_groups)]
    groups = _best(tuple(math.sqrt(math.fsum(x * x for x in row)) for row in rows), keep_groups)
    heads = tuple(g * each + h for g in groups for h in _best(rows[g], keep_each))
    return heads, groups


def _best(scores: Scores, count: int) -> tuple[int, ...]:
    """The indices of the highest scores, ascending; of equal ones the first."""
    return tuple(sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]))


def _check_size(flag: str, size: int, whole: int) -> None:
    if not 1 <= size <= whole:
        raise UsageError(
            f"{flag} is {size}, and the model has {whole}",
            hint=f"1 to {whole}" if whole else f"leave {flag} out",
        )


def _check_count(scores: Scores, count: int, what: str, file: Path) -> None:
    if len(scores) != count:
        raise FormatError(
            f"it has {len(scores)} scores of {what}, and the model has {count}",
            file=file,
            hint="measure the scores of this model: " + _HINT,
        )


def _rounded(scores: Sequence[float]) -> list[float]:
    return [float(f"{score:.7g}") for score in scores]


def _numbers(row: Any) -> Scores:
    if not isinstance(row, list):
        raise TypeError(f"{str(row)[:40]!r} is no list")
    if wrong := [x for x in row if type(x) not in (int, float)]:
        raise TypeError(f"{str(wrong[0])[:40]!r} is no number")
    numbers = tuple(float(x) for x in row)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a score is NaN or Inf")
    return numbers
