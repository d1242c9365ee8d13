"""Account: every tensor, object and small file of a source as moved, derived or dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megtool.checkpoint.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.checkpoint.plan import Dropped, Op, Plan
from megtool.reshard.open_source import CheckpointSource
from megtool.reshard.writers.target_spec import Target

TENSORS, OBJECTS, FILES = "tensors", "objects", "files"
KINDS = (TENSORS, OBJECTS, FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of all that the source holds, by its names there; each name stands once.

    `moved` things are in the target unchanged (wherever they lie and whatever they are called
    there), `derived` ones cast, decoded, averaged or written anew. The keys are `KINDS`; parts of
    Megatron's common state count as objects.
    """

    moved: dict[str, tuple[str, ...]]
    derived: dict[str, tuple[str, ...]]
    dropped: dict[str, tuple[Dropped, ...]]

    @property
    def all_dropped(self) -> tuple[Dropped, ...]:
        """What is dropped, of every kind."""
        return tuple(d for drops in self.dropped.values() for d in drops)

    def to_json(self) -> dict[str, Any]:
        """The lists as plain data, what is dropped in one, each with its kind."""
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
        """How many of a kind went where, in words; None where the source has none."""
        numbers = {
            "moved": len(self.moved[kind]),
            "derived": len(self.derived[kind]),
            "dropped": len(self.dropped[kind]),
        }
        if not any(numbers.values()):
            return None
        return ", ".join(f"{n:,} {what}" for what, n in numbers.items())


def account_of(opened: CheckpointSource, target: Target, plan: Plan) -> Account:
    """The account of a planned job, whose `plan.dropped` has all that is dropped but for files."""
    held = opened.catalogue
    used: dict[str, None] = {}
    changed: set[str] = set()
    for e in plan.entries:
        if e.source_index == 0:
            name = held.tensors[e.source_tensor].name
            used[name] = None
            if e.op is not Op.COPY:
                changed.add(name)
    moved_files, derived_files, dropped_files = _files(opened, target)
    tensors = {t.name for t in held.tensors} | {s.name for s in held.set_aside}
    dropped: dict[str, dict[str, Dropped]] = {kind: {} for kind in KINDS}
    for d in plan.dropped:
        kind = TENSORS if d.name in tensors else OBJECTS
        if kind == TENSORS and d.name in used:  # in part
            changed.add(d.name)
        else:
            dropped[kind][d.name] = d
    dropped[FILES] = {d.name: d for d in dropped_files}
    return Account(
        moved={
            TENSORS: tuple(n for n in used if n not in changed),
            OBJECTS: _once(target.moved),
            FILES: tuple(moved_files),
        },
        derived={
            TENSORS: tuple(n for n in used if n in changed),
            OBJECTS: _once(target.derived),
            FILES: tuple(derived_files),
        },
        dropped={kind: tuple(found.values()) for kind, found in dropped.items()},
    )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _files(opened: CheckpointSource, target: Target) -> tuple[list[str], list[str], list[Dropped]]:
    """Small files of the source that lie in the target as they are, or written anew, or neither."""
    folder = f"{target.sidecar_folder}/" if target.sidecar_folder else ""
    written = {n.removeprefix(folder): data for n, data in target.destination.all_small()}
    moved: list[str] = []
    derived: list[str] = []
    dropped: list[Dropped] = []
    for name, path in opened.catalogue.attachments.items():
        places = (name, f"hf/{name}", name.removeprefix("hf/"), name.removeprefix("tokenizer/"))
        data = next((written[p] for p in places if p in written), None)
        if data is None:
            reason = f"{target.format!r} has no place for it"
            lost = name.startswith(f"{MODELOPT_FOLDER}/")
            dropped.append(Dropped(name=name, reason=reason, is_lost=lost))
        elif len(data) == path.stat().st_size and data == path.read_bytes():
            moved.append(name)
        else:
            derived.append(name)
    return moved, derived, dropped
