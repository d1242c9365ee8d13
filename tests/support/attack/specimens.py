"""One small model in every format that megtool writes, made by its own commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.attack.child import run
from tests.support.models import tiny_llama, tiny_tokenizer
from tests.support.paths import ROOT
from tests.support.shared_folder import shared_folder

TEXT = "the model reads a text and writes it again while the tokens of every word are counted "
TRAIN = ["--seq-length=32", "--global-batch-size=2", "--lr=1e-3", "--threads=1", "-q"]

COMMANDS: dict[str, tuple[str, ...]] = {
    "hf": ("reshard", "source", "--to=hf", "--max-shard-size=40KB"),
    "safetensors": ("reshard", "source", "--to=safetensors"),
    "dcp": ("reshard", "source", "--to=dcp", "--dp=2"),
    "torch_checkpointing": ("reshard", "source", "--to=torch_checkpointing", "--dp=2"),
    "torch_dist": ("reshard", "source", "--to=torch_dist", "--tp=2"),
    "megatron": ("reshard", "source", "--to=megatron", "--tp=2", "--pp=2"),
    "zarr": ("reshard", "source", "--to=zarr"),
    "tensorstore": ("reshard", "source", "--to=tensorstore", "--compress=zstd"),
    "ocdbt": ("reshard", "source", "--to=ocdbt"),
    "fp8": ("quantize", "source", "--recipe=fp8_per_channel"),
    "nvfp4": ("quantize", "source", "--recipe=w4a16_nvfp4"),
    "fp8_block128": ("quantize", "source", "--recipe=fp8_block128"),
    "vllm": ("export", "fp8", "--to=vllm"),
    "compressed": ("export", "fp8", "--to=compressed-tensors"),
    "fp8-blocks": ("export", "fp8_block128", "--to=fp8-blocks"),
    "trtllm": ("export", "source", "--to=trtllm-legacy"),
    "gguf": ("export", "source", "--to=gguf", "--outtype=q8_0"),
    "trained": ("finetune", "source", "--train-iters=2", *TRAIN),
    "adapters": ("finetune", "source", "--train-iters=2", "--lora-rank=4", *TRAIN),
    "buckets": (
        "reshard",
        "trained",
        "--to=torch_dist",
        "--optimizer-format=dp_reshardable",
        "--dp=2",
    ),
    "legacy": ("reshard", "trained", "--to=megatron", "--tp=2"),
}
"""How each is made: verb, source and options."""

SINGLE_FILES = {"safetensors": "model.safetensors", "gguf": "model.gguf"}


def save_source(root: Path) -> Path:
    """A Hugging Face folder with all its small files, and a text to train on."""
    source = tiny_llama.save(
        root / "source", vocab_size=320, num_hidden_layers=2, hidden_size=64, head_dim=16
    )
    tiny_tokenizer.save(source)
    rows = [{"text": f"{n} {TEXT * (1 + n % 3)}"} for n in range(8)]
    (root / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return source


def path_of(root: Path, name: str) -> Path:
    """Where a specimen is."""
    return root / SINGLE_FILES.get(name, name)


def command(root: Path, name: str, destination: Path | None = None) -> list[object]:
    """The command that makes a specimen, at its own place or another."""
    verb, source, *options = COMMANDS[name]
    if verb == "finetune":
        options.append(f"--data={root / 'text.jsonl'}")
    return [verb, path_of(root, source), destination or path_of(root, name), *options, "--no-fsync"]


def make(root: Path, names: tuple[str, ...] = tuple(COMMANDS)) -> dict[str, Path]:
    """The source, and a specimen of each name, in the order of `COMMANDS`.

    Raises:
        RuntimeError: a command failed.
    """
    if not (root / "source").exists():
        save_source(root)
    needed = set(names)
    for name in reversed(COMMANDS):
        if name in needed:
            needed.add(COMMANDS[name][1])
    for name in COMMANDS:
        if name in needed and not path_of(root, name).exists():
            done = run(command(root, name))
            if done.status != 0:
                raise RuntimeError(f"{name}: status {done.status}: {done.err[-2000:]}")
    return {name: path_of(root, name) for name in names}


def shared_specimens(factory: pytest.TempPathFactory) -> Path:
    """The folder of all specimens, made once in a run of the tests: none may change them.

    They are made in a process of its own: libraries that ran in this one do not survive its fork.
    """
    code = (
        "import sys; from pathlib import Path; from tests.support.attack import specimens; "
        "specimens.make(Path(sys.argv[1]))"
    )

    def fill(folder: Path) -> None:
        subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True)

    return shared_folder(factory, "specimens", fill)
