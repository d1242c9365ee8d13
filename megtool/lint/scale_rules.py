"""Scale rules: which scales a module has, of what type and shape, and whether they can be right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megtool.lint import citations as at
from megtool.lint.config_rules import read_first
from megtool.lint.context import Linear, Subject
from megtool.lint.module_rules import algo_said, left_alone
from megtool.lint.rules import Fault, Rule, View
from megtool.lint.tables import PAIRS
from megtool.quant.recipes.formats import FORMATS
from megtool.quant.verification.metadata_checks import STORED, scale_shape
from megtool.quant.verification.scale_checks import APART, SCALE_NAMES, check_values
from megtool.quant.verification.stored_folder import CACHE_SCALES, Folder
from megtool.tensors.box import numel

MOST = 1 << 16
"""Elements of a scale that is read; larger ones are the business of `megtool verify`."""

_FLOATS = ("float32", "bfloat16", "float16")
_TYPES = {"float32": _FLOATS, "uint8": ("uint8", "float8_e8m0fnu")}
_PLACEHOLDER = {"W4A16_NVFP4": ("input_scale",)}
"""Scales that loaders take and throw away."""
_OF_OTHERS = ("weight_scale_inv", "weight_global_scale", "input_global_scale")
"""Scales of DeepSeek's and compressed-tensors' folders, which no format of ModelOpt's has."""


def _needed(subject: Subject, view: View) -> Iterator[Fault]:
    for one, algo in _read(subject, view):
        form = STORED[algo]
        needs = {"weight_scale": True, "weight_scale_2": form.second, "input_scale": form.inputs}
        lacks = [last for last, need in needs.items() if need and last not in one.tensors]
        if lacks:
            yield Fault(module=one.name, text=f"{', '.join(lacks)} is missing, which {algo} needs")


def _extra(subject: Subject, view: View) -> Iterator[Fault]:
    for one, algo in _read(subject, view):
        form = STORED[algo]
        allowed = {"weight_scale_2": form.second, "input_scale": form.inputs}
        for last, has in allowed.items():
            if last in one.tensors and not has and last not in _PLACEHOLDER.get(algo, ()):
                yield Fault(module=one.name, text=f"has {last}, which {algo} has not")
        never = (*_OF_OTHERS, *(() if FORMATS[algo].smooths else ("pre_quant_scale",)))
        for last in never:
            if last in one.tensors:
                yield Fault(module=one.name, text=f"has {last}, which {algo} has not")
    known = {one.name for one in subject.coded()}
    for module, tensors in subject.folder.modules.items():
        held = [n for n in tensors if n in SCALE_NAMES]
        if held and module not in known and "weight" not in tensors:
            yield Fault(module=module, text=f"has {', '.join(held)}, and no weight")
        elif held and module not in known and module not in subject.embeddings:
            yield Fault(module=module, text=f"has {', '.join(held)}, and holds no codes")


def _types(subject: Subject, view: View) -> Iterator[Fault]:
    for one, algo in _read(subject, view):
        form = STORED[algo]
        weight = one.tensors["weight"]
        if weight.dtype != form.codes:
            yield Fault(module=one.name, text=f"weight is {weight.dtype}, {algo} has {form.codes}")
        scale = one.tensors.get("weight_scale")
        if scale is not None and scale.dtype not in _TYPES.get(form.scale, (form.scale,)):
            text = f"weight_scale is {scale.dtype}, {algo} has {form.scale}"
            yield Fault(module=one.name, text=text)
        for last in ("weight_scale_2", "input_scale"):
            t = one.tensors.get(last)
            if t is not None and t.dtype not in _FLOATS:
                yield Fault(module=one.name, text=f"{last} is {t.dtype}, not float32")


def _shapes(subject: Subject, view: View) -> Iterator[Fault]:
    for one, algo in _read(subject, view):
        form = STORED[algo]
        rows, columns = one.tensors["weight"].shape
        group = _group(subject, view, one, algo)
        want = scale_shape(algo, (rows * form.rows, columns * form.columns), group)
        scale = one.tensors.get("weight_scale")
        if scale is not None and scale.shape != want and {scale.shape, want} != {(), (1,)}:
            text = f"weight_scale is {list(scale.shape)}, {algo} has {list(want)}"
            yield Fault(module=one.name, text=text)
        for last in ("weight_scale_2", "input_scale"):
            t = one.tensors.get(last)
            if t is not None and t.shape not in ((), (1,)):
                yield Fault(module=one.name, text=f"{last} is {list(t.shape)}, not one number")


