"""Transformer Engine's extra state (scales and amax histories), read and written without it.

A module's delayed scaling state is a dict of float32 tensors and other values. Releases 1.x save it
with `torch.save` in a BytesIO, 2.x as a pickle in a tensor of bytes, with the recipe.
Modules without FP8 have None or an empty tensor; recipes without state (current scaling, MXFP8) in
releases 2.x up to 2.16 have no tensors.
With G matrix products in a module (the experts of a grouped linear layer), `scale_fwd` is
`[3 * G]`, `scale_bwd` `[2 * G]`; histories have one more dimension in front. The order of the
columns changed with release 2.3: see `number_formats.grouped_delayed_scaling`, and
`te_grouped_state` for how Megatron-Core splits it.
Source: transformer_engine 1.13 and 2.20, `pytorch/module/base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.number_formats import delayed_scaling
from megtool.number_formats.delayed_scaling import Array, Columns, HistoryReduction, ScalingRule
from megtool.number_formats.grouped_delayed_scaling import columns_of
from megtool.pickles import reader as pickle_reader
from megtool.pickles.nested_tensors import (
    make_nested_tensor,
    make_stored_tensor,
    read_array,
)
from megtool.pickles.reader import Inert, PersistentRef, inert_global
from megtool.pickles.writer import encode
from megtool.pickles.zip_reader import load_object_bytes
from megtool.pickles.zip_writer import encode_object

RECIPES = "transformer_engine.common.recipe"
DELAYED = "DelayedScaling"

NUM_GEMMS = "num_gemms"
EXTRA_VARIABLES = "extra_fp8_variables"
_RECIPE = "recipe"
_ZIP, _PICKLE = b"PK\3\4", b"\x80"
_MARKS = (b"amax_history", b"scale_fwd", b"extra_fp8_variables", b"transformer_engine")
_MAX_NONE_BYTES = {1: 4096, 2: 64}
"""The largest size of a saved None, by release."""

_BYTES_IO = ("io.BytesIO", "_io.BytesIO")
_TENSOR = "torch._utils._rebuild_tensor_v2"
_ORDER = (
    "recipe",
    "scale_fwd",
    "scale_inv_fwd",
    "amax_history_fwd",
    "scale_bwd",
    "scale_inv_bwd",
    "amax_history_bwd",
    "extra_fp8_variables",
)
_UP_TO_2_2 = frozenset(
    {
        "margin",
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
        "scaling_factor_compute_algo",
        "reduce_amax",
        "fp8_dpa",
        "fp8_mha",
    }
)
"""The fields that a delayed scaling recipe has in releases 2.0 to 2.14; before 2.2 `interval` too.
Source: `common/recipe/__init__.py` at v2.0, v2.2, v2.3 and v2.15 (which adds one)."""
_ARRAYS = frozenset(n for n in _ORDER if n.endswith(("fwd", "bwd")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraState:
    """The FP8 state of one module.

    `tensors` are float32: `scale_fwd`, `amax_history_fwd` and so on, and of releases 1.x
    `scale_inv_fwd`; a recipe without state has none. `facts` are all other values, inert. `release`
    is the release of Transformer Engine, 1 or 2, that defines its form.
    """

    tensors: dict[str, Array]
    facts: dict[Any, Any]
    release: int

    @property
    def is_delayed(self) -> bool:
        """Whether it has scales and histories."""
        return bool(self.tensors)

    @property
    def num_gemms(self) -> int:
        """The number of GEMMs of the module."""
        count = self._variables.get(NUM_GEMMS)
        return count if isinstance(count, int) and count > 0 else 1

    @property
    def history_length(self) -> int:
        """Steps of the longest history, including the current one."""
        lengths = [len(t) for n, t in self.tensors.items() if n.startswith("amax_history_")]
        return max(lengths, default=0)

    @property
    def recipe_name(self) -> str | None:
        """The class of its recipe; None if it stores none, as in releases 1.x."""
        node = self.facts.get(_RECIPE)
        return node.qualname if isinstance(node, Inert) else None

    @property
    def recipe(self) -> dict[str, Any]:
        """The fields of its recipe, inert."""
        node = self.facts.get(_RECIPE)
        fields = node.state if isinstance(node, Inert) else None
        if isinstance(fields, tuple) and len(fields) == 2 and isinstance(fields[0], dict):
            fields = fields[0]  # a class with slots gives (fields, slots)
        return fields if isinstance(fields, dict) else {}

    @property
    def column_order(self) -> Columns | None:
        """The column order of a grouped linear layer; None if it cannot be determined.

        Unused columns show it, otherwise the release: `blocked` up to 1.x. In some 2.x releases the
        fields of the recipe identify it.
        """
        if (order := columns_of(self.tensors)) is not None:
            return order
        fields = self.recipe
        if self.release == 1 or "interval" in fields:
            return "blocked"
        is_newer = self.recipe_name == DELAYED and not fields.keys() <= _UP_TO_2_2
        return "interleaved" if is_newer else None

    @property
    def scaling_rule(self) -> ScalingRule:
        """How scales follow from histories: from the recipe, or inferred from the scales."""
        recipe, variables = self.recipe, self._variables
        fwd, bwd = _format_maxima(recipe.get("fp8_format")) or (448.0, 57344.0)
        base_rule = ScalingRule(
            max_fwd=_parse_positive(variables.get("fp8_max_fwd")) or fwd,
            max_bwd=_parse_positive(variables.get("fp8_max_bwd")) or bwd,
        )
        if not recipe:
            return replace(base_rule, margin=delayed_scaling.margin_of(self.tensors, base_rule))
        margin, algorithm = recipe.get("margin", 0), recipe.get("amax_compute_algo", "max")
        has_custom_scaling = recipe.get("scaling_factor_compute_algo") is not None
        named_algorithm = (
            algorithm if algorithm in ("max", "most_recent") and not has_custom_scaling else None
        )
        return replace(
            base_rule,
            margin=margin if isinstance(margin, int | float) and abs(margin) < 64 else 0,
            algorithm=named_algorithm,
        )

    @property
    def _variables(self) -> Mapping[Any, Any]:
        variables = self.facts.get(EXTRA_VARIABLES)
        return variables if isinstance(variables, dict) else {}


def _format_maxima(node: Any) -> tuple[float, float] | None:
    """The maxima, forward and backward, of a pickled format: `Format((448, 57344))`."""
    while isinstance(node, Inert) and node.args:
        node = node.args if len(node.args) == 2 else node.args[0]
    if isinstance(node, tuple) and len(node) == 2 and all(map(_parse_positive, node)):
        return float(node[0]), float(node[1])
    return None


def _parse_positive(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e9 else None


def decode(value: Any, *, file: str | Path = "") -> ExtraState | None:
    """The FP8 state in the inert tree of an extra state; None if there is none.

    Extra states of other tools, such as ModelOpt's, give None too.

    Raises:
        FormatError: the state is damaged, or names something hostile.
    """
    tree, release = _decode_value(value, file)
    if not isinstance(tree, dict) or not any(
        map(tree.__contains__, (*_ARRAYS, _RECIPE, EXTRA_VARIABLES))
    ):
        return None
    tensors = {
        k: t for k, v in tree.items() if k in _ARRAYS and (t := read_array(v, file)) is not None
    }
    for name, t in tensors.items():
        if t.ndim != (2 if name.startswith("amax_history_") else 1):
            raise FormatError(f"{name} in an extra state has {t.ndim} dimensions", file=file)
    facts = {k: v for k, v in tree.items() if k not in tensors}
    return ExtraState(tensors=tensors, facts=facts, release=release)


def is_empty(value: Any, *, file: str | Path = "") -> bool:
    """Whether an extra state (an inert tree) is empty: None, no bytes, or a saved None.

    Raises:
        FormatError: the state is damaged, or names something hostile.
    """
    if value is None:
        return True
    data, release = _extract_bytes(value)
    if release == 0 or len(data) > _MAX_NONE_BYTES[release]:
        return False
    tree, release = _decode_value(value, file)
    return release != 0 and tree is None


def raw_bytes(value: Any) -> bytes:
    """The bytes of an extra state; empty for None and for other tools' states."""
    return _extract_bytes(value)[0]


