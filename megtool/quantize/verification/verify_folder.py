"""Verify a quantized folder against its source, from its files alone.

Nothing is taken over from the writer: the folder is opened again, weights are decoded and compared
element by element, and smoothing factors are recovered from the norms. Then they are compared with
the quantization parameters of calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megtool.console import Progress, silent
from megtool.convert.dialects import CanonicalView, read_side
from megtool.convert.families.detection import detect_family
from megtool.dtypes import dtype
from megtool.errors import MegtoolError
from megtool.formats import open_checkpoint
from megtool.lint.expected import ExpectedModel
from megtool.lint.folder_view import COMPANIONS, TOKENIZER_FILES, FolderView, open_folder
from megtool.lint.recipe_rules import check_recipe
from megtool.quant.qparams import Floats, QParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import BLOCKS
from megtool.quant.statistics.activation_sites import list_activation_sites, map_norm_readers
from megtool.quantize.verification.code_values import check_codes, check_scales
from megtool.quantize.verification.scale_values import (
    check_global_scales,
    check_stored_qparams,
    read_global_scales,
)
from megtool.quantize.verification.unquantized_tensors import (
    check_norm_readers,
    compare_unquantized,
    recover_norm_factors,
)
from megtool.quantize.verification.weight_error import (
    ErrorSums,
    WeightPair,
    decode_as_float32,
    measure_errors,
    split_pre_quant_scales,
)
from megtool.report.finding import Finding, error, sort_findings, warning
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.reader import CheckpointReader

MIN_SQNR_DB = 6.0
"""A weight with a lower SQNR is a different weight: the coarsest format in use has more than twice
as much."""

MAX_ROW_ERROR = 0.5
"""Rows with a larger relative error are reported."""

MAX_CLIPPED = 0.02
_WRONG = "outputs are wrong in every engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAccuracy:
    """The error of a quantized weight against its source.

    If smoothing factors were folded into a norm or are stored, the source is compared after
    smoothing, as it was rounded. Without that, columns with small inputs would have large errors
    that do no harm.

    `num_bytes` are those in the files including scales, and `bits` the same per weight.
    `relative_error` is |source - written| / |source| over all elements, `max_error` the largest
    single difference. `num_clipped` elements exceed the largest code (None if scales could not be
    aligned with elements).
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
class FolderVerification:
    """The result of comparing a quantized folder with its source.

    `num_unquantized` tensors equal the source bit for bit, or are its cast; `num_norms` norms have
    the expected smoothing factors.
    """

    path: str
    rows: tuple[WeightAccuracy, ...] = ()
    findings: tuple[Finding, ...] = ()
    num_unquantized: int = 0
    num_norms: int = 0
    num_bytes: int = 0

    @property
    def num_errors(self) -> int:
        """The number of findings with severity error."""
        return sum(f.severity == "error" for f in self.findings)

    @property
    def exit_status(self) -> int:
        """0, or 7 if anything is wrong."""
        return 7 if self.num_errors else 0

    def worst(self, count: int = 5) -> tuple[WeightAccuracy, ...]:
        """The weights with the least SQNR."""
        return tuple(sorted(self.rows, key=lambda r: r.sqnr_db)[:count])

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self) | {"num_errors": self.num_errors}


