"""Every verb that writes, on a file system of a few KiB: one error, and nothing lost or left."""

from __future__ import annotations

import os
import random
import shutil
from itertools import product
from pathlib import Path

from tests.support.attack import inputs, specimens
from tests.support.attack.child import run
from tests.support.attack.environments import small_disk
from tests.support.attack.outcome import Outcome
from tests.support.folders import contents

KIBIBYTES = (8, 24, 64, 160, 400)
WRITERS: dict[str, str] = {
    **{name: "" for name in specimens.COMMANDS if name not in ("buckets", "legacy", "trained")},
    "trained": "",
    "tokenized": "tokenize {text.jsonl} DST --tokenizer={source}",
    "a calibration": "quantize {source} DST --recipe=fp8 --data={text.jsonl} --samples=2 "
    "--seq-length=32 --calibrate-only",
    "a calibrated model": "quantize {source} DST --recipe=fp8 --calibration={calibration}",
    "a second calibration": "quantize {source} DST --recipe=fp8 --data={text.jsonl} --samples=2 "
    "--seq-length=32 --save-calibration=DISK/second",
    "an imatrix": "export {source} DST.gguf --to=gguf --outtype=q4_0 --imatrix={calibration} "
    "--save-imatrix=DISK/second",
    "pruning scores": "evaluate {source} --data={text.jsonl} --pruning-scores=DST",
    "a report": "inspect {hf} --report=DST.html",
    "a report of verify": "verify {hf} --report=DST.html",
    "an adapter": "adapter convert {peft} DST --to=bridge --base={source}",
    "amax fixed": "amax fix {fp8_trained} DST",
    "amax stripped": "amax strip {fp8_trained} DST",
    "amax derived": "amax derive {fp8_trained} DST",
}
"""Commands by what they write; those of specimens are empty."""

_MANY_FILES = ("trained", "adapters")
"""Runs that add to their folder: what is finished stays."""


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Every writer on every size of disk, with and without an earlier result, `count` in all."""
    outcome = Outcome("small disks")
    inputs.make_inputs(root)
    attempts = list(product(WRITERS, KIBIBYTES, (False, True)))
    rng.shuffle(attempts)
    for writer, size, has_earlier in attempts[:count]:
        title = f"{writer} on {size} KiB{' over an earlier result' if has_earlier else ''}"
        outcome.note(title, _try(root, writer, size << 10, has_earlier=has_earlier))
    return outcome


def _arguments(root: Path, writer: str, disk: Path) -> tuple[list[str], Path]:
    if not WRITERS[writer]:
        out = disk / specimens.SINGLE_FILES.get(writer, "out")
        return [os.fspath(a) for a in map(str, specimens.command(root, writer, out))], out
    out = disk / "out"
    text = inputs.fill(WRITERS[writer], root)
    words = [w.replace("DST", str(out)).replace("DISK", str(disk)) for w in text]
    written = next(w.partition("=")[2] or w for w in words if str(out) in w)
    return words, Path(written)


def _try(root: Path, writer: str, size: int, *, has_earlier: bool) -> str | None:
    disk = root / "disk"
    disk.mkdir(exist_ok=True)
    with small_disk(disk, size) as is_mounted:
        if not is_mounted:
            return None  # only root mounts
        arguments, out = _arguments(root, writer, disk)
        if has_earlier:
            if writer == "tokenized" or writer in _MANY_FILES or "report" in writer:
                return None
            if out.suffix:
                out.write_bytes(b"GGUF earlier")
            else:
                out.mkdir()
                (out / "config.json").write_text("{}")
            if writer not in ("pruning scores",):
                arguments = [*arguments, "--overwrite"]
        earlier = contents(out) if has_earlier else None
        done = run(arguments)
        fault = done.fault
        if fault is None and done.status == 0 and "error:" in done.err:
            fault = f"status 0, and an error: {done.err[-200:]}"
        if fault is None and done.status not in (0, 7):
            fault = _judge(done.err, disk, out, earlier, is_run=writer in _MANY_FILES)
    shutil.rmtree(disk, ignore_errors=True)
    return fault


def _judge(
    text: str, disk: Path, out: Path, earlier: dict[str, bytes] | None, *, is_run: bool
) -> str | None:
    if str(disk) not in text:
        return f"the error names no file there: {text[-300:]}"
    if "hint:" not in text:
        return f"no way out: {text[-300:]}"
    if earlier is not None and contents(out) != earlier:
        return f"the earlier result is gone or another: {text[-200:]}"
    if earlier is None and not is_run and out.exists():
        return f"half a result: {text[-200:]}"
    run(["clean", disk, "--yes"])
    left = sorted(str(p.relative_to(disk)) for p in disk.iterdir() if p != out)
    return f"clean leaves {left}: {text[-200:]}" if left else None