def _group(subject: Subject, view: View, one: Linear, algo: str) -> int:
    """The group size that is said, else the only one the format has, else what tensors show."""
    declared = read_first(subject, view)
    said = declared.group_of(one.name) if declared is not None else None
    sizes = FORMATS[algo].groups
    return said or (sizes[0] if len(sizes) == 1 else one.group)


def _values(subject: Subject, view: View) -> Iterator[Fault]:
    for module, tensors in subject.folder.modules.items():
        for last, t in tensors.items():
            if last not in (*SCALE_NAMES, *CACHE_SCALES) or numel(t.shape) > MOST:
                continue
            for found in check_values(module, last, t, subject.numbers(t)):
                yield Fault(module=module, text=found.text, severity=found.severity)


def _smooth(subject: Subject, view: View) -> Iterator[Fault]:
    held = [n for n, t in subject.folder.modules.items() if "pre_quant_scale" in t]
    if not held:
        return
    more = f" (so do {len(held) - 1} more)" if len(held) > 1 else ""
    if view.engine != "trtllm":
        yield Fault(module=held[0], text=f"has a pre_quant_scale{more}")
        return
    by_name = {one.name: one for one in subject.linear}
    for name in held:
        t = subject.folder.modules[name]["pre_quant_scale"]
        one = by_name.get(name)
        if one is not None and t.shape != (one.shape[1],):
            text = f"pre_quant_scale is {list(t.shape)}, of {one.shape[1]} columns"
            yield Fault(module=name, text=text)
    said = [d for d in (subject.beside, subject.inline) if d is not None]
    if said and not any(d.pre_quant_scale for d in said):
        yield Fault(
            module=held[0],
            text=f"has a pre_quant_scale{more}, and no config file says so",
            hint="write pre_quant_scale: true",
        )


def _unsmoothed(subject: Subject, view: View) -> Iterator[Fault]:
    held = any("pre_quant_scale" in t for t in subject.folder.modules.values())
    for declared in (subject.beside, subject.inline):
        if declared is not None and declared.pre_quant_scale and not held:
            yield Fault(module=declared.where, text="says pre_quant_scale, and there are none")


def _siblings(subject: Subject, view: View) -> Iterator[Fault]:
    """Scales of scales that are one number for all parts of a fused projection."""
    for unit, modules in subject.units().items():
        if len(modules) < 2 or modules[0].expert is not None:
            continue
        for last in ("weight_scale_2", "weight_global_scale"):
            if told := _apart(subject.folder, modules, last):
                yield Fault(module=unit, text=told)
        if told := _far_apart(subject, modules):
            yield Fault(module=unit, text=told)


def _inputs(subject: Subject, view: View) -> Iterator[Fault]:
    for unit, modules in subject.units().items():
        if len(modules) < 2 or modules[0].expert is not None:
            continue
        for last in ("input_scale", "input_global_scale"):
            if told := _apart(subject.folder, modules, last):
                seconds = {"weight_scale_2", "weight_global_scale"} & modules[0].tensors.keys()
                yield Fault(module=unit, text=told, severity="error" if seconds else None)


def _pairs(subject: Subject, view: View) -> Iterator[Fault]:
    """The two matrices of an expert that are run as one have one scale of scales."""
    for unit, modules in subject.units().items():
        by_expert: dict[int, dict[str, Linear]] = {}
        for m in modules:
            if m.expert is not None:
                by_expert.setdefault(m.expert, {})[m.last] = m
        for number, held in by_expert.items():
            for pair in PAIRS:
                both = [held[last] for last in pair if last in held]
                for last in ("weight_scale_2", "weight_global_scale"):
                    if len(both) == 2 and (told := _apart(subject.folder, both, last)):
                        yield Fault(module=f"{unit}.{number}", text=told)
                if told := _far_apart(subject, both):
                    yield Fault(module=f"{unit}.{number}", text=told)


