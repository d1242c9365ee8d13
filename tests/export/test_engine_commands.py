"""The commands that a report names are those that TensorRT-LLM's parsers take.

Its packages cannot be installed here; the tables are the options of the sources that they name.
"""

from __future__ import annotations

import argparse
import ast
import shlex
from pathlib import Path

import pytest

from megtool import export
from megtool.export.engine_commands import (
    engine_build_command,
    engine_serve_command,
    llm_arguments,
)
from tests.support.models import gguf_models, trtllm_families
from tests.support.runs.exports import export_trtllm_legacy

BUILD = {
    # tensorrt_llm/commands/build.py at 008b2b8d, and cli_plugin_args of tensorrt_llm/plugin
    "--checkpoint_dir": {"type": str},
    "--output_dir": {"type": str},
    "--workers": {"type": int},
    "--gemm_plugin": {
        "choices": ["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"]
    },
    "--max_batch_size": {"type": int},
    "--max_seq_len": {"type": int},
}
SERVE = {
    # tensorrt_llm/commands/serve.py at 00209af1
    "--backend": {"choices": ["pytorch", "tensorrt", "_autodeploy"]},
    "--tensor_parallel_size": {"type": int},
    "--max_seq_len": {"type": int},
}
LLM_ARGUMENTS = {"model", "tokenizer", "tensor_parallel_size", "pipeline_parallel_size", "dtype"}
"""Names of `BaseLlmArgs` (tensorrt_llm/llmapi/llm_args.py)."""


def _parse(options: dict[str, dict[str, object]], words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name, how in options.items():
        parser.add_argument(name, **how)
    return parser.parse_args(words)


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_engine_builder_takes_its_command(world_size: int) -> None:
    program, *words = engine_build_command(Path("/x/llama legacy"), world_size=world_size)
    assert program == "trtllm-build"
    given = _parse(BUILD, words)
    assert given.checkpoint_dir == "/x/llama legacy"
    assert given.output_dir == "/x/llama legacy-engine"
    assert given.workers == (None if world_size == 1 else world_size)


def test_the_server_takes_its_command() -> None:
    program, folder, *words = engine_serve_command(Path("/x/llama"))
    assert (program, folder) == ("trtllm-serve", "/x/llama")
    assert _parse(SERVE, words).backend == "pytorch"
    assert set(llm_arguments(Path("/x"))) <= LLM_ARGUMENTS


@pytest.mark.parametrize("family", ["llama", *trtllm_families.CASES])
def test_reports_name_them(tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers")
    save = gguf_models.save if family == "llama" else trtllm_families.save
    source = save(tmp_path / "hf", family)
    legacy = export_trtllm_legacy(source, tmp_path / "legacy", tp=2)
    note = next(n for n in legacy.notes if "trtllm-build" in n)
    words = shlex.split(note.partition(": ")[2])
    given = _parse(BUILD, words[1:])
    assert given.workers == 2
    assert Path(given.checkpoint_dir) == tmp_path / "legacy"
    unified = export(source, tmp_path / "unified", to="trtllm")
    note = next(n for n in unified.notes if "trtllm-serve" in n)
    served, _, python = note.partition(": ")[2].partition("; in Python: ")
    program, folder, *words = shlex.split(served)
    assert (program, Path(folder)) == ("trtllm-serve", tmp_path / "unified")
    assert _parse(SERVE, words).backend == "pytorch"
    [call] = ast.parse(python).body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert {k.arg for k in call.value.keywords} <= LLM_ARGUMENTS
    other = export(source, tmp_path / "other", to="vllm")
    assert not any("trtllm-serve" in n for n in other.notes)
