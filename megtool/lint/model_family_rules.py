"""Family rules: gpt-oss's blocks of MXFP4, and the heads that engines turn in Llama 4."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.lint import citations as at
from megtool.lint.context import Subject
from megtool.lint.rules import Fault, Rule, View
from megtool.quant.recipes.engine_models import (
    ROTARY_HINT,
    ROTARY_SOURCES,
    rotary_fault,
    turns_rows,
)

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # under one scale


def _blocks(subject: Subject, view: View) -> Iterator[Fault]:
    """Codes and scales of experts come in pairs, and no expert is there in another form."""
    tensors = subject.folder.tensors
    held = {n.removesuffix(_BLOCKS): t for n, t in tensors.items() if n.endswith(_BLOCKS)}
    if not held:
        yield Fault(module="config.json", text="says mxfp4, and no tensor is called ..._blocks")
    for base, codes in held.items():
        scales = tensors.get(base + _SCALES)
        if scales is None:
            yield Fault(module=base, text=f"has no {_SCALES[1:]}")
        elif (codes.dtype, scales.dtype) != ("uint8", "uint8"):
            yield Fault(module=base, text=f"is {codes.dtype} with scales of {scales.dtype}")
        elif codes.shape != (*scales.shape, _BYTES):
            text = f"has blocks {list(codes.shape)} and scales {list(scales.shape)}"
            yield Fault(module=base, text=text)
    for t in subject.stacked:
        if not t.name.endswith((_BLOCKS, _SCALES)):
            yield Fault(module=t.name, text="are experts that are no blocks")
    for one in subject.coded():
        yield Fault(module=one.name, text=f"holds codes ({one.algo}), and is no expert in blocks")


def _rotary(subject: Subject, view: View) -> Iterator[Fault]:
    """Rows of q and k change places while they are loaded: their scales have to go with them."""
    named = (subject.folder.config or {}).get("architectures") or [""]
    if not turns_rows(view.target, str(named[0])):
        return
    for one in subject.coded():
        if one.last in ("q_proj", "k_proj") and (text := rotary_fault(view.target, one.algo)):
            yield Fault(module=one.name, text=f"({one.algo}) {text}")


RULES = (
    Rule(
        id="blocks",
        forms=("mxfp4",),
        sources={"vllm": at.VLLM_MXFP4, "sglang": at.SGLANG_MXFP4, "trtllm": at.TRTLLM_CONFIG},
        meaning="the loader stops, or multiplies by what it finds in memory",
        hint="quantize with the recipe mxfp4_experts",
        check=_blocks,
    ),
    Rule(
        id="llama4-rotary",
        forms=("modelopt", "compressed-tensors", "fp8"),
        sources=ROTARY_SOURCES,
        meaning="queries and keys get the scales of other rows: the output is wrong",
        hint=ROTARY_HINT,
        check=_rotary,
    ),
)
