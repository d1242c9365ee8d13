"""The commands by which TensorRT-LLM builds, or serves, what an export wrote."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def engine_build_command(checkpoint: Path, *, world_size: int) -> list[str]:
    """`trtllm-build` (TensorRT-LLM up to 1.x) for a legacy checkpoint of `world_size` ranks.

    Engines are built by as many workers as there are ranks, beside the checkpoint. Options are
    those of `tensorrt_llm/commands/build.py` and `PluginConfig`.
    """
    out = checkpoint.with_name(f"{checkpoint.name}-engine")
    command = ["trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(out)]
    command += ["--gemm_plugin", "auto"]
    return command if world_size == 1 else [*command, "--workers", str(world_size)]


def engine_serve_command(folder: Path) -> list[str]:
    """`trtllm-serve` for a Hugging Face folder; see `tensorrt_llm/commands/serve.py`."""
    return ["trtllm-serve", str(folder), "--backend", "pytorch"]


def llm_arguments(folder: Path) -> dict[str, str | int]:
    """What `tensorrt_llm.LLM` takes for a Hugging Face folder (its `LlmArgs`)."""
    return {"model": str(folder), "tensor_parallel_size": 1}


def describe_build(checkpoint: Path, *, world_size: int) -> str:
    """A note of a report: how an engine is built."""
    return "an engine is built by: " + _join(
        engine_build_command(checkpoint, world_size=world_size)
    )


def describe_serving(folder: Path) -> str:
    """A note of a report: how the folder is served, and loaded in Python."""
    given = ", ".join(f"{k}={v!r}" for k, v in llm_arguments(folder).items())
    return f"it is served by: {_join(engine_serve_command(folder))}; in Python: LLM({given})"


def _join(command: Sequence[str]) -> str:
    return shlex.join(command)
