"""The command line when its reader goes, and at the end of memory and threads."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megtool.cli.runner import explain_shortage, run
from megtool.console import Progress
from megtool.errors import OutOfMemoryError, StorageError
from tests.support.checkpoints.damage import SMALL
from tests.support.limits import is_within, run_limited
from tests.support.models import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer, which `export` and `generate` need."""
    folder = tmp_path_factory.mktemp("shortages") / "hf"
    tiny_llama.save(folder, **{**SMALL, "vocab_size": 300})
    (folder.parent / "text.txt").write_text("the model reads a text\n" * 20)
    return tiny_tokenizer.save(folder)


COMMANDS = [
    ["inspect", "SRC"],
    ["inspect", "SRC", "--json"],
    ["verify", "SRC"],
    ["verify", "SRC", "--json"],
    ["lint", "SRC"],
    ["recipe", "list"],
    ["recipe", "show", "fp8"],
    ["reshard", "SRC", "DST", "--dry-run"],
    ["--help"],
    ["inspect", "--help"],
    ["--version"],
]


@functools.cache
def run_undisturbed(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose output is read; once for both ways in which it is not."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("how", ["no reader", "closed"])
def test_a_closed_pipe_is_silent(checkpoint: Path, arguments: list[str], how: str) -> None:
    names = {"SRC": str(checkpoint), "DST": str(checkpoint.parent / "out")}  # of a dry run
    command = [sys.executable, "-m", "megtool", *(names.get(a, a) for a in arguments)]
    if how == "closed":
        shell = ["bash", "-c", 'exec "$@" >&-', "bash", *command]
        done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
        status, err = done.returncode, done.stderr
    else:
        reader, writer = os.pipe()
        os.close(reader)
        child = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        _, err = child.communicate(timeout=60)
        status = child.returncode
    expected = run_undisturbed(*command)
    assert status == expected.returncode
    assert err == expected.stderr


def test_a_pipe_that_closes_after_a_part_is_silent() -> None:
    """A second write after a partial one fails with ESPIPE, not EPIPE."""
    code = (
        "import sys; from megtool.console import echo\n"
        "for _ in range(9): echo('x' * 10**6)\n"
        "print('end', file=sys.stderr)"
    )
    reader, writer = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert os.read(reader, 70_000)
    os.close(reader)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"end\n")


