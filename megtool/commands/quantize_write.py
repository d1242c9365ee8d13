"""Quantize write: a Hugging Face folder in which decided weights are codes and scales.

What is kept is copied as by a reshard; what is quantised is computed on the way, tile by tile, by
feeds of the same plan: one stage, one journal, one rename.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megtool import __version__
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.copy import CopyReport, execute
from megtool.checkpoint.digest import SIDECAR, DigestMode, write_sidecar
from megtool.checkpoint.feed import Feed
from megtool.checkpoint.formats.quantised import QUANT_FILE
from megtool.checkpoint.formats.safetensors import DEFAULT_SHARD_BYTES, INDEX, lay_out
from megtool.checkpoint.plan import Plan, Source
from megtool.checkpoint.planner import build
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.sweep import usual_threads
from megtool.commands.job import expected_digests, peak_rss_bytes, places_of, sidecar_of
from megtool.commands.opened import Opened
from megtool.commands.target import Request, Target, make_target
from megtool.errors import MappingError, UsageError
from megtool.log import Progress, silent
from megtool.quant.given import Folded, Given
from megtool.quant.hf_config import Layer, hf_quant_config, quantization, with_quantization
from megtool.quant.match import Decision
from megtool.quant.modules import fused_with
from megtool.quant.pack import Weight, feeds_of, grain_of, taken_as
from megtool.quant.stored import Held, caches_of, held_of, input_scale, needs_amax
from megtool.quant.treatment import Floats, Settlement, Treatment
from megtool.quant.whole_amax import find_amaxes
from megtool.tensors.relation import Placement
from megtool.tensors.sharded import GlobalTensor

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What was written, or would be.

    `num_bytes` are those of all tensors, `source_bytes` of the source's. `files` are relative
    paths. `resumed_units` had been finished by an earlier run, and `repaired_units` of them were
    damaged since.
    """

    num_bytes: int
    source_bytes: int
    tensors: int
    files: tuple[str, ...]
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    peak_buffer_bytes: int = 0
    kernel_bytes: int = 0
    resumed_units: int = 0
    repaired_units: int = 0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A canonical weight in a stored module: its decision, its treatment, its first row there."""

    decision: Decision
    treatment: Treatment
    weight: Weight
    at: int
    amax: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Stored:
    """A stored module that is to be quantised: several canonical ones where a family has them in
    one tensor."""

    name: str
    tensor: GlobalTensor
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def smoothed(self) -> Floats | None:
        """Factors of columns that are to be stored."""
        first = self.pieces[0].treatment
        return first.columns if first.stores_columns else None


def check_storable(opened: Opened, decisions: Sequence[Decision]) -> None:
    """Refuse what a Hugging Face folder of this family cannot hold; from headers alone.

    Raises:
        MappingError: a weight is stored transposed, interleaved with others or stacked with them,
            or weights in one tensor are to have different formats.
        UsageError: groups do not divide a weight, or rows cannot be paired.
    """
    plain = {
        d.module.name: Treatment(module=d.module.name, format=d.format)
        for d in decisions
        if d.format is not None and d.format.algo
    }
    target = make_target(opened, Request(to="hf"))
    for stored in _modules(opened, decisions, plain, target):
        _held(stored, checked=False)


def write(
    opened: Opened,
    decisions: Sequence[Decision],
    settlement: Settlement,
    destination: Path,
    *,
    threads: int | None = None,
    memory_bytes: int = 256 << 20,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    digest: DigestMode = DigestMode.BUFFERED,
    files: Files | None = None,
    progress: Progress = silent,
) -> WriteReport:
    """Write the model of `opened` as `decisions` and `settlement` say, in ModelOpt's form.

    Atomic, resumed after a kill with the same bytes, whatever format and layout the source has; its
    files are not touched. Where a format needs the largest magnitude of whole weights, these are
    read once before (by `dry_run` they are not).

    Raises:
        MappingError, UsageError: see `check_storable`; before any work.
        CalibrationError: a treatment is missing, or does not say what its format needs.
        FormatError: a weight holds NaN or infinity.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    began = time.monotonic()
    count = usual_threads(threads)
    system = files or Files()
    target = make_target(
        opened, Request(to="hf", max_shard_bytes=max_shard_bytes, destination=destination)
    )
    modules = _modules(opened, decisions, _treatments(decisions, settlement), target)
    _check_inputs(modules)
    whole = opened.catalogue.num_bytes
    stage_of = _stages(opened, destination, system, overwrite=overwrite)
    stage_of("").check()
    if not dry_run:
        _find_amaxes(opened, modules, system, threads=count, progress=progress)
    plan = _plan(opened, decisions, settlement, modules, target, digest, max_shard_bytes)
    report = WriteReport(
        num_bytes=plan.target.catalogue.num_bytes,
        source_bytes=whole,
        tensors=len(plan.target.catalogue.tensors),
        files=_files(plan),
        notes=tuple(settlement.notes),
    )
    if dry_run:
        return report
    stage = stage_of(plan.fingerprint)
    try:
        copied = _write(opened, target, plan, stage, count, memory_bytes, digest, fsync, progress)
    except BaseException:
        if stage.describe_resume() in stage.messages:  # something was kept
            _LOG.warning("%s", stage.describe_resume())
        raise
    return replace(
        report,
        seconds=time.monotonic() - began,
        peak_rss_bytes=peak_rss_bytes(),
        peak_buffer_bytes=copied.peak_buffer_bytes,
        kernel_bytes=copied.kernel_bytes,
        resumed_units=copied.verified,
        repaired_units=copied.repaired,
        warnings=tuple(stage.messages),
    )


class _stages:  # noqa: N801 - a function with arguments kept
    """Makes the stage of a fingerprint."""

    def __init__(self, opened: Opened, path: Path, files: Files, *, overwrite: bool) -> None:
        self._opened, self._path, self._files = opened, path, files
        self._overwrite = overwrite

    def __call__(self, fingerprint: str) -> Stage:
        return Stage(
            self._path,
            files=self._files,
            fingerprint=fingerprint,
            overwrite=self._overwrite,
            sources=places_of(self._opened),
        )
