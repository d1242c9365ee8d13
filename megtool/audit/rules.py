"""What an audit looks for: a table of rules with stable ids, and the findings that name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

AuditSeverity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRule:
    """One kind of fault. `title` says what is wrong, `check` how it is seen, `hint` what to do.

    A rule that `needs_data` is not checked with --quick.
    """

    id: str
    severity: AuditSeverity
    title: str
    check: str
    hint: str
    needs_data: bool = True


_RESUME = "resume from the last save before it"

AUDIT_RULES: tuple[AuditRule, ...] = (
    AuditRule(
        id="identical-steps",
        severity="error",
        title="saves of several steps have the same weights, bit for bit",
        check="digests of all weights, where no learning rate of 0 and no skipped steps explain it",
        hint="the saver wrote stale data, or the optimizer did not step: resume from the first of "
        "these saves, and save once more from memory if the run is alive",
        needs_data=False,
    ),
    AuditRule(
        id="unmoved-weights",
        severity="error",
        title="a weight does not move although its optimizer state says that it should",
        check="digests of a weight and its master, the learning rate and the moments of the save",
        hint="look for parameters that are detached, not in the optimizer, or restored every step",
    ),
    AuditRule(
        id="unmoved-moments",
        severity="error",
        title="moments do not move, or are all zero, while weights do",
        check="digests of optimizer state; every step changes a moment that is not zero",
        hint="the optimizer state was saved from another object than the one that steps; its "
        "moments are of no use: resume with fresh ones (--no-load-optim)",
    ),
    AuditRule(
        id="foreign-masters",
        severity="error",
        title="master weights, rounded, are not the weights",
        check="every element where both are cut alike; some of each parameter in buckets; "
        "sketches elsewhere",
        hint="the optimizer belongs to another step or model: `megtool reshard --optimizer-format "
        "none` leaves it out, or " + _RESUME,
    ),
    AuditRule(
        id="foreign-moments",
        severity="error",
        title="moments do not belong to each other, or to the steps between saves",
        check="|exp_avg| against sqrt(exp_avg_sq) (Cauchy and Schwarz), signs, and exp_avg_sq "
        "against beta2^steps of the save before",
        hint="moments are of another parameter, step or run: resume with fresh ones, or " + _RESUME,
    ),
    AuditRule(
        id="mixed-save",
        severity="error",
        title="a save has shards of two steps",
        check="files whose shards are those of another save while all others moved; iterations of "
        "ranks' files; second copies that differ",
        hint="two saves wrote one folder, or a copy was interrupted: copy it again, or " + _RESUME,
    ),
    AuditRule(
        id="missing-shard",
        severity="error",
        title="a file, a rank or a part of a tensor is missing",
        check="coverage of every tensor by its shards",
        hint="copy the missing file again, or " + _RESUME,
        needs_data=False,
    ),
    AuditRule(
        id="truncated-file",
        severity="error",
        title="a file is shorter than what it should hold",
        check="extents of shards against sizes of files",
        hint="copy it again, or " + _RESUME,
        needs_data=False,
    ),
    AuditRule(
        id="flipped-bits",
        severity="error",
        title="bytes are not those that were saved",
        check="CRC-32 of zip containers (torch.save, torch_dist), and megtool's digests",
        hint="check the disk or the network, copy the file again, or " + _RESUME,
    ),
    AuditRule(
        id="unreadable-save",
        severity="error",
        title="a save cannot be opened",
        check="headers of all files",
        hint=_RESUME,
        needs_data=False,
    ),
    AuditRule(
        id="unfinished-save",
        severity="warning",
        title="a save was not finished",
        check="what the saving program writes last",
        hint="remove it if no run is writing it: a run that resumes may take it for the latest",
        needs_data=False,
    ),
    AuditRule(
        id="wrong-tracker",
        severity="error",
        title="the tracker does not name the last step",
        check="latest_checkpointed_iteration.txt against the folders",
        hint="write the number of the step to resume from into it",
        needs_data=False,
    ),
    AuditRule(
        id="wrong-iteration",
        severity="error",
        title="a save says another iteration than its folder",
        check="the iteration in the common state against the name of the folder",
        hint="the folder was renamed, or holds another save: name it after its iteration",
        needs_data=False,
    ),
    AuditRule(
        id="nan-or-inf",
        severity="error",
        title="NaN or Inf",
        check="every element",
        hint=_RESUME + "; skip its data, or lower the learning rate",
    ),
    AuditRule(
        id="denormals",
        severity="error",
        title="weights are denormal numbers: memory that was no tensor",
        check="numbers such as 1e-42 among weights and masters of float32 and bfloat16",
        hint="the save wrote memory that was not ready: save again, or " + _RESUME,
    ),
    AuditRule(
        id="dead-rows",
        severity="warning",
        title="rows of a weight became zeros",
        check="rows that had other values in an earlier save",
        hint="look for pruning, a failed copy of a part, or a mask that is applied to weights",
    ),
    AuditRule(
        id="dead-expert",
        severity="error",
        title="an expert became zeros",
        check="experts that had other values in an earlier save",
        hint="look at the expert's rank: its weights were not saved, or overwritten; " + _RESUME,
    ),
    AuditRule(
        id="exploding-norm",
        severity="error",
        title="the norm of a weight exploded",
        check="the norm against all earlier ones, and against what the learning rate allows",
        hint=_RESUME + "; lower the learning rate, or clip gradients",
    ),
    AuditRule(
        id="unmoved-scheduler",
        severity="error",
        title="the scheduler or the count of samples does not follow the steps",
        check="num_steps of the scheduler and consumed samples, which grow with the iteration",
        hint="the learning rate would start from an old place: set --override-opt-param-scheduler, "
        "or repair the common state",
        needs_data=False,
    ),
    AuditRule(
        id="wrong-step",
        severity="error",
        title="the optimizer's step does not follow the iteration",
        check="the step of the param groups: it grows by at most the steps between saves",
        hint="Adam's bias correction depends on it: the optimizer state is of another save",
        needs_data=False,
    ),
    AuditRule(
        id="stale-rng",
        severity="warning",
        title="random state does not follow the steps",
        check="random state that repeats while dropout uses it, or that ranks' saves lack",
        hint="dropout would repeat: resume with --no-load-rng, or from another save",
        needs_data=False,
    ),
    AuditRule(
        id="fp8-scale",
        severity="error",
        title="FP8 scales saturate, or hold no number",
        check="scales against all amaxes of their history; NaN, Inf and zeros",
        hint="`megtool amax fix` rebuilds them from the weights",
        needs_data=False,
    ),
    AuditRule(
        id="changed-dtype",
        severity="warning",
        title="the dtype of tensors changed between saves",
        check="stored dtypes of successive saves",
        hint="was the run restarted with another precision? Weights may have been rounded",
        needs_data=False,
    ),
    AuditRule(
        id="changed-layout",
        severity="warning",
        title="format, layout, names or shapes changed between saves",
        check="headers of successive saves",
        hint="was the run restarted with another layout or model? `megtool verify` compares both",
        needs_data=False,
    ),
    AuditRule(
        id="averaged-save",
        severity="error",
        title="a save is the average of others, not a step",
        check="sketches: its weights are a mean of those of other saves",
        hint="its optimizer state is not of these weights: use it for evaluation alone, and "
        + _RESUME,
    ),
)

RULES_BY_ID = {rule.id: rule for rule in AUDIT_RULES}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One thing that is wrong with a run: the rule, the steps and tensors that it is about.

    `tensor` is a tensor, a file, or empty where it is about all of a save; `others` counts further
    tensors of which the same is true, and `other_tensors` names the first of them.
    """

    id: str
    step: int
    tensor: str
    message: str
    steps: tuple[int, ...] = ()
    others: int = 0
    other_tensors: tuple[str, ...] = ()

    @property
    def rule(self) -> AuditRule:
        """The rule."""
        return RULES_BY_ID[self.id]

    def text(self) -> str:
        """Where it is and what is wrong."""
        where = f"{self.tensor}: " if self.tensor else ""
        more = f" (and {self.others:,} more tensors)" if self.others else ""
        return f"{where}{self.message}{more}"

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "id": self.id,
            "severity": self.rule.severity,
            "step": self.step,
            "steps": list(self.steps or (self.step,)),
            "tensor": self.tensor,
            "message": self.message,
            "others": self.others,
            "other_tensors": list(self.other_tensors),
            "hint": self.rule.hint,
        }


MAX_NAMED = 5
"""Tensors of one rule and step that are findings of their own; more are counted."""

MAX_OTHERS = 1000
"""Names of tensors that are counted with the last of those."""


def fold_findings(findings: Iterable[AuditFinding]) -> list[AuditFinding]:
    """The first findings of each rule and step; the last of them counts those left out."""
    groups: dict[tuple[str, int], list[AuditFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.id, finding.step), []).append(finding)
    return [f for members in groups.values() for f in _fold(members)]


def _fold(members: Sequence[AuditFinding]) -> list[AuditFinding]:
    if len(members) <= MAX_NAMED:
        return list(members)
    last, rest = members[MAX_NAMED - 1], members[MAX_NAMED:]
    names = tuple(f.tensor for f in rest[:MAX_OTHERS])
    return [*members[: MAX_NAMED - 1], replace(last, others=len(rest), other_tensors=names)]
