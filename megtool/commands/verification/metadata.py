"""Check everything but tensors: objects, and config files against the tensors they describe."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.commands.reports.verify import Difference
from megtool.lint.consistency import check_consistency
from megtool.lint.folder_view import open_folder
from megtool.reshard.foreign_objects import find_foreign_objects
from megtool.source.checkpoint import CheckpointSource


def check_quant_config(
    source: CheckpointSource, *, is_alone: bool = False
) -> tuple[list[Difference], list[str]]:
    """Contradictions between the files of a quantized folder and its tensors, and what is odd.

    Nothing for a checkpoint that is no such folder. All scales are read of one that `is_alone`;
    beside another checkpoint they are compared with the weights.
    """
    if not source.catalogue.packed or not (source.path / "config.json").is_file():
        return [], []
    differences: dict[Difference, None] = {}
    notes: dict[str, None] = {}
    with open_folder(source.path) as folder:
        for finding in check_consistency(folder, reads_all_scales=is_alone):
            if finding.severity == "error":
                differences[_difference(finding.module, finding.message)] = None
            else:
                notes[f"{finding.module} of {source.path}: {finding.message}"] = None
    return list(differences), list(notes)


def check_objects(source: CheckpointSource) -> Iterator[Difference]:
    """The objects of a checkpoint that would run code if they were loaded."""
    for foreign in find_foreign_objects(source.catalogue):
        yield Difference(
            tensor=foreign.name,
            stored=foreign.file,
            kind="object",
            text=f"{foreign.text}: do not load it",
        )


def _difference(module: str, text: str) -> Difference:
    return Difference(
        tensor=module, stored=module, kind="metadata", text=text, part="configuration"
    )
