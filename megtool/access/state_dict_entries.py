"""The entries of a state dict of PyTorch, of several parts, that a checkpoint has values for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megtool.access.checkpoint import Checkpoint, open_checkpoint
from megtool.access.extra_states import is_extra_state, refuse_foreign_stream
from megtool.access.live_objects import live_value
from megtool.access.optimizer_state import ABSENT, SavedOptimizer
from megtool.access.tensor_finder import TensorFinder, TensorMatch
from megtool.convert.megatron.names import MAIN
from megtool.formats import STATE_DICT_FORMATS
from megtool.megatron_state.param_groups import OPTIMIZER_OBJECT
from megtool.megatron_state.saved_objects import read_object
from megtool.pickles.zip_reader import load_object
from megtool.run_state.state_dict_groups import STEP
from megtool.storage.files import opened

_OPTIMIZER = re.compile(r"((?:.*?\.)?optim(?:izer)?)\.(state|param_groups)\.(.+)\.([^.]+)")
"""An entry of an optimizer: a state of a parameter, or a setting of a parameter or of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor; `name` is the parameter's if it is a weight."""

    match: TensorMatch
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """How many steps a parameter was trained."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEntry:
    """A setting of one parameter or, if `group` is a number, of those of a param group."""

    optimizer: str
    group: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEntry:
    """A value that the checkpoint has under the same name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentStateEntry:
    """The extra state of a module, which the checkpoint does not have and the module keeps."""


Entry = TensorEntry | StepEntry | SettingEntry | ValueEntry | AbsentStateEntry


class StateDictEntries:
    """Finds the entries of state dicts in a checkpoint.

    Optimizer state is opened when an entry of it is asked for. `options` are those of
    `megtool.open`.
    """

    def __init__(
        self,
        location: str | Path | Checkpoint,
        options: Mapping[str, Any],
        *,
        naming: str | None = None,
        prefix: str = "",
        threads: int | None = None,
    ) -> None:
        self.checkpoint = open_checkpoint(location, **options, optimizer=False)
        self.has_optimizer = False
        self._given = isinstance(location, Checkpoint)
        self._options, self._naming = options, naming
        self._prefix, self._threads = prefix, threads
        self._weights = TensorFinder(self.checkpoint.source, naming, threads=threads)

    @cached_property
    def optimizer(self) -> SavedOptimizer:
        """The optimizer's part; a checkpoint that was opened without it has none.

        Raises:
            CheckpointError: it cannot be opened with its optimizer state.
        """
        checkpoint = self.checkpoint
        if not self._given and checkpoint.source.optimizer_bytes:
            checkpoint = open_checkpoint(checkpoint.location, **self._options)
        return SavedOptimizer(checkpoint.source, self._naming, threads=self._threads)

    def find(self, name: str) -> Entry | None:
        """The entry of a name, None if the checkpoint has nothing for it.

        Raises:
            CheckpointError: it cannot be opened with its optimizer state.
        """
        if (match := self._weights.find(name, prefix=self._prefix)) is not None:
            return TensorEntry(match=match, name=name)
        if parts := _OPTIMIZER.fullmatch(name):
            entry = self._find_in_optimizer(*parts.groups())
            self.has_optimizer |= entry is not None
            if entry is not None:
                return entry
        is_value = self.checkpoint.format in STATE_DICT_FORMATS
        stored = self.checkpoint.source.catalogue.objects
        if is_value and name in stored and not OPTIMIZER_OBJECT.fullmatch(name):
            return ValueEntry(name=name)
        return AbsentStateEntry() if is_extra_state(name) else None

    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        return (self._prefix + name for name in self._weights.names())

    def main_weight(self, entry: TensorEntry) -> TensorMatch | None:
        """The master weight of a weight, if the checkpoint has one."""
        name = entry.name.removeprefix(self._prefix)
        return self.optimizer.find(MAIN, name)

    def setting(self, entry: SettingEntry, params: Any) -> Any:
        """The value of a setting, ABSENT if there is none; `params` are the group's, if known."""
        if not entry.group.isdigit():
            return self.optimizer.setting([entry.group], entry.key, self._prefix)
        names = [n for n in params if isinstance(n, str)] if isinstance(params, list) else []
        return self.optimizer.setting(names, entry.key, self._prefix)

    def value(self, entry: ValueEntry) -> Any:
        """The value of an object, ABSENT if it cannot be built without running code.

        Raises:
            FormatError: it is damaged, or the extra state of a module, which would run code.
        """
        catalogue = self.checkpoint.source.catalogue
        stored = catalogue.objects[entry.name]
        if stored.extent is None:
            tree = read_object(catalogue, stored)
        else:  # what is a list of one in a state dict is such a list
            path = catalogue.path(stored.extent[0])
            with opened(path) as fd:
                tree = load_object(fd, *stored.extent[1:], file=path)
        left_out: list[str] = []
        value = live_value(tree, entry.name, left_out)
        refuse_foreign_stream(entry.name, value, self.checkpoint.location)
        return ABSENT if left_out else value

    def _find_in_optimizer(self, optimizer: str, part: str, name: str, last: str) -> Entry | None:
        state = self.optimizer
        if not state.exists:
            return None
        if part == "param_groups":
            return SettingEntry(optimizer=optimizer, group=name, key=last)
        if last == STEP:
            step = state.step(name, self._prefix)
            return None if step is None else StepEntry(value=step)
        match = state.find(last, name, self._prefix)
        return None if match is None else TensorEntry(match=match)
