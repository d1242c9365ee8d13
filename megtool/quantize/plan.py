"""The plan of a quantize run: its stages, the size of the result, and an estimate of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.console import format_bytes
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.quant.explain import ExplainReport, explain
from megtool.quant.recipes.formats import packing_of
from megtool.quant.recipes.match import Decision
from megtool.quant.resolve import ResolvedRecipe
from megtool.quantize.calibration_data import CalibrationSamples
from megtool.report.sections import Report, Row, Section

if TYPE_CHECKING:
    from megtool.quant.calibration.calibration_file import CalibrationFile

_TRIED = (256, 1024)  # shape that is encoded to measure the speed


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePlan(Report):
    """The plan of `quantize`; seconds are rough, measured on small parts.

    `calibration` says which formats need data; it is empty if none does. `data` is the calibration
    data, or with `is_given` the calibration files.
    """

    explained: ExplainReport
    destination: str
    calibration: str
    data: str
    num_samples: int
    num_tokens: int
    calibrate_seconds: float
    write_seconds: float
    is_given: bool = False

    def to_json(self) -> dict[str, Any]:
        fields = {n: getattr(self, n) for n in self.__dataclass_fields__ if n != "explained"}
        fields |= {"dry_run": True, "recipe": self.explained.to_json()}
        return self.add_remarks(fields)

    def title(self) -> str:
        return self.explained.title()

    def rows(self) -> Iterator[Row]:
        yield from self.explained.rows()
        yield from self.explained.note_rows()

    def sections(self) -> Iterator[Section]:
        yield from self.explained.sections()
        yield Section(
            title=f"{self.destination} would be written (nothing is yet)", rows=[*self._stages()]
        )

    def _stages(self) -> Iterator[Row]:
        before, after = self.explained.source_bytes, self.explained.num_bytes
        yield "size", f"{format_bytes(before)} -> {format_bytes(after)}"
        if self.calibration:
            shown = f"{self.num_samples} samples, {self.num_tokens:,} tokens"
            read = "read from " if self.is_given else ""
            yield "calibration", f"{shown}: {read}{self.data}"
            yield "needed for", self.calibration
        else:
            yield "calibration", "none needed"
        shown, total = (
            f"writing and verification {_format_duration(self.write_seconds)}",
            self.write_seconds,
        )
        if self.calibrate_seconds:
            shown = f"calibration {_format_duration(self.calibrate_seconds)}, {shown}"
            total += self.calibrate_seconds
        yield "time", f"about {_format_duration(total)} ({shown})"


def plan_quantize(
    resolved: ResolvedRecipe,
    destination: str,
    *,
    wants_data: Sequence[Decision],
    samples: CalibrationSamples | None,
    threads: int,
    calibration_file: CalibrationFile | None = None,
    calibration: str = "",
) -> QuantizePlan:
    """Plan a run in which the decisions `wants_data` need calibration data; `calibration_file` is
    the merged content of the files that `calibration` names."""
    tokens = samples.num_tokens if samples else 0
    linear = sum(d.module.numel for d in resolved.matched.decisions if d.module.kind == "linear")
    measured = calibration_file if wants_data else None
    return QuantizePlan(
        explained=explain(resolved),
        destination=destination,
        calibration=_needed(wants_data),
        data=samples.name if samples else calibration if measured else "",
        num_samples=len(samples) if samples else measured.num_samples if measured else 0,
        num_tokens=tokens or (measured.num_tokens if measured else 0),
        calibrate_seconds=2 * linear * tokens / _flops() if tokens else 0.0,
        write_seconds=_pack_seconds(resolved.matched.decisions) / threads,
        notes=(samples.note,) if samples and samples.note else (),
        is_given=measured is not None,
    )


def _needed(decisions: Sequence[Decision]) -> str:
    labels = dict.fromkeys(d.label for d in decisions)
    count = len(decisions)
    return f"{', '.join(labels)} of {count} modules" if count else ""


def _flops() -> float:
    """Multiplications and additions a second of torch's products here, in float32."""
    import torch

    a, b = torch.ones(512, 1024), torch.ones(1024, 1024)
    a @ b
    began, times = time.perf_counter(), 4
    for _ in range(times):
        a @ b
    return 2 * times * a.numel() * b.shape[1] / max(time.perf_counter() - began, 1e-9)


def _pack_seconds(decisions: Sequence[Decision]) -> float:
    """One thread's time to encode all weights, and to read them back for the proof."""
    seconds: dict[str, float] = {}
    total = 0.0
    for d in decisions:
        if d.format is None or not d.format.algo:
            continue
        packing = packing_of(d.format)
        if packing not in seconds:
            seconds[packing] = _encode_seconds(packing)
        total += 2 * d.module.numel * seconds[packing]
    return total


def _encode_seconds(packing: str) -> float:
    """Seconds an element."""
    values = np.linspace(-1, 1, _TRIED[0] * _TRIED[1], dtype=np.float32).reshape(_TRIED)
    parts = layout(packing, _TRIED)
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        encode(packing, parts, values, "float32", (0, 0), _TRIED)
        best = min(best, time.perf_counter() - began)
    return best / values.size


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
