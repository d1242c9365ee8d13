"""Names: how modules are called in a quantized folder, and how many bytes each has there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megtool.convert.dialects import CanonicalView
from megtool.dtypes import dtype
from megtool.lint.finding import Finding, error
from megtool.lint.folder_view import COMPANIONS, FolderView
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import BLOCKS
from megtool.tensors.box import numel


def map_stored_names(decisions: Sequence[Decision], side: CanonicalView | None) -> dict[str, str]:
    """The stored names of modules by canonical ones: as found, else as they should be."""
    out = {}
    for d in decisions:
        place = side.placements.get(f"{d.module.name}.weight") if side else None
        if place is not None:
            out[d.module.name] = place.stored.removesuffix(".weight")
        elif d.module.kind != "kv_cache" and (called := d.module.names_in("hf")):
            out[d.module.name] = called[0]
    return out


def find_absent_weights(folder: FolderView, decisions: Sequence[Decision]) -> Iterator[Finding]:
    """Weights that are in no file, of a folder that cannot be decoded for it."""
    for d in decisions:
        stored = [f"{n}{end}" for n in d.module.names_in("hf") for end in (".weight", BLOCKS)]
        if d.module.kind != "kv_cache" and stored and not any(n in folder.tensors for n in stored):
            yield error("missing", d.module.name, f"{stored[0]} is in no file", "engines stop")


def count_stored_bytes(folder: FolderView, stored: str | None) -> int:
    """The bytes of a stored module: codes, and what lies beside them."""
    tensors = folder.modules.get(stored or "", {})
    held = [t for last, t in tensors.items() if last in ("weight", *COMPANIONS)]
    beside = (folder.tensors.get(f"{stored}{end}") for end in (BLOCKS, "_scales"))
    held += [t for t in beside if t is not None]
    return sum(numel(t.shape) * dtype(t.dtype).itemsize for t in held)
