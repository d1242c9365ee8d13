"""The table of the demo: which steps are compared with `cp`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megtool.commands import demo


@pytest.mark.parametrize(
    ("verb", "source", "is_compared"),
    [
        ("reshard", "hf", True),
        ("reshard", "model.gguf", False),
        ("quantize", "hf", False),
        ("export", "fp8", False),
    ],
)
def test_only_steps_that_move_bytes_are_compared_with_cp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, source: str, is_compared: bool
) -> None:
    calls: list[Any] = []
    answer = json.dumps({"seconds": 2.0, "num_bytes": 10, "peak_rss_bytes": 5})
    monkeypatch.setattr(demo, "_run", lambda *_: answer)
    monkeypatch.setattr(demo, "_copy_seconds", lambda folder: calls.append(folder) or 0.5)
    step = demo._step(tmp_path, ("a step", source, "out", []), verb)
    assert step.cp_seconds == (0.5 if is_compared else None)
    assert calls == [tmp_path / "out"][: int(is_compared)]
    report = demo.DemoReport(folder="f", steps=(step,), equal=True, verdicts=("equal",))
    (line,) = [text for text in report.lines(200) if "a step" in text]
    assert ("4.00" in line) == is_compared
