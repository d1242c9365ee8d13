"""The weights of a folder, compared with the model that its config.json describes.

The tables of the families say which tensors a model has, and their sizes, and a draft head has
those of `megtool.convert.families.draft_heads`. A model of an unknown family is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.convert.dialects import CanonicalView, read_side
from megtool.convert.families.detection import detect_family
from megtool.convert.families.draft_heads import compare_head
from megtool.convert.families.family import Family
from megtool.convert.language.binding import Binding, missing
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.dtypes import dtype
from megtool.errors import MappingError, UnknownTensorsError
from megtool.tensors.sharded import GlobalTensor

_MAX_MISMATCHES = 8
"""The check stops after so many: each needs another pass over all tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMismatch:
    """`missing` are stored names of weights that the folder lacks, `wrong` stored names with what
    their shape should be or why they do not fit the model, `unknown` those that the family's table
    does not have."""

    missing: tuple[str, ...] = ()
    wrong: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()


def check_model(
    config: Mapping[str, Any], weights: Sequence[tuple[str, tuple[int, ...]]]
) -> ModelMismatch | None:
    """Compare weights, by stored name and decoded shape, with a config.json.

    None if the family is unknown, or does not understand the configuration.
    """
    if (head := compare_head(config, dict(weights))) is not None:
        return _mismatch(*head)
    try:
        family = detect_family(config)
        model = family.read_config(config)
    except (MappingError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    bf16 = dtype("bfloat16")
    tensors = {n: GlobalTensor(name=n, shape=shape, dtype=bf16) for n, shape in weights}
    wrong: list[tuple[str, str]] = []
    unknown: list[str] = []
    for _ in range(_MAX_MISMATCHES):
        try:
            side = read_side(
                list(tensors.values()), dialect="hf", family=family, config=model, partial=True
            )
        except MappingError as e:
            if e.tensor not in tensors:
                return None if not (wrong or unknown) else _mismatch((), wrong, unknown)
            if isinstance(e, UnknownTensorsError):
                unknown.append(e.tensor)
            else:
                wrong.append((e.tensor, e.message))
            del tensors[e.tensor]
            continue
        missing_names = () if wrong else _find_missing(side, family)  # a wrong one is not missing
        return _mismatch(missing_names, wrong, unknown)
    return _mismatch((), wrong, unknown)


def _mismatch(
    missing_names: Sequence[str], wrong: Sequence[tuple[str, str]], unknown: Sequence[str]
) -> ModelMismatch:
    return ModelMismatch(missing=tuple(missing_names), wrong=tuple(wrong), unknown=tuple(unknown))


def _find_missing(side: CanonicalView, family: Family) -> list[str]:
    """Stored names of missing tensors; the canonical name if it is a part of another tensor."""
    if side.config is None:
        return []
    model = CanonicalModel(side.config, {**VOCABULARY, **family.vocabulary})
    names = missing(side.canonical, model)[0]
    bf16 = dtype("bfloat16")
    tensors = {n: GlobalTensor(name=n, shape=(), dtype=bf16) for n in names}
    try:
        stored = Binding(family.hf, model).write(tensors).placements if tensors else {}
    except MappingError:
        stored = {}
    return list(dict.fromkeys(stored[n].stored if n in stored else n for n in names))
