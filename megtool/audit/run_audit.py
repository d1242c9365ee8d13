"""The audit of a run: saves come in by step, findings go out, and little is kept of each."""

from __future__ import annotations

import math
import re
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.audit.rules import AuditFinding, fold_findings
from megtool.audit.run_saves import MEGATRON_STEP, RunFolder
from megtool.audit.save_checks import check_save
from megtool.audit.save_facts import FIRST_MOMENT, SECOND_MOMENT, SaveFacts
from megtool.audit.step_checks import RunHistory, check_steps, stands_still, update_norms

_LAYER = re.compile(r"(?:^|[./])(?:layers?|h|blocks?|blk)[./](\d+)[./]")
_EXPERT = re.compile(r"(experts\.(?:experts\.|local_experts\.)?)\d+\.")

MIN_WINDOW, MAX_WINDOW, WINDOW_BYTES = 3, 16, 32 << 20
"""Earlier saves whose sketches are kept: at least so many, and at most so many while they fit."""

_EXACT, _MIN_SHARE = 0.02, 0.02
_ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """The weights of one role in one layer at a step: norms over all of them.

    `update` is the estimated norm of their change since the save before; `moment` and `variance`
    are root mean squares of Adam's moments. None where it is not known.
    """

    step: int
    role: str
    layer: int | None
    norm: float
    update: float | None = None
    moment: float | None = None
    variance: float | None = None

    def to_json(self) -> list[object]:
        """Its numbers in order."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


@dataclass(slots=True)
class _KeptSketches:
    """The sketches of a save's weights, one after the other, and the norm of its rounding."""

    step: int
    names: int
    vector: NDArray[np.float32]
    rounding: float


@dataclass(slots=True)
class RunAudit:
    """Takes in the saves of a run in order of their steps.

    Memory does not grow with the number of saves, but for some numbers of each: the last save is
    kept in sums and digests, a few earlier ones in sketches.
    """

    findings: list[AuditFinding] = field(default_factory=list)
    points: list[StepPoint] = field(default_factory=list)
    saves: list[SaveFacts] = field(default_factory=list)
    _before: SaveFacts | None = None
    _unknown: list[SaveFacts] = field(default_factory=list)
    _history: RunHistory = field(default_factory=RunHistory)
    _digests: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _window: deque[_KeptSketches] = field(default_factory=lambda: deque(maxlen=MAX_WINDOW))

    def add(self, save: SaveFacts) -> list[AuditFinding]:
        """Check a save, alone and with those before it; returns what is new."""
        if save.unknown_kind is not None:
            self._unknown.append(save)
        findings = list(check_save(save))
        if save.is_open:
            before = self._before
            findings += self._check_identical(save, before)
            if before is not None:
                findings += check_steps(before, save, self._history)
            findings += self._check_average(save)
            self._history.add(save)
            self.points += _points(before, save)
            self._before = save
        self.saves.append(_without_tensors(save))
        findings = fold_findings(findings)
        self.findings += findings
        return findings

    def finish(self, run: RunFolder) -> list[AuditFinding]:
        """Check the tracker, after all saves; returns what is new."""
        findings = [*self._judge_unknown_kinds()]
        findings += _check_tracker(run, [s.step for s in self.saves if s.is_open])
        self.findings += findings
        return findings

    def _judge_unknown_kinds(self) -> Iterator[AuditFinding]:
        """Take a save of no known kind for a damaged one only where the run has others.

        A run of which no save is recognized was written by a program that megtool does not read,
        and nothing is known against it.
        """
        is_known_run = any(s.is_open for s in self.saves)
        for save in self._unknown:
            rule, where, text = save.unknown_kind or ("", "", "")
            if is_known_run or MEGATRON_STEP.fullmatch(save.path.rpartition("/")[2]):
                yield AuditFinding(id=rule, step=save.step, tensor=where, message=text)
            else:
                facts = next(s for s in self.saves if s.step == save.step)
                facts.notes.append(f"not read: {text}")
        self._unknown.clear()

    def _check_identical(self, save: SaveFacts, before: SaveFacts | None) -> Iterator[AuditFinding]:
        weights = save.weights()
        digests = sorted((n, t.digest) for n, t in weights.items())
        if not digests or any(d is None for _, d in digests):
            return
        digest = zlib.crc32(repr(digests).encode()) | zlib.adler32(repr(digests).encode()) << 32
        earlier = self._digests[digest]
        if earlier and not (
            before is not None and earlier[-1] == before.step and stands_still(before, save)
        ):
            listed = ", ".join(str(s) for s in earlier[-4:])
            states = "weights and optimizer state" if _same_states(before, save) else "weights"
            yield AuditFinding(
                id="identical-steps",
                step=save.step,
                tensor="",
                message=f"all {len(digests):,} {states} are those of step {listed}, bit for bit",
                steps=(*earlier, save.step),
            )
        earlier.append(save.step)

    def _check_average(self, save: SaveFacts) -> Iterator[AuditFinding]:
        """Whether the weights are a mean of those of the saves before."""
        sketches = _sketches(save)
        if sketches is None:
            return
        usable = [w for w in self._window if w.names == sketches.names]
        if len(usable) >= 2 and (shares := _mean_of(sketches, usable)) is not None:
            parts = [
                f"{share:.0%} of step {w.step}"
                for share, w in zip(shares, usable, strict=True)
                if share > _MIN_SHARE
            ]
            yield AuditFinding(
                id="averaged-save",
                step=save.step,
                tensor="",
                message=f"the weights are {' + '.join(parts)}",
                steps=(*(w.step for w in usable), save.step),
            )
        self._window.append(sketches)
        while (
            len(self._window) > MIN_WINDOW
            and sum(w.vector.nbytes for w in self._window) > WINDOW_BYTES
        ):
            self._window.popleft()


