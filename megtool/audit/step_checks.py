"""What can be wrong with a save, given an earlier one of the same run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megtool.audit.rules import AuditFinding
from megtool.audit.save_facts import (
    FIRST_MOMENT,
    MAIN,
    SECOND_MOMENT,
    SaveFacts,
    TensorFacts,
    sketch_distance,
)

_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_MUST_MOVE = 64.0
"""A weight whose expected update is that many times its precision has to move."""

_DECAY_SLACK = 0.98
_NORM_RATIO = 10.0
_UPDATE_SLACK = 4.0
_MOMENTS = (FIRST_MOMENT, SECOND_MOMENT, "momentum_buffer", "exp_avg_slow")


@dataclass(slots=True)
class RunHistory:
    """What is kept of all earlier saves: the largest norm and rows alive, by weight."""

    largest_rms: dict[str, float] = field(default_factory=dict)
    dead_rows: dict[str, int] = field(default_factory=dict)

    def add(self, save: SaveFacts) -> None:
        """Take in a save, after it was checked."""
        for name, t in save.weights().items():
            if t.sums.count and not (t.sums.nan or t.sums.inf):
                self.largest_rms[name] = max(self.largest_rms.get(name, 0.0), t.sums.rms)
            if t.dead_rows is not None:
                self.dead_rows[name] = t.dead_rows


def has_moved(before: TensorFacts | None, after: TensorFacts | None) -> bool | None:
    """Whether a tensor differs between two saves; None if that is not known."""
    if before is None or after is None or before.digest is None or after.digest is None:
        return None
    if {b for _, b in before.shards} != {b for _, b in after.shards}:
        return None  # cut in another way
    return before.digest != after.digest


def moved_weights(before: SaveFacts, after: SaveFacts) -> tuple[int, int]:
    """How many weights differ between two saves, and how many were compared."""
    earlier = before.weights()
    known = [
        m
        for name, t in after.weights().items()
        if (m := has_moved(earlier.get(name), t)) is not None
    ]
    return sum(known), len(known)


def stands_still(before: SaveFacts, after: SaveFacts) -> bool:
    """Whether nothing had to change: a learning rate of 0, or skipped steps of fp16 training."""
    a, b = before.training, after.training
    if a.learning_rate == 0 or b.learning_rate == 0:
        return True
    skipped = a.loss_scale is not None and b.loss_scale is not None
    same_step = a.optimizer_step is not None and a.optimizer_step == b.optimizer_step
    return skipped and a.loss_scale != b.loss_scale and (same_step or a.optimizer_step is None)


def check_steps(before: SaveFacts, after: SaveFacts, history: RunHistory) -> Iterator[AuditFinding]:
    """Findings about `after`, which follows `before` among the saves that could be opened."""
    yield from _check_headers(before, after)
    yield from _check_training(before, after)
    moved, compared = moved_weights(before, after)
    if compared and not moved:
        return  # identical: the run's checks say so
    yield from _check_mixed(before, after)
    yield from _check_unmoved(before, after, moved)
    yield from _check_decay(before, after)
    yield from _check_rows(after, history)
    yield from _check_norms(before, after, history)


def _check_headers(before: SaveFacts, after: SaveFacts) -> Iterator[AuditFinding]:
    def finding(rule: str, tensor: str, message: str) -> AuditFinding:
        steps = (before.step, after.step)
        return AuditFinding(id=rule, step=after.step, tensor=tensor, message=message, steps=steps)

    if before.format != after.format:
        yield finding("changed-layout", "", f"the format {before.format} became {after.format}")
    axes = ("tp", "pp", "vpp", "ep", "etp", "cp")
    old = {a: n for a in axes if (n := before.layout.get(a)) is not None}
    new = {a: n for a in axes if (n := after.layout.get(a)) is not None}
    if old and new and old != new:
        changes = ", ".join(
            f"{a} {old.get(a)} became {new.get(a)}" for a in axes if old.get(a) != new.get(a)
        )
        yield finding("changed-layout", "", changes)
    if before.format != after.format:
        return
    gone = [n for n in before.stored if n not in after.stored]
    added = [n for n in after.stored if n not in before.stored]
    for names, text in ((gone, "is not in this save any more"), (added, "was not in it before")):
        if names:
            yield finding("changed-layout", names[0], f"{text} ({len(names):,} tensors)")
    for name, (kind, shape) in after.stored.items():
        earlier = before.stored.get(name)
        if earlier is None:
            continue
        if earlier[0] != kind:
            yield finding("changed-dtype", name, f"{earlier[0]} became {kind}")
        if earlier[1] != shape:
            yield finding("changed-layout", name, f"{list(earlier[1])} became {list(shape)}")


def _check_training(before: SaveFacts, after: SaveFacts) -> Iterator[AuditFinding]:
    def finding(rule: str, tensor: str, message: str) -> AuditFinding:
        steps = (before.step, after.step)
        return AuditFinding(id=rule, step=after.step, tensor=tensor, message=message, steps=steps)

    a, b = before.training, after.training
    for name, old, new in (
        ("opt_param_scheduler.num_steps", a.scheduler_steps, b.scheduler_steps),
        ("args.consumed_train_samples", a.consumed_samples, b.consumed_samples),
    ):
        is_same = old == new and stands_still(before, after)
        if old is not None and new is not None and new <= old and (old or new) and not is_same:
            message = f"is {new:,}, and was {old:,} at step {before.step}"
            yield finding("unmoved-scheduler", name, message)
        if (old is None) != (new is None):
            was = "is there" if old is None else "is missing"
            yield finding("unmoved-scheduler", name, f"{was}, other than at step {before.step}")
    if a.optimizer_step is not None and b.optimizer_step is not None:
        steps = b.optimizer_step - a.optimizer_step
        if (
            steps > after.step - before.step
            or steps < 0
            or (not steps and not stands_still(before, after))
        ):
            message = (
                f"step {b.optimizer_step:g} of the optimizer follows {a.optimizer_step:g} at "
                f"iteration {before.step}"
            )
            yield finding("wrong-step", "optimizer.param_groups", message)
    for name, checksum in b.rng.items():
        if b.has_dropout and a.rng.get(name) == checksum:
            message = f"is that of step {before.step}, and dropout uses it"
            yield finding("stale-rng", name, message)
    if a.rng and not b.rng:
        yield finding("stale-rng", "", f"there is none, other than at step {before.step}")


def _check_mixed(before: SaveFacts, after: SaveFacts) -> Iterator[AuditFinding]:
    """Files all of whose moving shards are those of the save before, while other files' moved."""
    same: dict[str, list[str]] = defaultdict(list)
    moved: dict[str, int] = defaultdict(int)
    for key, tensor in after.tensors.items():
        earlier = before.tensors.get(key)
        if earlier is None or not tensor.sums.norm:
            continue
        partly = {s for s, crc in tensor.shards.items() if earlier.shards.get(s) == crc}
        for shard in tensor.shards:
            if shard not in earlier.shards:
                continue
            if shard in partly:
                same[shard[0]].append(key)
            else:
                moved[shard[0]] += 1
    if not moved:
        return
    for file, keys in same.items():
        if moved.get(file):
            continue
        # Frozen tensors are in files of their own, too: some of this file's have to move elsewhere.
        elsewhere = [k for k in keys if _moves_elsewhere(before.tensors[k], after.tensors[k], file)]
        states = [k for k in keys if after.tensors[k].state]
        if not elsewhere and not states:
            continue
        message = (
            f"all {len(keys):,} shards in it are those of step {before.step}, while "
            f"{sum(moved.values()):,} in other files moved"
        )
        yield AuditFinding(
            id="mixed-save",
            step=after.step,
            tensor=file,
            message=message,
            steps=(before.step, after.step),
        )


