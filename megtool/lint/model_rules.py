"""Rules about the model: whether all weights are there, of the sizes that config.json describes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from megtool.lint.context import Check, LintContext, parts_of
from megtool.lint.engines import EngineTarget, load_engines
from megtool.lint.folder_view import CONFIG_FILE
from megtool.quant.recipes.engine_models import permutes_rotary_rows, rotary_conflict
from megtool.report.finding import Finding

_LAYER = re.compile(r"(?P<stack>.*\blayers)\.(?P<number>\d+)\.(?P<name>.+)")


def _check_missing(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if context.mismatch is None:
        yield from _compare_layers(context)
        return
    for name in context.mismatch.missing:
        yield Finding(module=name, message="is in no file, and the model has it")


def _compare_layers(context: LintContext) -> Iterator[Finding]:
    """For models of an unknown family: what most other layers have."""
    layers: dict[str, set[int]] = defaultdict(set)
    parts: dict[str, Counter[str]] = defaultdict(Counter)
    for module in context.linears:
        if (match := _LAYER.fullmatch(module.name)) is not None:
            layers[match["stack"]].add(int(match["number"]))
            if module.unit != module.name and module.expert is None:
                parts[_name_in_layer(module.unit)][module.last] += 1
    for unit, modules in context.units().items():
        if not parts_of(unit) or modules[0].expert is not None:
            continue
        counts = parts[_name_in_layer(unit)]
        present = {m.last for m in modules}
        for last, count in counts.items():
            if last not in present and 2 * count > max(counts.values()):
                yield Finding(
                    module=f"{unit.rpartition('.')[0]}.{last}",
                    message=f"is in no file, unlike {', '.join(sorted(present))}",
                    severity="warning",
                )
    num_layers = context.model_config.get("num_hidden_layers")
    stacks = [numbers for numbers in layers.values() if 0 in numbers]
    if type(num_layers) is int and stacks:
        stored = max(len(numbers) for numbers in stacks)
        if stored < num_layers:
            text = f"num_hidden_layers is {num_layers}, and the files have {stored}"
            yield Finding(module=CONFIG_FILE, message=text, severity="warning")


def _name_in_layer(unit: str) -> str:
    match = _LAYER.fullmatch(unit)
    return match["name"] if match is not None else unit


def _check_sizes(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for name, text in context.mismatch.wrong if context.mismatch is not None else ():
        yield Finding(module=name, message=text)


def _check_unknown(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for name in context.mismatch.unknown if context.mismatch is not None else ():
        yield Finding(module=name, message="is no tensor of this architecture")


def _check_llama4_rotary(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Engines permute the rows of q and k while they load them, and must permute the scales too."""
    architecture = (context.architectures or [""])[0]
    if not permutes_rotary_rows(engine.target, architecture):
        return
    for module in context.quantized():
        is_rotated = module.last in ("q_proj", "k_proj")
        if is_rotated and (text := rotary_conflict(engine.target, module.algo)):
            yield Finding(module=module.name, message=f"({module.algo}) {text}")


def _check_deepseek_v4_form(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if context.folder.is_deepseek_v4 and any(context.quantized()):
        algos = sorted({m.algo for m in context.quantized()})
        text = f"declares {', '.join(algos)} in ModelOpt's form, and {engine.engine} has its own"
        yield Finding(module=CONFIG_FILE, message=text)


def _check_mtp_copies(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Copies of the embedding and the head, which later releases take from the model."""
    config, tensors = context.folder.config or {}, context.folder.tensors
    num_layers, num_mtp = (config.get(k) for k in ("num_hidden_layers", "num_nextn_predict_layers"))
    if type(num_layers) is not int or type(num_mtp) is not int:
        return
    layers = [f"model.layers.{num_layers + m}" for m in range(min(num_mtp, len(tensors)))]
    layers = [layer for layer in layers if f"{layer}.eh_proj.weight" in tensors]
    for row in load_engines().mtp_copies:
        if (
            row.engine != engine.engine
            or engine.target.has(row.before)
            or row.quantized != bool(context.form)
            or config.get("model_type") not in row.model_types
        ):
            continue
        missing = [f"{layer}.{t}" for layer in layers for t in row.tensors]
        for name in (n for n in missing if n not in tensors):
            text = f"is in no file, and {engine.engine} before {row.before} needs it"
            yield Finding(module=name, message=text, source=row.source)


CHECKS: Mapping[str, Check] = {
    "tensors-missing": _check_missing,
    "sizes-said": _check_sizes,
    "tensors-unknown": _check_unknown,
    "mtp-copies": _check_mtp_copies,
    "llama4-rotary": _check_llama4_rotary,
    "deepseek-v4-form": _check_deepseek_v4_form,
}
