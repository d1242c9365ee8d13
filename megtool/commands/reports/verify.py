"""Reports of `verify`: what differs, as data and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from megtool.console import format_bytes
from megtool.quantize.verification.sqnr_thresholds import WeightComparison
from megtool.report.sections import Report, Row, Section, Table, fold_names

_SHOWN, _SHOWN_NAMES = 20, 6
_GROUPS = 6
_WORST = 5
_PARTS = ("configuration", "training state", "files", "logits", "tensors")
_NOUNS = {
    "tensors": "tensors",
    "configuration": "settings",
    "training state": "entries",
    "files": "files",
    "logits": "tokens",
}

DifferenceKind = Literal[
    "missing",
    "shape",
    "dtype",
    "values",
    "closeness",
    "metadata",
    "digest",
    "replica",
    "file",
    "object",
    "state",
    "logits",
]
PartName = Literal["tensors", "configuration", "training state", "files", "logits"]
PartVerdict = Literal["equal", "close", "differs", "not compared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor (or file) that is not what it should be; `text` explains it.

    `stored` is its name in the files. Where numbers differ: how many of them, by how much at most
    (absolute, and relative to the element of B where that is not 0), and at which index of the
    tensor. `samples` are the first elements that differ: index, value in A, value in B.
    `part` is the part of the checkpoint, and where a setting, an entry of the training state or a
    file differs, `tensor` is its name.
    """

    tensor: str
    stored: str
    kind: DifferenceKind
    text: str
    num_elements: int | None = None
    num_differing: int | None = None
    largest_abs: float | None = None
    largest_abs_at: tuple[int, ...] | None = None
    largest_rel: float | None = None
    largest_rel_at: tuple[int, ...] | None = None
    samples: tuple[tuple[tuple[int, ...], float, float], ...] = ()
    part: PartName = "tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCheck:
    """The verdict on one part of two checkpoints.

    `compared` are the names of what was compared, `not_compared` those of what was not, each with
    the reason. The part is `not compared` if nothing of it was.
    """

    part: PartName
    verdict: PartVerdict
    compared: tuple[str, ...] = ()
    not_compared: Mapping[str, str] = field(default_factory=dict)
    num_differences: int = 0

    @classmethod
    def of(
        cls,
        part: PartName,
        compared: Iterable[str],
        not_compared: Mapping[str, str],
        differences: Collection[Difference],
    ) -> PartCheck:
        """Make the verdict from what was compared and what differs."""
        names = tuple(compared)
        verdict: PartVerdict = "equal" if names else "not compared"
        return cls(
            part=part,
            verdict="differs" if differences else verdict,
            compared=names,
            not_compared=dict(not_compared),
            num_differences=len(differences),
        )

    def with_verdict(self, verdict: PartVerdict) -> PartCheck:
        """Return the same part with another verdict."""
        return replace(self, verdict=verdict)

    def with_differences(self, count: int) -> PartCheck:
        """Return the same part with a number of differences, which decides the verdict."""
        return replace(self, num_differences=count, verdict="differs") if count else self

    def describe(self) -> str:
        """Return the verdict, what was compared, and by name what was not."""
        count = f"{len(self.compared)} {_NOUNS[self.part]}"
        if self.verdict == "differs":
            text = f"differs: {self.num_differences} of {count}" if self.compared else "differs"
        elif self.part in ("training state", "files") and self.compared:
            text = f"{self.verdict}: {_some_names(self.compared)}"
        else:
            text = f"{self.verdict}: {count}" if self.compared else self.verdict
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.not_compared.items():
            by_reason.setdefault(reason, []).append(name)
        left = [
            reason if names == [self.part] else f"{_some_names(names)} ({reason})"
            for reason, names in by_reason.items()
        ]
        if not left:
            return text
        return (
            f"{text}; not compared: {'; '.join(left)}"
            if self.compared
            else f"{text}: " + ("; ".join(left))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestCheck:
    """How the digests stored with one checkpoint compare with its bytes: numbers of tensors and of
    files. `unverified` tensors have none. Of two checkpoints, files without tensors are counted.
    """

    path: str
    matching: int
    differing: int
    unverified: tuple[str, ...]
    matching_files: int = 0
    differing_files: int = 0

    def format_counts(self) -> str:
        """The counts as text."""
        num_files = self.matching_files + self.differing_files
        if not self.matching and not self.differing and not num_files:
            return (
                f"none: nothing vouches for the bytes, all {len(self.unverified)} tensors are "
                "unverified"
            )
        text = (
            f"tensors: {self.matching} match, {self.differing} differ, "
            f"{len(self.unverified)} unverified"
        )
        if num_files:
            text += f"; files: {self.matching_files} match, {self.differing_files} differ"
        return text


def _some_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingPair:
    """One setting of the model as each of two checkpoints has it."""

    name: str
    a: Any
    b: Any
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsCheck:
    """The logits of two models over the same tokens.

    `largest` is the largest magnitude of a logit in B, `largest_abs` the largest difference, and
    `tolerance` the difference that is allowed, None where one of the models is quantized.
    `num_equal_choices` counts positions where both have the same best token.
    """

    num_tokens: int
    largest: float
    largest_abs: float
    tolerance: float | None
    num_equal_choices: int

    def describe(self) -> str:
        """Return the figures as text."""
        allowed = "" if self.tolerance is None else f" ({self.tolerance:.3g} allowed)"
        return (
            f"{self.num_tokens} tokens: the largest difference is {self.largest_abs:.3g}{allowed}, "
            f"the largest logit {self.largest:.3g}; {self.num_equal_choices} of {self.num_tokens} "
            "best tokens agree"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """What was checked and what differs.

    `matched_by` says whether tensors met under the `canonical` names of a family, or under the
    names they are `stored` by. `num_tensors` were compared with those of B, or, of a single
    checkpoint, held against digests; `num_bytes` were read for it on one side. `within` is the
    largest difference that the tolerance let pass. `notes` say what is odd, and no difference.
    `weights` are those compared by signal over noise, the worst first, where one side is quantized.
    `compared` are the names of the tensors that were compared element by element. `parts` are the
    verdicts on the parts of two checkpoints, and `settings` those of both models side by side.
    `num_finite` tensors of a single checkpoint have no digest: they were read for NaN and Inf.
    """

    a: str
    b: str | None
    a_format: str
    b_format: str | None
    family: str | None
    matched_by: Literal["canonical", "stored"]
    atol: float
    rtol: float
    num_tensors: int
    num_bytes: int
    num_replicas: int
    seconds: float
    within: float
    digests: tuple[DigestCheck, ...]
    differences: tuple[Difference, ...]
    weights: tuple[WeightComparison, ...] = ()
    compared: tuple[str, ...] = ()
    parts: tuple[PartCheck, ...] = ()
    settings: tuple[SettingPair, ...] = ()
    num_finite: int = 0
    logits: LogitsCheck | None = None

    @property
    def exit_status(self) -> int:
        """0, or 7 if anything differs."""
        return 7 if self.differences else 0

    @property
    def verdict(self) -> Literal["equal", "close", "different", "ok", "unverified"]:
        """One word. One checkpoint is `ok` only if every tensor was held against a digest; two are
        `close` if one is quantized, and every weight has no more noise than its format may."""
        if self.differences:
            return "different"
        if self.parts and all(p.verdict == "not compared" for p in self.parts):
            return "unverified"
        if self.b is not None:
            return "close" if any(w.sqnr_db != math.inf for w in self.weights) else "equal"
        return "unverified" if any(d.unverified for d in self.digests) else "ok"

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return self.add_remarks({"verdict": self.verdict, **asdict(self)})

    def title(self) -> str:
        """What was checked, and the verdict."""
        other = f" and {self.b} ({self.b_format})" if self.b is not None else ""
        return f"{self.a} ({self.a_format}){other}: {self.verdict}"

    def sections(self) -> Iterator[Section]:
        """Weights by format, those with the least signal over noise, and what differs."""
        if self.weights:
            yield Section(table=self._format_table())
            yield Section(table=self._worst_table())
        yield Section(rows=[*self._difference_rows()])

    def _difference_rows(self) -> Iterator[Row]:
        by_part = sorted(self.differences, key=lambda d: _PARTS.index(d.part))
        for d in by_part[:_SHOWN]:
            where = f"{d.tensor} ({d.stored})" if d.stored != d.tensor else d.tensor
            is_named = d.text.startswith(f"{where} is ")  # a setting
            yield d.kind, d.text if is_named else f"{where}: {d.text}"
        if len(self.differences) > _SHOWN:
            kinds = Counter(d.kind for d in self.differences)
            counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
            yield "in all", f"{counts} (--json lists them)"

    def _format_table(self) -> Table:
        kinds: dict[str, list[WeightComparison]] = {}
        for w in self.weights:
            kinds.setdefault(w.packing, []).append(w)
        rows = [
            (
                packing,
                str(len(some)),
                f"{some[0].sqnr_db:.1f} dB",
                f"{some[len(some) // 2].sqnr_db:.1f} dB",
                f"{some[0].least_db:g} dB",
                f"{min(w.cosine for w in some):.5f}",
            )
            for packing, some in kinds.items()
        ]
        return Table(header=("format", "weights", "worst", "median", "least", "cosine"), rows=rows)

    def _worst_table(self) -> Table:
        rows = [
            (w.tensor, f"{w.sqnr_db:.1f} dB", f"{w.cosine:.5f}", f"{w.max_error:.3g}")
            + (("with pre_quant_scale",) if w.is_scaled else ())
            for w in self.weights[:_WORST]
        ]
        return Table(header=("worst weights", "SQNR", "cosine", "largest error"), rows=rows)

    def rows(self) -> Iterator[Row]:
        """What was compared, how, and with what result."""
        rate = f" ({format_bytes(self.num_bytes / self.seconds)}/s)" if self.seconds else ""
        if not self.parts or any(p.part == "tensors" for p in self.parts):
            yield (
                "read" if self.b is None else "compared",
                f"{self.num_tensors} tensors, {format_bytes(self.num_bytes)} "
                f"in {self.seconds:.2f} s{rate}",
            )
        for part in self.parts:
            text = part.describe()
            if part.part == "logits" and self.logits is not None:
                text = f"{part.verdict}: {self.logits.describe()}"
            yield part.part, text
        if self.num_finite:
            wrong = sum(d.kind == "values" for d in self.differences)
            yield (
                "data",
                f"{self.num_finite} tensors without a digest: "
                + (f"{wrong} have NaN or Inf" if wrong else "no NaN, no Inf"),
            )
        if self.matched_by == "canonical":
            yield "names", f"canonical{f', of family {self.family}' if self.family else ''}"
        else:
            yield "names", "as stored"
        if self.atol or self.rtol:
            yield (
                "tolerance",
                f"{self.atol:g} + {self.rtol:g} * |B|; the largest difference within it is "
                f"{self.within:.3g}",
            )
        for check in self.digests:
            of = f"{check.path}: " if len(self.digests) > 1 else ""
            yield "digests", f"{of}{check.format_counts()}"
        if len(self.digests) == 1 and (self.digests[0].matching or self.digests[0].differing):
            for name, n in fold_names(self.digests[0].unverified)[:_GROUPS]:
                yield "unverified", f"{name}{f' ({n} tensors)' if n > 1 else ''}"
        if self.num_replicas:
            wrong = sum(d.kind == "replica" for d in self.differences)
            yield "replicas", f"{self.num_replicas - wrong} equal, {wrong} differ"