def test_an_illegal_seek_of_stdout_is_a_closed_pipe(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from megtool import console

    def fail(*_: object, **__: object) -> None:
        raise OSError(29, "Illegal seek")

    monkeypatch.setattr("builtins.print", fail)
    monkeypatch.setattr(console, "_discard", lambda descriptor: None)
    console.echo("x")


def test_both_streams_in_one_closed_pipe(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "megtool", "inspect", str(checkpoint / "nothing")]
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.Popen(command, stdout=writer, stderr=writer)
    os.close(writer)
    assert child.wait(60) == 3


def test_files_are_never_standard_streams(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import megtool.cli.app as a; a.main(['--version']); print(open('/dev/null').fileno() > 2)"
    )
    out = tmp_path / "out"
    shell = f'exec "$@" <&- >&- 2>&- 9>{out}'
    code = code.replace("print(", "import os; os.write(9, b'%d' % int(") + ")"
    done = subprocess.run(["bash", "-c", shell, "bash", sys.executable, "-c", code], check=False)
    assert done.returncode == 0
    assert out.read_text() == "1"


# ---- memory


def raising(error: BaseException) -> object:
    def work(progress: Progress) -> None:
        raise error

    return run(work)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 2),
        (OSError(12, "Cannot allocate memory"), 2),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), 2),
        (ImportError("x.so: failed to map segment from shared object"), 2),
        (RuntimeError("can't start new thread"), 3),
        (RuntimeError("The global thread pool has not been initialized.: ThreadPoolBuildError"), 3),
        (BlockingIOError(11, "Resource temporarily unavailable"), 3),
    ],
)
def test_a_shortage_is_one_sentence(
    error: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(error) == status
    assert re.fullmatch(r"error: the system .*\n  hint: .*\n", capsys.readouterr().err)
    assert isinstance(explain_shortage(error), OutOfMemoryError if status == 2 else StorageError)


def test_other_errors_are_no_shortage() -> None:
    for error in (RuntimeError("no"), OSError(5, "I/O error"), ImportError("no module")):
        assert explain_shortage(error) is None


STEP = ["--train-iters", "1", "--seq-length", "16", "--global-batch-size", "1", "--threads", "4"]
VERBS = {
    "inspect": ["inspect", "SRC", "--stats", "--threads", "4"],
    "verify": ["verify", "SRC", "--threads", "4"],
    "reshard": ["reshard", "SRC", "DST", "--to", "torch_dist", "--threads", "4"],
    "zarr": ["reshard", "SRC", "DST", "--to", "zarr", "--threads", "4", "--digest", "all"],
    "quantize": ["quantize", "SRC", "DST", "--recipe", "fp8_block128", "--threads", "4"],
    "export": ["export", "SRC", "DST", "--to", "gguf", "--threads", "4"],
    "lint": ["lint", "SRC"],
    "amax": ["amax", "inspect", "SRC"],
    "clean": ["clean", "SRC"],
    "doctor": ["doctor"],
    "tokenize": ["tokenize", "TEXT", "DST", "--tokenizer", "SRC"],
    "evaluate": ["evaluate", "SRC", "--data", "TEXT", "--threads", "4"],
    "finetune": ["finetune", "SRC", "DST", "--data", "TEXT", *STEP],
    "generate": ["generate", "SRC", "--prompt", "the", "--max-new-tokens", "2"],
}
WITH_TORCH = ("doctor", "tokenize", "evaluate", "finetune", "generate")
RESULTS = {
    "tokenize": ("{}.bin", "{}.idx"),
    "finetune": ("{}/latest_checkpointed_iteration.txt", "{}/iter_0000001"),
}
"""What a verb writes for DST; `finetune` keeps tokens and its log in that folder all the time."""


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_process_at_the_end_of_its_memory_ends(
    checkpoint: Path, tmp_path: Path, verb: str
) -> None:
    """From what Python itself needs to what the verb needs: one sentence, and no destination."""
    limits = [60, 90, *range(110, 330, 10), *range(350, 1000, 90)]
    if verb in WITH_TORCH:
        limits = [100, 200, 300, *range(500, 1100, 60)]
    statuses = []
    for number, limit in enumerate(limits):
        destination = tmp_path / f"out{number}"
        names = {"SRC": checkpoint, "DST": destination, "TEXT": checkpoint.parent / "text.txt"}
        arguments = ["-m", "megtool", *(names.get(a, a) for a in VERBS[verb])]
        done = run_limited(arguments, address_bytes=limit << 20, timeout=600)
        statuses.append(done.status)
        assert done.status in (0, 2, 3), f"{limit} MiB: {done.status} {done.err}"
        assert done.status == 0 or done.err.count("error: ") == 1, f"{limit} MiB: {done.err}"
        for text in ("Traceback", "unexpected", "OpenBLAS", "terminate called"):
            assert text not in done.err, f"{limit} MiB: {done.err}"
        results = [tmp_path / n.format(f"out{number}") for n in RESULTS.get(verb, ("{}",))]
        written = [p.name for p in results if p.exists()]
        assert done.status == 0 or not written, f"{limit} MiB: {done.err}"
        left = {p.name for p in tmp_path.iterdir() if f"out{number}" in p.name}
        assert left <= {destination.name, f".{destination.name}.megtool", *written}
    assert statuses[0] == 2
    assert statuses[-1] == 0


def test_a_process_without_threads_ends(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import _thread, threading, sys\n"
        'def refuse(*_, **__): raise RuntimeError("can\'t start new thread")\n'
        "_thread.start_new_thread = threading._start_new_thread = refuse\n"
        "from megtool.cli.app import main; sys.exit(main())"
    )
    start = time.monotonic()
    for verb in ("inspect", "verify", "reshard", "zarr"):
        names = {"SRC": checkpoint, "DST": tmp_path / verb}
        done = run_limited(["-c", code, *(names.get(a, a) for a in VERBS[verb])], timeout=60)
        assert done.status in (0, 3), f"{verb}: {done.err}"
        assert "Traceback" not in done.err, f"{verb}: {done.err}"
        assert done.status == 0 or "thread" in done.err
        assert done.status == 0 or not (tmp_path / verb).exists()
    assert is_within(time.monotonic() - start, 100, time.monotonic)
