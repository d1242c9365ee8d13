"""Reports of `finetune`: the result of a run, or its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megtool.console import format_bytes, several
from megtool.report.sections import Report, Row, Section, Table, flatten
from megtool.train.run_log import format_duration

if TYPE_CHECKING:
    from megtool.train.loop import TrainOutcome

_REASONS = {
    "done": "all steps are done",
    "patience": "evaluations no longer improve",
    "signal": "SIGTERM; the same command resumes",
    "interrupt": "interrupted and saved; the same command resumes",
    "time": "--exit-duration-in-mins; the same command resumes",
}


def format_layout(sizes: Mapping[str, int]) -> str:
    """A layout by its axes above 1, such as `tp=2 dp=4`."""
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetunePlan(Report):
    """The plan of a run. Bytes are those of the rank with most parameters.

    `adapter_bytes` are a part of `weight_bytes`; `fake_quant_bytes` are those of the copies of
    weights that quantization-aware training rounds. `precisions` maps modules and their layers to
    the precision that a recipe gives them; empty without a recipe. `te_modules` says of layers what
    computes them with `--kernels te`.
    """

    source: str
    destination: str
    format: str
    family: str | None
    resumes_from: str | None
    layout: Mapping[str, int]
    dtype: str
    num_parameters: int
    rank_parameters: int
    rank_trainable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    samples: int
    eval_samples: int
    counts: Mapping[str, int]
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    num_microbatches: int
    tokens_per_step: int
    train_iters: int
    teacher_bytes: int = 0
    fake_quant_bytes: int = 0
    adapter_bytes: int = 0
    precisions: Mapping[str, str] = field(default_factory=dict)
    te_modules: Mapping[str, str] = field(default_factory=dict)

    def title(self) -> str:
        return f"{self.source} ({self.format}) -> {self.destination}"

    def rows(self) -> Iterator[Row]:
        yield "family", self.family or "not named"
        if self.resumes_from:
            yield "resumes", f"from {self.resumes_from}"
        yield "layout", f"{format_layout(self.layout)}, {self.dtype}"
        yield (
            "parameters",
            f"{self.num_parameters / 1e6:,.1f} M, on a rank "
            f"{self.rank_parameters / 1e6:,.1f} M, of which {self.rank_trainable / 1e6:,.1f} M "
            "are trained",
        )
        total = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        total += self.teacher_bytes + self.fake_quant_bytes
        teacher = f", teacher {format_bytes(self.teacher_bytes)}" if self.teacher_bytes else ""
        if self.fake_quant_bytes:
            teacher += f", copies of rounded weights {format_bytes(self.fake_quant_bytes)}"
        adapters = f" (adapters {format_bytes(self.adapter_bytes)})" if self.adapter_bytes else ""
        yield (
            "a rank",
            f"{format_bytes(total)}: weights {format_bytes(self.weight_bytes)}"
            f"{adapters}, gradients {format_bytes(self.gradient_bytes)}, "
            f"optimizer {format_bytes(self.optimizer_bytes)}{teacher}, and activations",
        )
        yield "data", _counts(self)
        yield (
            "step",
            f"{self.tokens_per_step:,} tokens: {self.global_batch_size:,} rows, "
            f"{self.num_microbatches:,} micro batches of {self.micro_batch_size:,} on a rank",
        )
        yield "steps", f"{self.train_iters:,}"

    def sections(self) -> Iterator[Section]:
        for title, lines in (
            ("precision", self.precisions),
            ("Transformer Engine", self.te_modules),
        ):
            if lines:
                yield Section(title=title, table=Table(rows=[*lines.items()], left=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneReport(Report):
    """The result of a run. The `outcome` is that of this call, from its first step on.

    Losses are in nats per token; `evaluations` are (step, loss). `hf` is the folder of the exported
    model, `adapter` that of LoRA adapters, `draft_head` that of an EAGLE-3 head. `against` are
    other runs whose curves the page shows, too.
    """

    source: str
    destination: str
    format: str
    family: str | None
    device: str
    dtype: str
    layout: Mapping[str, int]
    num_parameters: int
    train_iters: int
    start_iteration: int
    outcome: TrainOutcome
    first_loss: float | None
    last_loss: float | None
    evaluations: tuple[tuple[int, float], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    seq_length: int = 0
    peak_bytes: int = 0
    plot: str | None = None
    hf: str | None = None
    adapter: str | None = None
    draft_head: str | None = None
    against: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        return 130 if self.outcome.stop_reason == "interrupt" else 0

    def to_json(self) -> dict[str, Any]:
        return self.add_remarks(flatten(asdict(self), "outcome"))

    def title(self) -> str:
        return f"{self.source} ({self.format}) -> {self.destination}"

    def rows(self) -> Iterator[Row]:
        run = self.outcome
        yield "family", self.family or "not named"
        yield "layout", f"{format_layout(self.layout)}, {self.dtype} on {self.device}"
        start = f", resumed at {self.start_iteration:,}" if self.start_iteration else ""
        yield (
            "steps",
            f"{run.iteration:,} of {self.train_iters:,}{start}: {_REASONS[run.stop_reason]}",
        )
        if self.first_loss is not None and self.last_loss is not None:
            skipped = f", {run.skipped:,} steps skipped" if run.skipped else ""
            yield "loss", f"{self.first_loss:.4f} -> {self.last_loss:.4f}{skipped}"
        if self.evaluations:
            step, best = min(self.evaluations, key=lambda e: e[1])
            yield (
                "evaluation",
                f"{self.evaluations[0][1]:.4f} -> {self.evaluations[-1][1]:.4f}, "
                f"best {best:.4f} at step {step:,}",
            )
        if self.counts:
            yield "data", _counts(self)
        if run.seconds and run.tokens:
            yield (
                "speed",
                f"{run.tokens / run.seconds:,.1f} tokens/s, "
                f"{format_duration(run.seconds)} in total, {run.stall_seconds:.1f} s of it for "
                "checkpoints",
            )
        yield "memory", f"{format_bytes(self.peak_bytes)} at most"
        if run.saved_iteration is not None:
            yield "saved", f"iteration {run.saved_iteration:,}"
        if self.plot:
            yield "curve", self.plot
        if self.hf:
            yield "model", self.hf
        if self.adapter:
            yield "adapter", self.adapter
        if self.draft_head:
            yield "draft head", self.draft_head


def _counts(report: FinetunePlan | FinetuneReport) -> str:
    """Documents and rows of a pass over the data, and documents that did not fit."""
    parts = [
        f"{several(report.counts['documents'], 'document')} in "
        f"{several(report.counts['rows'], 'row')} of {report.seq_length:,} tokens"
    ]
    fates = ("split", "truncated", "skipped")
    return ", ".join([*parts, *(f"{n:,} {x}" for x in fates if (n := report.counts[x]))])
