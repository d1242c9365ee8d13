"""Chooses one option per item: the least total loss whose bytes stay within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CalibrationError, UsageError

MOST_STATES = 1 << 18
"""The most partial choices to extend. With more, only the best of similar size are kept, and the
result may not be the optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOption:
    """An option of one item: its size and its predicted loss."""

    name: str
    num_bytes: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackItem:
    """An item that takes exactly one of its options."""

    name: str
    options: tuple[FormatOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackSelection:
    """The index of the option of each item, and their sums.

    No choice within the budget has a loss below `bound`; the selection is optimal if its loss
    equals it.
    """

    picks: tuple[int, ...]
    num_bytes: int
    loss: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackStep:
    """A point of the curve of all budgets: the least loss for a number of bytes.

    It differs from the previous point in that `item` takes its option `option` (both empty for the
    first point, the smallest).
    """

    num_bytes: int
    loss: float
    item: str = ""
    option: str = ""


@dataclass(frozen=True, slots=True)
class _Rise:
    """A step of an item from one option of its hull to the next larger one."""

    slope: float
    item: int
    place: int
    num_bytes: int
    loss: float


def smallest(items: Sequence[KnapsackItem]) -> int:
    """The bytes of the smallest choice."""
    return sum(min(o.num_bytes for o in item.options) for item in items)


def select(
    items: Sequence[KnapsackItem], budget: int, *, most_states: int = MOST_STATES
) -> KnapsackSelection:
    """Select the options with the least total loss within `budget` bytes; ties go to the smallest.

    Partial choices are extended item by item. One is dropped if another is no larger and no worse,
    or if even fractions of options could not bring it below the best known choice (the linear
    relaxation, whose optimum is on the lower convex hulls of the options). The result is
    deterministic.

    Raises:
        UsageError: no choice fits; names the smallest.
        CalibrationError: a loss is NaN or Inf.
    """
    _check(items, budget)
    hulls = [_hull(item) for item in items]
    picks = _greedy(items, hulls, budget)
    best = _total(items, picks)
    bound = _relaxed(items, hulls, budget)
    if best[1] <= bound or not items:
        return KnapsackSelection(
            picks=picks, num_bytes=best[0], loss=best[1], bound=min(bound, best[1])
        )
    best_picks, exact = _searched(items, hulls, budget, best[1], most_states)
    if best_picks is not None and _better(_total(items, best_picks), best):
        picks, best = best_picks, _total(items, best_picks)
    return KnapsackSelection(
        picks=picks, num_bytes=best[0], loss=best[1], bound=best[1] if exact else bound
    )


def curve(items: Sequence[KnapsackItem]) -> tuple[KnapsackStep, ...]:
    """List budgets and the least losses they allow, from the smallest choice to the one without
    loss.

    Every point is the best choice of its size; choices between two points are slightly above the
    line.

    Raises:
        CalibrationError: a loss is NaN or Inf.
    """
    _check(items, None)
    hulls = [_hull(item) for item in items]
    options = [item.options[hull[0]] for item, hull in zip(items, hulls, strict=True)]
    size = sum(o.num_bytes for o in options)
    out = [KnapsackStep(num_bytes=size, loss=math.fsum(o.loss for o in options))]
    for rise in _rises(items, hulls):
        item = items[rise.item]
        options[rise.item] = option = item.options[hulls[rise.item][rise.place]]
        size += rise.num_bytes
        loss = math.fsum(o.loss for o in options)
        out.append(KnapsackStep(num_bytes=size, loss=loss, item=item.name, option=option.name))
    return tuple(out)


def _check(items: Sequence[KnapsackItem], budget: int | None) -> None:
    for item in items:
        for option in item.options:
            if not np.isfinite(option.loss):
                raise CalibrationError(
                    f"the sensitivity of {item.name} in {option.name} is {option.loss}",
                    hint="measure again; activations may have overflowed",
                )
    if budget is not None and budget < (smallest_bytes := smallest(items)):
        raise UsageError(
            f"a budget of {budget} bytes is below the {smallest_bytes} bytes of the smallest choice"
        )


def _better(a: tuple[int, float], b: tuple[int, float]) -> bool:
    return (a[1], a[0]) < (b[1], b[0])


def _total(items: Sequence[KnapsackItem], picks: Sequence[int]) -> tuple[int, float]:
    chosen = [item.options[p] for item, p in zip(items, picks, strict=True)]
    return sum(o.num_bytes for o in chosen), float(sum(o.loss for o in chosen))


def _useful(item: KnapsackItem) -> list[int]:
    """Options by size that cost less than all smaller ones."""
    order = sorted(
        range(len(item.options)), key=lambda i: (item.options[i].num_bytes, item.options[i].loss, i)
    )
    out: list[int] = []
    for i in order:
        if not out or item.options[i].loss < item.options[out[-1]].loss:
            out.append(i)
    return out


def _hull(item: KnapsackItem) -> list[int]:
    """The options on the lower convex hull of (bytes, loss), by size."""
    out: list[int] = []
    for i in _useful(item):
        while len(out) > 1 and _slope(item, out[-2], i) <= _slope(item, out[-2], out[-1]):
            out.pop()
        out.append(i)
    return out


def _slope(item: KnapsackItem, a: int, b: int) -> float:
    small, large = item.options[a], item.options[b]
    return (large.loss - small.loss) / (large.num_bytes - small.num_bytes)


def _rises(items: Sequence[KnapsackItem], hulls: Sequence[Sequence[int]]) -> list[_Rise]:
    """All steps along all hulls, those with the largest gain per byte first."""
    out = []
    for number, (item, hull) in enumerate(zip(items, hulls, strict=True)):
        for place in range(1, len(hull)):
            a, b = item.options[hull[place - 1]], item.options[hull[place]]
            slope = _slope(item, hull[place - 1], hull[place])
            out.append(_Rise(slope, number, place, b.num_bytes - a.num_bytes, b.loss - a.loss))
    return sorted(out, key=lambda r: (r.slope, r.item, r.place))


def _greedy(
    items: Sequence[KnapsackItem], hulls: Sequence[Sequence[int]], budget: int
) -> tuple[int, ...]:
    """A good solution: steps by gain per byte while they fit, then whatever fits."""
    places = [0] * len(items)
    remaining = budget - sum(
        item.options[hull[0]].num_bytes for item, hull in zip(items, hulls, strict=True)
    )
    for rise in _rises(items, hulls):
        if rise.num_bytes <= remaining and places[rise.item] == rise.place - 1:
            places[rise.item] = rise.place
            remaining -= rise.num_bytes
    picks = [hull[place] for hull, place in zip(hulls, places, strict=True)]
    while True:
        fitting = [
            (o.loss - now.loss, number, i)
            for number, item in enumerate(items)
            if (now := item.options[picks[number]])
            for i, o in enumerate(item.options)
            if o.loss < now.loss and o.num_bytes - now.num_bytes <= remaining
        ]
        if not fitting:
            return tuple(picks)
        _, number, i = min(fitting)
        remaining -= (
            items[number].options[i].num_bytes - items[number].options[picks[number]].num_bytes
        )
        picks[number] = i


def _relaxed(items: Sequence[KnapsackItem], hulls: Sequence[Sequence[int]], budget: int) -> float:
    """The least loss within the budget if options could be mixed; no choice has less."""
    sizes, losses = _line(items, hulls, range(len(items)))
    return float(np.interp(budget, sizes, losses))


def _line(
    items: Sequence[KnapsackItem], hulls: Sequence[Sequence[int]], numbers: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The convex line of least losses by bytes of some items, relaxed."""
    first = [items[i].options[hulls[i][0]] for i in numbers]
    rises = _rises([items[i] for i in numbers], [hulls[i] for i in numbers])
    sizes = np.cumsum([sum(o.num_bytes for o in first), *(r.num_bytes for r in rises)])
    losses = np.cumsum([float(sum(o.loss for o in first)), *(r.loss for r in rises)])
    return sizes.astype(np.float64), losses


def _searched(
    items: Sequence[KnapsackItem],
    hulls: Sequence[Sequence[int]],
    budget: int,
    best: float,
    most_states: int,
) -> tuple[tuple[int, ...] | None, bool]:
    """The best choice with a loss of at most `best`, and whether the search was exhaustive."""
    order = _by_clearness(items, hulls, budget)
    allowed = best + 1e-12 * abs(best)
    sizes, losses = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
    exact = True
    for place, number in enumerate(order):
        options = items[number].options
        useful = _useful(items[number])
        grown = np.concatenate([sizes + options[i].num_bytes for i in useful])
        cost = np.concatenate([losses + options[i].loss for i in useful])
        parent = np.tile(np.arange(len(sizes), dtype=np.int32), len(useful))
        pick = np.repeat(np.array(useful, np.int32), len(sizes))
        line = _line(items, hulls, order[place + 1 :])
        remaining = budget - grown
        hopeful = (remaining >= line[0][0]) & (cost + np.interp(remaining, *line) <= allowed)
        survivors = np.flatnonzero(hopeful)
        survivors = survivors[np.lexsort((survivors, cost[survivors], grown[survivors]))]
        survivors = survivors[_falls(cost[survivors])]
        if len(survivors) > most_states:
            exact = False
            survivors = _thinned(survivors, grown[survivors], most_states)
        sizes, losses = grown[survivors], cost[survivors]
        steps.append((parent[survivors], pick[survivors]))
        if not len(survivors):  # by rounding alone: the choice that `best` is of was within
            return None, exact
    index = len(losses) - 1  # losses fall as sizes grow
    picks = [0] * len(items)
    for number, (parent, pick) in zip(reversed(order), reversed(steps), strict=True):
        picks[number], index = int(pick[index]), int(parent[index])
    return tuple(picks), exact


def _falls(losses: NDArray[np.float64]) -> NDArray[np.intp]:
    """Places whose loss is below all before."""
    if not len(losses):
        return np.zeros(0, np.intp)
    before = np.concatenate([[np.inf], np.minimum.accumulate(losses)[:-1]])
    return np.flatnonzero(losses < before)


def _thinned(states: NDArray[np.intp], sizes: NDArray[np.int64], most: int) -> NDArray[np.intp]:
    """At most `most` of the states by size: the largest, so the best, of each width of sizes."""
    width = max(int(sizes[-1] - sizes[0]), 1)
    bins = (sizes - sizes[0]) * (most - 1) // width
    last = np.append(np.flatnonzero(np.diff(bins)), len(bins) - 1)
    out: NDArray[np.intp] = states[last]
    return out


def _by_clearness(
    items: Sequence[KnapsackItem], hulls: Sequence[Sequence[int]], budget: int
) -> list[int]:
    """Items whose second-best option is far behind first: those in doubt multiply states last."""
    price, remaining = (
        0.0,
        budget - sum(i.options[h[0]].num_bytes for i, h in zip(items, hulls, strict=True)),
    )
    for rise in _rises(items, hulls):
        price = -rise.slope
        remaining -= rise.num_bytes
        if remaining < 0:
            break
    doubt = []
    for number, item in enumerate(items):
        prices = sorted(o.loss + price * o.num_bytes for o in item.options)
        doubt.append((prices[0] - prices[1] if len(prices) > 1 else -np.inf, number))
    return [number for _, number in sorted(doubt)]
