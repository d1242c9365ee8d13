"""Delayed scaling: amax histories of a module, and the scales computed from them.

The state of a module is a dict of float32 arrays: `amax_history_fwd` `[H, 3 * G]` and `scale_fwd`
`[3 * G]` for the input, the weight and the output of each of its G matrix products (in an order
that `grouped_delayed_scaling` tells), `amax_history_bwd` `[H, 2 * G]` and `scale_bwd` `[2 * G]` for
two gradients; releases 1.x of Transformer Engine keep `scale_inv_fwd` and `scale_inv_bwd` too. Row
0 of a history is the step under way, 0 once it is over; the others run from the oldest to the
newest. Source: `_amax_and_scale_update` and `_default_sf_compute` in Transformer Engine 1.13
(`pytorch/fp8.py`) and 2.20 (`pytorch/quantization.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
State = Mapping[str, Array]
HistoryReduction = Literal["max", "first"]
Columns = Literal["blocked", "interleaved"]
"""How the columns of several products lie: kind after kind, or product after product."""

KINDS = {"fwd": 3, "bwd": 2}
"""What each product has of forward and backward state: input, weight, output; two gradients."""

INPUT, WEIGHT, OUTPUT = range(3)
GRAD_OUTPUT, GRAD_INPUT = range(2)

_UNUSED = {"fwd": (OUTPUT,), "bwd": (GRAD_INPUT,)}
"""What no linear layer quantizes: there, histories of zeros are as they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """How scales are computed from histories: `FP8_MAX / amax / 2^margin`.

    `algorithm` is `max` (of the history), `most_recent`, or None for a function of the run's own,
    which is not known here: scales then stay what they are.
    """

    max_fwd: float = 448.0
    max_bwd: float = 57344.0
    margin: float = 0
    algorithm: str | None = "max"

    def fp8_max(self, direction: str) -> float:
        """The largest value of the number format of a direction, `fwd` or `bwd`."""
        return self.max_fwd if direction == "fwd" else self.max_bwd


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFault:
    """A fault in some columns of one array of a state: `nan`, `inf`, `negative`, `zeros`.

    `zeros` is a history in which nothing was ever seen, though the product uses it.
    """

    kind: str
    array: str
    columns: tuple[int, ...]


