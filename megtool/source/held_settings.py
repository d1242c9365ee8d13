"""Whether what is written of a checkpoint holds every setting that its model computes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megtool.convert.canonical_view import CanonicalView
from megtool.convert.dialects import write_side
from megtool.convert.families.class_form import find_class_form
from megtool.convert.families.detection import families
from megtool.convert.families.family import Family
from megtool.convert.families.read_back import (
    TENSOR_FLAGS,
    find_lost_in_class,
    find_unsaid,
    holds,
    lost_settings_error,
)
from megtool.errors import MegtoolError
from megtool.spec.model_config import ModelConfig


def check_held(
    family: Family,
    view: CanonicalView,
    config: ModelConfig,
    stored: Mapping[str, Any],
    *,
    dropped: Mapping[str, Any],
    is_partial: bool,
) -> None:
    """Refuse a config.json, as its keys `stored`, which the family reads as another model.

    Settings in `dropped` may be lost. Of a part of a model, tensors do not say what is there.

    Raises:
        MappingError: a setting would be lost; the message names it, and the hint who holds it.
    """
    ignored = {*dropped, *(TENSOR_FLAGS if is_partial else ())}
    if lost := find_lost_in_class(config, family, stored, ignored=ignored):
        error = lost_settings_error(
            lost, f"config.json of {family.name!r}", find_fitting_families(view, config)
        )
        form = find_class_form(config, family) if view.dialect == "megatron" else None
        if form and all(form.config.get(s.field) != s.value for s in lost):
            error.hint = (
                "`megtool reshard --to hf` first: it stores the same model as its class does"
            )
        raise error


def check_said(
    family: Family,
    config: ModelConfig,
    describe: Callable[[ModelConfig], object],
    *,
    place: str,
    dropped: Mapping[str, Any],
) -> None:
    """Refuse a file that nothing reads back, if it says the same of a model without a setting.

    `describe` makes what the file says of a configuration, `place` names the file.

    Raises:
        MappingError: a setting would be lost.
    """
    lost = [s for s in find_unsaid(config, family, describe) if s.field not in dropped]
    if lost:
        raise lost_settings_error(lost, place)


def find_fitting_families(view: CanonicalView, config: ModelConfig) -> tuple[str, ...]:
    """Return the families that hold all settings of a model, and have places for its tensors.

    The best known come first, and those that say the least of a model.
    """
    fitting = [f for f in families() if holds(f, config) and _has_places(f, view, config)]
    fitting.sort(
        key=lambda f: (
            not f.torchtitan,
            not f.gguf,
            len(f.config) + len(f.traits) + len(f.vocabulary),
        )
    )
    return tuple(f.name for f in fitting)


def _has_places(family: Family, view: CanonicalView, config: ModelConfig) -> bool:
    try:
        write_side(view, dialect="hf", family=family, config=config.with_fields(extra={}))
    except (MegtoolError, KeyError):
        return False
    return True
