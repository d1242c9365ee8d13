"""Every file and folder that a verb reads, damaged in every way: one sentence, in little memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.attack import specimens
from tests.support.attack.child import ChildRun, run
from tests.support.attack.outcome import Outcome

CPU_SECONDS, MEMORY_BYTES = 30.0, 512 << 20
TRAIN = "--train-iters=2 --seq-length=32 --global-batch-size=2 --threads=1"

COMMANDS: dict[str, str] = {
    "inspect": "inspect {hf} --stats",
    "inspect of torch_dist": "inspect {torch_dist} --tensors",
    "inspect of rank folders": "inspect {megatron}",
    "inspect of GGUF": "inspect {gguf}",
    "reshard": "reshard {hf} DST --to=torch_dist",
    "reshard of torch_dist": "reshard {torch_dist} DST --to=hf",
    "reshard of rank folders": "reshard {megatron} DST --to=hf",
    "reshard of zarr": "reshard {zarr} DST --to=hf",
    "reshard of tensorstore": "reshard {tensorstore} DST --to=hf",
    "reshard of ocdbt": "reshard {ocdbt} DST --to=hf",
    "reshard with an adapter": "reshard {source} DST --adapter={peft} --to=hf",
    "reshard like": "reshard {safetensors} DST --like={source} --to=hf",
    "reshard of an average": "reshard {source} DST --average={hf} --to=hf",
    "reshard by scores": "reshard {source} DST --to=hf --pruning-scores={scores} --num-layers=1",
    "verify": "verify {hf}",
    "verify of two": "verify {source} {hf}",
    "audit": "audit {trained}",
    "lint": "lint {vllm}",
    "quantize": "quantize {source} DST --recipe={recipe.yaml} --calibration={calibration}",
    "quantize with data": "quantize {source} DST --recipe=fp8 --data={text.jsonl} "
    "--config={options.yaml}",
    "export": "export {fp8} DST --to=vllm",
    "export to GGUF": "export {source} DST --to=gguf --outtype=q4_0 --imatrix={imatrix.gguf}",
    "finetune": f"finetune {{source}} DST --data={{text.jsonl}} --eval-data={{plain.txt}} "
    f"--eval-iters=1 {TRAIN}",
    "finetune of indexed data": f"finetune {{source}} DST --data={{indexed}}/data {TRAIN}",
    "finetune that resumes": f"finetune {{source}} {{trained}} --data={{text.jsonl}} {TRAIN} "
    "--train-iters=3",
    "finetune from a run": f"finetune {{trained}} DST --data={{text.jsonl}} {TRAIN}",
    "finetune of a student": f"finetune {{source}} DST --data={{text.jsonl}} {TRAIN} "
    "--teacher={hf}",
    "generate": "generate {source} --prompts={prompts.jsonl} --chat --max-new-tokens=1",
    "generate with an adapter": "generate {source} --adapter={peft} -p a --max-new-tokens=1",
    "generate of GGUF": "generate {gguf} -p a --max-new-tokens=1 --tokenizer={source}",
    "evaluate": "evaluate {source} --data={text.parquet}",
    "tokenize": "tokenize {text.jsonl.gz} DST --tokenizer={source}",
    "clean": "clean {trained}",
    "doctor": "doctor {hf}",
    "adapter inspect": "adapter inspect {peft}",
    "adapter convert": "adapter convert {peft} DST --to=bridge --base={source}",
    "recipe show": "recipe show {recipe.yaml}",
    "recipe explain": "recipe explain {source} --recipe={recipe.yaml}",
    "amax inspect": "amax inspect {fp8_trained}",
    "amax fix": "amax fix {fp8_trained} DST",
    "amax strip": "amax strip {fp8_trained} DST",
    "amax derive": "amax derive {fp8_trained} DST",
}
"""Commands by what they are; what is in braces is an input, `DST` is written."""

_INPUT = re.compile(r"\{([^}]+)\}")


# ---- damage


def _write(path: Path, data: bytes) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(data)


def _part(path: Path, stop: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * stop)])


def _noise(path: Path, rng: random.Random, share: float) -> None:
    data = bytearray(path.read_bytes())
    begin = int(len(data) * share)
    for at in range(begin, min(begin + 48, len(data))):
        data[at] = rng.randrange(256)
    path.write_bytes(data)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _link(path: Path, target: str) -> None:
    _remove(path)
    path.symlink_to(target)


def _grow(path: Path, num_bytes: int) -> None:
    """Make a file sparse and huge: it takes no room on the disk, and all memory if it is read."""
    with path.open("r+b") as file:
        file.truncate(num_bytes)


FORGED = "a\nerror: forged\x1b[2K\x1b[1A\x9b1A\u2028b"
VALUES = (
    None, True, -1, 0, 1.5, 1e308, float("nan"), 1 << 70, 10**4000, "", "a", FORGED, "\ud800",
    "9" * 5000, "../../x", "/etc/passwd", "a\0b", [], {}, [None], [[[[]]]], {"a": {"a": 1}},
    [FORGED], {FORGED: FORGED}, "x" * 100_000,
)  # fmt: skip
"""What the value of a key becomes."""


def _change_value(path: Path, rng: random.Random, *, is_key: bool = False) -> None:
    """Give one value (or one key) of a JSON file, chosen by chance, another one."""
    first, line_break, rest = path.read_text().partition("\n")
    try:
        tree, end = json.loads(first), line_break + rest
    except ValueError:
        tree, end = json.loads(first + line_break + rest), ""
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [tree]
    for part in pending:  # the list grows during the loop
        pairs = list(part.items()) if isinstance(part, dict) else list(enumerate(part))[:8]
        places += [(part, key) for key, _ in pairs]
        pending += [value for _, value in pairs if isinstance(value, dict | list)]
    part, key = rng.choice(places)
    if is_key and isinstance(part, dict):
        part[rng.choice((FORGED, "", "9" * 5000, key * 3))] = part.pop(key)
    else:
        part[key] = rng.choice(VALUES)
    path.write_bytes((json.dumps(tree) + end).encode())


FILE_DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "empty": lambda p, _: _write(p, b""),
    "of one byte": lambda p, _: _part(p, 1.5 / max(1, p.stat().st_size)),
    "cut in half": lambda p, _: _part(p, 0.5),
    "cut at its end": lambda p, _: _part(p, 1 - 1.5 / max(1, p.stat().st_size)),
    "with another start": lambda p, rng: _noise(p, rng, 0.0),
    "with another middle": lambda p, rng: _noise(p, rng, rng.random()),
    "of zeros": lambda p, _: p.write_bytes(bytes(p.stat().st_size)),
    "of noise": lambda p, rng: p.write_bytes(rng.randbytes(5000)),
    "a folder": lambda p, _: _replace_by_folder(p),
    "missing": lambda p, _: _remove(p),
    "a link to itself": lambda p, _: _link(p, p.name),
    "a link to nothing": lambda p, _: _link(p, "nothing"),
    "a FIFO": lambda p, _: (_remove(p), os.mkfifo(p))[1],
    "of a tebibyte": lambda p, _: _grow(p, 1 << 40),
    "nested": lambda p, _: p.write_bytes(b"[" * 200_000),
    "an object nested": lambda p, _: p.write_bytes(b'{"a":' * 100_000),
    "null": lambda p, _: p.write_bytes(b"null"),
    "a list": lambda p, _: p.write_bytes(b'["a", 1, null]'),
    "an empty object": lambda p, _: p.write_bytes(b"{}"),
    "a huge number": lambda p, _: p.write_bytes(b"9" * 100_000),
    "not UTF-8": lambda p, _: p.write_bytes(b'{"\xff\xfe": "\xff"}'),
    "UTF-16": lambda p, _: p.write_bytes('{"a": 1}'.encode("utf-16")),
}
"""What becomes of a file."""

JSON_DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    **{f"with another value {n}": _change_value for n in range(12)},
    **{f"with another key {n}": partial(_change_value, is_key=True) for n in range(2)},
}
"""What becomes of a file of JSON besides."""

FOLDER_DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "empty": lambda p, _: (shutil.rmtree(p), p.mkdir())[1],
    "a file": lambda p, _: _write(p, b"a file\n"),
    "missing": lambda p, _: _remove(p),
    "a link to itself": lambda p, _: _link(p, p.name),
    "a FIFO": lambda p, _: (_remove(p), os.mkfifo(p))[1],
}
"""What becomes of a folder."""


def make_inputs(root: Path) -> None:
    """The specimens, and the other files that commands read."""
    specimens.make(root)
    if (root / "fp8_trained").exists():
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.support.checkpoints import fp8_trained

    rows = (root / "text.jsonl").read_text()
    with gzip.open(root / "text.jsonl.gz", "wt") as file:
        file.write(rows)
    (root / "plain.txt").write_text(specimens.TEXT * 20)
    (root / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    texts = [json.loads(row)["text"] for row in rows.splitlines()]
    pq.write_table(pa.table({"text": texts}), root / "text.parquet")
    recipe = Path(__file__).parents[3] / "quant_recipes" / "fp8.yaml"
    shutil.copy(recipe, root / "recipe.yaml")
    (root / "options.yaml").write_text("samples: 2\nseq-length: 32\n")
    (root / "indexed").mkdir(exist_ok=True)
    for made, line in (
        ("indexed/data.idx", "tokenize text.jsonl indexed/data --tokenizer=source"),
        (
            "calibration",
            "quantize source calibration --recipe=fp8 --data=text.jsonl --samples=2 "
            "--seq-length=32 --calibrate-only",
        ),
        (
            "imatrix.gguf",
            "export source weighed.gguf --to=gguf --outtype=q4_0 --imatrix=calibration "
            "--save-imatrix=imatrix.gguf",
        ),
        ("scores", "evaluate source --data=text.jsonl --pruning-scores=scores"),
        (
            "peft",
            "adapter convert adapters/iter_0000002/adapter peft --to=peft --base=source",
        ),
    ):
        if (root / made).exists():
            continue
        done = run(line.split(), cwd=root)
        if done.status != 0:
            raise RuntimeError(f"{line}: {done.status} {done.err[-1500:]}")
    (root / "scaled").mkdir()
    made = fp8_trained.rank_files(root / "scaled")
    made.rename(root / "fp8_trained")


def attempts_of(root: Path, title: str) -> list[tuple[str, str, str]]:
    """The input, the file in it (or nothing for itself) and the damage, of each attempt."""
    out = []
    for name in _INPUT.findall(COMMANDS[title]):
        path = locate(root, name)
        inner = [path, *sorted(path.rglob("*"))] if path.is_dir() else [path]
        for file in inner:
            relative = "" if file == path else str(file.relative_to(path))
            damages = [d for d in damages_of(file) if relative or d != "a FIFO"]
            out += [(name, relative, damage) for damage in damages]
    return out


def fill(command: str, root: Path) -> list[str]:
    """The words of a command with its inputs in place."""
    return [
        _INPUT.sub(lambda match: os.fspath(locate(root, match[1])), word)
        for word in command.split()
    ]


def damages_of(path: Path) -> dict[str, Callable[[Path, random.Random], None]]:
    """What can become of a file or a folder."""
    if path.is_dir():
        return FOLDER_DAMAGE
    is_json = path.suffix in (".json", ".jsonl") or path.name == ".zarray"
    return FILE_DAMAGE | (JSON_DAMAGE if is_json else {})


def locate(root: Path, name: str) -> Path:
    """Where an input is."""
    return specimens.path_of(root, name)


def attack(root: Path, rng: random.Random, count: int) -> Outcome:
    """Damage inputs of commands, `count` in all: each command in turn, by chance what and how."""
    outcome = Outcome("inputs")
    make_inputs(root)
    base = {}
    todo = {title: attempts_of(root, title) for title in COMMANDS}
    for choices in todo.values():
        rng.shuffle(choices)
    number = 0
    while number < count and any(todo.values()):
        for title in COMMANDS:
            if not todo[title]:
                continue
            if title not in base:
                done = _run(root, title, None)
                if done.status not in (0, 7):
                    raise RuntimeError(f"{title}: {done.status} {done.err[-800:]}")
                base[title] = done.peak_bytes
            name, inner, damage = todo[title].pop()
            fault = _judge(_run(root, title, (name, inner, damage), rng), base[title])
            outcome.note(f"{title}: {name} {inner} is {damage}", fault)
            number += 1
    return outcome


def _run(
    root: Path,
    title: str,
    what: tuple[str, str, str] | None,
    rng: random.Random | None = None,
) -> ChildRun:
    work = root / "damaged"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    paths = {}
    for name in _INPUT.findall(COMMANDS[title]):
        path = locate(root, name)
        paths[name] = path
        is_written = title == "finetune that resumes" and name == "trained"
        if is_written or (what is not None and what[0] == name):
            copy = work / path.name
            if path.is_dir():
                shutil.copytree(path, copy)
            else:
                shutil.copy(path, copy)
            paths[name] = copy
    if what is not None:
        name, inner, damage = what
        target = paths[name] / inner if inner else paths[name]
        damages_of(target)[damage](target, rng or random.Random(1))
    out = work / ("out.gguf" if "to=gguf" in COMMANDS[title] else "out")
    arguments = [
        os.fspath(out) if word == "DST" else _INPUT.sub(lambda m: os.fspath(paths[m[1]]), word)
        for word in COMMANDS[title].split()
    ]
    return run(arguments, setup=_limit, timeout=60)


def _judge(done: ChildRun, base: int) -> str | None:
    fault = done.fault
    if fault is None and done.cpu_seconds > CPU_SECONDS:
        fault = f"took {done.cpu_seconds:.0f} s of a processor"
    if fault is None and done.peak_bytes - base > MEMORY_BYTES:
        fault = f"took {(done.peak_bytes - base) >> 20} MiB more"
    return fault or find_forgery(done)


def find_forgery(done: ChildRun) -> str | None:
    """What of the output no line of megtool's can hold: control characters, a second error."""
    text = done.out + done.err
    if match := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]", text.replace("\r", "")):
        return (
            f"{match[0]!r} in the output: {text[max(0, match.start() - 60) : match.end() + 60]!r}"
        )
    if sum(line.startswith("error:") for line in done.err.splitlines()) > 1:
        return f"several errors: {done.err[-300:]!r}"
    return None


def _limit() -> None:
    """So that damage that is believed hurts no other process."""
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
