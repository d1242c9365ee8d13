"""What can be wrong with one save by itself."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.audit.rules import AuditFinding
from megtool.audit.save_facts import (
    MAIN,
    SECOND_MOMENT,
    WEIGHT,
    SaveFacts,
    TensorFacts,
    sketch_distance,
)

MIN_DENORMALS = 8
MIN_DENORMAL_SHARE = 1e-4
"""Weights with more denormals than both are no weights: decay never leads there."""

_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
_SKETCH_SLACK = 4.0


def check_save(save: SaveFacts) -> Iterator[AuditFinding]:
    """Findings about a save that need no other save."""
    for rule, where, text in save.problems:
        yield AuditFinding(id=rule, step=save.step, tensor=where, message=text)
    if not save.is_open:
        return
    yield from _check_iteration(save)
    for tensor in save.tensors.values():
        yield from _check_numbers(save.step, tensor)
    yield from _check_pairs(save)


def _check_iteration(save: SaveFacts) -> Iterator[AuditFinding]:
    inner = save.training.iteration
    if inner is not None and inner != save.step and inner != 0:
        message = f"its files say iteration {inner}, its folder {save.step}"
        yield AuditFinding(id="wrong-iteration", step=save.step, tensor="", message=message)


def _check_numbers(step: int, tensor: TensorFacts) -> Iterator[AuditFinding]:
    sums, name = tensor.sums, tensor.key
    if sums.nan or sums.inf:
        message = f"{sums.nan:,} NaN and {sums.inf:,} Inf of {sums.count:,} elements"
        yield AuditFinding(id="nan-or-inf", step=step, tensor=name, message=message)
    is_weight = tensor.state in (WEIGHT, MAIN) and tensor.dtype in ("bfloat16", "float32")
    least = max(MIN_DENORMALS, MIN_DENORMAL_SHARE * sums.count)
    if is_weight and sums.denormals >= least:
        message = f"{sums.denormals:,} of {sums.count:,} elements are denormal, such as 1e-42"
        yield AuditFinding(id="denormals", step=step, tensor=name, message=message)
    if tensor.state == SECOND_MOMENT and sums.negative:
        message = f"{sums.negative:,} elements are negative, and squares of gradients are not"
        yield AuditFinding(id="foreign-moments", step=step, tensor=name, message=message)


def _check_pairs(save: SaveFacts) -> Iterator[AuditFinding]:
    for name, pair in save.pairs.items():
        if pair.unequal_masters:
            message = (
                f"{pair.unequal_masters:,} of {pair.compared_masters:,} master weights, rounded, "
                "are not the weight"
            )
            yield AuditFinding(id="foreign-masters", step=save.step, tensor=name, message=message)
        if pair.large_first_moments:
            message = (
                f"{pair.large_first_moments:,} of {pair.compared_moments:,} elements of exp_avg "
                "are larger than gradients with this exp_avg_sq can make them"
            )
            yield AuditFinding(id="foreign-moments", step=save.step, tensor=name, message=message)
    if save.training.is_low_precision:
        return
    weights = save.weights()
    for name, main in save.of_state(MAIN).items():
        weight, compared = weights.get(name), save.pairs.get(name)
        if weight is None or (compared is not None and compared.compared_masters):
            continue
        distance = sketch_distance(weight.sums.sketch, main.sums.sketch)
        rounding = _ROUNDING.get(weight.dtype)
        if distance is None or rounding is None or weight.num_elements != main.num_elements:
            continue
        limit = max(rounding, 1e-6) * _SKETCH_SLACK * weight.sums.norm
        if distance > limit and weight.sums.count == main.sums.count == weight.num_elements:
            message = (
                f"they differ by about {distance / max(weight.sums.norm, 1e-30):.2%} of the "
                "weight's norm, more than rounding does"
            )
            yield AuditFinding(id="foreign-masters", step=save.step, tensor=name, message=message)
