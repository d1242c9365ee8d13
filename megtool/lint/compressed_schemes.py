"""Schemes: compressed-tensors' groups as words, and DeepSeek's FP8, held against what loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megtool.lint import citations as at
from megtool.lint.context import Linear, Subject
from megtool.lint.rules import Fault, Rule, View, lines_for
from megtool.lint.scheme_table import PER_GROUP_FORMATS, SCHEMES
from megtool.quant.recipes.compressed_targets import means

Said = Mapping[str, Any]
_CONFIG = "config.json"


def lists_of(said: Said) -> tuple[str, ...]:
    """Modules that are left alone, by whatever key."""
    out: list[str] = []
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        found = said.get(key)
        out += map(str, found) if isinstance(found, list) else []
    return tuple(dict.fromkeys(out))


def groups_of(said: Said) -> dict[str, Said]:
    """The groups of a config."""
    found = said.get("config_groups")
    if not isinstance(found, dict):
        return {}
    return {str(n): g for n, g in found.items() if isinstance(g, dict)}


def targeted(said: Said, one: Linear) -> Said | None:
    """The first group whose targets name a module, or the class it has in engines."""
    return group_of(said, one.name, classes=one.last != "lm_head")


def group_of(said: Said, module: str, *, classes: bool = True) -> Said | None:
    """The first group whose targets name a module; or all that are linear, with `classes` (so the
    library itself takes it, for which an output layer is as linear as others)."""
    for group in groups_of(said).values():
        targets = group.get("targets")
        for target in map(str, targets) if isinstance(targets, list) else ():
            if means(target, module) or (classes and target.lower() == "linear"):
                return group
    return None


def kind_of_inputs(inputs: Any) -> str:
    """How inputs are rounded, in the words of `Scheme.inputs`."""
    if not isinstance(inputs, dict):
        return "none"
    strategy = str(inputs.get("strategy") or ("token" if inputs.get("dynamic") else "tensor"))
    if strategy in ("tensor_group", "group", "token"):
        return strategy
    return "dynamic" if inputs.get("dynamic") else strategy


def _scheme(subject: Subject, view: View) -> Iterator[Fault]:
    groups = groups_of(subject.said)
    if not groups:
        yield Fault(module=_CONFIG, text="config_groups is empty")
        return
    whole = str(subject.said.get("format", ""))
    each = PER_GROUP_FORMATS.get(view.engine)
    heeds = each is not None and view.target.has(each)
    if whole == "mixed-precision" and not heeds:
        yield Fault(module=_CONFIG, text="format mixed-precision: groups have formats of their own")
        return
    experts = any(one.expert is not None for one in subject.coded())
    for name, group in groups.items():
        form = str(group.get("format") or whole) if heeds else whole
        if told := _unloaded(group, form, experts, view):
            yield Fault(module=f"{_CONFIG}: {name}", text=told)


def _unloaded(group: Said, form: str, experts: bool, view: View) -> str:
    """Why a group is not loaded; empty where it is."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return "weights are not quantized"
    bits, kind = weights.get("num_bits"), str(weights.get("type", "int"))
    strategy, size = str(weights.get("strategy") or "tensor"), weights.get("group_size")
    inputs = kind_of_inputs(group.get("input_activations"))
    told = (
        f"{form} of {kind} {bits} bits, a scale a {strategy}"
        + (f" of {size}" if size and strategy not in ("channel", "tensor") else "")
        + f", inputs {inputs}"
    )
    if weights.get("dynamic"):
        return f"{told}: weights with scales found at run time"
    for line in lines_for(view, SCHEMES):
        if (
            form in line.formats
            and kind == line.type
            and bits in line.bits
            and strategy in line.strategies
            and inputs in line.inputs
            and (not line.group_sizes or size in line.group_sizes)
        ):
            if experts and not line.experts:
                return f"{told}: for dense modules alone, and there are experts"
            return ""
    return f"{told}: is not known to be loaded"


def _targets(subject: Subject, view: View) -> Iterator[Fault]:
    """Class names are no targets for TensorRT-LLM where there are several groups."""
    groups = groups_of(subject.said)
    if len(groups) < 2:
        return
    names = [one.name for one in subject.linear]
    for name, group in groups.items():
        for target in group.get("targets") or ():
            if not any(means(str(target), n) for n in names):
                yield Fault(module=f"{_CONFIG}: {name}", text=f"target {target!r} names no module")


def _packed(subject: Subject, view: View) -> Iterator[Fault]:
    """Codes lie under the name that the format says."""
    whole = str(subject.said.get("format", ""))
    for one in subject.coded():
        group = targeted(subject.said, one) or {}
        form = str(group.get("format") or whole)
        packed = "pack-quantized" in form
        if form and packed != ("weight_packed" in one.tensors):
            has = "weight_packed" if "weight_packed" in one.tensors else "weight"
            yield Fault(module=one.name, text=f"has {has}, and the format is {form}")


