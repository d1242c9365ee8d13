"""Amax: what becomes of FP8's delayed scaling state on its way to another checkpoint.

States follow their layers and experts by name (`objects`), those of several ranks are merged when
they are read (`rank_states`). Here they are brought to the form asked for and looked over; no
weight is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from megtool.checkpoint.catalogue import StoredObject
from megtool.checkpoint.containers.extra_state import (
    ExtraState,
    at_release,
    decode,
    to_tree,
    with_length,
)
from megtool.commands.megatron.amax_report import (
    HOW,
    RELEASES,
    AmaxFinding,
    AmaxReport,
    AmaxWish,
)
from megtool.commands.megatron.extra_states import (
    EMPTY,
    holds_nothing,
    is_extra_state,
    site_of,
)
from megtool.commands.megatron.facts import object_value
from megtool.commands.megatron.objects import Carried
from megtool.commands.megatron.rank_states import merged_of
from megtool.commands.opened import Opened
from megtool.errors import UsageError
from megtool.packing.delayed import KINDS, Fault, faults

LONGEST = 1 << 20
"""Steps of the longest history that is written."""

_REBUILD = "megtool.commands.scaling.rebuild"
_SHORT = 2048
"""Bytes of a saved object in which no state of scales has room."""

_KINDS = {
    "fwd": ("input", "weight", "output"),
    "bwd": ("gradient of the output", "gradient of the input", "gradient of the input"),
}
_SAYS = {
    "nan": "NaN",
    "inf": "infinity",
    "negative": "negative numbers",
    "zeros": "nothing but zeros",
}
_LINEAR = ("eh_proj", "output_layer")


def wish_of(how: str, release: int | None, history: int | None) -> AmaxWish:
    """What the user asks for.

    Raises:
        UsageError: there is no such thing.
    """
    for known in HOW:
        if how == known:
            break
    else:
        raise UsageError(f"amax {how!r}", hint=f"one of {', '.join(HOW)}")
    if release is not None and release not in RELEASES:
        raise UsageError(
            f"Transformer Engine {release}", hint="1 for releases 1.x, 2 for releases 2.x"
        )
    if history is not None and not 1 <= history <= LONGEST:
        raise UsageError(f"a history of {history} steps", hint=f"from 1 to {LONGEST}")
    return AmaxWish(how=known, release=release, history=history)


class States:
    """The extra states on their way to one target: brought to its form, counted, looked over."""

    def __init__(self, source: Opened, carried: Carried, wish: AmaxWish) -> None:
        self.findings: list[AmaxFinding] = []
        self._source, self._carried, self._wish = source, carried, wish
        self._merged = merged_of(source.catalogue)
        self._delayed: dict[str, ExtraState] = {}
        self._empty: list[str] = []
        self._changed: dict[str, Any] = {}
        self._rewritten: set[str] = set()
        self._counts = dict.fromkeys(
            ("modules", "stateless", "merged", "differing", "rebuilt", "stripped"), 0
        )
        self._ranks = 1
        self._releases: set[int] = set()
        self._history = (0, 0)

    @property
    def release(self) -> int | None:
        """The release in whose form states are written; None where there are none."""
        return self._wish.release or max(self._releases, default=None)

    def nothing(self) -> Any:
        """What a module without FP8 keeps: 1.x wants a None, and 2.0 to 2.7 refuse it."""
        return None if self.release in (None, 1) else to_tree(None, release=2)

    def settle(self, asked: Collection[str]) -> None:
        """Bring what is carried to the form asked for; what needs no change does not change a bit.

        `asked` are the objects that Megatron asks for, with or without content.

        Raises:
            FormatError: a state is damaged or hostile.
            UsageError: --amax rebuild, which needs a part of megtool that is not there.
        """
        carried, wish = self._carried, self._wish
        for name, held in carried.kept.items():
            if is_extra_state(name):
                self._look(name, held)
        if wish.how == "rebuild" and self._delayed:
            self._rebuild()
        if wish.how == "strip":
            self._strip(asked)
        elif wish.release is not None:
            for name in self._empty:
                self._changed.setdefault(name, self.nothing())
        self._put()
        self.findings[:0] = self._merged.findings

    def _look(self, name: str, held: StoredObject) -> None:
        """One object: count it, find its faults, bring it to the form asked for."""
        wish = self._wish
        is_short = held.extent is not None and held.extent[2] < _SHORT
        if is_short and wish.release is None and wish.how != "strip":
            return
        catalogue = self._source.catalogue
        file = catalogue.path(held.extent[0]) if held.extent else self._source.path
        value = object_value(catalogue, held)
        state = decode(value, file=file)
        if state is None:
            if holds_nothing(value):
                self._empty.append(name)
            return
        self._releases.add(state.release)
        self._counts["modules" if state.is_delayed else "stateless"] += 1
        ranks = self._merged.ranks.get(id(held.value), 1)
        self._ranks = max(self._ranks, ranks)
        self._counts["merged"] += ranks > 1
        if id(held.value) in self._merged.differing:
            self._counts["differing"] += 1
            self._rewritten.add(name)
        where = label(name)
        self.findings += [as_finding(where, f, state) for f in faults_of(name, state)]
        new = self._brought(where, state)
        if new is not None and new.is_delayed:
            self._delayed[name] = new
            before, after = self._history
            self._history = (
                max(before, state.history_length),
                max(after, new.history_length),
            )
        if new is not state:
            self._changed[name] = to_tree(new, release=None if new else wish.release)

    def _brought(self, where: str, state: ExtraState) -> ExtraState | None:
        """The state with the history and in the form asked for; None where that has none for it."""
        wish = self._wish
        out: ExtraState | None = state
        if wish.history is not None and state.is_delayed and state.history_length != wish.history:
            out = with_length(state, wish.history)
        if wish.release is not None and out is not None:
            out = at_release(out, wish.release)
            if out is None:
                text = f"Transformer Engine 1.x has no {state.recipe_name or 'recipe'}: left out"
                self.findings.append(AmaxFinding(module=where, kind="recipe", text=text))
        return out

    def _rebuild(self) -> None:
        """States whose weights contradict them, from the weights."""
        try:
            rebuild = importlib.import_module(_REBUILD).rebuild
        except ModuleNotFoundError as e:
            if e.name != _REBUILD:
                raise
            raise UsageError("--amax rebuild is not there yet", hint="--amax keep") from e
        names = {site_of(self._carried.kept[n].name): n for n in self._delayed}
        states = {site: self._delayed[n] for site, n in names.items() if site is not None}
        rebuilt, findings = rebuild(self._source, states)
        self.findings += findings
        for site, state in rebuilt.items():
            name = names[site]
            self._delayed[name] = state
            self._changed[name] = to_tree(state)
            self._counts["rebuilt"] += 1

    def _strip(self, asked: Collection[str]) -> None:
        """Leave out what holds nothing, or has seen nothing, where Megatron loads without it."""
        unseen = [n for n, state in self._delayed.items() if is_unseen(state)]
        for name in (*self._empty, *unseen):
            if name in asked:
                if name in self._delayed or self._wish.release is not None:
                    self._changed[name] = self.nothing()
                continue
            self._counts["stripped"] += 1
            held = self._carried.kept.pop(name)
            self._changed.pop(name, None)
            self._rewritten.discard(name)
            self._carried.drop(held.name, EMPTY, is_lost=False)
        gone = {d.name for d in self._carried.dropped}
        self._carried.moved = [n for n in self._carried.moved if n not in gone]

    def _put(self) -> None:
        """Put what changed in the place of what was carried."""
        kept = self._carried.kept
        derived = {kept[n].name for n in (*self._changed, *self._rewritten)}
        for name, value in self._changed.items():
            kept[name] = StoredObject(name=kept[name].name, kind="object", value=value)
        self._rewritten |= self._changed.keys()
        self._carried.moved = [n for n in self._carried.moved if n not in derived]
        self._carried.derived += sorted(derived)

    def report(self) -> AmaxReport | None:
        """What became of them; None where there is no state of Transformer Engine."""
        counts = self._counts
        if not (counts["modules"] or counts["stateless"] or counts["stripped"] or self.findings):
            return None
        return AmaxReport(
            how=self._wish.how,
            empty=len(self._empty),
            ranks=self._ranks,
            source_release=max(self._releases, default=None),
            release=self.release,
            source_history=self._history[0],
            history=self._history[1],
            rewritten=len(self._rewritten),
            findings=tuple(self.findings),
            **counts,
        )


def is_unseen(state: ExtraState) -> bool:
    """The state says nothing: histories of zeros, scales of one."""
    return all(
        not t.any() if n.startswith("amax_history_") else bool((t == 1).all())
        for n, t in state.tensors.items()
    )


def label(name: str) -> str:
    """The module whose state an object of this name is, as a person reads it."""
    site = site_of(name)
    if site is None:
        return name
    return site.module if site.expert is None else f"{site.module} of expert {site.expert}"


def faults_of(name: str, state: ExtraState) -> list[Fault]:
    """What is wrong with the numbers of a state, by the name of its object."""
    site = site_of(name)
    last = (site.module if site else name).rpartition(".")[2]
    return faults(state.tensors, linear=last.startswith("linear_") or last in _LINEAR)


def as_finding(where: str, fault: Fault, state: ExtraState) -> AmaxFinding:
    """A fault in words."""
    direction = fault.array[-3:]
    gemms = max(state.tensors[fault.array].shape[-1] // KINDS[direction], 1)
    whose = dict.fromkeys(_KINDS[direction][min(c // gemms, 2)] for c in fault.columns)
    what = "history" if fault.array.startswith("amax") else fault.array.rpartition("_")[0]
    text = f"{_SAYS[fault.kind]} in the {what} of the {' and the '.join(whose)}"
    return AmaxFinding(module=where, kind=fault.kind, text=text)
