"""Objects of a checkpoint that must not be written again, because loading them would run code.

An object is foreign if it names a class or function that is not on the allow-list of
`checkpoint.containers.pickle_globals`, or if it cannot be read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megtool.convert.dialects import TargetView
from megtool.errors import FormatError, listed
from megtool.formats.auxiliary_files import has_pickles
from megtool.formats.header_reader import read_exact
from megtool.megatron_state.ranks.objects import MODELOPT
from megtool.megatron_state.saved_objects import read_object
from megtool.pickles.allow_list import ALLOWED_GLOBALS
from megtool.pickles.rewrite import drop_problems
from megtool.pickles.rules import find_problems
from megtool.pickles.small_files import is_pickle_file, recode_pickle_file
from megtool.pickles.writer import DROP_OBJECTS_HINT
from megtool.plan.copies import DroppedItem
from megtool.source.checkpoint import CheckpointSource
from megtool.source.foreign_tensors import find_foreign_tensors, is_extra_state_tensor
from megtool.source.nested_items import find_item_problems
from megtool.tensors.catalogue import Catalogue, StoredObject
from megtool.tensors.sharded import Shards

_PREFIX = "common state: "
_ALLOWED_NAMES = {f"{module}.{name}" for module, name in ALLOWED_GLOBALS}
_IS_NAME = re.compile(r"[\w.]+( \([\w ]+\))?")
_KEY_PATHS = "planner_data"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignObject:
    """An object, an extra state in a tensor, a part of the common state or a small file that must
    not be written.

    `globals` are the names that are not allowed, or what else is wrong with it. One that
    `is_truncated` is a damaged file, and not known to be hostile.
    """

    name: str
    file: str
    globals: tuple[str, ...]
    is_truncated: bool = False

    @property
    def text(self) -> str:
        """Why it is foreign."""
        if self.is_truncated:
            return f"is damaged: {listed(self.globals)}"
        if all(map(_IS_NAME.fullmatch, self.globals)):
            return f"names {listed(self.globals)}, which no checkpoint needs"
        return f"holds what cannot be copied: {listed(self.globals)}"

    def to_json(self) -> dict[str, Any]:
        """The object as plain data."""
        return {"name": self.name, "file": self.file, "globals": list(self.globals)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Screened:
    """A catalogue without its foreign objects, and contents for small files that are pickles."""

    catalogue: Catalogue
    edited: dict[str, bytes]
    foreign: list[ForeignObject]


def find_foreign_objects(catalogue: Catalogue) -> list[ForeignObject]:
    """The foreign objects of a checkpoint; reads all its objects, extra states and small files.

    Those of rank files are named too that are in none of the objects, which are never written.
    """
    foreign = _screen(catalogue).foreign + _check_tensors(catalogue)
    reported = {name for f in foreign for name in f.globals}
    names_by_file: dict[str, frozenset[str]] = catalogue.metadata.get("globals", {})
    for file, names in names_by_file.items():
        if others := sorted(names - _ALLOWED_NAMES - reported):
            path = str(catalogue.root / file)
            foreign.append(ForeignObject(name=file, file=path, globals=tuple(others)))
    return foreign


def screen_source(
    source: CheckpointSource, *, drop: bool, only_tensors: bool = False
) -> tuple[CheckpointSource, list[DroppedItem]]:
    """The source without foreign objects, and what is left out.

    With `only_tensors` its objects and small files are not looked at, because the target has none.

    Raises:
        FormatError: it has some, and not `drop`.
    """
    names = {p.stored for p in source.view.placements.values()}  # no others are written
    tensors = _check_tensors(source.catalogue, names)
    screened = (
        _Screened(catalogue=source.catalogue, edited={}, foreign=[])
        if only_tensors
        else _screen(source.catalogue)
    )
    foreign = screened.foreign + tensors
    _refuse(foreign, drop=drop)
    dropped = [DroppedItem(name=f.name, reason=f"it {f.text}") for f in foreign]
    edited = {**screened.edited, **source.edited}
    source = replace(source, catalogue=screened.catalogue, edited=edited)
    return _without_tensors(source, {f.name for f in tensors}), dropped


def screen_renamed(source: CheckpointSource, side: TargetView, *, drop: bool) -> TargetView:
    """The target's tensors, without ordinary ones that get the name of an extra state and would be
    a hostile one.

    Raises:
        FormatError: there are some, and not `drop`.
    """
    stored = {
        name: source.view.placements[name].stored
        for name, p in side.placements.items()
        if is_extra_state_tensor(p.stored) and name in source.view.placements
    }
    names = {s for s in stored.values() if not is_extra_state_tensor(s)}
    if not names:
        return side
    foreign = [
        ForeignObject(name=name, file=file, globals=problems)
        for name, file, problems in find_foreign_tensors(source.catalogue, (), renamed=names)
    ]
    _refuse(foreign, drop=drop)
    reasons = {f.name: f"it {f.text}" for f in foreign}
    dropped = [(n, reasons[s]) for n, s in stored.items() if s in reasons]
    return _without_targets(side, dropped) if dropped else side


def _without_targets(side: TargetView, dropped: Sequence[tuple[str, str]]) -> TargetView:
    """A target without canonical tensors, each with the reason."""
    removed = {side.placements[name].stored for name, _ in dropped}
    is_chosen = np.array([t.name not in removed for t in side.tensors], bool)
    shards = side.shards
    if shards is not None:
        rows = np.flatnonzero(is_chosen[shards.tensor])
        number = (np.cumsum(is_chosen) - 1)[shards.tensor[rows]].astype(np.int32)
        shards = Shards(number, shards.boxes[rows], shards.owner[rows])
    return replace(
        side,
        tensors=[t for t in side.tensors if t.name not in removed],
        placements={n: p for n, p in side.placements.items() if p.stored not in removed},
        shards=shards,
        fills=[f for f in side.fills if f.placement.stored not in removed],
        dropped=[*side.dropped, *dropped],
    )


def _refuse(foreign: Sequence[ForeignObject], *, drop: bool) -> None:
    """Refuse foreign objects, or with `drop` say that they are left out."""
    if foreign and not drop:
        first = next((f for f in foreign if not f.is_truncated), foreign[0])
        more = f" and {len(foreign) - 1} more objects" if len(foreign) > 1 else ""
        if first.is_truncated:
            raise FormatError(
                f"not copied, because it cannot be read: {first.name} {first.text}{more}",
                file=first.file,
                hint="copy the file again from where it was saved; --drop-objects leaves it out",
                error_id="truncated-file",
            )
        raise FormatError(
            f"not copied, because loading it could run code: {first.name} {first.text}{more}",
            file=first.file,
            hint=DROP_OBJECTS_HINT,
            error_id="hostile-pickle",
        )
    for f in foreign:
        _LOG.warning("%s is left out: it %s", f.name, f.text)


def _screen(catalogue: Catalogue) -> _Screened:
    foreign: list[ForeignObject] = []
    metadata = dict(catalogue.metadata)
    common = metadata.get("common")
    if isinstance(common, dict) and catalogue.format != "dcp":  # there, its parts are objects
        metadata["common"], problems = drop_problems(common)
        file = catalogue.root / "common.pt"
        foreign += [
            ForeignObject(
                name=_PREFIX + path,
                file=str(file if file.exists() else catalogue.root),
                globals=names,
            )
            for path, names in problems.items()
            if not MODELOPT.match(path)  # an object of every rank
        ]
    if _KEY_PATHS in metadata:
        metadata[_KEY_PATHS] = _plain_paths(metadata[_KEY_PATHS])
    unreadable = list(_check_objects(catalogue))
    foreign += unreadable
    names = {f.name for f in unreadable}
    edited, files = _check_files(catalogue)
    foreign += files
    names |= {f.name for f in files}
    return _Screened(
        catalogue=replace(
            catalogue,
            metadata=metadata,
            objects={n: o for n, o in catalogue.objects.items() if n not in names},
            auxiliary_files={n: p for n, p in catalogue.auxiliary_files.items() if n not in names},
        ),
        edited=edited,
        foreign=foreign,
    )


def _check_tensors(
    catalogue: Catalogue, names: Collection[str] | None = None
) -> list[ForeignObject]:
    return [
        ForeignObject(name=name, file=file, globals=problems)
        for name, file, problems in find_foreign_tensors(catalogue, names)
    ]


def _without_tensors(source: CheckpointSource, names: Collection[str]) -> CheckpointSource:
    if not names:
        return source
    catalogue = source.catalogue.select(lambda name: name not in names)
    view = source.view
    placements = {n: p for n, p in view.placements.items() if p.stored not in names}
    return replace(
        source,
        catalogue=catalogue,
        view=replace(
            view,
            tensors=tuple(catalogue.tensors),
            placements=placements,
            canonical={n: t for n, t in view.canonical.items() if n in placements},
            padding={n: rows for n, rows in view.padding.items() if n not in names},
        ),
    )


def _plain_paths(paths: Any) -> dict[str, tuple[str | int, ...]]:
    """Positions in a state dict, without those that are no paths of names and numbers."""
    if not isinstance(paths, dict):
        return {}
    return {
        name: path
        for name, path in paths.items()
        if isinstance(name, str)
        and isinstance(path, tuple)
        and all(type(part) in (str, int) for part in path)
    }


def _check_objects(catalogue: Catalogue) -> Iterator[ForeignObject]:
    """The foreign objects; those of the same bytes are read once."""
    problems_by_bytes: dict[bytes, tuple[str, ...]] = {}
    for name, stored in catalogue.objects.items():
        file = catalogue.root if stored.extent is None else catalogue.path(stored.extent[0])
        if stored.extent is None:
            problems = _problems(catalogue, stored)
        else:
            data = read_exact(file, *stored.extent[1:])
            if data not in problems_by_bytes:
                problems_by_bytes[data] = _problems(catalogue, stored)
            problems = problems_by_bytes[data]
        if problems:
            yield ForeignObject(name=name, file=str(file), globals=problems)


def _problems(catalogue: Catalogue, stored: StoredObject) -> tuple[str, ...]:
    try:
        return find_problems(read_object(catalogue, stored))
    except FormatError as e:
        return (e.message,)


def _check_files(catalogue: Catalogue) -> tuple[dict[str, bytes], list[ForeignObject]]:
    """New contents of the small files that are pickles, and the foreign ones."""
    edited: dict[str, bytes] = {}
    foreign: list[ForeignObject] = []
    pickles = {n: path for n, path in catalogue.auxiliary_files.items() if has_pickles(n)}
    problems_by_file = find_item_problems(pickles)
    for name, path in pickles.items():
        is_truncated = False
        if name in problems_by_file:
            problems = problems_by_file[name]
        elif is_pickle_file(path):
            try:
                edited[name] = recode_pickle_file(path)
                continue
            except (FormatError, ValueError, TypeError) as e:
                problems = (e.message if isinstance(e, FormatError) else str(e),)
                is_truncated = isinstance(e, FormatError) and e.id == "truncated-file"
        else:
            continue
        if problems:
            foreign.append(
                ForeignObject(
                    name=name, file=str(path), globals=problems, is_truncated=is_truncated
                )
            )
    return edited, foreign