def verify_folder(
    source: CheckpointSource,
    destination: Path,
    decisions: Sequence[Decision],
    qparams: QParams,
    *,
    auxiliary_files: Mapping[str, bytes] | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> FolderVerification:
    """Check a quantized Hugging Face folder, finished or still staged, against its source.

    `auxiliary_files` are the other files of the unquantized model; None skips their comparison.
    Memory is bounded by a dozen tiles per thread. A broken folder causes findings, not an error.

    Raises:
        CheckpointError: the source cannot be read.
    """
    findings: list[Finding] = []
    try:
        folder = open_folder(destination)
    except MegtoolError as e:
        return FolderVerification(path=str(destination), findings=(_unreadable(destination, e),))
    with folder:
        decoded = _open_decoded(source, destination, folder, findings)
        names = map_stored_names(decisions, decoded[1] if decoded else None)
        expected = ExpectedModel(
            decisions=decisions,
            stored_names=names,
            needs_tokenizer=any(
                n.endswith(TOKENIZER_FILES) for n in source.catalogue.auxiliary_files
            ),
            auxiliary_files=auxiliary_files or {},
        )
        findings += check_recipe(folder, expected)
        findings += check_stored_qparams(folder, decisions, names, qparams)
        if decoded is None:
            findings += find_absent_weights(folder, decisions)
            return FolderVerification(path=str(destination), findings=sort_findings(findings))
        sizes = {
            d.module.name: count_stored_bytes(folder, names.get(d.module.name)) for d in decisions
        }
        global_scales = read_global_scales(folder, names)
    verification = _WeightVerification(
        source, *decoded, decisions, qparams, global_scales, findings
    )
    rows = verification.run(default_threads(threads, source.path), progress, sizes)
    return FolderVerification(
        path=str(destination),
        rows=tuple(rows),
        findings=sort_findings(findings),
        num_unquantized=verification.num_unquantized,
        num_norms=verification.num_norms,
        num_bytes=sum(t.num_bytes for t in _stored_tensors(destination)),
    )


def _unreadable(path: Path, e: MegtoolError) -> Finding:
    return error("unreadable", e.tensor or path.name, e.message, "no engine loads it")


def _open_decoded(
    source: CheckpointSource, destination: Path, folder: FolderView, findings: list[Finding]
) -> tuple[Catalogue, CanonicalView] | None:
    """Open the folder with the reader of quantized folders; None if that fails."""
    try:
        catalogue = open_checkpoint(destination)
        family, config = source.view.family, source.view.config
        if folder.config is not None:
            family = detect_family(folder.config)
            config = family.read_config(folder.config)
            if source.view.config is not None:  # what tensors of the source say, and no key
                mtp = source.view.config.mtp
                config = config.with_fields(
                    mtp_own_head=mtp.mtp_own_head, mtp_own_embedding=mtp.mtp_own_embedding
                )
        side = read_side(
            catalogue.tensors, dialect="hf", family=family, config=config, partial=True
        )
    except (MegtoolError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        mismatch = e if isinstance(e, MegtoolError) else MegtoolError(f"cannot be read: {e}")
        findings.append(_unreadable(destination, mismatch))
        return None
    for message in catalogue.warnings:
        findings.append(warning("config", destination.name, message, "loaders may warn, too"))
    return catalogue, side


def _stored_tensors(path: Path) -> Iterator[Any]:
    for file in sorted(path.glob("*.safetensors")):
        yield from open_checkpoint(file).tensors


class _WeightVerification:
    """One comparison of all weights, and its findings."""

    def __init__(
        self,
        source: CheckpointSource,
        catalogue: Catalogue,
        side: CanonicalView,
        decisions: Sequence[Decision],
        qparams: QParams,
        global_scales: Mapping[str, float],
        findings: list[Finding],
    ) -> None:
        self.source, self.side = source, side
        self.catalogue, self.stored_factors = split_pre_quant_scales(decode_as_float32(catalogue))
        self.qparams, self.global_scales, self.findings = qparams, global_scales, findings
        self.decisions = {f"{d.module.name}.weight": d for d in decisions}
        modules = [d.module for d in decisions]
        sites = list_activation_sites(modules, source.view.config) if source.view.config else ()
        self.norm_of = {f"{m}.weight": p.norm for p in sites for m in p.modules if p.norm}
        self.readers = map_norm_readers(sites, modules)
        self.num_unquantized = self.num_norms = 0

    def run(
        self, threads: int, progress: Progress, sizes: Mapping[str, int]
    ) -> Iterator[WeightAccuracy]:
        """Compare every tensor with the source."""
        source_view, written_view = self.source.view, self.side
        common = [
            n
            for n in source_view.canonical
            if n in written_view.canonical and self._has_same_shape(n)
        ]
        self._compare_names()
        with (
            CheckpointReader(
                decode_as_float32(self.source.catalogue), Files(), is_strict=False
            ) as a,
            CheckpointReader(self.catalogue, Files(), is_strict=False) as b,
        ):
            packed = [
                n for n in common if self.catalogue[written_view.placements[n].stored].packing
            ]
            plain = [n for n in common if n not in set(packed)]
            norms = {n: f for n in self.qparams.norm_scales for f in (f"{n}.weight", f"{n}.bias")}
            folded = {n for n in plain if n in set(norms.values())} | {
                f"{n}.weight" for n in self.norm_of.values() if f"{n}.weight" in plain
            }
            factors = recover_norm_factors(
                self.source.view, written_view, a, b, folded, self.qparams
            )
            self.findings += factors.findings
            self.num_norms = factors.num_folded
            quantized = {n.removesuffix(".weight") for n in packed}
            self.findings += check_norm_readers(factors, self.readers, quantized)
            unquantized = [n for n in plain if n not in factors.handled]
            weights = [
                WeightPair(
                    name=n,
                    source=source_view.placements[n],
                    written=written_view.placements[n],
                    shape=(source_view.canonical[n].shape[0], source_view.canonical[n].shape[1]),
                    input_factors=self._input_factors(n, factors.values),
                )
                for n in packed
                if len(source_view.canonical[n].shape) == 2
            ]
            total = sum(4 * numel(w.shape) for w in weights)
            progress("prove", 0, total)
            wrong = compare_unquantized(
                source_view, written_view, a, b, unquantized, threads=threads
            )
            self.findings += wrong
            self.num_unquantized = len(unquantized) - sum(f.id == "kept" for f in wrong)
            sums = measure_errors(
                weights, a, b, threads=threads, progress=lambda n: progress("prove", 4 * n, total)
            )
            qparams = self.qparams
            self.findings += check_codes(weights, qparams, a, self.catalogue, threads=threads)
            self.findings += check_scales(weights, qparams, self.catalogue)
            modules = [d.module for d in self.decisions.values()]
            self.findings += check_global_scales(
                weights, modules, sums, qparams, self.global_scales
            )
        return iter([self._row(w, sums[w.name], sizes) for w in weights])

    def _input_factors(self, name: str, norms: Mapping[str, Floats]) -> Floats | None:
        """The factors of each input, by the preceding norm and by `pre_quant_scale`."""
        folded = norms.get(self.norm_of.get(name, ""))
        stored = self.stored_factors.get(self.side.placements[name].stored)
        if folded is None or stored is None:
            return stored if folded is None else folded
        return folded * stored

    def _has_same_shape(self, name: str) -> bool:
        expected, stored = self.source.view.canonical[name], self.side.canonical[name]
        if expected.shape != stored.shape:
            text = f"has shape {list(stored.shape)}, but {list(expected.shape)} in the source"
            self.findings.append(error("shape", name.removesuffix(".weight"), text, _WRONG))
        return expected.shape == stored.shape

    def _compare_names(self) -> None:
        """Report tensors that only one side has."""
        expected, stored = self.source.view.canonical, self.side.canonical
        for name in expected:
            if ":" not in name and name not in stored:
                text = "is in the source, but was not written"
                self.findings.append(
                    error("missing", name.removesuffix(".weight"), text, "engines stop")
                )
        for name in stored:
            if name not in expected:
                text = "was written, but is not in the source"
                self.findings.append(
                    error("extra", name.removesuffix(".weight"), text, "engines stop")
                )
        for name, reason in self.side.dropped:
            if self.side.copies.get(name) is None:
                text = f"was written, but is not part of the model: {reason}"
                self.findings.append(warning("extra", name, text, "engines may refuse it"))

    def _row(self, w: WeightPair, sums: ErrorSums, sizes: Mapping[str, int]) -> WeightAccuracy:
        name = w.name.removesuffix(".weight")
        self._check_sums(name, w, sums)
        d = self.decisions.get(w.name)
        packing = self.catalogue[w.written.stored].packing or ""
        num_bytes = sizes.get(name, 0)
        stored = self.catalogue[w.written.stored].shape  # several experts may share it
        num_bytes = round(num_bytes * numel(w.shape) / max(numel(stored), 1))
        return WeightAccuracy(
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

    def _check_sums(self, name: str, w: WeightPair, s: ErrorSums) -> None:
        """Report what the error of a weight shows."""
        params = self.qparams.weights.get(name)
        if s.num_nan:
            text = f"{s.num_nan:,} elements are NaN or Inf"
            self.findings.append(error("weight-nan", name, text, _WRONG))
        if s.count and s.sqnr_db < MIN_SQNR_DB:
            text = (
                f"has an SQNR of {s.sqnr_db:.1f} dB (cosine {s.cosine:.3f}): it is another "
                "weight, or its codes and scales do not belong together"
            )
            self.findings.append(error("weight", name, text, _WRONG))
            return
        # `check_codes` compares codes that calibration chose.
        rounds_to_nearest = params is None or params.codes is None
        if s.num_wrong and rounds_to_nearest:
            index = list(s.first_wrong or ())
            text = (
                f"{s.num_wrong:,} of {s.num_bounded:,} elements differ from the source by more "
                f"than rounding, the first at {index}"
            )
            self.findings.append(error("weight", name, text, _WRONG))
        elif s.worst_row_error > MAX_ROW_ERROR:
            text = (
                f"row {s.worst_row} has a relative error of {s.worst_row_error:.0%}, the entire "
                f"weight of {s.relative_error:.1%}"
            )
            self.findings.append(
                warning("row", name, text, "the output of this row is mostly noise")
            )
        share = s.num_clipped / max(s.num_bounded, 1)
        is_clipping_expected = params is not None and (
            params.amax is not None or params.global_amax > 0
        )
        if (
            s.num_clipped
            and not is_clipping_expected
            and rounds_to_nearest
            and "nvfp4" not in self._packing(w)
        ):
            text = f"{s.num_clipped:,} elements are clipped, though calibration clips nothing"
            self.findings.append(error("clipped", name, text, "a scale is too small"))
        elif share > MAX_CLIPPED:
            text = f"{share:.1%} of its elements are clipped"
            self.findings.append(
                warning("clipped", name, text, "large values are lost in every engine")
            )

    def _packing(self, w: WeightPair) -> str:
        return self.catalogue[w.written.stored].packing or ""


def map_stored_names(decisions: Sequence[Decision], side: CanonicalView | None) -> dict[str, str]:
    """Map canonical modules to stored names: those in the folder, or the expected ones."""
    out = {}
    for d in decisions:
        place = side.placements.get(f"{d.module.name}.weight") if side else None
        if place is not None:
            out[d.module.name] = place.stored.removesuffix(".weight")
        elif d.module.kind != "kv_cache" and (names := d.module.names_in("hf")):
            out[d.module.name] = names[0]
    return out


def find_absent_weights(folder: FolderView, decisions: Sequence[Decision]) -> Iterator[Finding]:
    """Report weights that are in no file, for a folder that cannot be decoded."""
    for d in decisions:
        stored = [f"{n}{end}" for n in d.module.names_in("hf") for end in (".weight", BLOCKS)]
        if d.module.kind != "kv_cache" and stored and not any(n in folder.tensors for n in stored):
            yield error("missing", d.module.name, f"{stored[0]} is in no file", "engines stop")


def count_stored_bytes(folder: FolderView, stored: str | None) -> int:
    """Count the bytes of a stored module: codes and scales."""
    tensors = folder.modules.get(stored or "", {})
    parts = [t for last, t in tensors.items() if last in ("weight", *COMPANIONS)]
    blocks = (folder.tensors.get(f"{stored}{end}") for end in (BLOCKS, "_scales"))
    parts += [t for t in blocks if t is not None]
    return sum(numel(t.shape) * dtype(t.dtype).itemsize for t in parts)
