"""What published measurements say of formats, with their sources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatAdvice:
    """What is known of the formats `algos`, and where it was measured."""

    algos: tuple[str, ...]
    text: str
    source: str


_SIXTEEN_BIT_PRODUCTS = ("W4A16_NVFP4", "W4A16_AWQ", "W8A16")

ADVICE = (
    FormatAdvice(
        algos=("W4A16_NVFP4", "W4A16_AWQ"),
        text="weights of four bits with inputs of sixteen save memory, not always time: W4A16 was "
        "slower than BF16 in 10 of 12 measured shapes",
        source="https://github.com/NVIDIA/Model-Optimizer/issues/2411",
    ),
    FormatAdvice(
        algos=_SIXTEEN_BIT_PRODUCTS,
        text="products are computed in 16 bits, so only what waits for memory gets faster (few "
        "sequences at a time); long prompts and large batches do with fp8 or nvfp4",
        source="https://github.com/vllm-project/llm-compressor/issues/2793",
    ),
)


def find_advice(algos: Iterable[str]) -> list[str]:
    """A sentence with its source for each row that concerns one of the formats."""
    present = set(algos)
    return [f"{a.text} ({a.source})" for a in ADVICE if present & set(a.algos)]
