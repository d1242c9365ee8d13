"""A fault at every request of a run that reads a checkpoint from a bucket.

What passes is cured; what does not pass ends in one typed error. Nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.stores import fault_runs
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.fault_runs import CURED, FAULTS, Ending
from tests.support.stores.s3_bucket import S3Bucket


@dataclass
class Recorded:
    """A run without a fault: its words, its ending and its requests, by number."""

    proxy: FaultProxy
    words: tuple[str, ...]
    expected: Ending = field(init=False)
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.proxy.reset()
        self.expected = fault_runs.run(*self.words)
        self.lines = [request.line for request in self.proxy.requests]
        assert self.expected.status == 0, self.expected

    def ending(self, name: str, number: int, times: int | None = 1) -> Ending:
        """How the run ends with a fault at one request."""
        action, settings = FAULTS[name]
        self.proxy.reset()
        self.proxy.inject(action, skip=number, times=times, **settings)
        return fault_runs.run(*self.words)

    def complaint(self, name: str, number: int, ending: Ending) -> str | None:
        """What is wrong with an ending, None if nothing is."""
        where = f"{name} at {number} ({self.lines[number]})"
        if ending.status == 0:
            return None if ending == self.expected else f"{where}: another result: {ending}"
        if name in CURED:
            return f"{where}: not cured: {ending}"
        if ending.status not in (2, 3, 5, 7) or "unexpected" in ending.error:
            return f"{where}: no typed error: {ending}"
        return None


@pytest.fixture
def recorded(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    s3_bucket: S3Bucket,
    fault_proxy: FaultProxy,
) -> Iterator[Recorded]:
    """The run of a verb on a format; nothing in the bucket changes."""
    verb, name = request.param
    url = s3_bucket.upload(checkpoints[name], f"run/{checkpoints[name].name}")
    before = s3_bucket.contents()
    yield Recorded(fault_proxy, (verb, url, "--threads=1"))
    assert s3_bucket.contents() == before


@pytest.mark.parametrize("recorded", [("verify", "torch_dist")], indirect=True, ids="-".join)
def test_each_request_meets_one_fault(recorded: Recorded) -> None:
    """Each in turn; the slow test has all of them at each request."""
    names = list(FAULTS)
    complaints = []
    for number in range(len(recorded.lines)):
        name = names[number % len(names)]
        complaints.append(recorded.complaint(name, number, recorded.ending(name, number)))
    assert not any(complaints), "\n".join(filter(None, complaints))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(
    "recorded",
    [("verify", n) for n in ("hf", "safetensors", "torch_dist", "dcp")],
    indirect=True,
    ids="-".join,
)
def test_each_request_meets_every_fault(recorded: Recorded, name: str) -> None:
    complaints = [
        recorded.complaint(name, number, recorded.ending(name, number))
        for number in range(len(recorded.lines))
    ]
    assert not any(complaints), "\n".join(filter(None, complaints))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut", "503", "403", "truncated by one byte"])
@pytest.mark.parametrize("recorded", [("verify", "torch_dist")], indirect=True, ids="-".join)
def test_what_does_not_pass_ends_in_an_error(
    recorded: Recorded, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    for number, line in enumerate(recorded.lines):
        ending = recorded.ending(name, number, times=None)
        if ending != recorded.expected:  # no body, no truncation
            assert ending.status == 3, (line, ending)
            assert ending.report["error"]["file"].startswith("s3://"), (line, ending)
