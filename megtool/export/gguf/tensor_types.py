"""Choose the GGUF type of each tensor, as llama.cpp does."""

from __future__ import annotations

from collections.abc import Sequence

from megtool.errors import UsageError
from megtool.number_formats.gguf import block, encodings

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that are plain elements, by torch's name."""

_ENDS = ("token_embd.weight", "output.weight")
_FINER = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
_TERNARY = ("TQ1_0", "TQ2_0")


def parse_tensor_type(text: str) -> str:
    """GGUF's name of the type asked for.

    Raises:
        UsageError: there is none, or the installed package does not encode it.
        MissingPackageError: the gguf package is not installed.
    """
    name = text.upper()
    if name not in encodings():
        raise UsageError(
            f"--outtype is {text!r}, which is no type that the gguf package encodes",
            hint="one of " + ", ".join(k.lower() for k in encodings()),
        )
    return name


def choose_tensor_type(name: str, shape: Sequence[int], kind: str, *, tied: bool) -> str:
    """The type of one tensor of a file of this kind, where blocks divide its rows.

    Vectors, norms and routers are F32. The output matrix (the embedding, where it serves as such)
    is Q8_0 in files of four and five bits: llama.cpp makes it Q6_K, which its package cannot
    encode. Ternary files have both ends in F16, and MXFP4 is for experts alone, beside Q8_0.
    """
    if len(shape) < 2 or "_norm." in name or not name.endswith(".weight") or "ffn_gate_inp" in name:
        return "F32"
    if kind in PLAIN:
        return kind
    if kind in _TERNARY and name in _ENDS:
        return "F16"
    if kind in _FINER and name == _ENDS[not tied]:
        return "Q8_0"
    if kind == "MXFP4" and "_exps." not in name:
        return "Q8_0"
    return kind


def has_whole_blocks(kind: str, shape: Sequence[int]) -> bool:
    """Whether rows of a tensor are whole blocks."""
    return kind in PLAIN or shape[-1] % block(kind)[0] == 0
