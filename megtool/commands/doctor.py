"""Tell what this machine has, and what of megtool works with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megtool.commands.options.checkpoints import DoctorOptions
from megtool.console import format_bytes, several
from megtool.machine.abilities import Ability, find_abilities
from megtool.machine.hardware import Hardware, find_hardware
from megtool.machine.packages import Extra, find_extras
from megtool.report.sections import Report, Row, Section, Table
from megtool.storage.location_probe import FolderProbe, StoreProbe, probe_location

if TYPE_CHECKING:
    from megtool.kernels.choices import KernelChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport(Report):
    """The machine, its packages and what works with them; `place` is the location that was tried,
    `kernels` the implementation of each fused operation that `--kernels auto` takes."""

    version: str
    hardware: Hardware
    extras: tuple[Extra, ...]
    place: FolderProbe | StoreProbe
    abilities: tuple[Ability, ...]
    kernels: tuple[KernelChoice, ...]

    def to_json(self) -> dict[str, Any]:
        return self.add_remarks(
            {
                "version": self.version,
                "hardware": asdict(self.hardware),
                "extras": [
                    asdict(extra) | {"is_complete": extra.is_complete} for extra in self.extras
                ],
                "place": asdict(self.place),
                "abilities": [asdict(ability) for ability in self.abilities],
                "kernels": {k.operation: k.implementation for k in self.kernels},
            }
        )

    def title(self) -> str:
        h = self.hardware
        return f"megtool {self.version} with Python {h.python} and torch {h.torch} on {h.system}"

    def rows(self) -> Iterator[Row]:
        h = self.hardware
        limit = "" if h.cpu_limit is None else f", limited to {h.cpu_limit:g}"
        yield "processors", f"{h.num_cpus}{limit}"
        if h.free_bytes is not None:
            yield "memory", f"{format_bytes(h.free_bytes)} free"
        yield "open files", f"at most {h.max_open_files:,}"
        for number, gpu in enumerate(h.gpus):
            capability = (
                ""
                if gpu.capability is None
                else ", compute capability {}.{}".format(*gpu.capability)
            )
            yield f"GPU {number}", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}{capability}"
        if not h.gpus:
            built = f"torch is built for CUDA {h.cuda}" if h.cuda else "torch is built without CUDA"
            yield "GPUs", f"none; {built}"
        else:
            yield "CUDA", f"{h.cuda}, NCCL {h.nccl or 'none'}"
        yield "location", f"{self.place.location}: {_describe(self.place)}"

    def sections(self) -> Iterator[Section]:
        rows = [(a.name, "yes" if a.works else "no", a.reason) for a in self.abilities]
        yield Section(table=Table(header=("what", "works here", ""), rows=rows, left=3))
        chosen = [(k.operation, k.implementation) for k in self.kernels]
        yield Section(
            table=Table(header=("operation", "--kernels auto takes"), rows=chosen, left=2)
        )


def _describe(place: FolderProbe | StoreProbe) -> str:
    """What was found of a location, in one line."""
    if isinstance(place, StoreProbe):
        speed = f"{place.seconds * 1e3:.0f} ms a request"
        if not place.is_writable:
            return f"a store that is read only, {speed}"
        if place.faults:
            return f"{speed}; the store {'; it '.join(place.faults)}"
        return f"a store that keeps all that a commit needs, {speed}"
    texts = [place.kind or "unknown file system", f"{format_bytes(place.free_bytes)} free"]
    if place.is_network:
        texts.append("on a network")
    if not place.is_writable:
        return ", ".join([*texts, "not writable"])
    texts.append(
        {
            "shared blocks": "copies share blocks",
            "kernel": "copies inside the kernel",
            "buffer": "copies through a buffer",
        }[place.copies]
    )
    texts.append("replaces in one step" if place.has_exchange else "replaces in two renames")
    texts.append("locks" if place.has_locks else "no locks: two runs there are not kept apart")
    return ", ".join(texts)


def _find_choices(hardware: Hardware) -> tuple[KernelChoice, ...]:
    import torch

    from megtool.kernels.choices import automatic_choices

    return automatic_choices(torch.device("cuda" if hardware.gpus else "cpu"))


def doctor(options: DoctorOptions) -> DoctorReport:
    """Look at this machine, the packages and one location.

    Raises:
        StorageError: the location does not exist, or its store refused.
    """
    from megtool import __version__

    hardware, extras = find_hardware(), find_extras()
    notes = []
    incomplete = [extra for extra in extras if not extra.is_complete]
    if incomplete:
        notes.append(f"{several(len(incomplete), 'group')} of optional packages incomplete")
    return DoctorReport(
        version=__version__,
        hardware=hardware,
        extras=extras,
        place=probe_location(options.location),
        abilities=find_abilities(hardware, extras),
        kernels=_find_choices(hardware),
        notes=tuple(notes),
    )
