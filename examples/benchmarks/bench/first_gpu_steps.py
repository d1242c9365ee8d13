"""Runs a step of `first_gpu.py` within its time, and reads what it measured."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[3]
TAIL = 6000  # characters of output that a row keeps


class StepError(Exception):
    """A step that did not end well."""

    def __init__(self, why: str, output: str = "", *, is_late: bool = False) -> None:
        super().__init__(why)
        self.why, self.output, self.is_late = why, output[-TAIL:], is_late


def run_limited(command: Sequence[str], seconds: float) -> str:
    """Run a process for so many seconds; returns the end of its output.

    Raises:
        StepError: it failed, or ran out of time and was killed with its children.
    """
    if seconds <= 0:
        raise StepError("the time of its part was over before it began", is_late=True)
    with subprocess.Popen(
        command,
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise StepError(f"killed after {seconds:.0f} s", output, is_late=True) from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        lines = [line for line in output.strip().splitlines() if line.strip()]
        last = next((x for x in lines if x.startswith("error:")), lines[-1] if lines else "")
        raise StepError(f"exit status {process.returncode}: {last[:300]}", output)
    return output[-TAIL:]


def read_figures(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Return what a step measured.

    Raises:
        StepError: it measured nothing.
    """
    file = folder / "figures"
    if kind == "run":
        file = folder / "run" / "log.jsonl"
    if not kind:
        return []
    if not file.exists():
        raise StepError("it wrote no figures")
    if kind == "tests":
        return [read_tests(file)]
    if kind == "run":
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [x for x in lines if "tokens_per_second" in x]
        if not steps:
            raise StepError("it trained no step")
        late = steps[len(steps) // 4 :]  # the first ones compile and warm up
        names = ("tokens_per_second", "seconds", "tflops")
        middle = {n: statistics.median(x[n] for x in late) for n in names if n in late[0]}
        losses = {"first loss": steps[0]["loss"], "last loss": steps[-1]["loss"]}
        return [{**middle, **losses}]
    figures: list[dict[str, Any]] = json.loads(file.read_text())
    if not figures:
        raise StepError("it measured nothing")
    return figures


def read_tests(file: Path) -> dict[str, Any]:
    """Return the counts of JUnit's XML, and the tests that failed and why."""
    suites = ElementTree.parse(file).getroot().iter("testsuite")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    failed = []
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
        for case in suite.iter("testcase"):
            for problem in (*case.iter("failure"), *case.iter("error")):
                first = (problem.get("message") or "").partition("\n")[0]
                failed.append(f"{case.get('classname')}::{case.get('name')}: {first[:200]}")
    return {**counts, "failed": "; ".join(failed) or "none"}
