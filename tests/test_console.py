"""What reaches stderr, on a terminal and elsewhere."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from megtool.console import Bar, Lines, format_bytes, log_line, printable, set_up, silent

WORK = """
import logging, time
from megtool.console import Bar, set_up
set_up()
with Bar() as progress:
    for step in range(8):
        progress("copy", 256 * 1024, 2 * 1024 * 1024)
        time.sleep(0.06)
    logging.getLogger("megtool.test").warning("one shard has no digest")
print("done")
"""


def on_terminal(code: str, checkout: Path, columns: int = 80, **env: str) -> str:
    """What `code` shows on a terminal, escape sequences included."""
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    left = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    clean = {k: v for k, v in os.environ.items() if k not in left}
    environment = {**clean, "TERM": "xterm-256color", "PYTHONPATH": str(checkout), **env}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL, env=environment
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(control, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(control)
    assert process.wait() == 0, shown
    return shown.decode()


def test_a_terminal_sees_bytes_rate_and_time_left(checkout: Path) -> None:
    shown = on_terminal(WORK, checkout)
    assert "copy" in shown
    assert "of 2.0 MiB" in shown
    assert "MiB/s" in shown
    assert "left" in shown
    assert "warning:\x1b[0m one shard has no digest" in shown
    assert shown.rstrip().endswith("done")


WIDEST = """
import time
from megtool.console import Bar
with Bar() as progress:
    for step in range(4):
        progress("statistics", 1000 << 20, 10 * (1000 << 20) + 1023 * (1 << 40))
        time.sleep(0.3)
"""


@pytest.mark.parametrize("columns", [80, 60])
def test_a_stage_is_one_line_of_the_terminal(checkout: Path, columns: int) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(WIDEST, checkout, columns))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert all(line.startswith("statistics") for line in lines), lines
    assert max(map(len, lines)) <= columns
    if columns == 80:
        assert re.search(r"GiB of 1023\.0 TiB  [\d.]+ [KMGT]iB/s left", lines[-1])


def test_no_color_is_honoured(checkout: Path) -> None:
    shown = on_terminal(WORK, checkout, NO_COLOR="1")
    assert "of 2.0 MiB" in shown
    assert "warning: one shard" in shown
    assert "\x1b[3" not in shown.replace("\x1b[?", "")


def test_a_pipe_sees_no_bar_and_does_not_import_rich(checkout: Path) -> None:
    code = WORK + "\nimport sys; print('rich' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "done\nFalse\n"
    assert done.stderr == "warning: one shard has no digest\n"


def test_long_work_leaves_lines_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("megtool.console.time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = Lines(seconds=5)
    lines.count("copy", 1 << 20, 4 << 20)
    assert capsys.readouterr().err == ""
    now[0] += 6
    lines.count("copy", 1 << 20, 4 << 20)
    lines.count("copy", 1 << 20, 4 << 20)
    shown = capsys.readouterr().err
    assert re.fullmatch(r"copy: 2\.0 MiB of 4\.0 MiB, 50%, about 0:06 left\n", shown)
    now[0] += 6
    lines.count("generate", 5, 10)
    assert capsys.readouterr().err == "generate: 5 of 10 tokens\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "resuming\nwarning: odd\nerror: bad\n"),
        ({"quiet": True}, "error: bad\n"),
        ({"verbose": True}, "debug: detail\nresuming\nwarning: odd\nerror: bad\n"),
    ],
)
def test_levels(
    options: dict[str, bool], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(**options)
    logger = logging.getLogger("megtool.somewhere")
    logger.debug("detail")
    logger.info("resuming")
    logger.warning("odd")
    logger.error("bad")
    assert capsys.readouterr() == ("", expected)


def test_setting_up_twice_does_not_say_things_twice(capsys: pytest.CaptureFixture[str]) -> None:
    set_up()
    set_up()
    logging.getLogger("megtool").warning("once")
    assert capsys.readouterr().err == "warning: once\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (4 * 2**30, "4.0 GiB"),
        (3 * 2**50, "3072.0 TiB"),
    ],
)
def test_sizes_read_well(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_hostile_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "layer\x1b]0;owned\x07\u202e\ud800é\n\tend"
    assert printable(name) == "layer\\x1b]0;owned\\x07\\u202e\\ud800é\n\tend"
    log_line("error", f"unknown tensor {name}")
    assert "\x1b" not in capsys.readouterr().err


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    silent("copy", 1, 2)
    with Bar(shown=False) as progress:
        progress("copy", 1, 2)
    assert capsys.readouterr() == ("", "")