def detect_release(value: Any) -> int | None:
    """The release, 1 or 2, of an extra state's form; None if it has neither form."""
    return _extract_bytes(value)[1] or None


def _decode_value(value: Any, file: str | Path) -> tuple[Any, int]:
    """The decoded extra state (None if empty) and its release; 0 if it is not TE's."""
    data, release = _extract_bytes(value)
    if not data or not release:
        return None, release
    if not data.startswith(_ZIP if release == 1 else _PICKLE):
        return None, 0
    try:
        if release == 1:
            return load_object_bytes(data, file=file), 1
        return pickle_reader.decode(data, file=file), 2
    except FormatError as e:
        if e.hint or any(mark in data for mark in _MARKS):  # a hint means it is hostile
            raise
        return None, 0


def to_tree(state: ExtraState | None, *, release: int | None = None) -> Any:
    """A state as an inert tree in the form of its release; None gives the state without FP8.

    Raises:
        ValueError: `release` differs from the state's; see `convert_release`.
    """
    release = release or (state.release if state else 2)
    if state is None:
        return _make_bytes_io(encode_object(None)) if release == 1 else make_bytes_tensor(b"")
    if release != state.release:
        raise ValueError(
            f"a state of release {state.release} cannot be written as release {release}"
        )
    values = {**state.facts, **state.tensors}
    names = [n for n in _ORDER if n in values] + [n for n in values if n not in _ORDER]
    if release == 1:
        numbers = {name: str(k) for k, name in enumerate(state.tensors)}
        tree = {
            n: make_stored_tensor(values[n], numbers[n]) if n in numbers else values[n]
            for n in names
        }
        return _make_bytes_io(encode_object(tree))
    tree = {n: make_nested_tensor(values[n]) if n in state.tensors else values[n] for n in names}
    return make_bytes_tensor(encode(tree, protocol=3))


