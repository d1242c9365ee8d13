"""Verification of a quantized checkpoint against another: weights by SQNR, norms by factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megtool.commands.reports.verify import Difference
from megtool.formats.safetensors.quantization_config import quantization_config
from megtool.lint.compressed_rules import find_group
from megtool.quantize.verification.sqnr_thresholds import (
    ChangedNorm,
    WeightComparison,
    compare_with_threshold,
    find_changed_norms,
    list_norm_sites,
)
from megtool.quantize.verification.unquantized_tensors import compare_unquantized
from megtool.quantize.verification.weight_error import (
    Floats,
    WeightPair,
    measure_errors,
    split_pre_quant_scales,
)
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.transport.reading.reader import CheckpointReader


def packings_differ(a: CheckpointSource, b: CheckpointSource) -> bool:
    """Whether any tensor is quantized on one side only, or in different formats."""
    x, y = a.view.placements, b.view.placements
    return any(_packing(a, n) != _packing(b, n) for n in x if n in y)


def _packing(source: CheckpointSource, name: str) -> str:
    placement = source.view.placements.get(name)
    stored = source.catalogue[placement.stored] if placement is not None else None
    return (stored.packing or "") if stored is not None else ""


def _number_packing(source: CheckpointSource, name: str) -> str:
    """The packing by number of bits: compressed-tensors stores 4-bit codes in a byte each if inputs
    are quantized too (W4A8), which does not reduce their error."""
    packing = _packing(source, name)
    quant_config = quantization_config(source.catalogue.metadata) or {}
    if not packing.startswith("int8") or not isinstance(quant_config.get("config_groups"), dict):
        return packing
    stored = source.view.placements[name].stored
    weights = (find_group(quant_config, stored.rpartition(".")[0]) or {}).get("weights")
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    has_four_bits = isinstance(bits, int) and bits <= 4
    return packing.replace(packing.partition(":")[0], "int4", 1) if has_four_bits else packing


@dataclass(slots=True)
class QuantizedPair:
    """Two checkpoints of which one is quantized, or both in different formats.

    `a` is the reference: the unquantized one, or the first. `weights` are compared by SQNR; `casts`
    are unquantized tensors of different dtypes; `norms` are those that differ, with their factors.
    `weights` includes the unquantized modules that read such norms.
    """

    a: CheckpointSource
    b: CheckpointSource
    sqnr: float | None
    weights: list[str] = field(default_factory=list)
    casts: list[str] = field(default_factory=list)
    norms: dict[str, ChangedNorm] = field(default_factory=dict)
    rows: list[WeightComparison] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        a: CheckpointSource,
        b: CheckpointSource,
        readers: Sequence[CheckpointReader],
        sqnr: float | None,
    ) -> QuantizedPair:
        """Sort the tensors into lists; those in no list are compared bit by bit."""
        is_swapped = _is_quantized(a) and not _is_quantized(b)
        reference, quantized = (b, a) if is_swapped else (a, b)
        first, second = reversed(readers) if is_swapped else readers
        pair = cls(reference, quantized, sqnr)
        reference_view, quantized_view = reference.view, quantized.view
        names = [
            n
            for n, t in reference_view.canonical.items()
            if n in quantized_view.canonical and t.shape == quantized_view.canonical[n].shape
        ]
        packed = {n for n in names if _packing(reference, n) != _packing(quantized, n)}
        sites = [
            p
            for p in list_norm_sites(reference_view)
            if any(f"{m}.weight" in packed for m in p.modules)
        ]
        pair.norms = find_changed_norms(sites, reference_view, quantized_view, first, second)
        after_norms = {f"{m}.weight" for n in pair.norms.values() for m in n.site.modules}
        for n in names:
            if len(reference_view.canonical[n].shape) < 2:
                if (
                    _dtype(reference, n) != _dtype(quantized, n)
                    and n.rpartition(".")[0] not in pair.norms
                ):
                    pair.casts.append(n)
            elif n in packed or n in after_norms:
                pair.weights.append(n)
            elif _dtype(reference, n) != _dtype(quantized, n):
                pair.casts.append(n)
        return pair

    def names(self) -> set[str]:
        """Names that are not compared bit by bit."""
        folded = {f"{n}.{last}" for n in self.norms for last in ("weight", "bias")}
        return {*self.weights, *self.casts, *folded}

    @property
    def num_elements(self) -> int:
        """The elements that `run` reports as progress, at four bytes each."""
        return sum(numel(self.a.view.canonical[n].shape) for n in self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of the reference's tensors that are not compared bit by bit."""
        tensors = self.a.view.canonical
        return sum(tensors[n].num_bytes for n in self.names() if n in tensors)

    def run(self, *, threads: int, progress: Callable[[int], None]) -> None:
        """Measure the errors of weights, and report those that are too large and wrong casts."""
        reference_view, quantized_view = self.a.view, self.b.view
        catalogue, pre_quant_scales = split_pre_quant_scales(self.b.catalogue)
        with ExitStack() as stack:
            a = stack.enter_context(CheckpointReader(self.a.catalogue, Files()))
            b = stack.enter_context(CheckpointReader(catalogue, Files()))
            unsplit = stack.enter_context(CheckpointReader(self.b.catalogue, Files()))
            norm_of = {f"{m}.weight": n for n in self.norms.values() for m in n.site.modules}
            weights = []
            for name in self.weights:
                shape = reference_view.canonical[name].shape
                stored = quantized_view.placements[name].stored
                weights.append(
                    WeightPair(
                        name=name,
                        source=reference_view.placements[name],
                        written=quantized_view.placements[name],
                        shape=(numel(shape[:-1]), shape[-1]),
                        input_factors=_multiply_factors(
                            norm_of.get(name), pre_quant_scales.get(stored)
                        ),
                    )
                )
            sums = measure_errors(weights, a, b, threads=threads, progress=progress)
            for finding in compare_unquantized(
                reference_view, quantized_view, a, unsplit, self.casts, threads=threads
            ):
                self._add_difference(finding.module, f"{finding.message.partition(',')[0]}")
        for w in weights:
            row = compare_with_threshold(
                w.name,
                w.written.stored,
                (_number_packing(self.a, w.name), _number_packing(self.b, w.name)),
                sums[w.name],
                sqnr=self.sqnr,
                scaled=w.input_factors is not None,
            )
            self.rows.append(row)
            if not row.is_sound:
                self._report_weight(row)
        self.rows.sort(key=lambda r: r.sqnr_db)
        self._check_norms()

    def _add_difference(self, name: str, text: str) -> None:
        self.differences.append(Difference(tensor=name, stored=name, kind="values", text=text))

    def _report_weight(self, row: WeightComparison) -> None:
        if row.num_nan:
            text = f"{row.num_nan:,} elements are NaN or Inf"
        elif row.sqnr_db >= row.least_db and row.most_row_error is not None:
            text = (
                f"row {row.lost_row} has a relative error of {row.lost_row_error:.0%}, but "
                f"{row.packing} has at most {row.most_row_error:.0%} (the entire weight has "
                f"{row.sqnr_db:.1f} dB)"
            )
        else:
            text = (
                f"the SQNR is {row.sqnr_db:.1f} dB (cosine {row.cosine:.4f}), but "
                f"{row.packing} has at least {row.least_db:g} dB; row {row.worst_row} has a "
                f"relative error of {row.worst_row_error:.0%}"
            )
        self.differences.append(
            Difference(
                tensor=row.tensor,
                stored=row.stored,
                kind="closeness",
                text=text,
                num_elements=row.num_elements,
                largest_abs=row.max_error,
            )
        )

    def _check_norms(self) -> None:
        """Report norms whose change is not undone by the weights that read them."""
        close = {r.tensor: r.is_sound for r in self.rows}
        folded = 0
        for name, norm in self.norms.items():
            read = [f"{m}.weight" for m in norm.site.modules]
            wrong = [m for m in read if not close.get(m, True)]
            if not wrong:
                folded += 1
                continue
            text = (
                "differs, and smoothing scales do not explain it: the product of norm and weight "
                f"differs in {', '.join(wrong)}"
            )
            self._add_difference(f"{name}.weight", text)
        if folded:
            self.notes.append(
                f"{folded} norms differ by smoothing scales that are folded into the weights after "
                "them: their products were compared"
            )
        smooth = [r for r in self.rows if not r.is_sound and not r.is_scaled and r.cosine < 0.9]
        if smooth:
            self.notes.append(
                "smoothing scales folded from one projection into another (v into o, up into "
                "down) are not stored: they cannot be distinguished from damage"
            )


def _multiply_factors(norm: ChangedNorm | None, stored: Floats | None) -> Floats | None:
    """The factors of each input, by the preceding norm and by `pre_quant_scale`."""
    if norm is None or stored is None:
        return stored if norm is None else norm.factors
    return norm.factors * stored


def _dtype(opened: CheckpointSource, name: str) -> str:
    return opened.view.canonical[name].dtype.name


def _is_quantized(opened: CheckpointSource) -> bool:
    return bool(opened.catalogue.packed)
