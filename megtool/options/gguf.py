"""What a GGUF file is: the types of its weights, and how its tokenizer splits text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megtool.options.field import Options, option
from megtool.options.groups import INPUT, OUTPUT


@dataclass(frozen=True, kw_only=True)
class GgufForm(Options):
    """The types of weights in a GGUF file, and what else it is to be."""

    outtype: str | None = option(
        OUTPUT,
        "Number format of a GGUF file: bf16, f16, f32, q8_0, q4_0, ... or a mixture of K-quants "
        "(q4_k_m, q5_k_m, q6_k, ...) by llama.cpp's rules; nvfp4 keeps codes and scales of a SRC "
        "that is quantized so; default: bf16.",
        metavar="TYPE",
    )
    imatrix: Path | None = option(
        INPUT,
        "Weigh the errors of a weight's columns by an importance matrix: a calibration file of "
        "this model (megtool quantize --calibrate-only), or an imatrix file of llama.cpp.",
        metavar="FILE",
    )
    save_imatrix: Path | None = option(
        OUTPUT,
        "Also write the importance matrix as a file for llama.cpp's own quantizer.",
        metavar="FILE",
        is_written=True,
    )
    pre_tokenizer: str | None = option(
        OUTPUT,
        "llama.cpp's name for how the tokenizer splits text (its LLAMA_VOCAB_PRE); default: found "
        "in tokenizer.json.",
        metavar="NAME",
    )
