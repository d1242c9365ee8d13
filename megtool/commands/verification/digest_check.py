"""The digests stored with a checkpoint, and the tensors and files that are compared with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from megtool.commands.reports.verify import Difference, DigestCheck
from megtool.digests.compare import ComparedSource, TensorPair
from megtool.digests.crc32c import (
    SIDECAR,
    StoredDigest,
    TensorDigest,
    read_sidecar,
)
from megtool.digests.embedded import check_embedded, find_embedded
from megtool.digests.files import FileMismatch, check_files, read_sections
from megtool.errors import MappingError, MegtoolError
from megtool.formats import open_checkpoint
from megtool.formats.save_folder import find_iteration
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import ScanPart


class FileCheck:
    """The files of one checkpoint, compared with the digests that were written with them.

    Without `is_alone` (there is a second checkpoint, so tensors are read anyway), files of tensors
    are left out, unless some tensors are packed: these have no digests of their own.
    """

    def __init__(self, source: CheckpointSource, *, is_alone: bool) -> None:
        self._source = source
        is_alone = is_alone or bool(source.catalogue.packed)
        catalogue = source.catalogue
        self._expected = dict(source.sidecar.files) if source.sidecar else {}
        if not is_alone:
            tensor_files = {f.path for f in catalogue.files}
            self._expected = {n: d for n, d in self._expected.items() if n not in tensor_files}
        self._embedded = find_embedded(catalogue, source.path)
        self._stored = dict(source.sidecar.stored_tensors) if source.sidecar and is_alone else {}
        self.mismatches: list[FileMismatch] = []
        self.differing: list[str] = []
        self._verified: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """The bytes that `run` reads."""
        if self._embedded is not None:
            return self._source.catalogue.num_bytes
        return sum(digest.size for digest in self._expected.values())

    @property
    def num_files(self) -> int:
        """The number of files that have a digest and are compared with it."""
        return 1 if self._embedded is not None else len(self._expected)

    def run(
        self, *, threads: int, progress: Callable[[int], None], scan: ScanPart | None = None
    ) -> None:
        """Compare all files; of those that differ, find the stored tensors that do.

        With `scan`, workers share it out.

        Raises:
            FormatError: the digests do not fit the file that holds them.
            StorageError: a read failed.
        """
        if self._embedded is not None:
            catalogue = open_checkpoint(self._source.path)
            check = check_embedded(
                catalogue, self._embedded, threads=threads, progress=progress, scan=scan
            )
            self.differing += check.differing
            self.mismatches += [check.outside] if check.outside is not None else []
            return
        root = self._source.catalogue.root
        self.mismatches += check_files(
            root, self._expected, threads=threads, progress=progress, scan=scan
        )
        damaged = {m.file for m in self.mismatches}
        self._verified = set(self._expected) - damaged
        for name, digest in self._stored.items():
            if digest.file in damaged and not _is_intact(root, digest):
                self.differing.append(name)

    @functools.cached_property
    def verified(self) -> frozenset[str]:
        """Stored tensors all of whose files are as they were written."""
        catalogue = self._source.catalogue
        if self._embedded is not None:
            return frozenset(t.name for t in catalogue.tensors) - {*self.differing}
        paths = [f.path for f in catalogue.files]
        damaged = np.array([path not in self._verified for path in paths], bool)
        if not damaged.any():
            return frozenset(t.name for t in catalogue.tensors)
        rows = damaged[catalogue.extents.file]
        touched = set(catalogue.shards.tensor[rows].tolist())
        return frozenset(t.name for n, t in enumerate(catalogue.tensors) if n not in touched)

    def differences(self) -> list[Difference]:
        """Files and stored tensors that differ."""
        out = [describe_mismatch(m) for m in self.mismatches]
        text = "its stored bytes differ from their digest"
        return out + [
            Difference(tensor=n, stored=n, kind="digest", text=text) for n in self.differing
        ]


def describe_mismatch(mismatch: FileMismatch) -> Difference:
    """A file that differs, as a difference."""
    return Difference(tensor=mismatch.file, stored=mismatch.file, kind="file", text=mismatch.reason)


def _is_intact(root: Path, digest: StoredDigest) -> bool:
    try:
        section = digest.begin, digest.begin + digest.size
        return read_sections(Files(), root / digest.file, [section]) == [digest.crc32c]
    except MegtoolError:
        return False


def find_damage(path: Path, iteration: int | str | None) -> list[FileMismatch]:
    """Files of a checkpoint that cannot be opened, which differ from their digests."""
    try:
        root = find_iteration(path, iteration) or path
        sidecar = read_sidecar(root / SIDECAR) if root.is_dir() else None
        return check_files(root, sidecar.files) if sidecar else []
    except MegtoolError:
        return []


class DigestIndex:
    """The digests of one checkpoint.

    `compared` are those of tensors that are compared as they are; `stored_whole` those of whole
    stored tensors of which something else is compared, each with its placement. `by_file` are
    tensors whose files were verified as a whole. `differences` need no reading: a digest of a
    tensor that does not exist, or that has another dtype or shape.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.compared: dict[str, TensorDigest] = {}
        self.stored_whole: dict[str, TensorDigest] = {}
        self.placements: dict[str, Placement] = {}
        self.by_file: set[str] = set()
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        if source.reason is not None:
            self.notes.append(_describe_mismatch(source, source.reason))
        sidecar = source.sidecar
        known: Mapping[str, TensorDigest] = sidecar.tensors if sidecar else {}
        by_stored = sidecar is not None and sidecar.names == "stored"
        if sidecar and not by_stored and not source.is_canonical:
            self.notes.append(
                f"the digests of {source.path} are not used: they have canonical names, and the "
                "model is not known (--family and --like say which it is)"
            )
            known = {}
        for name, digest in known.items():
            self._sort(name, digest, by_stored=by_stored)
        self.unverified = tuple(
            name
            for name, p in source.view.placements.items()
            if (p.stored if by_stored else name) not in known
        )

    def _sort(self, name: str, digest: TensorDigest, *, by_stored: bool) -> None:
        source, shape = self.source, digest.shape
        tensor = None if by_stored and source.is_canonical else source.view.canonical.get(name)
        stored_tensor = tensor
        if by_stored and name in source.catalogue:
            stored_tensor = source.catalogue[name]
        if stored_tensor is None:
            self.differences.append(
                Difference(
                    tensor=name,
                    stored=name,
                    kind="missing",
                    text="has a digest, but does not exist",
                )
            )
        elif tensor is not None and (shape, digest.dtype) == (tensor.shape, tensor.dtype):
            self.compared[name] = digest
        elif (
            by_stored
            and digest.dtype == stored_tensor.dtype
            and len(shape) == len(stored_tensor.shape)
            and shape[1:] == stored_tensor.shape[1:]
            and shape[:1] <= stored_tensor.shape[:1]
        ):
            self.stored_whole[name] = digest
            self.placements[name] = Placement.identity(name, shape)
        else:
            self._differ(
                name,
                f"it is {stored_tensor.dtype} {list(stored_tensor.shape)}, but its digest is of "
                f"{digest.dtype} {list(shape)}",
            )

    def compared_source(self, reader: CheckpointReader) -> ComparedSource:
        """This side of the comparison, with the digests of `compared` computed while reading."""
        return ComparedSource(reader=reader, sizes=_sizes(self.compared))

    def plan_stored_reads(
        self, reader: CheckpointReader
    ) -> tuple[list[TensorPair], ComparedSource]:
        """What is read for `stored_whole`."""
        pairs = [
            TensorPair(name=name, a=placement, b=None)
            for name, placement in self.placements.items()
            if name in self.stored_whole
        ]
        return pairs, ComparedSource(reader=reader, sizes=_sizes(self.stored_whole))

    def check_computed(self, computed_source: ComparedSource) -> None:
        """Compare the computed digests with the stored ones."""
        for name in computed_source.sizes:
            expected = self.compared[name] if name in self.compared else self.stored_whole[name]
            computed = computed_source.digests.get(name) if computed_source.digests else None
            if computed != expected.crc32c:
                self._differ(
                    name,
                    f"its bytes have the CRC-32C {computed or 0:08x}, but {SIDECAR} of "
                    f"{self.source.path} says {expected.crc32c:08x}",
                )

    def _differ(self, name: str, text: str) -> None:
        placement = self.source.view.placements.get(name)
        stored = name if placement is None or name in self.stored_whole else placement.stored
        self.differences.append(Difference(tensor=name, stored=stored, kind="digest", text=text))

    def use_files(self, verified: Collection[str], *, is_alone: bool) -> None:
        """Count stored tensors that the digests of files have verified.

        If the checkpoint `is_alone`, they are not read again; of two, all tensors are read, and
        this counts those without a digest of their own.
        """
        stored = {n: p.stored for n, p in self.source.view.placements.items()}
        self.by_file = {n for n, name in stored.items() if name in verified}
        if is_alone:
            self.compared = {n: d for n, d in self.compared.items() if n not in self.by_file}
            self.stored_whole = {n: d for n, d in self.stored_whole.items() if n not in verified}
        else:
            self.by_file &= {*self.unverified}
        self.unverified = tuple(n for n in self.unverified if n not in self.by_file)

    def summarize(self, files: FileCheck) -> DigestCheck:
        """Count the digests that match, those that differ, and tensors without one."""
        wrong = {d.tensor for d in self.differences if d.kind == "digest"} | {*files.differing}
        read = [*self.by_file, *self.compared, *self.stored_whole]
        return DigestCheck(
            path=str(self.source.path),
            matching=sum(name not in wrong for name in read),
            differing=len(wrong),
            unverified=tuple(n for n in self.unverified if n not in wrong),
            matching_files=files.num_files - len(files.mismatches),
            differing_files=len(files.mismatches),
        )

    def plan_reads(self) -> Iterator[TensorPair]:
        """What is read for `compared` if there is no second checkpoint."""
        for name in self.compared:
            yield TensorPair(name=name, a=self.source.view.placements[name], b=None)


def _describe_mismatch(source: CheckpointSource, reason: MappingError) -> str:
    """Why a checkpoint is not read as the model that it declares, and what to do about it."""
    consequence = (
        "the model of the other checkpoint is used"
        if source.is_canonical
        else "its tensors keep their stored names, and missing ones are not detected"
    )
    hint = f"; hint: {reason.hint}" if reason.hint else ""
    return f"{source.path}: {reason.message}; {consequence}{hint}"


def _sizes(digests: Mapping[str, TensorDigest]) -> dict[str, int]:
    return {name: numel(d.shape) * d.dtype.itemsize for name, d in digests.items()}
