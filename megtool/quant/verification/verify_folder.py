"""Proof: what was written, read again from the files alone, and held against the source.

Nothing the writer knew is believed: the folder is opened afresh, weights are decoded and compared
element by element, factors folded into norms are found from the norms, and only then held against
what calibration settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.formats import open_checkpoint
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.console import Progress, silent
from megtool.convert.dialects import CanonicalView, read_side
from megtool.convert.families import detect_family
from megtool.errors import MegtoolError
from megtool.quant.calibration.activation_sites import list_points, readers_of
from megtool.quant.qparams import Floats, Settlement
from megtool.quant.recipes.match import Decision
from megtool.quant.verification.code_values import check_codes, check_scales_settled
from megtool.quant.verification.findings import Finding, error, in_order, warning
from megtool.quant.verification.metadata_checks import check_metadata
from megtool.quant.verification.mxfp4_blocks import check_blocks, has_blocks
from megtool.quant.verification.names import absent, num_bytes_of, stored_names
from megtool.quant.verification.scale_checks import check_scales
from megtool.quant.verification.scale_values import check_seconds, check_settled, seconds_of
from megtool.quant.verification.small_checks import check_small
from megtool.quant.verification.stored_folder import TOKENIZERS, Folder, open_folder
from megtool.quant.verification.unquantized_tensors import check_readers, compare_kept, recovered
from megtool.quant.verification.weight_error import Sums, Weight, in_full, measure, without_columns
from megtool.reshard.source import CheckpointSource
from megtool.tensors.box import numel

LEAST_DB = 6.0
"""A weight with less signal over noise than this is another weight: the coarsest format that
anyone ships keeps more than twice as much."""

WORST_ROW = 0.5
"""A row whose error is a larger part of its size is worth a look."""

MOST_CLIPPED = 0.02
_WRONG = "outputs are wrong in every engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantized weight beside its source.

    Where factors of columns were moved into a norm or beside the weight, both are as they were
    rounded: columns of the source times the factors. In the source's own terms columns that have
    small inputs would look bad, and do no harm.

    `num_bytes` are those in the files, scales included, and `bits` the same per weight.
    `relative_error` is |source - written| / |source| over all elements, `max_error` the largest
    single difference. `num_clipped` elements lie beyond the largest code (None where scales do not
    lie as the matrix does, and elements could not be held against them one by one).
    """

    name: str
    label: str
    bits: float
    num_bytes: int
    sqnr_db: float
    cosine: float
    max_error: float
    relative_error: float
    num_clipped: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is proved about a quantized folder, and what is not right with it.

    `num_kept` tensors are bit for bit those of the source, or their cast; `num_norms` are those
    whose factors were found again.
    """

    path: str
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    num_kept: int = 0
    num_norms: int = 0
    num_bytes: int = 0

    @property
    def num_errors(self) -> int:
        """Findings that nothing should be shipped with."""
        return sum(f.severity == "error" for f in self.findings)

    @property
    def exit_status(self) -> int:
        """0, or 7 if anything is wrong."""
        return 7 if self.num_errors else 0

    def worst(self, count: int = 5) -> tuple[Row, ...]:
        """The rows with the least signal over noise."""
        return tuple(sorted(self.rows, key=lambda r: r.sqnr_db)[:count])

    def to_json(self) -> dict[str, Any]:
        """The proof as plain data."""
        return asdict(self) | {"num_errors": self.num_errors}


def prove(
    source: CheckpointSource,
    destination: Path,
    decisions: Sequence[Decision],
    settlement: Settlement,
    *,
    small: Mapping[str, bytes] | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> Proof:
    """Check a quantized Hugging Face folder, finished or still staged, against its source.

    `small` are the files beside the tensors as the model has them unquantized; None leaves them
    unread. Memory is bounded by a dozen tiles a thread. What is wrong is a finding, not an error,
    however broken the folder is.

    Raises:
        CheckpointError: the source cannot be read.
    """
    findings: list[Finding] = []
    try:
        folder = open_folder(destination)
    except MegtoolError as e:
        return Proof(path=str(destination), findings=(_unreadable(destination, e),))
    with folder:
        opened = _opened(source, destination, folder, findings)
        names = stored_names(decisions, opened[1] if opened else None)
        tokenizer = any(n.endswith(TOKENIZERS) for n in source.catalogue.attachments)
        check = check_blocks if has_blocks(decisions) else check_metadata
        findings += check(folder, decisions, names, tokenizer=tokenizer)
        findings += check_small(folder, small or {})
        findings += check_scales(folder, decisions, names)
        findings += check_settled(folder, decisions, names, settlement)
        if opened is None:
            findings += absent(folder, decisions)
            return Proof(path=str(destination), findings=in_order(findings))
        sizes = {d.module.name: num_bytes_of(folder, names.get(d.module.name)) for d in decisions}
        seconds = seconds_of(folder, names)
    proof = _Proof(source, *opened, decisions, settlement, seconds, findings)
    rows = proof.run(usual_threads(threads), progress, sizes)
    return Proof(
        path=str(destination),
        rows=tuple(rows),
        findings=in_order(findings),
        num_kept=proof.num_kept,
        num_norms=proof.num_norms,
        num_bytes=sum(t.num_bytes for t in _files(destination)),
    )


def _unreadable(path: Path, e: MegtoolError) -> Finding:
    return error("unreadable", e.tensor or path.name, e.message, "no engine loads it")


def _opened(
    source: CheckpointSource, destination: Path, folder: Folder, findings: list[Finding]
) -> tuple[Catalogue, CanonicalView] | None:
    """The folder through the reader of quantized folders; None where that cannot be."""
    try:
        catalogue = open_checkpoint(destination)
        family, config = source.side.family, source.side.config
        if folder.config is not None:
            family = detect_family(folder.config)
            config = family.read_config(folder.config)
        side = read_side(
            catalogue.tensors, dialect="hf", family=family, config=config, partial=True
        )
    except (MegtoolError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        known = e if isinstance(e, MegtoolError) else MegtoolError(f"cannot be understood: {e}")
        findings.append(_unreadable(destination, known))
        return None
    for warned in catalogue.warnings:
        findings.append(warning("config", destination.name, warned, "loaders may warn of it too"))
    return catalogue, side


def _files(path: Path) -> Iterator[Any]:
    for file in sorted(path.glob("*.safetensors")):
        yield from open_checkpoint(file).tensors


class _Proof:
    """One run, with what it has found so far."""

    def __init__(
        self,
        source: CheckpointSource,
        catalogue: Catalogue,
        side: CanonicalView,
        decisions: Sequence[Decision],
        settlement: Settlement,
        seconds: Mapping[str, float],
        findings: list[Finding],
    ) -> None:
        self.source, self.side = source, side
        self.catalogue, self.stored_factors = without_columns(in_full(catalogue))
        self.settlement, self.seconds, self.findings = settlement, seconds, findings
        self.decisions = {f"{d.module.name}.weight": d for d in decisions}
        modules = [d.module for d in decisions]
        points = list_points(modules, source.side.config) if source.side.config else ()
        self.norm_of = {f"{m}.weight": p.norm for p in points for m in p.modules if p.norm}
        self.readers = readers_of(points, modules)
        self.num_kept = self.num_norms = 0

    def run(self, threads: int, progress: Progress, sizes: Mapping[str, int]) -> Iterator[Row]:
        """Hold every tensor against the source."""
        mine, theirs = self.source.side, self.side
        both = [n for n in mine.canonical if n in theirs.canonical and self._same_shape(n)]
        self._left_over()
        with (
            Reader(in_full(self.source.catalogue), Files()) as a,
            Reader(self.catalogue, Files()) as b,
        ):
            packed = [n for n in both if self.catalogue[theirs.placements[n].stored].packing]
            plain = [n for n in both if n not in set(packed)]
            norms = {n: f for n in self.settlement.norms for f in (f"{n}.weight", f"{n}.bias")}
            folded = {n for n in plain if n in set(norms.values())} | {
                f"{n}.weight" for n in self.norm_of.values() if f"{n}.weight" in plain
            }
            gammas = recovered(self.source.side, theirs, a, b, folded, self.settlement)
            self.findings += gammas.findings
            self.num_norms = gammas.num_folded
            quantized = {n.removesuffix(".weight") for n in packed}
            self.findings += check_readers(gammas, self.readers, quantized)
            kept = [n for n in plain if n not in gammas.handled]
            weights = [
                Weight(
                    name=n,
                    source=mine.placements[n],
                    written=theirs.placements[n],
                    shape=(mine.canonical[n].shape[0], mine.canonical[n].shape[1]),
                    gammas=self._gammas(n, gammas.values),
                )
                for n in packed
                if len(mine.canonical[n].shape) == 2
            ]
            total = sum(4 * numel(w.shape) for w in weights)
            progress("prove", 0, total)
            wrong = compare_kept(mine, theirs, a, b, kept, threads=threads)
            self.findings += wrong
            self.num_kept = len(kept) - sum(f.check == "kept" for f in wrong)
            found = measure(
                weights, a, b, threads=threads, progress=lambda n: progress("prove", 4 * n, total)
            )
            settled = self.settlement
            self.findings += check_codes(weights, settled, a, self.catalogue, threads=threads)
            self.findings += check_scales_settled(weights, settled, self.catalogue)
            modules = [d.module for d in self.decisions.values()]
            self.findings += check_seconds(weights, modules, found, settled, self.seconds)
        return iter([self._row(w, found[w.name], sizes) for w in weights])

    def _gammas(self, name: str, norms: Mapping[str, Floats]) -> Floats | None:
        """What inputs are multiplied by: by the norm before, and by the engine."""
        folded = norms.get(self.norm_of.get(name, ""))
        stored = self.stored_factors.get(self.side.placements[name].stored)
        if folded is None or stored is None:
            return stored if folded is None else folded
        return folded * stored

    def _same_shape(self, name: str) -> bool:
        mine, theirs = self.source.side.canonical[name], self.side.canonical[name]
        if mine.shape != theirs.shape:
            text = f"is {list(theirs.shape)}, and {list(mine.shape)} in the source"
            self.findings.append(error("shape", name.removesuffix(".weight"), text, _WRONG))
        return mine.shape == theirs.shape

    def _left_over(self) -> None:
        """Tensors of one side alone."""
        mine, theirs = self.source.side.canonical, self.side.canonical
        for name in mine:
            if ":" not in name and name not in theirs:
                text = "is in the source, and was not written"
                self.findings.append(
                    error("missing", name.removesuffix(".weight"), text, "engines stop")
                )
        for name in theirs:
            if name not in mine:
                text = "was written, and is not in the source"
                self.findings.append(
                    error("extra", name.removesuffix(".weight"), text, "engines stop")
                )
        for name, reason in self.side.dropped:
            if self.side.copies.get(name) is None:
                text = f"was written, and is no part of the model: {reason}"
                self.findings.append(warning("extra", name, text, "engines may refuse it"))

    def _row(self, w: Weight, sums: Sums, sizes: Mapping[str, int]) -> Row:
        name = w.name.removesuffix(".weight")
        self._judge(name, w, sums)
        d = self.decisions.get(w.name)
        packing = self.catalogue[w.written.stored].packing or ""
        num_bytes = sizes.get(name, 0)
        stored = self.catalogue[w.written.stored].shape  # several experts may share it
        num_bytes = round(num_bytes * numel(w.shape) / max(numel(stored), 1))
        return Row(
            name=name,
            label=d.label if d is not None and d.format else packing,
            bits=8 * num_bytes / max(numel(w.shape), 1),
            num_bytes=num_bytes,
            sqnr_db=sums.sqnr_db,
            cosine=sums.cosine,
            max_error=sums.max_error,
            relative_error=sums.relative_error,
            num_clipped=sums.num_clipped if sums.num_bounded else None,
        )

    def _judge(self, name: str, w: Weight, s: Sums) -> None:
        """What the sums of a weight give cause for."""
        treatment = self.settlement.treatments.get(name)
        if s.num_nan:
            text = f"{s.num_nan:,} elements are no finite numbers"
            self.findings.append(error("weight-nan", name, text, _WRONG))
        if s.count and s.sqnr_db < LEAST_DB:
            text = (
                f"has {s.sqnr_db:.1f} dB of signal over noise (cosine {s.cosine:.3f}): it is "
                "another weight, or its codes and scales do not belong together"
            )
            self.findings.append(error("weight", name, text, _WRONG))
            return
        # Codes that were chosen for outputs are held against those that were settled.
        nearest = treatment is None or treatment.codes is None
        if s.num_wrong and nearest:
            at = list(s.first_wrong or ())
            text = (
                f"{s.num_wrong:,} of {s.num_bounded:,} elements are further from the source than "
                f"rounding takes them, the first at {at}"
            )
            self.findings.append(error("weight", name, text, _WRONG))
        elif s.worst_row_error > WORST_ROW:
            text = (
                f"row {s.worst_row} is off by {s.worst_row_error:.0%} of its size, and the whole "
                f"by {s.relative_error:.1%}"
            )
            self.findings.append(
                warning("row", name, text, "what comes of this row is mostly noise")
            )
        share = s.num_clipped / max(s.num_bounded, 1)
        asked = treatment is not None and (treatment.amax is not None or treatment.second_amax > 0)
        if s.num_clipped and not asked and nearest and "nvfp4" not in self._packing(w):
            text = f"{s.num_clipped:,} elements are cut off, though nothing was to be cut off"
            self.findings.append(error("clipped", name, text, "a scale is too small"))
        elif share > MOST_CLIPPED:
            text = f"{share:.1%} of its elements are cut off"
            self.findings.append(
                warning("clipped", name, text, "large values are lost in every engine")
            )

    def _packing(self, w: Weight) -> str:
        return self.catalogue[w.written.stored].packing or ""