def num_gemms(state: State) -> int | None:
    """The matrix products that a state is of; None where its arrays do not agree on a number."""
    counts = set()
    for name, array in state.items():
        columns, each = array.shape[-1] if array.ndim else 0, KINDS[direction_of(name)]
        counts.add(columns // each if columns % each == 0 else 0)
    return counts.pop() if len(counts) == 1 and 0 not in counts else None


def direction_of(name: str) -> str:
    """`fwd` or `bwd`."""
    return name[-3:]


def amax(history: Array, algorithm: str | None = "max") -> Array:
    """The amax `[columns]` of a history `[H, columns]`; 0 for an empty history."""
    if not len(history):
        return np.zeros(history.shape[1:], np.float32)
    if algorithm == "most_recent":
        newest: Array = np.where(history[0] != 0, history[0], history[-1])
        return newest
    maximum: Array = history.max(0)
    return maximum


def scale(magnitude: Array, previous: Array, fp8_max: float, margin: float = 0) -> Array:
    """Scales for amaxes; the `previous` ones if an amax is 0, NaN or infinite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scales = (np.float32(fp8_max) / magnitude.astype(np.float32)) / np.float32(2.0**margin)
    usable = np.isfinite(magnitude) & (magnitude > 0)
    most = np.float32(np.finfo(np.float32).max)
    out = np.where(usable, np.where(np.isinf(scales), most, scales), previous)
    return np.asarray(out, np.float32)


def inverses(state: State) -> dict[str, Array]:
    """A state with the inverses of its scales, as releases 1.x keep them."""
    out: dict[str, Array] = {}
    for name, array in state.items():
        if name.startswith("scale_inv_"):
            continue
        out[name] = array
        if name.startswith("scale_"):
            with np.errstate(divide="ignore"):
                out[f"scale_inv_{direction_of(name)}"] = (np.float32(1) / array).astype(np.float32)
    return out


def without_inverses(state: State) -> dict[str, Array]:
    """A state as releases 2.x keep it."""
    return {n: a for n, a in state.items() if not n.startswith("scale_inv_")}


def margin_of(state: State, rule: ScalingRule) -> int:
    """The margin that explains a state's scales, for releases 1.x do not keep it; usually 0.

    It is one that most columns agree on exactly.
    """
    votes: list[float] = []
    for d in KINDS:
        history, stored_scale = state.get(f"amax_history_{d}"), state.get(f"scale_{d}")
        if history is None or stored_scale is None or history.shape[1:] != stored_scale.shape:
            continue
        maximum = amax(history)
        good = np.isfinite(maximum) & (maximum > 0) & np.isfinite(stored_scale) & (stored_scale > 0)
        votes += np.log2(
            rule.fp8_max(d) / maximum[good].astype(np.float64) / stored_scale[good]
        ).tolist()
    near = [round(v) for v in votes if abs(v - round(v)) < 1e-5]
    top = max(set(near), key=near.count, default=0)
    return top if 2 * near.count(top) > len(votes) and 0 < top < 64 else 0


def same_shapes(states: Sequence[State]) -> bool:
    """States have the same arrays, of as many columns; their histories may differ in length."""
    first = {n: a.shape[-1:] for n, a in states[0].items()}
    return all({n: a.shape[-1:] for n, a in s.items()} == first for s in states)


def merge(
    states: Sequence[State], rule: ScalingRule, *, reduction: HistoryReduction = "max"
) -> dict[str, Array]:
    """Merge the states that several ranks have of the same module into one.

    Histories are merged row by row, the newest with the newest: NaN only where all are, else the
    largest. Scales are computed again where ranks differ, and are otherwise as they were: what all
    ranks agree on does not change by a bit. `how` `first` takes the first rank's.

    Raises:
        ValueError: they are not of the same shapes.
    """
    out = dict(states[0])
    if reduction == "first" or len(states) == 1:
        return out
    if not same_shapes(states):
        raise ValueError("the states of these ranks differ in shape")
    for d in KINDS:
        history_key, scale_key, inverse_key = f"amax_history_{d}", f"scale_{d}", f"scale_inv_{d}"
        differs = np.zeros(1, bool)
        if history_key in out:
            length = max(len(s[history_key]) for s in states)
            rows = np.stack([lengthened(s[history_key], length) for s in states])
            out[history_key] = np.fmax.reduce(rows, 0)
            differs = differs | _differ(rows).any(0)
        if scale_key in out:
            scales = np.stack([s[scale_key] for s in states])
            before = scales
            differs = differs | _differ(before)
            usable = np.where(np.isfinite(before) & (before > 0), before, np.inf).min(0)
            previous = np.where(np.isfinite(usable), usable, np.float32(1)).astype(np.float32)
            rescaled_scale = _recompute_scale(out, d, previous, rule)
            out[scale_key] = np.where(differs, rescaled_scale, scales[0])
        if inverse_key in out and scale_key in out:
            with np.errstate(divide="ignore"):
                turned = (np.float32(1) / out[scale_key]).astype(np.float32)
            differs = differs | _differ(np.stack([s[inverse_key] for s in states]))
            out[inverse_key] = np.where(differs, turned, out[inverse_key])
    return out


def _differ(rows: Array) -> NDArray[np.bool_]:
    """Where the first axis does not hold the same value throughout; NaN is the same as NaN."""
    first = rows[:1]
    is_equal = (rows == first) | (np.isnan(rows) & np.isnan(first))
    return np.asarray(~is_equal.all(0))


def _recompute_scale(state: State, direction: str, previous: Array, rule: ScalingRule) -> Array:
    history = state.get(f"amax_history_{direction}")
    if history is None or rule.algorithm is None or history.shape[1:] != previous.shape:
        return previous
    maximum = amax(history, rule.algorithm)
    return scale(maximum, previous, rule.fp8_max(direction), rule.margin)


def rescaled(state: State, rule: ScalingRule) -> dict[str, Array]:
    """The state with all scales computed from its histories; those it cannot compute stay."""
    out = dict(state)
    for d in KINDS:
        if (current := state.get(f"scale_{d}")) is not None:
            out[f"scale_{d}"] = _recompute_scale(state, d, current, rule)
    return inverses(out) if any(n.startswith("scale_inv_") for n in state) else out


def lengthened(history: Array, length: int) -> Array:
    """A history `[H, columns]` of another length: the newest rows, zeros before the oldest."""
    have = len(history)
    if length == have or have == 0 or length < 1:
        return history
    if length < have:
        return np.concatenate([history[:1], history[have - length + 1 :]])
    zeros = np.zeros((length - have, *history.shape[1:]), np.float32)
    return np.concatenate([history[:1], zeros, history[1:]])


def with_length(state: State, length: int, rule: ScalingRule) -> dict[str, Array]:
    """A state with histories of `length` steps; scales follow where a maximum was forgotten."""
    out = dict(state)
    for d in KINDS:
        history_key, scale_key = f"amax_history_{d}", f"scale_{d}"
        if history_key not in state:
            continue
        out[history_key] = lengthened(state[history_key], length)
        if scale_key in state:
            before, after = (
                amax(h, rule.algorithm) for h in (state[history_key], out[history_key])
            )
            new_scale = _recompute_scale(out, d, state[scale_key], rule)
            out[scale_key] = np.where(before == after, state[scale_key], new_scale)
            if (inverse := f"scale_inv_{d}") in state:
                with np.errstate(divide="ignore"):
                    turned = (np.float32(1) / out[scale_key]).astype(np.float32)
                out[inverse] = np.where(before == after, state[inverse], turned)
    return out


def unseen(like: State) -> dict[str, Array]:
    """A fresh state of the same shapes: histories of 0, scales of 1."""
    return {
        n: np.zeros_like(a) if n.startswith("amax_history_") else np.ones_like(a)
        for n, a in like.items()
    }


def faults(
    state: State, *, linear: bool = True, columns: Columns | None = "blocked"
) -> list[ScalingFault]:
    """The faults in a state's numbers.

    `linear` says that the module is a linear layer, whose inputs, weights and gradients of outputs
    are all quantized; of others, and of several products whose `columns` are not known (None),
    histories of zeros are no fault. Nor are those of gradients where there never were any: in the
    first of layers that are frozen.
    """
    out: list[ScalingFault] = []
    no_gradients = _has_no_gradients(state)
    for name, array in state.items():
        if array.ndim == 0 or array.size == 0:
            continue
        flat = array.reshape(-1, array.shape[-1])
        bad: dict[str, Any] = {}
        if not (flat.min() >= 0 and np.isfinite(flat.max())):  # rare; NaN is in both
            bad["nan"], bad["inf"] = np.isnan(flat).any(0), np.isinf(flat).any(0)
            bad["negative"] = (flat < 0).any(0)
        if name.startswith("amax_history_"):
            is_backward = direction_of(name) == "bwd"
            if (
                linear
                and len(flat) > 1
                and columns is not None
                and not (is_backward and no_gradients)
            ):
                idle = unused(direction_of(name), flat.shape[1], columns)
                bad["zeros"] = (flat == 0).all(0) & ~idle
        else:
            bad["zeros"] = (flat == 0).any(0)
        out += [
            ScalingFault(kind=kind, array=name, columns=tuple(np.flatnonzero(indices).tolist()))
            for kind, indices in bad.items()
            if indices.any()
        ]
    return out


def _has_no_gradients(state: State) -> bool:
    """Whether only the forward pass ran: gradient scales still have their initial values."""
    histories = [state.get(f"amax_history_{d}") for d in KINDS]
    scale = state.get("scale_bwd")
    if scale is None or any(h is None or not h.size for h in histories):
        return False
    has_forward, has_backward = (np.any(h) for h in histories)
    return bool(has_forward and not has_backward and (scale == 1).all())


def kinds_of(direction: str, number: int, columns: Columns) -> NDArray[np.int_]:
    """The role of each of `number` columns: input, weight, output, or two gradients, from 0."""
    each = KINDS[direction]
    index = np.arange(number)
    kinds = index % each if columns == "interleaved" else index // max(number // each, 1)
    return np.asarray(np.minimum(kinds, each - 1))


def unused(direction: str, number: int, columns: Columns) -> NDArray[np.bool_]:
    """Which columns are of what no linear layer quantizes."""
    return np.asarray(np.isin(kinds_of(direction, number, columns), _UNUSED[direction]))
