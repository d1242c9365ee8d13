"""How long an export takes, as a multiple of `cp` of the bytes that are read.

python examples/benchmarks/export_speed.py [--gib 1] [--dir DIR] [--rounds 3] [--source NAME]...

Sources: a Hugging Face folder of bfloat16 weights, the same as a Megatron checkpoint of four ranks,
and quantized folders made of it by shipped recipes. Each is written in every form it has, by two
threads.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.race import Entrant, Result, race, run_job
from bench.synthetic import llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

from megtool import reshard

PLAIN, CODED = 1.1, 3.0
"""Limits: of weights that stay as they are, and of quantized ones."""

Form = tuple[str, Mapping[str, Any], float | None]
LEGACY = {"to": "trtllm-legacy", "tp": 2}
SOURCES: Mapping[str, tuple[Form, ...]] = {
    "hf": (
        ("hf", {"to": "hf"}, PLAIN),
        ("vllm", {"to": "vllm"}, PLAIN),
        ("trtllm-legacy, TP=2", LEGACY, None),
        ("gguf, BF16", {"to": "gguf", "kind": "bf16"}, None),
        ("gguf, Q8_0", {"to": "gguf", "kind": "q8_0"}, None),
        ("gguf, Q4_0", {"to": "gguf", "kind": "q4_0"}, None),
    ),
    "torch_dist TP=2 PP=2": (("hf", {"to": "hf"}, PLAIN),),
    "fp8": (
        ("vllm", {"to": "vllm"}, CODED),
        ("compressed-tensors", {"to": "compressed-tensors"}, CODED),
        ("trtllm-legacy, TP=2", LEGACY, CODED),
        ("hf, dequantized", {"to": "hf"}, None),
    ),
    "int4_weight_only": (
        ("trtllm", {"to": "trtllm"}, CODED),
        ("compressed-tensors", {"to": "compressed-tensors"}, None),
        ("hf, dequantized", {"to": "hf"}, None),
    ),
    "w4a16_nvfp4": (
        ("unified", {"to": "unified"}, CODED),
        ("compressed-tensors", {"to": "compressed-tensors"}, CODED),
        ("hf, dequantized", {"to": "hf"}, None),
    ),
}
NOTE = (
    "bfloat16 Llama of normal numbers, files in the page cache, no fsync on either side; cp is "
    "`cp -r --reflink=never` of the source around each run. `s` is of `export()` in a fresh "
    "process, its imports included; memory is anonymous, of the whole process. Dequantizing writes "
    "two to four times the bytes that are read, and repacking INT4 moves every code."
)


def prepared(name: str, plain: Path, root: Path) -> Path:
    """The source called `name`, made of the plain one."""
    if name == "hf":
        return plain
    place = root / "source"
    if name.startswith("torch_dist"):
        reshard(plain, place, to="torch_dist", tp=2, pp=2, fsync=False)
    else:
        options = {"source": str(plain), "destination": str(place), "recipe": name, "threads": 2}
        run_job("quantize", options)
    return place


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes: GGUF holds one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def measure(given: argparse.Namespace, root: Path) -> None:
    """All forms of all sources."""
    made = llama(root / "plain", given.gib, finite=True)
    add_tokenizer(made.folder)
    head = ("source", "MiB read", "form", "s", "fastest cp s", "x fastest cp", "limit")
    table = Table(title="Export, two threads", head=(*head, "x cp around it", "memory MiB"))
    for name in given.source or list(SOURCES):
        source = prepared(name, made.folder, root)
        size = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
        entrants = [
            Entrant(
                name=form,
                kind="export",
                options={**options, "threads": 2},
                ideal_bytes=2 * size,
                limit=limit,
            )
            for form, options, limit in SOURCES[name]
        ]
        for result in race(entrants, source, root / "scratch", rounds=given.rounds, fsync=False):
            add(table, name, size, result)
        if source != made.folder:
            shutil.rmtree(source)
        show(given, root, [table], NOTE)


def add(table: Table, source: str, num_bytes: int, result: Result) -> None:
    """A row."""
    table.add(
        source,
        mib(num_bytes),
        result.entrant.name,
        f"{min(result.seconds):.2f}",
        f"{result.copy_least:.2f}",
        times(result.least),
        verdict(result.least, result.entrant.limit),
        times(result.median),
        mib(result.peak_bytes),
        source=source,
        num_bytes=num_bytes,
        **result.figures,
    )


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=1)
    options.add_argument("--source", action="append", choices=list(SOURCES), help="repeatable")
    given = options.parse_args()
    with workplace(given) as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
