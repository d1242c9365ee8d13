"""Model rules: whether all weights of the model are there, of the sizes that config.json says."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from megtool.lint import citations as at
from megtool.lint.context import Subject, shards_of
from megtool.lint.rules import Fault, Rule, View

_LAYER = re.compile(r"(?P<stack>.*\blayers)\.(?P<number>\d+)\.(?P<rest>.+)")


def _missing(subject: Subject, view: View) -> Iterator[Fault]:
    if subject.model is None:
        yield from _guessed(subject)
        return
    for name in subject.model.missing:
        yield Fault(module=name, text="is in no file, and the model has it")


def _guessed(subject: Subject) -> Iterator[Fault]:
    """Of models that no family is known of: what most other layers have."""
    layers: dict[str, set[int]] = defaultdict(set)
    parts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in subject.linear:
        if (found := _LAYER.fullmatch(one.name)) is not None:
            layers[found["stack"]].add(int(found["number"]))
            if one.unit != one.name and one.expert is None:
                parts[_anywhere(one.unit)][one.last] += 1
    for unit, modules in subject.units().items():
        shards = shards_of(unit)
        if not shards or modules[0].expert is not None:
            continue
        common = parts[_anywhere(unit)]
        mine = {m.last for m in modules}
        for last, count in common.items():
            if last not in mine and 2 * count > max(common.values()):
                yield Fault(
                    module=f"{unit.rpartition('.')[0]}.{last}",
                    text=f"is in no file, and {', '.join(sorted(mine))} beside it are",
                    severity="warning",
                )
    said = subject.config.get("num_hidden_layers")
    stacks = [numbers for numbers in layers.values() if 0 in numbers]
    if type(said) is int and stacks and (most := max(len(s) for s in stacks)) < said:
        text = f"num_hidden_layers is {said}, and {most} are in the files"
        yield Fault(module="config.json", text=text, severity="warning")


def _anywhere(unit: str) -> str:
    found = _LAYER.fullmatch(unit)
    return found["rest"] if found is not None else unit


def _sizes(subject: Subject, view: View) -> Iterator[Fault]:
    for name, text in subject.model.wrong if subject.model is not None else ():
        yield Fault(module=name, text=text)


def _unknown(subject: Subject, view: View) -> Iterator[Fault]:
    for name in subject.model.unknown if subject.model is not None else ():
        yield Fault(module=name, text="is not known of models of this architecture")


_SOURCES = {"vllm": at.VLLM_LOADING, "sglang": at.SGLANG_LOADING, "trtllm": at.TRTLLM_LINEAR}

RULES = (
    Rule(
        id="tensors-missing",
        sources=_SOURCES,
        meaning="engines stop, or go on with whatever memory holds (quantized models are not "
        "checked for what was not loaded)",
        hint="export the model again, whole",
        check=_missing,
    ),
    Rule(
        id="sizes-said",
        sources=_SOURCES,
        meaning="engines build the model by config.json, and stop at tensors of other sizes",
        hint="config.json must be that of the model that was quantized",
        check=_sizes,
    ),
    Rule(
        id="tensors-unknown",
        severity="warning",
        sources=_SOURCES,
        meaning="loaders stop at names that they have no place for, or leave them out",
        hint="leave the tensor out, if the engine does not know it",
        check=_unknown,
    ),
)
