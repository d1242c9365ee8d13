"""Check tensors: digests, the elements of two checkpoints, data that no digest vouches for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.reports.verify import Difference, DigestCheck, PartCheck
from megtool.commands.verification.digest_check import DigestIndex, FileCheck
from megtool.commands.verification.findings import Findings
from megtool.commands.verification.metadata import check_objects, check_quant_config
from megtool.commands.verification.quantized import QuantizedPair, packings_differ
from megtool.commands.verification.tensor_pairs import (
    ReadTask,
    find_missing,
    match_tensors,
    plan_own_checks,
)
from megtool.console import Progress
from megtool.digests.compare import ComparedSource, TensorPair, compare
from megtool.digests.finite import count_nonfinite
from megtool.formats.save_folder import TRACKER, describe_tracker_fault, is_save_folder
from megtool.quantize.verification.sqnr_thresholds import WeightComparison
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import SharedScan


@dataclass(slots=True, kw_only=True)
class TensorCheck:
    """The tensors of one checkpoint, or of two under the same names; `run` reads them.

    `num_tensors` were compared with the other side's, of one checkpoint held against digests or
    read for NaN and Inf (`num_finite`); `num_bytes` were read for it on one side.
    """

    options: VerifyOptions
    sources: Sequence[CheckpointSource]
    findings: Findings
    threads: int
    progress: Progress
    num_tensors: int = 0
    num_bytes: int = 0
    num_finite: int = 0
    compared: tuple[str, ...] = ()
    weights: tuple[WeightComparison, ...] = ()
    _digests: list[DigestIndex] = field(default_factory=list)
    _files: list[FileCheck] = field(default_factory=list)

    @property
    def is_alone(self) -> bool:
        """Whether only one checkpoint is verified, against its own digests."""
        return len(self.sources) == 1

    def run(self, scan: SharedScan | None, *, is_last: bool) -> None:
        """Read and compare; with `scan`, workers share it out, and the last one reports.

        Raises:
            MegtoolError: a shard is missing, a read failed, or digests do not fit.
        """
        findings, sources = self.findings, self.sources
        digests = self._digests = [DigestIndex(o) for o in sources]
        self._files = [FileCheck(o, is_alone=self.is_alone) for o in sources]
        self._check_files(scan)
        quantized: QuantizedPair | None = None
        with ExitStack() as stack:
            readers = [
                stack.enter_context(CheckpointReader(o.catalogue, Files(), is_strict=False))
                for o in sources
            ]
            for reader in readers:  # finds every shard, whether or not its bytes will be read
                reader.locator.offsets(np.arange(len(reader.catalogue.shards)))
            compared = [i.compared_source(r) for i, r in zip(digests, readers, strict=True)]
            if self.is_alone:
                self._check_contents(is_last=is_last)
                pairs = list(digests[0].plan_reads())
            else:
                quantized, pairs = self._pair_tensors(readers, compared)
            for o in sources:
                findings.add(*check_quant_config(o, is_alone=self.is_alone))
            total = self._compare(pairs, quantized, compared, readers, stack, scan)
            if quantized is not None and is_last:
                quantized.run(
                    threads=self.threads,
                    progress=lambda n: self.progress("verify", 4 * n, total),
                )
                findings.add(quantized.differences, quantized.notes)
            unread = self._unread_tensors() if self.is_alone else []
            self._read_unverified(readers[0], unread, scan)
        for index, source in zip(digests, compared, strict=True):
            index.check_computed(source)
            index.source.catalogue.check_unchanged()
            findings.add(index.differences, index.notes)
        self.compared = tuple(p.name for p in pairs if p.a is not None and p.b is not None)
        self.num_tensors += len(self.compared)
        if self.is_alone:
            self.num_tensors = len({*(p.name for p in pairs), *digests[0].by_file}) + len(unread)
            self.num_bytes += sum(check.num_bytes for check in self._files)
        if quantized is not None:
            self.num_tensors += len(quantized.names())
            self.num_bytes += quantized.num_bytes
            self.weights = tuple(quantized.rows)

    def digest_checks(self) -> tuple[DigestCheck, ...]:
        """Return how the digests of each checkpoint compare with its bytes."""
        pairs = zip(self._digests, self._files, strict=True)
        return tuple(index.summarize(check) for index, check in pairs)

    def part(self) -> PartCheck:
        """Return the verdict on the tensors of two checkpoints."""
        wrong = [d for d in self.findings.differences if d.part == "tensors"]
        names = (*self.compared, *(w.tensor for w in self.weights))
        part = PartCheck.of("tensors", names, self.findings.uncompared, wrong)
        is_close = part.verdict == "equal" and any(np.isfinite(w.sqnr_db) for w in self.weights)
        return part.with_verdict("close") if is_close else part

    def _check_contents(self, *, is_last: bool) -> None:
        """Find what a single checkpoint lacks, and what it should not hold."""
        source, findings = self.sources[0], self.findings
        findings.differences += [*find_missing(source), *check_objects(source)]
        if is_last:
            findings.check_files(source.catalogue, self.threads)
        findings.differences += _check_tracker(source, self.options.iteration)

    def _pair_tensors(
        self, readers: Sequence[CheckpointReader], compared: Sequence[ComparedSource]
    ) -> tuple[QuantizedPair | None, list[TensorPair]]:
        options, (a, b) = self.options, self.sources
        has_tolerance = bool(options.atol or options.rtol)
        quantized: QuantizedPair | None = None
        if not has_tolerance and packings_differ(a, b):
            quantized = QuantizedPair.of(a, b, readers, options.sqnr)
        excluded = quantized.names() if quantized else set()
        return quantized, list(
            match_tensors(a, b, compared, has_tolerance, self.findings, excluded)
        )

    def _compare(
        self,
        pairs: list[TensorPair],
        quantized: QuantizedPair | None,
        compared: Sequence[ComparedSource],
        readers: Sequence[CheckpointReader],
        stack: ExitStack,
        scan: SharedScan | None,
    ) -> int:
        """Compare elements and digests, replicas, and copies of the embedding.

        Returns the bytes that the progress counts, those of quantized weights included.
        """
        findings, options = self.findings, self.options
        first = ReadTask(
            pairs, compared[0], compared[-1], lambda deltas: findings.add_values(pairs, deltas)
        )
        tasks = [first]
        for source, index, reader in zip(self.sources, self._digests, readers, strict=True):
            tasks += plan_own_checks(source, index, reader, findings, stack)
        total = sum(task.num_bytes for task in tasks) + 4 * (
            quantized.num_elements if quantized else 0
        )
        if total:
            self.progress("verify", 0, total)
        for number, task in enumerate(tasks):
            deltas = compare(
                task.pairs,
                task.a,
                task.b,
                atol=0.0 if number else options.atol,
                rtol=0.0 if number else options.rtol,
                threads=self.threads,
                progress=lambda n: self.progress("verify", n, total),
                scan=scan.part(f"tensors {number}") if scan else None,
            )
            task.report(deltas)
        self.num_bytes += first.num_bytes
        return total

    def _unread_tensors(self) -> list[str]:
        """Return the stored tensors whose bytes no digest vouches for."""
        index, source = self._digests[0], self.sources[0]
        placements = source.view.placements
        names = [placements[n].stored for n in index.unverified if n in placements]
        names += [stored for stored, _ in source.view.dropped if stored in source.catalogue]
        verified = {*index.stored_whole, *(placements[n].stored for n in index.by_file)}
        return [n for n in dict.fromkeys(names) if n not in verified]

    def _read_unverified(
        self, reader: CheckpointReader, names: Sequence[str], scan: SharedScan | None
    ) -> None:
        """Read tensors without a digest, and report those with NaN or Inf."""
        source = self.sources[0]
        tensors = [source.catalogue[n] for n in names]
        total = sum(numel(t.shape) * t.dtype.itemsize for t in tensors)
        if not total:
            return
        self.progress("verify data", 0, total)
        counts = count_nonfinite(
            reader,
            names,
            threads=self.threads,
            progress=lambda n: self.progress("verify data", n, total),
            scan=scan.part("data") if scan else None,
        )
        canonical = {p.stored: n for n, p in source.view.placements.items()}
        reported = {d.tensor for d in self.findings.differences}  # scales that make Inf of codes
        for name, count in counts.items():
            is_told = source.catalogue[name].packing and name.rpartition(".")[0] in reported
            if count and not is_told:
                self.findings.differences.append(
                    Difference(
                        tensor=canonical.get(name, name),
                        stored=name,
                        kind="values",
                        text=f"{count.nan:,} elements are NaN and {count.inf:,} are Inf",
                        num_elements=numel(source.catalogue[name].shape),
                        num_differing=count.nan + count.inf,
                    )
                )
        self.num_finite = len(names)
        self.num_bytes += total

    def _check_files(self, scan: SharedScan | None) -> None:
        """Compare files with their digests.

        What differs in a single checkpoint is a difference, and a note if there are two: these are
        compared by their contents.
        """
        total = sum(check.num_bytes for check in self._files)
        if total:
            self.progress("verify files", 0, total)
        for number, (check, index) in enumerate(zip(self._files, self._digests, strict=True)):
            check.run(
                threads=self.threads,
                progress=lambda n: self.progress("verify files", n, total),
                scan=scan.part(f"files {number}") if scan else None,
            )
            index.use_files(check.verified, is_alone=self.is_alone)
            if self.is_alone:
                self.findings.differences += check.differences()
                continue
            self.findings.notes += [
                f"{d.stored} of {index.source.path} is not as it was written: it {d.text}"
                for d in check.differences()
            ]


def _check_tracker(source: CheckpointSource, iteration: object) -> Iterator[Difference]:
    """Whether the tracker of a save folder that megtool wrote names its last iteration."""
    if iteration is not None or source.sidecar is None or not is_save_folder(source.path):
        return
    text = describe_tracker_fault(source.path)
    if text is not None:
        yield Difference(tensor=TRACKER, stored=TRACKER, kind="file", text=text)
