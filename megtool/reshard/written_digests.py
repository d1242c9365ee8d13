"""Digests of everything that was staged: tensors, stored tensors and files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from megtool.console import several
from megtool.digests.crc32c import SIDECAR, TOOL, FileDigest, Sidecar, StoredDigest, encode_sidecar
from megtool.digests.embedded import embed_digests, embed_nothing, list_sections
from megtool.digests.files import digest_tree, read_sections
from megtool.options.execution import DigestMode
from megtool.plan.copies import Op, ReshardPlan
from megtool.plan.execute import CopyReport
from megtool.staging.stage import Stage
from megtool.storage.location.path import is_remote
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


def write_digests(
    plan: ReshardPlan,
    stage: Stage,
    copied: CopyReport,
    mode: DigestMode,
    *,
    tensors: Sidecar | None = None,
    folder: str = "",
    is_raw: bool = True,
    threads: int = 1,
) -> Sidecar:
    """Write the digests of all that is staged: to the sidecar in `folder`, or into the single file.

    Digests of most bytes were computed as they were written; other files are read once. With
    `buffered`, files that the kernel wrote have none; with `none`, nothing has one, except for
    `tensors`, the digests by canonical name. Without `is_raw`, the bytes of tensors were encoded
    after they were written.
    """
    sidecar = tensors or Sidecar(names="stored", tool=TOOL, tensors={})
    if stage.is_file:
        sidecar = _embed(plan, stage, mode, sidecar, threads)
    elif mode is not DigestMode.NONE:
        skipped = () if mode is DigestMode.ALL else copied.kernel_files
        digests = digest_tree(
            stage.files, stage.tree, stage.digests, excluded=skipped, threads=threads
        )
        stored = {}
        if is_raw and not plan.target.catalogue.extents.contained:
            stored = _stored_digests(plan, stage, sidecar, digests, folder, threads)
        sidecar = replace(sidecar, files=_relative_to(digests, folder), stored_tensors=stored)
    is_record = sidecar.pruning or sidecar.rotation or sidecar.dropped_settings
    if not stage.is_file and (sidecar.num_tensors or sidecar.files or is_record):
        stage.write(str(PurePosixPath(folder) / SIDECAR), encode_sidecar(sidecar))
    stage.sidecar = sidecar
    stage.complete_data(threads=threads)
    return sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestCount:
    """Numbers of stored tensors of which all elements have a digest, and of files that have one."""

    tensors: int = 0
    files: int = 0


def count_digests(plan: ReshardPlan, stage: Stage) -> DigestCount:
    """Count what has a digest of what was staged; a single file has one."""
    sidecar = stage.sidecar
    if sidecar is None:
        return DigestCount(files=int(stage.is_file))
    missing = {
        e.target.stored
        for e in plan.entries
        if e.op is not Op.FILL and e.canonical not in sidecar.tensors
    }
    written = {e.target.stored for e in plan.entries if e.op is not Op.FILL}
    names = [t.name for t in plan.target.catalogue.tensors]
    complete = written - missing
    return DigestCount(
        tensors=sum(n in sidecar.stored_tensors or n in complete for n in names),
        files=1 if stage.is_file else len(sidecar.files),
    )


def describe_digests(digested: int, total: int, num_files: int, *, inherited: int = 0) -> str:
    """How many tensors and files have a digest, as a row of a report.

    `inherited` further tensors have one that was not computed, but is the source's.
    """
    carried = f", {inherited:,} carried over" if inherited else ""
    tensors = f"{digested:,} of {several(total, 'tensor')} digested"
    return f"{tensors}{carried}, and {several(num_files, 'file')}"


def _relative_to(digests: dict[str, FileDigest], folder: str) -> dict[str, FileDigest]:
    """The files inside `folder`, by their path in it."""
    prefix = f"{folder}/" if folder else ""
    return {
        name.removeprefix(prefix): digest
        for name, digest in digests.items()
        if name.startswith(prefix) and name != f"{prefix}{SIDECAR}"
    }


def _stored_digests(
    plan: ReshardPlan,
    stage: Stage,
    sidecar: Sidecar,
    digests: dict[str, FileDigest],
    folder: str,
    threads: int,
) -> dict[str, StoredDigest]:
    """Digests of the stored tensors of which no part has one by canonical name."""
    covered = {
        e.target.stored
        for e in plan.entries
        if e.op is not Op.FILL and e.canonical in sidecar.tensors
    }
    prefix = f"{folder}/" if folder else ""
    out = {}
    for tensor, name, begin, end in _whole_tensors(plan):
        if tensor.name in covered or name not in digests or not name.startswith(prefix):
            continue
        path = stage.tree / name
        crc = stage.digests.section(path, begin, end)
        if crc is None:
            (crc,) = read_sections(stage.files, path, [(begin, end)], threads=threads)
        out[tensor.name] = StoredDigest(
            crc32c=crc,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=name.removeprefix(prefix),
            begin=begin,
            size=end - begin,
        )
    return out


def _whole_tensors(plan: ReshardPlan) -> Iterator[tuple[GlobalTensor, str, int, int]]:
    """Tensors whose bytes are in one place: file, begin and end."""
    catalogue, extents = plan.target.catalogue, plan.target.catalogue.extents
    owner = catalogue.shards.tensor.tolist()
    columns = zip(
        owner, extents.file.tolist(), extents.offset.tolist(), extents.length.tolist(), strict=True
    )
    for number, file, offset, length in columns:
        tensor = catalogue.tensors[number]
        if length == tensor.num_bytes:
            yield tensor, catalogue.files[file].path, offset, offset + length


def _inherited(plan: ReshardPlan, tensors: Sidecar) -> dict[str, int]:
    """The digests of stored tensors whose bytes are those of a canonical tensor that has one."""
    return {
        e.target.stored: tensors.tensors[e.canonical].crc32c
        for e in plan.entries
        if e.op is Op.COPY
        and e.canonical in tensors.tensors
        and plan.target_tensor(e).shape == e.shape
        and e.target == Placement.identity(e.target.canonical, e.shape, stored=e.target.stored)
    }


def _embed(
    plan: ReshardPlan, stage: Stage, mode: DigestMode, tensors: Sidecar, threads: int
) -> Sidecar:
    """Complete the digests in the header of a single file.

    Where a store has copied bytes that have no digest, the file has none.
    """
    sidecar = Sidecar(names="stored", tool=TOOL, tensors={})
    catalogue, path = plan.target.catalogue, stage.path("")
    ((_, _, head),) = plan.target.fragments
    if mode is DigestMode.NONE:
        embed_nothing(stage.files, path, head)
        return sidecar
    sections = list_sections(catalogue)
    inherited = _inherited(plan, tensors)
    crcs = [
        inherited.get(name) if crc is None else crc
        for name, begin, end in sections
        for crc in [stage.digests.section(path, begin, end)]
    ]
    if is_remote(path) and mode is not DigestMode.ALL and None in crcs:
        embed_nothing(stage.files, path, head)
        return sidecar
    missing = [number for number, crc in enumerate(crcs) if crc is None]
    ranges = [(sections[n][1], sections[n][2]) for n in missing]
    for number, crc in zip(
        missing, read_sections(stage.files, path, ranges, threads=threads), strict=True
    ):
        crcs[number] = crc
    complete = [crc or 0 for crc in crcs]
    embed_digests(stage.files, path, catalogue, head, complete)
    stored = {
        name: StoredDigest(
            crc32c=crc,
            dtype=catalogue[name].dtype,
            shape=catalogue[name].shape,
            file="",
            begin=begin,
            size=end - begin,
        )
        for (name, begin, end), crc in zip(sections, complete, strict=True)
    }
    return replace(sidecar, stored_tensors=stored)
