"""Regular expressions out of files: the same answers as `re`, and an end."""

from __future__ import annotations

import re
import time

import pytest

from megtool.errors import FormatError
from megtool.process import patterns
from megtool.process.patterns import Pattern, compile_pattern

NAMES = ["model.layers.0.self_attn.q_proj", "lm_head", "a" * 40, "model.layers.11.mlp.gate", ""]
PATTERNS = [
    r".*self_attn.*",
    r"model\.layers\.(?:0|1)\..*_proj",
    r"(?!.*mlp).*",
    r"[^.]*",
    r"(?P<x>a+)\Z",
    r"lm_head$",
]


@pytest.mark.parametrize("text", PATTERNS)
def test_answers_are_those_of_re(text: str) -> None:
    for name in NAMES:
        for method in ("match", "fullmatch", "search"):
            found = getattr(compile_pattern(text), method)(name)
            expected = getattr(re.compile(text), method)(name)
            assert (found is None) == (expected is None)
            assert expected is None or found.span() == expected.span()


def test_a_catastrophic_pattern_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(FormatError, match="takes too long") as caught:
        Pattern(r"(?:(?:a|a)(?:a|a))*[bc]").fullmatch("a" * 60)
    assert time.monotonic() - start < 5
    assert caught.value.id == "slow-pattern"
    assert caught.value.hint


def test_many_slow_matches_are_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_SLOW_SECONDS", -1.0)
    monkeypatch.setattr(patterns, "_SECONDS", 1e-4)
    pattern = Pattern("a")

    def match_many() -> None:
        for _ in range(10_000):
            pattern.match("a")

    with pytest.raises(FormatError, match="takes too long"):
        match_many()


@pytest.mark.parametrize("text", ["(", "*a", "(?P<1>a)", "a" * 20_000, "(" * 5_000 + ")" * 5_000])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(re.error):
        Pattern(text)
