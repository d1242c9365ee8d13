"""Files of a checkpoint that are FIFOs or that may not be read: one sentence, never a hang.

Every file and folder of every format is damaged in turn, in a process that obeys permissions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from tests.support.checkpoints.damage import SMALL, save_gguf
from tests.support.models import tiny_llama
from tests.support.paths import ROOT

FORMATS: dict[str, dict[str, Any]] = {
    "hf": {},
    "torch_dist": {"to": "torch_dist", "tp": 2},
    "dcp": {"to": "dcp"},
    "torch_checkpointing": {"to": "torch_checkpointing", "dp": 2},
    "megatron": {"to": "megatron", "tp": 2},
    "zarr": {"to": "zarr"},
    "gguf": {},
}

SURVEY = """
import json, os, shutil, signal, sys, traceback
from pathlib import Path

import megtool
from megtool.errors import MegtoolError
from tests.support.runs.unprivileged import obey_permissions

source, out = Path(sys.argv[1]), Path(sys.argv[1]).parent / "out"
VERBS = {
    "inspect": lambda: megtool.inspect(source, stats=True),
    "verify": lambda: megtool.verify(source),
    "reshard": lambda: megtool.reshard(source, out, to="torch_dist", fsync=False),
}


def expire(*_):
    raise TimeoutError("it hangs")


signal.signal(signal.SIGALRM, expire)
obey_permissions()


def attempt(target, damage):
    for name, verb in VERBS.items():
        error = None
        signal.alarm(20)
        try:
            verb()
        except MegtoolError as e:
            error = e
        except BaseException:
            print(json.dumps([damage, str(target), name, "crash", traceback.format_exc()]))
            continue
        finally:
            signal.alarm(0)
            shutil.rmtree(out, ignore_errors=True)
        state = "ok" if error is None else "refused"
        text = None if error is None else [error.exit_status, error.file, error.hint, str(error)]
        print(json.dumps([damage, str(target), name, state, text]))


for target in [source] if source.is_file() else sorted(source.rglob("*")):
    mode = target.stat().st_mode
    os.chmod(target, 0)
    attempt(target, "permission")
    os.chmod(target, mode)
    if target.is_file():
        target.rename(source.parent / "aside")
        os.mkfifo(target)
        attempt(target, "FIFO")
        target.unlink()
        (source.parent / "aside").rename(target)
"""


def run_python(
    script: str, *arguments: object, cwd: Path = ROOT, prepare: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prepare) + script, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    kind = request.param
    original = tiny_llama.save(tmp_path / "hf", dtype="float16", **SMALL)
    if kind == "hf":
        return original
    if kind == "gguf":
        save_gguf(tmp_path / "model.gguf", original)
        return tmp_path / "model.gguf"
    reshard(original, tmp_path / kind, fsync=False, **FORMATS[kind])
    return tmp_path / kind


@pytest.mark.parametrize("checkpoint", FORMATS, indirect=True)
def test_every_file_of_every_format(checkpoint: Path) -> None:
    done = run_python(SURVEY, checkpoint)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(rows) >= 6
    for damage, target, verb, state, facts in rows:
        where = (damage, target, verb, facts)
        assert state != "crash", where
        unread = verb != "reshard" and target.endswith("tokenizer.json")
        assert state == "refused" or unread, where
        if state == "refused":
            assert facts[0] in (2, 3, 7), where
            assert facts[1], where


def save_llama(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf", **SMALL)


CLI = "import sys; from megtool.cli.app import main; sys.exit(main())"
OBEY = """
    from tests.support.runs.unprivileged import obey_permissions
    obey_permissions()
"""


def megtool(*words: object, cwd: Path = ROOT, prepare: str = OBEY) -> tuple[int, str]:
    done = run_python(CLI, *words, cwd=cwd, prepare=prepare)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


VERBS = {
    "generate": ["generate", "SRC", "--prompt", "a", "--max-new-tokens", "1"],
    "tokenize": ["tokenize", "TEXT", "data", "--tokenizer", "SRC"],
    "evaluate": ["evaluate", "SRC", "--data", "TEXT"],
    "export": ["export", "SRC", "out", "--to", "gguf"],
    "quantize": ["quantize", "SRC", "out", "--recipe", "fp8"],
    "finetune": ["finetune", "SRC", "out", "--data", "TEXT", "--train-iters", "1"],
}
IN_FAST_RUN = dict(zip(VERBS, ["config.json", "tokenizer.json"] * 3, strict=True))


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        pytest.param(verb, name, marks=() if IN_FAST_RUN[verb] == name else pytest.mark.slow)
        for verb in VERBS
        for name in ("tokenizer.json", "config.json")
    ],
)
def test_every_verb_names_the_file_that_it_may_not_read(
    tmp_path: Path, verb: str, name: str
) -> None:
    source = save_llama(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    (source / name).chmod(0)
    places = {"SRC": source, "TEXT": tmp_path / "text.txt"}
    status, errors = megtool(*(places.get(w, w) for w in VERBS[verb]), cwd=tmp_path)
    assert status in (2, 3), errors
    assert str(source / name) in errors
    assert "hint" in errors


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_a_special_file_as_a_source(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "source"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        script = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
        assert run_python(script, "source", cwd=tmp_path).returncode == 0
    for words in (["inspect", path], ["verify", path], ["reshard", path, tmp_path / "out"]):
        status, errors = megtool(*words)
        assert status == 3, errors
        assert str(path) in errors


def test_an_index_that_names_a_device(tmp_path: Path) -> None:
    source = save_llama(tmp_path)
    (source / "model.safetensors").rename(source / "a.safetensors")
    (source / "model-00001-of-00001.safetensors").symlink_to("/dev/zero")
    weights = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(weights))
    (source / "a.safetensors").unlink()
    status, errors = megtool("inspect", source)
    assert status == 3, errors


def test_a_deleted_current_folder(tmp_path: Path) -> None:
    source = save_llama(tmp_path)
    (tmp_path / "gone").mkdir()
    script = "import os; os.rmdir(os.getcwd())\n"
    gone = tmp_path / "gone"
    out = tmp_path / "out"
    status, errors = megtool("reshard", source, out, "--to", "dcp", cwd=gone, prepare=script)
    assert status == 0, errors
    assert (out / ".metadata").exists()
    for words in (["reshard", source, "out2"], ["reshard", "hf", out], ["inspect", "hf"]):
        gone.mkdir()
        status, errors = megtool(*words, cwd=gone, prepare=script)
        assert status in (2, 3), errors
        assert errors.count("error") == 1
    gone.mkdir()
    status, errors = megtool("reshard", source, out, "--overwrite", cwd=gone, prepare=script)
    assert status == 0, errors


# ---- what finetune keeps in its folder


def test_a_tracker_that_may_not_be_read(tmp_path: Path) -> None:
    source = save_llama(tmp_path)
    reshard(source, tmp_path / "save", to="torch_dist", fsync=False)
    tracker = tmp_path / "save" / "latest_checkpointed_iteration.txt"
    tracker.chmod(0)
    (tmp_path / "text.txt").write_text("some text")
    for words in (
        ["inspect", tmp_path / "save"],
        ["reshard", tmp_path / "save", tmp_path / "out"],
        ["finetune", source, tmp_path / "save", "--data", tmp_path / "text.txt"],
    ):
        status, errors = megtool(*words)
        assert status == 3, errors
        assert str(tracker) in errors