def _far_apart(subject: Subject, modules: Sequence[Linear]) -> str:
    """Scales of whole FP8 matrices that are joined, so far apart that under the larger one all
    codes of the other come to zero or next to it; empty where they are not."""
    found: dict[str, float] = {}
    for m in modules:
        t = m.tensors.get("weight_scale")
        if m.algo == "FP8" and t is not None and numel(t.shape) == 1:
            value = subject.numbers(t).first
            if 0 < value < float("inf"):
                found[m.last] = value
    if len(found) < 2 or max(found.values()) <= APART * min(found.values()):
        return ""
    return "weight_scale is far apart: " + ", ".join(f"{n} {v:.6g}" for n, v in found.items())


def _apart(folder: Folder, modules: Sequence[Linear], last: str) -> str:
    """How a scale differs among modules; empty where it does not."""
    found: dict[str, float] = {}
    for m in modules:
        t = m.tensors.get(last)
        if t is not None and numel(t.shape) == 1:
            found[m.last] = float(folder.values(t).reshape(-1)[0])
    if len(set(found.values())) < 2:
        return ""
    return f"{last} differs: " + ", ".join(f"{n} {v:.6g}" for n, v in found.items())


def _read(subject: Subject, view: View) -> Iterator[tuple[Linear, str]]:
    """Modules that the engine reads as quantized, with the format it takes them for."""
    skipped = left_alone(subject, view)
    for one in subject.coded():
        said = algo_said(subject, view, one)
        if one.unit not in skipped and said in STORED and "weight" in one.tensors:
            yield one, said


_MODELOPT = ("modelopt",)
_SOURCES = {"vllm": at.VLLM_MODELOPT, "sglang": at.SGLANG_MODELOPT, "trtllm": at.TRTLLM_LINEAR}

RULES = (
    Rule(
        id="scale-missing",
        forms=_MODELOPT,
        sources=_SOURCES,
        meaning="engines stop, or go on with a scale that is whatever memory holds",
        hint="export it again: every quantized module needs its scales",
        check=_needed,
    ),
    Rule(
        id="scale-extra",
        forms=_MODELOPT,
        sources={"vllm": at.VLLM_LOADING, "sglang": at.SGLANG_LOADING},
        meaning="loaders refuse names that they have no place for",
        hint="leave the scale out, or say the format that has it",
        check=_extra,
    ),
    Rule(
        id="type",
        forms=_MODELOPT,
        sources=_SOURCES,
        meaning="loaders copy numbers, not bytes: another type becomes other values",
        hint="export it again",
        check=_types,
    ),
    Rule(
        id="shape",
        forms=_MODELOPT,
        sources=_SOURCES,
        meaning="loaders stop at shapes that do not fit",
        hint="export it again",
        check=_shapes,
    ),
    Rule(
        id="scale-value",
        sources=_SOURCES,
        meaning="engines multiply and divide by it: outputs are wrong, zero or NaN",
        hint="calibrate and export again",
        check=_values,
    ),
    Rule(
        id="pre-quant-scale",
        forms=_MODELOPT,
        sources={**_SOURCES, "trtllm": at.TRTLLM_CONFIG},
        meaning="factors of columns are left out, and outputs are wrong",
        hint="quantize for this engine (--target), which folds them or does without",
        check=_smooth,
    ),
    Rule(
        id="pre-quant-scale-missing",
        forms=_MODELOPT,
        sources={"trtllm": at.TRTLLM_CONFIG},
        meaning="the engine multiplies by whatever memory holds",
        hint="write pre_quant_scale: false",
        check=_unsmoothed,
    ),
    Rule(
        id="siblings",
        sources=_SOURCES,
        meaning="engines keep the largest for all parts: the others come out wrong",
        hint="quantize the parts with one scale of scales",
        check=_siblings,
    ),
    Rule(
        id="input-siblings",
        severity="warning",
        sources=_SOURCES,
        meaning="engines keep the largest for all parts: some lose precision",
        hint="calibrate the parts together",
        check=_inputs,
    ),
    Rule(
        id="w1-w3",
        sources={
            "vllm": at.VLLM_MODELOPT,
            "sglang": at.SGLANG_MODELOPT,
            "trtllm": at.MODELOPT_W1_W3,
        },
        meaning="engines keep the first: the other matrix of the expert comes out wrong",
        hint="quantize both with one scale of scales",
        check=_pairs,
    ),
)