def _same_states(before: SaveFacts | None, save: SaveFacts) -> bool:
    """Whether the optimizer state is that of the save before, too."""
    if before is None or not save.states():
        return False
    pairs = [
        (before.tensors.get(k), t)
        for k, t in save.tensors.items()
        if t.state and t.digest is not None
    ]
    return bool(pairs) and all(a is not None and a.digest == t.digest for a, t in pairs)


def _sketches(save: SaveFacts) -> _KeptSketches | None:
    weights = sorted(save.weights().items())
    parts = [t.sums.sketch.ravel() for _, t in weights if t.sums.sketch.size]
    if not parts:
        return None
    rounding = sum((_ROUNDING.get(t.dtype, 2.0**-25) * t.sums.norm) ** 2 for _, t in weights)
    names = zlib.crc32(repr([(n, t.num_elements) for n, t in weights]).encode())
    vector = np.concatenate(parts).astype(np.float32)
    return _KeptSketches(save.step, names, vector, float(rounding) ** 0.5)


def _mean_of(save: _KeptSketches, earlier: Sequence[_KeptSketches]) -> list[float] | None:
    """The shares of earlier saves of which a save is the mean; None if it is no mean of them.

    A save that follows others moves on: it is outside of what means of them can be, or, on a random
    walk, far from it.
    """
    last = earlier[-1].vector.astype(np.float64)
    moved = save.vector - last
    distance = float(np.linalg.norm(moved))
    if distance <= 4 * save.rounding or not np.isfinite(distance):
        return None
    basis = np.stack([w.vector - last for w in earlier[:-1]], 1)
    shares, *_ = np.linalg.lstsq(basis, moved, rcond=1e-6)
    rest = float(np.linalg.norm(moved - basis @ shares)) / distance
    all_shares = [*shares.tolist(), 1.0 - float(shares.sum())]
    if rest > max(_EXACT, 2 * save.rounding / distance):
        return None
    if min(all_shares) < -_MIN_SHARE or sum(s > _MIN_SHARE for s in all_shares) < 2:
        return None
    return all_shares


def _check_tracker(run: RunFolder, steps: Sequence[int]) -> Iterator[AuditFinding]:
    if run.tracker is None:
        return
    last = max(steps, default=run.saves[-1].step)

    def finding(message: str, step: int) -> AuditFinding:
        return AuditFinding(
            id="wrong-tracker", step=step, tensor=run.tracker or "", message=message
        )

    if run.tracker_fault is not None:
        yield finding(run.tracker_fault, last)
    elif run.tracked is not None and run.tracked not in {s.step for s in run.saves}:
        yield finding(f"it names step {run.tracked}, which is not there", run.tracked)
    elif run.tracked is not None and run.tracked < last:
        yield finding(f"it names step {run.tracked}, and there is step {last}", run.tracked)


def _points(before: SaveFacts | None, save: SaveFacts) -> Iterator[StepPoint]:
    """Norms, updates and moments by role and layer."""
    updates = update_norms(before, save) if before is not None else {}
    moments, variances = save.of_state(FIRST_MOMENT), save.of_state(SECOND_MOMENT)
    groups: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for name, t in save.weights().items():
        if t.sums.count:
            groups[_role(name)].append(name)
    weights = save.weights()
    for (role, layer), names in groups.items():
        changes = [updates[n] ** 2 for n in names if n in updates]
        first = [moments[n].sums for n in names if n in moments]
        second = [variances[n].sums for n in names if n in variances]
        yield StepPoint(
            step=save.step,
            role=role,
            layer=layer,
            norm=sum(weights[n].sums.squares for n in names) ** 0.5,
            update=sum(changes) ** 0.5 if len(changes) == len(names) else None,
            moment=_root_mean_square((s.squares, s.count) for s in first) if first else None,
            variance=_root_mean_square((s.squares, s.count) for s in second) if second else None,
        )


def _role(name: str) -> tuple[str, int | None]:
    name = _EXPERT.sub(r"\1*.", name)
    match = _LAYER.search(name)
    if match is None:
        return name, None
    role = f"{name[: match.start()]}.{name[match.end() :]}".lstrip(".")
    return role.removeprefix("decoder."), int(match[1])


def _root_mean_square(sums: Iterable[tuple[float, int]]) -> float:
    pairs = list(sums)
    return math.sqrt(sum(s for s, _ in pairs) / max(sum(n for _, n in pairs), 1))


def _without_tensors(save: SaveFacts) -> SaveFacts:
    """What a report needs of a save."""
    short = SaveFacts(step=save.step, path=save.path)
    short.format, short.layout, short.training = save.format, save.layout, save.training
    short.notes, short.problems, short.is_open = save.notes, save.problems, save.is_open
    short.unknown_kind = save.unknown_kind
    short.read_bytes, short.total_bytes = save.read_bytes, save.total_bytes
    return short
