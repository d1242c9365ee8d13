"""Options of `megtool export` and `megtool lint`, and which have an effect together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megtool.options.execution import (
    WITHOUT_CHECKS,
    ExecutionOptions,
    LargeExecution,
)
from megtool.options.field import (
    REQUIRED,
    OptionCondition,
    argument,
    group,
    layout_size,
    option,
)
from megtool.options.gguf import GgufForm
from megtool.options.groups import (
    INPUT,
    OUTPUT,
    SOURCE,
    AdaptedSource,
    HtmlPage,
    RequiredEngine,
)

EXPORT_FORMATS = {
    "hf": "plain Hugging Face folder; quantized weights are decoded",
    "unified": "Hugging Face folder with ModelOpt's codes and scales",
    "vllm": "unified, as vLLM loads it",
    "sglang": "unified, as SGLang loads it",
    "trtllm": "unified, as TensorRT-LLM loads it",
    "compressed-tensors": "Hugging Face folder as llm-compressor writes it",
    "fp8-blocks": "Hugging Face folder in FP8 blocks of 128 x 128, as DeepSeek publishes it",
    "trtllm-legacy": "config.json and rankN.safetensors of TensorRT-LLM up to 1.x",
    "gguf": "one file for llama.cpp",
}
"""What `export` writes."""


def _formats(*names: str) -> OptionCondition:
    return OptionCondition(
        holds=lambda options, facts: options.to in names,
        reason="{has} no effect with this --to",
        hint=f"only with --to {', '.join(names)}",
    )


_FOLDERS = _formats(*(f for f in EXPORT_FORMATS if f not in ("gguf", "trtllm-legacy")))
_LEGACY = _formats("trtllm-legacy")
_GGUF = _formats("gguf")
_PLAIN = _formats("hf", "unified", "vllm", "trtllm", "sglang", "trtllm-legacy")
_NOT_CODED = OptionCondition(
    holds=lambda options, facts: not facts.is_repacked,
    reason="{has} no effect with --to {to} of a quantized folder",
    hint="its tensors keep their types, and its config.json stays; --to hf decodes it",
    on_facts=True,
)


@dataclass(frozen=True, kw_only=True)
class ExportFacts:
    """What `export` knows about its source: `is_repacked` if it is quantized and stays so."""

    to: str
    is_repacked: bool


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RequiredEngine):
    """Write a checkpoint as the files that an engine loads, quantized or not.

    Codes and scales are copied as they are, packed as the format packs them. Needs no GPU, no
    framework and little memory; an interrupted run resumes when the same command is given again.

    Example: megtool export ./SmolLM2-fp8 ./out --to compressed-tensors --target vllm
    """

    extra_needs: ClassVar = {
        _FOLDERS: ("target", "max_shard_size"),
        _NOT_CODED: ("iteration", "like"),
        _GGUF: ("outtype", "imatrix", "save_imatrix", "pre_tokenizer"),
    }
    not_offered: ClassVar = WITHOUT_CHECKS
    shown_after: ClassVar = {"target": "memory"}

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument(
        "The folder (or GGUF file) to write; it appears when complete.", "DST", is_written=True
    )
    to: Literal[
        "hf",
        "unified",
        "vllm",
        "sglang",
        "trtllm",
        "compressed-tensors",
        "fp8-blocks",
        "trtllm-legacy",
        "gguf",
    ] = option(
        OUTPUT,
        "hf: plain weights; unified, vllm, sglang, trtllm: ModelOpt's codes and scales; "
        "compressed-tensors: llm-compressor's; fp8-blocks: DeepSeek's; trtllm-legacy: "
        "TensorRT-LLM up to 1.x; gguf: llama.cpp.",
        REQUIRED,
        metavar="FORMAT",
    )
    tp: int | None = layout_size("tp", note=", for trtllm-legacy", needs=(_LEGACY,))
    pp: int | None = layout_size("pp", note=", for trtllm-legacy", needs=(_LEGACY,))
    ep: int | None = layout_size(
        "ep", note=", for trtllm-legacy; shares the ranks of --tp", needs=(_LEGACY,)
    )
    gguf: GgufForm = group(GgufForm)
    dtype: str | None = option(
        OUTPUT,
        "Cast weights that are not quantized (bfloat16, float16, float32, ...).",
        metavar="NAME",
        needs=(_PLAIN, _NOT_CODED),
    )
    max_shard_size: str | None = option(OUTPUT, "Largest file; default: 5GB.", metavar="SIZE")
    reading: AdaptedSource = group(AdaptedSource)
    execution: ExecutionOptions = group(LargeExecution)


@dataclass(frozen=True, kw_only=True)
class LintOptions(HtmlPage):
    """Check an exported folder against the rules of engines' loaders.

    Reads headers, config files and small scales. Exit status 7 if an engine would stop, or give
    wrong output.

    Example: megtool lint ./exported --target vllm --target trtllm@1.0.0 --tp 2
    """

    path: Path = argument("An exported Hugging Face folder.", "EXPORTED")
    target: tuple[str, ...] = option(
        INPUT,
        "vllm, trtllm or sglang, or ENGINE@VERSION; repeatable; default: all three.",
        (),
        metavar="ENGINE",
    )
    tp: int | None = layout_size("tp", note=" that it will run on")
