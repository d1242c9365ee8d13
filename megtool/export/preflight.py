"""Rules: what is held against a folder to be exported before a byte of it is staged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megtool.checkpoint.plan import Plan
from megtool.errors import MappingError, listed
from megtool.lint.context import read_subject
from megtool.lint.planned_folder import PlannedFolder, planned_folder
from megtool.lint.registry import RULES
from megtool.lint.rules import View, apply
from megtool.lint.scale_rules import MOST
from megtool.quant.recipes.engine_support import Target, read_target
from megtool.quant.verification.scale_checks import SCALE_NAMES, check_values
from megtool.quant.verification.stored_folder import Folder, open_folder
from megtool.tensors.box import numel

_WHOEVER_LOADS = ("scale-value", "siblings", "input-siblings", "w1-w3")
"""Rules about scales that are wrong for every engine alike."""


def check_rules(folder: Folder, target: str | None) -> list[str]:
    """What an engine's rules warn of; without an engine, nothing but wrong scales is looked for.

    Raises:
        MappingError: the engine cannot load the folder, or scales are wrong for all of them.
    """
    engine = read_target(target) if target else None
    subject = read_subject(folder)
    view = View(target=engine or Target(engine="vllm"))
    rules = [r for r in RULES if engine is not None or r.id in _WHOEVER_LOADS]
    found = list(apply(rules, subject, view))
    errors = [f for f in found if f.severity == "error"]
    if errors:
        first, count = errors[0], len(errors) - 1
        more = f", and {count} more" if count else ""
        who = f"{engine.name} cannot load what would be made" if engine else "no engine reads right"
        raise MappingError(
            f"{who}: {first.module}: {first.message}{more}",
            tensor=first.module or None,
            hint=f"{first.hint or 'see its rule'} ({first.source})",
        )
    if engine is None:
        return []
    told = [f"{engine.name}: {f.module}: {f.message}" for f in found]
    return told + ([engine.unknown] if engine.unknown else [])


def check_plan(plan: Plan, path: Path, target: str) -> list[str]:
    """The same for a plan that makes a folder of plain weights."""
    return check_rules(planned_of(plan, path), target)


def planned_of(plan: Plan, path: Path) -> PlannedFolder:
    """The folder that a plan makes, its scales unread."""
    return planned_folder(path, plan.target.catalogue, plan.target.all_small())


def wrong_scales(source: Path) -> Iterator[str]:
    """Scales of a quantized folder that make its weights wrong as they are decoded."""
    with open_folder(source) as folder:
        found: dict[str, list[str]] = {}
        for module, tensors in folder.modules.items():
            for last, t in tensors.items():
                if last not in SCALE_NAMES or last.startswith("input") or numel(t.shape) > MOST:
                    continue
                for one in check_values(module, last, t, folder.numbers(t)):
                    if one.severity == "error":
                        found.setdefault(one.text, []).append(module)
    for text, modules in found.items():
        yield f"{text}, and decoded weights are as wrong: {listed(modules)}"