def _parts(subject: Subject, view: View) -> Iterator[Fault]:
    for one in subject.coded():
        group = targeted(subject.said, one) or {}
        inputs = group.get("input_activations")
        static = isinstance(inputs, dict) and inputs.get("dynamic") in (False, None)
        needed = ["weight_scale"]
        if one.algo in ("NVFP4", "W4A16_NVFP4"):
            needed.append("weight_global_scale")
            if isinstance(inputs, dict):
                needed.append("input_global_scale")
        elif static:
            needed.append("input_scale")
        if "weight_packed" in one.tensors and one.tensors["weight_packed"].dtype == "int32":
            needed.append("weight_shape")
        if lacks := [n for n in needed if n not in one.tensors]:
            yield Fault(module=one.name, text=f"{', '.join(lacks)} is missing")


def _fp8(subject: Subject, view: View) -> Iterator[Fault]:
    block, inputs = subject.said.get("weight_block_size"), subject.said.get("activation_scheme")
    if inputs not in ("static", "dynamic"):
        if view.engine != "trtllm" or not block:
            yield Fault(module=_CONFIG, text=f"activation_scheme is {inputs!r}")
        return
    if block is not None and (not isinstance(block, list) or len(block) != 2):
        yield Fault(module=_CONFIG, text=f"weight_block_size is {block!r}")
    elif block and inputs != "dynamic" and view.engine != "trtllm":
        yield Fault(module=_CONFIG, text="blocks of weights, and activation_scheme is static")
    elif view.engine == "trtllm" and block and block != [128, 128]:
        yield Fault(module=_CONFIG, text=f"weight_block_size is {block}, not [128, 128]")
    elif view.engine == "trtllm" and not block and inputs == "dynamic":
        yield Fault(
            module=_CONFIG,
            text="a scale a tensor, and inputs scaled as they come: nothing is read of it",
        )


def _fp8_scales(subject: Subject, view: View) -> Iterator[Fault]:
    block = subject.said.get("weight_block_size")
    inputs = subject.said.get("activation_scheme")
    name = "weight_scale_inv" if block else "weight_scale"
    for one in subject.coded():
        scale = one.tensors.get(name)
        if scale is None:
            yield Fault(module=one.name, text=f"{name} is missing")
            continue
        if inputs == "static" and "input_scale" not in one.tensors:
            yield Fault(module=one.name, text="input_scale is missing")
        if isinstance(block, list) and len(block) == 2:
            want = tuple(-(-n // b) for n, b in zip(one.shape, block, strict=True))
            if scale.shape != want:
                text = f"{name} is {list(scale.shape)}, not {list(want)}"
                yield Fault(module=one.name, text=text)
        elif scale.shape not in ((), (1,)):
            yield Fault(module=one.name, text=f"{name} is {list(scale.shape)}, not one number")


_COMPRESSED = ("compressed-tensors",)
_SOURCES = {
    "vllm": at.VLLM_COMPRESSED,
    "sglang": at.SGLANG_COMPRESSED,
    "trtllm": at.TRTLLM_COMPRESSED,
}
_FP8_SOURCES = {"vllm": at.VLLM_FP8, "sglang": at.SGLANG_FP8, "trtllm": at.TRTLLM_CONFIG}

RULES = (
    Rule(
        id="scheme",
        forms=_COMPRESSED,
        sources=_SOURCES,
        meaning="the loader finds no scheme for it, and stops",
        hint="megtool's documentation lists the schemes that each engine loads",
        check=_scheme,
    ),
    Rule(
        id="targets",
        forms=_COMPRESSED,
        sources={"trtllm": at.TRTLLM_COMPRESSED},
        meaning="the loader stops at targets that it finds no module for",
        hint="name modules, or give a re: pattern",
        check=_targets,
    ),
    Rule(
        id="packed",
        forms=_COMPRESSED,
        sources=dict.fromkeys(("vllm", "sglang", "trtllm"), at.COMPRESSED_FORMATS),
        meaning="the loader looks for codes under another name",
        hint="say the format that the tensors have",
        check=_packed,
    ),
    Rule(
        id="parts",
        forms=_COMPRESSED,
        sources=_SOURCES,
        meaning="the engine goes on with numbers that no file gives",
        hint="export it again: every quantized module needs its scales",
        check=_parts,
    ),
    Rule(
        id="fp8-config",
        forms=("fp8",),
        sources=_FP8_SOURCES,
        meaning="the loader stops, or leaves modules unquantized that hold codes",
        hint="blocks of 128 x 128 with activation_scheme dynamic are loaded by all three",
        check=_fp8,
    ),
    Rule(
        id="fp8-scales",
        forms=("fp8",),
        sources=_FP8_SOURCES,
        meaning="the engine goes on with scales that no file gives",
        hint="export it again",
        check=_fp8_scales,
    ),
)
