"""Rank states: the extra states of one module in several rank files, merged into the module's own.

Tensor ranks, and for all but experts the ranks of experts too, have each their own copy. Where
Transformer Engine reduces maxima over them (its default) they agree; where not, the module's is
their maximum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.containers.extra_state import (
    ExtraState,
    decode,
    merge,
    raw_bytes,
    split,
    to_tree,
)
from megtool.checkpoint.formats.legacy_tree import entries
from megtool.commands.megatron.amax_report import AmaxFinding
from megtool.commands.megatron.extra_states import SUFFIX, Site, holds_nothing
from megtool.commands.megatron.rank_names import to_global

_KEY = re.compile(r"(.+)\._extra_state(\d*)")
_TOGETHER = re.compile(
    r"(?:decoder|encoder|mtp)\.layers\.\d+\.(?:\w+_layer\.)?mlp\.experts\.linear_fc[12]"
)
_METADATA = "merged_extra_states"


@dataclass(slots=True, kw_only=True)
class Merged:
    """How the states of a checkpoint's ranks were merged.

    `ranks` says by the `id` of each value in the catalogue, which stays when objects get other
    names, how many ranks it is of; in `differing` are those whose ranks did not agree.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)
    findings: list[AmaxFinding] = field(default_factory=list)


def merged_of(catalogue: Catalogue) -> Merged:
    """How the ranks' states were merged when it was opened; nothing in other formats."""
    found = catalogue.metadata.get(_METADATA)
    return found if isinstance(found, Merged) else Merged()


def remember(metadata: Mapping[str, Any], merged: Merged) -> dict[str, Any]:
    """Metadata of a catalogue that knows how states were merged."""
    return {**metadata, _METADATA: merged}


@dataclass(slots=True, kw_only=True)
class _Held:
    """What ranks hold of one module: a value as it is in a file, or a state that no file has."""

    value: Any = None
    state: ExtraState | None = None
    ranks: int = 1
    differs: bool = False

    def read(self) -> ExtraState | None:
        """The state, None where it holds none or is not Transformer Engine's."""
        if self.state is None and self.value is not None:
            self.state = decode(self.value)
        return self.state


class RankStates:
    """The extra states of rank files, collected chunk by chunk of each rank."""

    def __init__(self) -> None:
        self._held: dict[Site | str, _Held] = {}
        self._findings: dict[AmaxFinding, None] = {}

    def add(
        self, model: Any, place: str, *, first_layer: int, first_expert: int, experts: int
    ) -> None:
        """A chunk's states; those of several modules that cannot be told apart, under `place`.

        Raises:
            FormatError: one is damaged or hostile.
        """
        keys: list[tuple[str, int | None, Any]] = []
        for key, value in entries(model) or ():
            match = _KEY.fullmatch(key) if isinstance(key, str) else None
            if match is not None and value is not None:
                keys.append((match[1], int(match[2]) if match[2] else None, value))
        numbered = {own for own, number, _ in keys if number is not None}
        for own, number, value in keys:
            known = to_global(own, first_layer=first_layer, first_expert=first_expert)
            if not _TOGETHER.fullmatch(known.key):
                if number is None:
                    self._add_value(Site(known.key, known.expert), value)
                continue
            module = known.key.replace(".mlp.experts.", ".mlp.experts.experts.")
            if own in numbered or experts == 1:
                self._add_value(Site(module, first_expert + (number or 0)), value)
            elif not holds_nothing(value):
                self._add_parts(f"{place}/{own}{SUFFIX}", module, value, first_expert, experts)

    def _add_parts(
        self, name: str, module: str, value: Any, first_expert: int, experts: int
    ) -> None:
        """The states of experts that share a module; the module's own if they cannot be split."""
        state = decode(value)
        parts = split(state, experts) if state is not None else None
        if parts is None:
            if state is not None:
                self._find(module, "shape", f"a state of another number than {experts} experts")
            self._held.setdefault(name, _Held(value=value))
            return
        for k, part in enumerate(parts):
            self._add_state(Site(module, first_expert + k), part)

    def _add_value(self, site: Site, value: Any) -> None:
        held = self._held.get(site)
        if held is None:
            self._held[site] = _Held(value=value)
        elif held.value is not None and raw_bytes(held.value) == raw_bytes(value):
            held.ranks += 1
        elif (state := decode(value)) is not None:
            if held.read() is None and holds_nothing(held.value):
                self._held[site] = _Held(value=value, state=state)
            else:
                self._merge(site, held, state)

    def _add_state(self, site: Site, state: ExtraState) -> None:
        held = self._held.get(site)
        if held is None:
            self._held[site] = _Held(state=state)
        else:
            self._merge(site, held, state)

    def _merge(self, site: Site, held: _Held, state: ExtraState) -> None:
        mine = held.read()
        held.ranks += 1
        if mine is None:
            return
        if mine.is_delayed and state.is_delayed and mine.rule != state.rule:
            self._find(site.module, "recipe", "ranks have different recipes: the first's is used")
        merged = merge([mine, state])
        if merged is None:
            self._find(site.module, "shape", "the states of ranks do not fit: the first's is used")
        elif not _alike(mine, state):
            held.differs = True
            if not _alike(mine, merged):
                held.value, held.state = None, merged

    def _find(self, module: str, kind: str, text: str) -> None:
        self._findings[AmaxFinding(module=module, kind=kind, text=text)] = None

    def values(self) -> dict[Site | str, Any]:
        """Every module's state as an inert tree."""
        return {
            site: held.value if held.value is not None or held.state is None
            else to_tree(held.state)
            for site, held in self._held.items()
        }  # fmt: skip

    def merged(self, values: Mapping[Site | str, Any]) -> Merged:
        """How they were merged, by the `values` they became."""
        held = {id(values[site]): one for site, one in self._held.items()}
        return Merged(
            ranks={key: one.ranks for key, one in held.items()},
            differing={key for key, one in held.items() if one.differs},
            findings=list(self._findings),
        )


def _alike(a: ExtraState, b: ExtraState) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(
        np.array_equal(t, b.tensors[n], equal_nan=True) for n, t in a.tensors.items()
    )
