"""Amax: what becomes of FP8's delayed scaling state on its way to another checkpoint.

States follow their layers and experts by name (`objects`), those of several ranks are merged when
they are read (`rank_states`). Here they are brought to the form asked for and looked over; no
weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from megtool.checkpoint.catalogue import StoredObject
from megtool.checkpoint.containers.te_extra_state import (
    ExtraState,
    at_release,
    decode,
    to_tree,
    with_length,
)
from megtool.checkpoint.containers.te_grouped_state import mixed
from megtool.checkpoint.megatron_metadata import object_value
from megtool.errors import UsageError
from megtool.number_formats.delayed_scaling import Columns
from megtool.reshard.megatron.amax_report import (
    HOW,
    RELEASES,
    AmaxFinding,
    AmaxReport,
    AmaxWish,
)
from megtool.reshard.megatron.checkpoint_objects import Carried
from megtool.reshard.megatron.extra_state_names import (
    EMPTY,
    holds_nothing,
    is_extra_state,
    site_of,
)
from megtool.reshard.megatron.fp8_faults import as_finding, faults_of, label
from megtool.reshard.megatron.rank_extra_state import by_expert, expert_states, merged_of
from megtool.reshard.open_source import CheckpointSource

LONGEST = 1 << 20
"""Steps of the longest history that is written."""

_RELEASE = re.compile(r"(\d)(?:\.(\d+))?(?:\.\w+)*")
_SHORT = 2048
"""Bytes of a saved object in which no state of scales has room."""


def wish_of(how: str, release: int | float | str | None, history: int | None) -> AmaxWish:
    """What the user asks for.

    A `release` is `1`, `2` or one of them with its minor number: 2.0 to 2.2 lay the columns of
    grouped experts out as 1.x does, 2.3 and later do not. `2` alone leaves them as they are in
    states of 2.x, and is 2.3 for those of 1.x.

    Raises:
        UsageError: there is no such thing.
    """
    for known in HOW:
        if how == known:
            break
    else:
        raise UsageError(f"amax {how!r}", hint=f"one of {', '.join(HOW)}")
    number, columns = _release_of(release)
    if history is not None and not 1 <= history <= LONGEST:
        raise UsageError(f"a history of {history} steps", hint=f"from 1 to {LONGEST}")
    return AmaxWish(how=known, release=number, history=history, columns=columns)


def _release_of(said: int | float | str | None) -> tuple[int | None, Columns | None]:
    """The release in whose form states are written, and how it lays out columns if that is said."""
    if said is None:
        return None, None
    match = _RELEASE.fullmatch(str(said))
    if match is None or int(match[1]) not in RELEASES:
        raise UsageError(
            f"Transformer Engine {said}",
            hint="1 for releases 1.x, 2.2 for 2.0 to 2.2, 2.3 for 2.3 and later; 2 for any of 2.x",
        )
    if match[1] == "1":
        return 1, "blocked"
    if match[2] is None:
        return 2, None
    return 2, "blocked" if int(match[2]) < 3 else "interleaved"


class States:
    """The extra states on their way to one target: brought to its form, counted, looked over.

    `mix` is the number of experts on each rank that Megatron-Core will join to one state of what
    is written, as it does; 1 where states go to a module of their own, or are joined here.
    """

    def __init__(
        self, source: CheckpointSource, carried: Carried, wish: AmaxWish, *, mix: int = 1
    ) -> None:
        self.findings: list[AmaxFinding] = []
        self._source, self._carried, self._wish = source, carried, wish
        self._merged = merged_of(source.catalogue)
        self._mix = mix
        self._raw: dict[str, ExtraState] = {}
        self._columns: Columns | None = None
        self._untold: frozenset[str] = frozenset()
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

    @property
    def columns(self) -> Columns:
        """How the states of several experts that share a module are laid out where written.

        Where neither the user nor the source says, as the releases since 2.3 do.
        """
        return self._known_columns or "interleaved"

    @property
    def _known_columns(self) -> Columns | None:
        if self._wish.columns is not None:
            return self._wish.columns
        if self.release == 1:
            return "blocked"
        if max(self._releases, default=2) == 2:
            return self._columns
        return "interleaved"  # of 1.x brought to 2: the release asked for is any of 2.x

    def find_joined(self) -> None:
        """Say what is assumed where states of single experts are joined and nothing tells how."""
        if self._known_columns is None:
            text = "as Transformer Engine 2.3 and later lays them out; --te 2.2 for 2.0 to 2.2"
            self.findings.append(AmaxFinding(module="experts", kind="assumed", text=text))

    def nothing(self) -> Any:
        """What a module without FP8 keeps: 1.x wants a None, and 2.0 to 2.7 refuse it."""
        return None if self.release in (None, 1) else to_tree(None, release=2)

    def settle(self, asked: Collection[str]) -> None:
        """Bring what is carried to the form asked for; what needs no change does not change a bit.

        `asked` are the objects that Megatron asks for, with or without content.

        Raises:
            FormatError: a state is damaged or hostile.
        """
        wish = self._wish
        self._read()
        right = expert_states(self._source.catalogue, self._raw)
        self._columns, self._untold = right.columns, right.untold
        self.findings += right.findings
        for name, state in self._raw.items():
            self._look(name, right.states.get(name, state))
        if wish.how == "rebuild" and self._delayed:
            self._rebuild()
        if self._mix > 1 and self.columns == "interleaved":
            self._mix_experts()
            if by_expert(self._delayed):
                self.find_joined()
        if wish.how == "strip":
            self._strip(asked)
        elif wish.release is not None:
            for name in self._empty:
                self._changed.setdefault(name, self.nothing())
        self._put()
        self.findings[:0] = self._merged.findings

    def _read(self) -> None:
        """Read the states that are carried, and note those that hold nothing."""
        wish, catalogue = self._wish, self._source.catalogue
        for name, held in self._carried.kept.items():
            is_short = held.extent is not None and held.extent[2] < _SHORT
            if is_short and wish.release is None and wish.how != "strip":
                continue
            if not is_extra_state(name):
                continue
            file = catalogue.path(held.extent[0]) if held.extent else self._source.path
            value = object_value(catalogue, held)
            state = decode(value, file=file)
            if state is not None:
                self._raw[name] = state
            elif holds_nothing(value):
                self._empty.append(name)

    def _look(self, name: str, state: ExtraState) -> None:
        """One state: count it, find its faults, bring it to the form asked for."""
        wish, held = self._wish, self._carried.kept[name]
        self._releases.add(state.release)
        self._counts["modules" if state.is_delayed else "stateless"] += 1
        ranks = self._merged.ranks.get(id(held.value), 1)
        self._ranks = max(self._ranks, ranks)
        self._counts["merged"] += ranks > 1
        if id(held.value) in self._merged.differing:
            self._counts["differing"] += 1
            self._rewritten.add(name)
        where = label(name)
        if name not in self._untold:
            self.findings += [as_finding(where, f, state) for f in faults_of(name, state)]
        new = self._brought(where, state)
        if new is not None and new.is_delayed:
            self._delayed[name] = new
            before, after = self._history
            self._history = (
                max(before, state.history_length),
                max(after, new.history_length),
            )
        if new is not self._raw[name]:
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
        from megtool.reshard.fp8_state.rebuild import rebuild

        own = [n for n in self._delayed if n not in self._untold]
        names = {site_of(self._carried.kept[n].name): n for n in own}
        states = {site: self._delayed[n] for site, n in names.items() if site is not None}
        rebuilt, findings = rebuild(self._source, states)
        self.findings += findings
        for site, state in rebuilt.items():
            name = names[site]
            self._delayed[name] = state
            self._changed[name] = to_tree(state)
            self._counts["rebuilt"] += 1

    def _mix_experts(self) -> None:
        """Write what Megatron-Core will join to the states that the experts of a rank have."""
        each, few = self._mix, 0
        modules = by_expert({n: s for n, s in self._delayed.items() if n not in self._untold})
        for module, held in modules.items():
            for first in range(0, max(held) + 1, each):
                names = [held[k] for k in range(first, first + each) if k in held]
                found = mixed([self._delayed[n] for n in names]) if len(names) == each else None
                if found is None:
                    few += bool(names)
                    continue
                for name, state in zip(names, found, strict=True):
                    if alike(state, self._raw[name]):  # so it came
                        self._changed.pop(name, None)
                    else:
                        self._changed[name] = to_tree(state)
            if few:
                text = f"not all of the {each} experts of a rank have a state that fits"
                self.findings.append(AmaxFinding(module=module, kind="missing", text=text))
                few = 0
        if modules:
            text = (
                f"for {each} experts on each rank: Megatron-Core joins those of Transformer Engine "
                "2.3 and later rightly at no other number (megtool reshards them)"
            )
            module = f"{len(modules):,} modules of experts"
            self.findings.append(AmaxFinding(module=module, kind="experts", text=text))

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


def alike(a: ExtraState, b: ExtraState) -> bool:
    """They are of one release and hold the same numbers."""
    same = a.release == b.release and a.tensors.keys() == b.tensors.keys()
    return same and all(
        np.array_equal(t, b.tensors[n], equal_nan=True) for n, t in a.tensors.items()
    )


def is_unseen(state: ExtraState) -> bool:
    """The state says nothing: histories of zeros, scales of one."""
    return all(
        not t.any() if n.startswith("amax_history_") else bool((t == 1).all())
        for n, t in state.tensors.items()
    )