def convert_release(state: ExtraState, release: int) -> ExtraState | None:
    """A state in the form of another release; None if that release has no such form.

    Releases 1.x store inverse scales and no recipe, and support only delayed scaling.
    """
    if release == state.release:
        return state
    facts = {k: v for k, v in state.facts.items() if k != _RECIPE}
    if not state.is_delayed:
        return None
    if release == 1:
        return ExtraState(tensors=delayed_scaling.inverses(state.tensors), facts=facts, release=1)
    node = state.facts.get(_RECIPE) or make_delayed_recipe(state.scaling_rule, state.history_length)
    tensors = delayed_scaling.without_inverses(state.tensors)
    return ExtraState(tensors=tensors, facts={_RECIPE: node, **facts}, release=2)


def make_delayed_recipe(rule: ScalingRule, history_length: int) -> Inert:
    """The recipe of delayed scaling as releases 2.x pickle it."""
    helper = inert_global(RECIPES, "_FormatHelper")
    numbers = tuple(int(n) if n == int(n) else n for n in (rule.max_fwd, rule.max_bwd))
    kind = inert_global(RECIPES, DELAYED)
    node = kind.__new__(kind)
    node.__setstate__(
        {
            "margin": int(rule.margin) if rule.margin == int(rule.margin) else rule.margin,
            "fp8_format": inert_global(RECIPES, "Format")(helper.__new__(helper, *numbers)),
            "amax_history_len": history_length,
            "amax_compute_algo": rule.algorithm or "max",
            "scaling_factor_compute_algo": None,
            "reduce_amax": True,
            "fp8_dpa": False,
            "fp8_mha": False,
        }
    )
    return node


def make_bytes_tensor(data: bytes) -> Inert:
    """A tensor of bytes as an inert tree, to be written to a `torch.save` file."""
    storage = PersistentRef(
        ("storage", inert_global("torch", "ByteStorage"), "0", "cpu", len(data))
    )
    storage.data = data
    hooks = inert_global("collections", "OrderedDict")()
    rebuild = inert_global("torch._utils", "_rebuild_tensor_v2")
    return rebuild(storage, 0, (len(data),), (1,), False, hooks)


def _make_bytes_io(data: bytes) -> Inert:
    kind = inert_global("_io", "BytesIO")
    node = kind.__new__(kind)
    node.__setstate__((data, 0, None))
    return node


def replace_tensors(state: ExtraState, tensors: Mapping[str, Array]) -> ExtraState:
    """The state with other tensors; the recipe's history length is updated."""
    out = replace(state, tensors=dict(tensors))
    length, recipe = out.history_length, out.facts.get(_RECIPE)
    if not length or not isinstance(recipe, Inert) or "amax_history_len" not in out.recipe:
        return out
    if out.recipe["amax_history_len"] == length:
        return out
    new = type(recipe).__new__(type(recipe), *recipe.args, **recipe.kwargs)
    new.built_by, new.items, new.pairs = recipe.built_by, recipe.items, recipe.pairs
    fields = {**out.recipe, "amax_history_len": length}
    new.__setstate__((fields, recipe.state[1]) if isinstance(recipe.state, tuple) else fields)
    return replace(out, facts={**out.facts, _RECIPE: new})


def resize_history(state: ExtraState, length: int) -> ExtraState:
    """The state with histories of `length` steps."""
    return replace_tensors(
        state, delayed_scaling.with_length(state.tensors, length, state.scaling_rule)
    )


def merge(
    states: Sequence[ExtraState], *, reduction: HistoryReduction = "max"
) -> ExtraState | None:
    """Merge the states of several ranks; None if they are not compatible.

    States of other releases are converted to the first's, and the first's facts are used.
    """
    first = states[0]
    converted = [convert_release(s, first.release) for s in states]
    matching = [s for s in converted if s is not None and s.is_delayed == first.is_delayed]
    if len(matching) != len(states) or not delayed_scaling.same_shapes(
        [s.tensors for s in matching]
    ):
        return None
    merged = delayed_scaling.merge(
        [s.tensors for s in matching], first.scaling_rule, reduction=reduction
    )
    return replace_tensors(first, merged)


def _extract_bytes(value: Any) -> tuple[bytes, int]:
    """The bytes of an extra state, and the release of its form (0: neither)."""
    if (raw := pickle_reader.as_bytes(value)) is not None:
        return raw, 2
    if not isinstance(value, Inert):
        return b"", 0
    if value.name in _BYTES_IO:
        parts = [*value.args, *(value.state if isinstance(value.state, tuple) else ())]
        return next(filter(None, map(pickle_reader.as_bytes, parts)), b""), 1
    if value.name != _TENSOR or len(value.args) < 3 or not isinstance(value.args[0], PersistentRef):
        return b"", 0
    start, shape = value.args[1], value.args[2]
    data = value.args[0].data or b""
    if isinstance(shape, Inert) and shape.name == "torch.Size" and shape.args:
        shape = shape.args[0]
    if not isinstance(start, int) or not isinstance(shape, tuple) or len(shape) != 1:
        return b"", 0
    return data[start : start + shape[0]], 2
