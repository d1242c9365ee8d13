"""Small files that claim or expand to gigabytes: refused in bounded time and memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import resource
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.attack import specimens
from tests.support.attack.child import run
from tests.support.attack.outcome import Outcome

CPU_SECONDS, MEMORY_BYTES = 20.0, 700 << 20
CHUNK_BYTES = 64 << 10
PART, REPEATS = b"\0" * (16 << 20), 256
DONE = "{% for a in range(1000000000) %}{% endfor %}"

TEMPLATES = {
    "repetition": "{{ 'a' * 4000000000 }}",
    "a list repeated": "{{ [1] * 2000000000 }}",
    "padding": "{{ '%4000000000d' % 1 }}",
    "format": "{{ '{:>4000000000}'.format(1) }}",
    "center": "{{ 'a' | center(4000000000) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "tojson": "{{ ('a' * 100000000) | list | tojson(indent=100000) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "a loop": DONE,
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}.{% endfor %}"
    "{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "doubling": "{% set ns = namespace(a='a') %}{% for i in range(60) %}"
    "{% set ns.a = ns.a ~ ns.a %}"
    "{% endfor %}{{ ns.a }}",
}


def zstd_frame(num_blocks: int, claimed: int | None = None) -> bytes:
    """A frame of blocks that each repeat one byte 128 Ki times."""
    header = b"\x00\x58" if claimed is None else b"\xc0\x58" + claimed.to_bytes(8, "little")
    block = (128 << 10) << 3 | 1 << 1
    last = num_blocks - 1
    blocks = [(block | (k == last)).to_bytes(3, "little") + b"\0" for k in range(num_blocks)]
    return b"\x28\xb5\x2f\xfd" + header + b"".join(blocks)


def _zlib() -> bytes:
    stream = zlib.compressobj(9)
    begin = stream.compress(b"") + stream.flush(zlib.Z_FULL_FLUSH)
    part = stream.compress(PART) + stream.flush(zlib.Z_FULL_FLUSH)
    return begin + part * REPEATS + stream.flush()


CHUNKS: dict[str, tuple[dict[str, Any], Callable[[], bytes]]] = {
    "gzip": ({"id": "gzip", "level": 1}, lambda: gzip.compress(PART) * REPEATS),
    "zlib": ({"id": "zlib", "level": 1}, _zlib),
    "bz2": ({"id": "bz2", "level": 1}, lambda: bz2.compress(PART) * REPEATS),
    "lzma": ({"id": "lzma"}, lambda: lzma.compress(PART) * REPEATS),
    "zstd": ({"id": "zstd", "level": 1}, lambda: zstd_frame(32768)),
    "zstd that claims 2**63": ({"id": "zstd", "level": 1}, lambda: zstd_frame(1, 1 << 63)),
    "a level that is a list": ({"id": "zstd", "level": [3]}, lambda: zstd_frame(1)),
    "a level of 2**70": ({"id": "gzip", "level": 1 << 70}, lambda: gzip.compress(PART)),
}


def _write_array(folder: Path, name: str) -> Path:
    codec, make = CHUNKS[name]
    folder.mkdir(parents=True)
    shape = [CHUNK_BYTES // 4]
    metadata = {"zarr_format": 2, "shape": shape, "chunks": shape, "order": "C"}
    metadata |= {"dtype": "<f4", "fill_value": 0, "compressor": codec, "filters": None}
    (folder / ".zarray").write_text(json.dumps(metadata))
    (folder / "0").write_bytes(make())
    return folder


def _header(path: Path, header: bytes, size: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header)
    return path


def _tensor(shape: list[int], begin: int, end: int) -> bytes:
    return json.dumps(
        {"a": {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}}
    ).encode()


def _zip(path: Path) -> Path:
    """A file of torch.save whose pickle is compressed zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("archive/data.pkl", "w", force_zip64=True) as member:
            for _ in range(64):
                member.write(PART)
        file.writestr("archive/version", "3\n")
    return path


FILES: dict[str, Callable[[Path], Path]] = {
    "safetensors with a header of 2**62": lambda p: _header(p / "a.safetensors", b"{}", 1 << 62),
    "safetensors nested": lambda p: _header(p / "a.safetensors", b"[" * 1_000_000),
    "safetensors of a petabyte": lambda p: _header(
        p / "a.safetensors", _tensor([1 << 48], 0, 1 << 50)
    ),
    "safetensors of 2**62 beside 0": lambda p: _header(
        p / "a.safetensors", _tensor([1 << 62, 0], 0, 0)
    ),
    "GGUF with 2**62 tensors": lambda p: _bytes(
        p / "a.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 1 << 62)
    ),
    "GGUF with a key of 2**62": lambda p: _bytes(
        p / "a.gguf", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62)
    ),
    "a compressed pickle of 1 GiB": lambda p: _zip(p / "a.pt"),
    "JSON of many values": lambda p: _bytes(
        p / "model.safetensors.index.json", b'{"weight_map": [' + b"[]," * 5_000_000 + b"[]]}"
    ),
}


def _bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Every bomb through the verbs that read it; `count` at most."""
    outcome = Outcome("bombs")
    specimens.make(root, ("hf",))
    shutil.rmtree(root / "bombs", ignore_errors=True)
    (root / "bombs").mkdir()
    attempts: list[tuple[str, list[object]]] = []
    for number, name in enumerate(CHUNKS):
        folder = _write_array(root / "bombs" / f"chunk{number}", name)
        attempts.append((f"zarr: {name}", ["inspect", folder, "--stats"]))
        attempts.append((f"zarr: {name}", ["reshard", folder, root / "out", "--to=safetensors"]))
    for number, (name, make) in enumerate(FILES.items()):
        folder = root / "bombs" / f"file{number}"
        folder.mkdir()
        path = make(folder)
        attempts.append((name, ["inspect", folder if path.suffix == ".json" else path]))
        attempts.append((name, ["verify", path]))
    for number, (name, template) in enumerate(TEMPLATES.items()):
        folder = root / "bombs" / f"template{number}"
        shutil.copytree(root / "source", folder)
        (folder / "chat_template.jinja").write_text(template)
        attempts.append(
            (
                f"chat template: {name}",
                ["generate", folder, "--prompt=a", "--chat", "--max-new-tokens=1"],
            )
        )
    base = run(["inspect", root / "source"]).peak_bytes
    rng.shuffle(attempts)
    for name, arguments in attempts[:count]:
        done = run(arguments, setup=_limit)
        fault = done.fault
        if fault is None and done.status in (0, 7) and arguments[0] != "verify":
            fault = f"not refused: status {done.status}" if _must_fail(name) else None
        if fault is None and done.cpu_seconds > CPU_SECONDS:
            fault = f"took {done.cpu_seconds:.0f} s of a processor"
        if fault is None and done.peak_bytes - base > MEMORY_BYTES:
            fault = f"took {done.peak_bytes >> 20} MiB"
        outcome.note(f"{arguments[0]} of {name}", fault)
        shutil.rmtree(root / "out", ignore_errors=True)
        (root / "out").unlink(missing_ok=True)
    return outcome


def _must_fail(name: str) -> bool:
    return name != "safetensors of 2**62 beside 0"


def _limit() -> None:
    """So that a bomb that goes off hurts no other process."""
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
