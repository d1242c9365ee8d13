"""Check a planned export against the rules of engines, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megtool.errors import MappingError, listed
from megtool.lint.context import read_context
from megtool.lint.engines import EngineTarget
from megtool.lint.folder_view import KV_CACHE_SCALES, FolderView, open_folder, plan_folder
from megtool.lint.rules import apply_rules, load_rules
from megtool.lint.scale_rules import MAX_ELEMENTS
from megtool.lint.scale_sanity import SCALE_NAMES, check_values
from megtool.plan.copies import ReshardPlan
from megtool.quant.recipes.engine_support import EngineVersion, parse_engine
from megtool.tensors.box import numel

_EVERY_ENGINE = ("scale-value", "siblings", "input-siblings", "w1-w3")
"""Rules about scales that are wrong for every engine alike."""


def check_engine_rules(folder: FolderView, target: str | None) -> list[str]:
    """The warnings of an engine's rules; without an engine, only wrong scales are looked for.

    Raises:
        MappingError: the engine cannot load the folder, or scales are wrong for all of them.
    """
    engine = parse_engine(target) if target else None
    context = read_context(folder)
    engine_target = EngineTarget(target=engine or EngineVersion(engine="vllm"))
    rules = [r for r in load_rules() if engine is not None or r.id in _EVERY_ENGINE]
    findings = list(apply_rules(rules, context, engine_target))
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        first, count = errors[0], len(errors) - 1
        more = f", and {count} more" if count else ""
        reason = (
            f"{engine.name} cannot load what would be made" if engine else "no engine reads right"
        )
        raise MappingError(
            f"{reason}: {first.module}: {first.message}{more}",
            tensor=first.module or None,
            hint=f"{first.hint or 'see its rule'} ({first.source})",
            error_id="unsupported-by-engine",
        )
    if engine is None:
        return []
    notes = [f"{engine.name}: {f.module}: {f.message}" for f in findings]
    return notes + ([engine.unknown] if engine.unknown else [])


def check_plan(plan: ReshardPlan, path: Path, target: str) -> list[str]:
    """The same for a plan that makes a folder of plain weights."""
    return check_engine_rules(view_planned_folder(plan, path), target)


def view_planned_folder(plan: ReshardPlan, path: Path) -> FolderView:
    """The folder that a plan makes, its scales unread."""
    return plan_folder(path, plan.target.catalogue, plan.target.iter_small_files())


def check_source_scales(source: Path) -> None:
    """Refuse a quantized folder whose scales are wrong for every engine, those of inputs too.

    Raises:
        MappingError: a scale is zero, NaN, infinite, negative or beyond all weights.
    """
    for message, modules in _wrong_scales(source, are_inputs_read=True).items():
        raise MappingError(
            f"no engine reads right: {message}: {listed(modules)}",
            file=source,
            tensor=modules[0],
            hint="megtool lint lists all that is wrong; quantize it again",
            error_id="unsupported-by-engine",
        )


def find_wrong_scales(source: Path) -> Iterator[str]:
    """Scales of a quantized folder that make its decoded weights wrong."""
    for message, modules in _wrong_scales(source, are_inputs_read=False).items():
        yield f"{message}, and so are the decoded weights: {listed(modules)}"


def _wrong_scales(source: Path, *, are_inputs_read: bool) -> dict[str, list[str]]:
    """What is wrong with scales of weights (and of inputs and KV caches), with their modules."""
    modules_by_message: dict[str, list[str]] = {}
    with open_folder(source) as folder:
        for module, tensors in folder.modules.items():
            for last, t in tensors.items():
                is_weights = last in SCALE_NAMES and not last.startswith("input")
                is_read = are_inputs_read and last in (*SCALE_NAMES, *KV_CACHE_SCALES)
                if not (is_weights or is_read):
                    continue
                if numel(t.shape) > MAX_ELEMENTS:
                    continue
                for finding in check_values(module, last, t, folder.read_statistics(t)):
                    if finding.severity == "error":
                        modules_by_message.setdefault(finding.message, []).append(module)
    return modules_by_message
