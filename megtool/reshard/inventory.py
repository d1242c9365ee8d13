"""An inventory of a source: every tensor, object and small file as moved, derived or dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megtool.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.plan.copies import DroppedItem, Op, ReshardPlan
from megtool.reshard.writers.target_spec import Target
from megtool.source.checkpoint import CheckpointSource
from megtool.source.unread_files import find_unread_files
from megtool.storage.files import read_file

TENSORS, OBJECTS, FILES = "tensors", "objects", "files"
KINDS = (TENSORS, OBJECTS, FILES)
SETTINGS = "settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What became of everything in the source, by its names there; each name occurs once.

    `moved` items are in the target unchanged, whatever their names there; `derived` ones are cast,
    decoded, averaged, merged or rewritten. The keys are `KINDS`; parts of Megatron's common state
    count as objects. Settings may be dropped alone, and are another kind then.
    """

    moved: dict[str, tuple[str, ...]]
    derived: dict[str, tuple[str, ...]]
    dropped: dict[str, tuple[DroppedItem, ...]]

    @property
    def all_dropped(self) -> tuple[DroppedItem, ...]:
        """All dropped items, of every kind."""
        return tuple(d for drops in self.dropped.values() for d in drops)

    def to_json(self) -> dict[str, Any]:
        """The inventory as plain data; dropped items of all kinds are one list."""
        return {
            "moved": {kind: list(names) for kind, names in self.moved.items()},
            "derived": {kind: list(names) for kind, names in self.derived.items()},
            "dropped": [
                {
                    "name": d.name,
                    "kind": kind,
                    "reason": d.reason,
                    "num_bytes": d.num_bytes,
                    "is_lost": d.is_lost,
                }
                for kind, drops in self.dropped.items()
                for d in drops
            ],
        }

    def counts(self, kind: str) -> str | None:
        """How many items of a kind were moved, derived and dropped; None where there are none."""
        numbers = {
            "moved": len(self.moved[kind]),
            "derived": len(self.derived[kind]),
            "dropped": len(self.dropped[kind]),
        }
        if not any(numbers.values()):
            return None
        return ", ".join(f"{n:,} {outcome}" for outcome, n in numbers.items())


def take_inventory(source: CheckpointSource, target: Target, plan: ReshardPlan) -> Inventory:
    """The inventory of a planned reshard. `plan.dropped` lists all dropped items except files."""
    catalogue = source.catalogue
    used: dict[str, None] = {}
    changed: set[str] = set()
    for e in plan.entries:
        if e.source_index == 0:
            name = catalogue.tensors[e.source_tensor].name
            used[name] = None
            if e.op is not Op.COPY:
                changed.add(name)
    moved_files, derived_files, dropped_files = _sort_files(source, target)
    tensors = {t.name for t in catalogue.tensors} | {s.name for s in catalogue.ignored}
    repeated = {p.stored for p in target.parts.values() if p.is_identity} & used.keys()
    dropped: dict[str, dict[str, DroppedItem]] = {kind: {} for kind in KINDS}
    for d in plan.dropped:
        is_file = d.name in catalogue.auxiliary_files
        kind = FILES if is_file else TENSORS if d.name in tensors else OBJECTS
        if kind == TENSORS and d.name in repeated:
            continue
        if kind == TENSORS and d.name in used:  # in part
            changed.add(d.name)
        else:
            dropped[kind][d.name] = d
    dropped[FILES] = {d.name: d for d in dropped_files} | dropped[FILES]
    if settings := source.model.dropped if source.model else {}:
        reason = "--drop-setting: the result computes without it"
        dropped[SETTINGS] = {n: DroppedItem(name=n, reason=reason, is_lost=False) for n in settings}
    return Inventory(
        moved={
            TENSORS: tuple(n for n in used if n not in changed),
            OBJECTS: _unique(target.moved),
            FILES: tuple(moved_files),
        },
        derived={
            TENSORS: tuple(n for n in used if n in changed),
            OBJECTS: _unique(target.derived),
            FILES: tuple(derived_files),
        },
        dropped={kind: tuple(drops.values()) for kind, drops in dropped.items()},
    )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _sort_files(
    source: CheckpointSource, target: Target
) -> tuple[list[str], list[str], list[DroppedItem]]:
    """The source's small files: in the target unchanged, in it with other contents, or dropped."""
    folder = f"{target.sidecar_folder}/" if target.sidecar_folder else ""
    written = {n.removeprefix(folder): data for n, data in target.destination.iter_small_files()}
    moved: list[str] = []
    derived: list[str] = []
    dropped: list[DroppedItem] = []
    for name, path in source.catalogue.auxiliary_files.items():
        new_names = (name, f"hf/{name}", name.removeprefix("hf/"), name.removeprefix("tokenizer/"))
        data = next((written[n] for n in new_names if n in written), None)
        if data is None:
            reason = f"{target.format!r} has no place for it"
            is_lost = name.startswith(f"{MODELOPT_FOLDER}/")
            dropped.append(DroppedItem(name=name, reason=reason, is_lost=is_lost))
        elif len(data) == path.stat().st_size and data == read_file(path):
            moved.append(name)
        else:
            derived.append(name)
    for file in find_unread_files(source.catalogue):
        reason = "it is training state in another program's pickle, which is not read"
        if not file.is_state:
            reason = "it is a copy of weights in another format, which is not read"
        dropped.append(
            DroppedItem(
                name=file.name, reason=reason, num_bytes=file.num_bytes, is_lost=file.is_state
            )
        )
    return moved, derived, dropped
