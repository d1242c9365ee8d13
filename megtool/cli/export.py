"""The verb `export`: options and help only; it calls its function in `commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from megtool.cli.options import (
    DryRun,
    Dtype,
    Family,
    Fsync,
    Iteration,
    Json,
    Like,
    MaxShardSize,
    Memory,
    Overwrite,
    Quiet,
    Source,
    Threads,
    Verbose,
    engine_option,
    layout,
    output,
    place,
)
from megtool.cli.runner import Report, apart, run
from megtool.console import Progress

Form = Annotated[
    Literal[
        "hf",
        "unified",
        "vllm",
        "sglang",
        "trtllm",
        "compressed-tensors",
        "trtllm-legacy",
        "gguf",
    ],
    output(
        "hf: plain weights; unified, vllm, sglang, trtllm: ModelOpt's codes and scales; "
        "compressed-tensors: llm-compressor's; trtllm-legacy: TensorRT-LLM up to 1.x; gguf: "
        "llama.cpp.",
        "--to",
        metavar="FORM",
    ),
]
Target = Annotated[str | None, engine_option("Output")]
Tp = Annotated[int | None, layout("Tensor-parallel ranks, for trtllm-legacy.", "--tp")]
Pp = Annotated[int | None, layout("Pipeline-parallel ranks, for trtllm-legacy.", "--pp")]
Kind = Annotated[
    str | None,
    output(
        "Number format of a GGUF file: bf16, f16, f32, q8_0, q4_0 and what else the gguf package "
        "encodes; default: bf16.",
        "--kind",
        metavar="KIND",
    ),
]


def _export(
    source: Source,
    destination: Annotated[
        Path, place("The folder (or GGUF file) to write; it appears when complete.", "DST")
    ],
    to: Form,
    target: Target = None,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    tp: Tp = None,
    pp: Pp = None,
    kind: Kind = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    threads: Threads = None,
    memory: Memory = "256MiB",
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
) -> int:
    """Write a checkpoint as the files that an engine loads, quantized or not.

    Codes and scales go over as they are, packed as the form packs them. No GPU, no framework, and
    little memory; an interrupted run resumes when the same command is given again.

    Example: megtool export ./SmolLM2-fp8 ./out --to compressed-tensors --target vllm
    """
    given, manners = apart(locals())

    def work(progress: Progress) -> Report:
        from megtool.commands.export import export

        return export(**given, progress=progress)

    return run(work, resumes=True, **manners)
