"""Model check: the weights of a folder held against the model that its config.json says it is.

The families' own tables say which tensors a model has, and of what sizes. Of a model that no family
is known of nothing is said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.convert.binding import Binding, missing
from megtool.convert.canonical import VOCABULARY, CanonicalModel
from megtool.convert.dialects import CanonicalView, read_side
from megtool.convert.families import Family, detect_family
from megtool.dtypes import dtype
from megtool.errors import MappingError, UnknownTensorsError
from megtool.tensors.sharded import GlobalTensor

_MOST = 8
"""Faults after which no more are looked for: each takes another look at all tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFaults:
    """`missing` are stored names of weights that the model has and the folder has not, `wrong`
    stored names with what their shape should be or why they have no place in the model, `unknown`
    those that the family's table does not have."""

    missing: tuple[str, ...] = ()
    wrong: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()


def check_model(
    config: Mapping[str, Any], weights: Sequence[tuple[str, tuple[int, ...]]]
) -> ModelFaults | None:
    """Hold weights, by stored name and shape as decoded, against a config.json.

    None where no family is known, or its configuration is one that it does not know.
    """
    try:
        family = detect_family(config)
        model = family.read_config(config)
    except (MappingError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    kind = dtype("bfloat16")
    held = {n: GlobalTensor(name=n, shape=shape, dtype=kind) for n, shape in weights}
    wrong: list[tuple[str, str]] = []
    unknown: list[str] = []
    for _ in range(_MOST):
        try:
            side = read_side(
                list(held.values()), dialect="hf", family=family, config=model, partial=True
            )
        except MappingError as e:
            if e.tensor not in held:
                return None if not (wrong or unknown) else _faults((), wrong, unknown)
            if isinstance(e, UnknownTensorsError):
                unknown.append(e.tensor)
            else:
                wrong.append((e.tensor, e.message))
            del held[e.tensor]
            continue
        absent = () if wrong else _absent(side, family)  # what is cut is there all the same
        return _faults(absent, wrong, unknown)
    return _faults((), wrong, unknown)


def _faults(
    absent: Sequence[str], wrong: Sequence[tuple[str, str]], unknown: Sequence[str]
) -> ModelFaults:
    return ModelFaults(missing=tuple(absent), wrong=tuple(wrong), unknown=tuple(unknown))


def _absent(side: CanonicalView, family: Family) -> list[str]:
    """Stored names of what is missing; the canonical one where it is a part of another tensor."""
    if side.config is None:
        return []
    model = CanonicalModel(side.config, {**VOCABULARY, **family.vocabulary})
    names = missing(side.canonical, model)[0]
    kind = dtype("bfloat16")
    wanted = {n: GlobalTensor(name=n, shape=(), dtype=kind) for n in names}
    try:
        stored = Binding(family.hf, model).write(wanted).placements if wanted else {}
    except MappingError:
        stored = {}
    return list(dict.fromkeys(stored[n].stored if n in stored else n for n in names))