def _moves_elsewhere(before: TensorFacts, after: TensorFacts, file: str) -> bool:
    """Whether shards of a tensor moved that are in other files."""
    return any(before.shards.get(s, crc) != crc for s, crc in after.shards.items() if s[0] != file)


def _check_unmoved(before: SaveFacts, after: SaveFacts, moved: int) -> Iterator[AuditFinding]:
    steps = (before.step, after.step)
    if stands_still(before, after):
        return
    moments = {
        (state, name): t
        for state in _MOMENTS
        for name, t in after.of_state(state).items()
        if t.sums.count
    }
    if moments and moved and all(t.sums.largest == 0 for t in moments.values()):
        yield AuditFinding(
            id="unmoved-moments",
            step=after.step,
            tensor="",
            message=f"all moments are zero, and {moved:,} weights moved since step {before.step}",
            steps=steps,
        )
    for (state, name), t in moments.items():
        earlier = before.tensors.get(t.key)
        if t.sums.largest > 0 and has_moved(earlier, t) is False and not _is_denormal(t):
            message = f"{state} is the same as at step {before.step}, bit for bit"
            yield AuditFinding(
                id="unmoved-moments", step=after.step, tensor=name, message=message, steps=steps
            )
    earlier_weights, mains = before.weights(), after.of_state(MAIN)
    for name, weight in after.weights().items():
        if has_moved(earlier_weights.get(name), weight) is not False:
            continue
        main = mains.get(name)
        if main is not None and has_moved(before.tensors.get(main.key), main) is not False:
            continue
        if main is None and weight.dtype != "float32":
            continue  # updates may be lost in 16 bits
        update = _expected_update(before, after, name)
        if update is None:
            continue
        least = _MUST_MOVE * _EPSILON["float32"] * max(weight.sums.rms, 1e-12)
        if update > least:
            message = (
                f"it is the same as at step {before.step}, and updates of about {update:.1e} were "
                "due"
            )
            yield AuditFinding(
                id="unmoved-weights", step=after.step, tensor=name, message=message, steps=steps
            )


