"""Value rules: scales that would stand for numbers that no model has, or are unlike their likes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megtool.lint import citations as at
from megtool.lint.context import Linear, Subject
from megtool.lint.rules import Fault, Rule, View
from megtool.quant.verification.scale_checks import apart_from_layers, without_numbers
from megtool.quant.verification.stored_folder import Numbers
from megtool.tensors.box import numel

MOST_OF_WEIGHTS = 2688.0
"""The largest weight that is believed; those of trained models are below some tens. It is also
where NVFP4's divisor (2688 over the largest weight) comes to 1: one that is smaller is most likely
a scale that was not inverted, as ModelOpt has it."""

MOST_OF_INPUTS = 65504.0
"""The largest input that is believed: the largest number of float16. A few elements of models'
inputs come to some thousands."""

LEAST = 1e-9
"""What the largest weight or input of a matrix that is used lies above."""

_LARGEST: Mapping[str, float] = {
    "FP8": 448.0,
    "W8A8_SQ_PER_CHANNEL": 127.0,
    "W4A8_AWQ": 448.0,
    "NVFP4": 2688.0,
    "W4A16_NVFP4": 2688.0,
    "W4A8_NVFP4_FP8": 2688.0,
}
"""What a scale is multiplied by to give the largest number it was made for."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A single scale: the formats whose whole range it stands for, and whether of inputs."""

    algos: tuple[str, ...]
    inputs: bool
    divides: bool = False


_NV = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
_KINDS: Mapping[str, _Kind] = {
    "weight_scale": _Kind(("FP8",), inputs=False),
    "weight_scale_2": _Kind(_NV, inputs=False),
    "weight_global_scale": _Kind(_NV, inputs=False, divides=True),
    "input_scale": _Kind(("FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ", "NVFP4"), inputs=True),
    "input_global_scale": _Kind(_NV, inputs=True, divides=True),
}


def _believable(subject: Subject, view: View) -> Iterator[Fault]:
    for one in subject.coded():
        for last, kind in _KINDS.items():
            t = one.tensors.get(last)
            if t is None or one.algo not in kind.algos or numel(t.shape) != 1:
                continue
            value = subject.numbers(t).first
            if not 0 < value < float("inf"):
                continue  # told as what it is
            most = MOST_OF_INPUTS if kind.inputs else MOST_OF_WEIGHTS
            made = _LARGEST[one.algo] / value if kind.divides else _LARGEST[one.algo] * value
            if not LEAST <= made <= most:
                what = "inputs" if kind.inputs else "weights"
                yield Fault(
                    module=one.name,
                    text=f"{last} is {value:.3g}, that of {what} up to {made:.3g}",
                )


def _alike(subject: Subject, view: View) -> Iterator[Fault]:
    """Single scales against those of the same module in other layers and experts."""
    some: dict[tuple[str, str], list[tuple[str, Numbers]]] = defaultdict(list)
    for one, last in _singles(subject):
        numbers = subject.numbers(one.tensors[last])
        if numbers.largest:
            some[without_numbers(one.name), last].append((one.name, numbers))
    for (_, last), found in some.items():
        for told in apart_from_layers(last, found):
            yield Fault(module=told.module, text=told.text)


def _singles(subject: Subject) -> Iterator[tuple[Linear, str]]:
    for one in subject.coded():
        for last in _KINDS:
            if last in one.tensors and numel(one.tensors[last].shape) == 1:
                yield one, last


_SOURCES = {"vllm": at.VLLM_MODELOPT, "sglang": at.SGLANG_MODELOPT, "trtllm": at.TRTLLM_LINEAR}

RULES = (
    Rule(
        id="scale-range",
        severity="warning",
        sources=_SOURCES,
        meaning="the scale is another's, or upside down (compressed-tensors divides by its global "
        "scales, ModelOpt multiplies), and outputs are wrong",
        hint="hold the folder against its source: megtool verify",
        check=_believable,
    ),
    Rule(
        id="scale-outlier",
        severity="warning",
        sources=_SOURCES,
        meaning="calibration saw something else here, or the value is damaged",
        hint="calibrate again, or hold the folder against its source: megtool verify",
        check=_alike,
    ),
)