def _is_denormal(tensor: TensorFacts) -> bool:
    """Whether all that is left of a moment is too small to become smaller."""
    return tensor.sums.largest < 1e-37


def _expected_update(before: SaveFacts, after: SaveFacts, name: str) -> float | None:
    """About how large updates of a weight were, by Adam's moments; None without them."""
    first, second = (after.of_state(s).get(name) for s in (FIRST_MOMENT, SECOND_MOMENT))
    rate = after.training.learning_rate
    if first is None or second is None or not rate or not before.training.learning_rate:
        return None
    if not first.sums.rms or not second.sums.count:
        return None
    mean_square = second.sums.largest
    return rate * first.sums.rms / (math.sqrt(mean_square) + 1e-8)


def _check_decay(before: SaveFacts, after: SaveFacts) -> Iterator[AuditFinding]:
    """The second moment of every element is at least beta2^steps of what it was."""
    a, b = before.training, after.training
    steps = after.step - before.step
    if a.optimizer_step is not None and b.optimizer_step is not None:
        steps = int(b.optimizer_step - a.optimizer_step)
    if b.betas is None or steps < 0 or has_restarted(before, after):
        return
    factor = b.betas[1] ** steps * _DECAY_SLACK
    if factor < 1e-3:
        return
    for name, t in after.of_state(SECOND_MOMENT).items():
        earlier = before.tensors.get(t.key)
        if earlier is None or t.sums.sketch.shape != earlier.sums.sketch.shape:
            continue
        if earlier.num_elements != t.num_elements or not t.sums.sketch.size:
            continue
        least = earlier.sums.sketch * factor
        short = t.sums.sketch < least - 1e-6 * earlier.sums.sketch.max(initial=0)
        if int(short.sum()):
            ratio = float((t.sums.sketch[short] / earlier.sums.sketch[short]).min())
            message = (
                f"a part of exp_avg_sq shrank to {ratio:.2%} of step {before.step}, and {steps:,} "
                f"steps leave at least {b.betas[1] ** steps:.2%}"
            )
            yield AuditFinding(
                id="foreign-moments",
                step=after.step,
                tensor=name,
                message=message,
                steps=(before.step, after.step),
            )


def has_restarted(before: SaveFacts, after: SaveFacts) -> bool:
    """Whether the optimizer began anew between two saves, which its step says."""
    a, b = before.training.optimizer_step, after.training.optimizer_step
    return a is not None and b is not None and b < a


def _check_rows(after: SaveFacts, history: RunHistory) -> Iterator[AuditFinding]:
    for name, t in after.weights().items():
        earlier = history.dead_rows.get(name)
        if t.dead_rows is None or earlier is None or t.num_rows is None:
            continue
        new = t.dead_rows - earlier
        if new <= 0:
            continue
        if t.dead_rows == t.num_rows and ".experts." in name:
            message = f"all {t.num_rows:,} rows became zeros"
            yield AuditFinding(id="dead-expert", step=after.step, tensor=name, message=message)
        else:
            message = f"{new:,} of {t.num_rows:,} rows became zeros"
            yield AuditFinding(id="dead-rows", step=after.step, tensor=name, message=message)


def _check_norms(
    before: SaveFacts, after: SaveFacts, history: RunHistory
) -> Iterator[AuditFinding]:
    rate = max(before.training.learning_rate or 0.0, after.training.learning_rate or 0.0)
    steps = after.step - before.step
    for name, t in after.weights().items():
        largest = history.largest_rms.get(name)
        if largest is None or t.sums.nan or t.sums.inf or not t.sums.count:
            continue
        # Adam's updates are at most a few times the rate; without one anything small may grow.
        moved = largest + _UPDATE_SLACK * rate * steps * _NORM_RATIO if rate else 1.0
        limit = max(_NORM_RATIO * largest, moved)
        if t.sums.rms > limit and t.sums.rms > 1e-6:
            message = (
                f"its root mean square is {t.sums.rms:.3g}, and was at most {largest:.3g} before"
            )
            yield AuditFinding(
                id="exploding-norm",
                step=after.step,
                tensor=name,
                message=message,
                steps=(before.step, after.step),
            )


def update_norms(before: SaveFacts, after: SaveFacts) -> Mapping[str, float]:
    """The estimated norm of each weight's change between two saves, where sketches can tell."""
    earlier = before.weights()
    out = {}
    for name, t in after.weights().items():
        old = earlier.get(name)
        if old is None or old.num_elements != t.num_elements:
            continue
        distance = sketch_distance(old.sums.sketch, t.sums.sketch)
        if distance is not None:
            out[name] = distance
    return out
