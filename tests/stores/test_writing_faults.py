"""A fault at every request of a reshard from a bucket to a bucket.

The destination is complete, or no reader takes it for a checkpoint; the next run completes it and
sends no part again that the first one finished.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megtool.storage.objects import part_layout
from tests.support.models import tiny_llama
from tests.support.stores import fault_runs
from tests.support.stores.fault_proxy import FaultProxy, ProxiedRequest
from tests.support.stores.fault_runs import CURED, FAULTS, Ending
from tests.support.stores.s3_bucket import S3Bucket

FLIPS = {name for name in FAULTS if "flipped" in name}
"""Not told by a source without digests, unless the connection is encrypted."""
DATA = re.compile(r"^PUT /[^/]+/[^/]+/new/(?!\.)")


def finished(requests: list[ProxiedRequest]) -> set[str]:
    """The parts and objects of the destination that were put: their keys, and numbers of parts."""
    return {
        re.sub(r"uploadId=[^&]*&?", "", request.path.partition("/new/")[2])
        for request in requests
        if DATA.search(request.line) and request.status == 200
    }


def ending_names(ending: Ending) -> bool:
    """Whether the ending tells that something was left."""
    return (
        "megtool clean" in ending.error or "left-overs remain" in f"{ending.error}{ending.report}"
    )


@dataclass
class RecordedReshard:
    """A reshard without a fault: what it writes, and its requests, by number."""

    bucket: S3Bucket
    proxy: FaultProxy
    source: str
    options: tuple[str, ...]
    contents: dict[str, bytes] = field(init=False)
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        ending = self.run("sound")
        assert ending.status == 0, ending
        self.lines = [request.line for request in self.proxy.requests]
        self.contents = self.bucket.contents("sound/new/")
        assert self.contents
        assert self.left("sound") == []

    def run(self, prefix: str) -> Ending:
        destination = self.bucket.url(f"{prefix}/new")
        return fault_runs.run("reshard", self.source, destination, *self.options)

    def left(self, prefix: str) -> list[str]:
        """What a run left beside the destination, and its uploads."""
        keys = [k for k in self.bucket.keys(f"{prefix}/") if not k.startswith(f"{prefix}/new/")]
        return keys + list(self.bucket.uploads(f"{prefix}/").values())

    def complaints(self, name: str, number: int) -> list[str]:
        """What is wrong after a fault at one request and, if it ended the run, after another."""
        prefix = f"{name}-{number}".replace(" ", "-")
        action, settings = FAULTS[name]
        self.proxy.reset()
        self.proxy.inject(action, skip=number, **settings)
        first = self.run(prefix)
        requests = list(self.proxy.requests)
        self.proxy.reset()
        second, out = None, []
        if first.status == 0:
            reader = fault_runs.run("verify", self.bucket.url(f"{prefix}/new"))
            if reader.status != 0:
                out.append(f"done, and not readable: {reader}")
        else:
            if name in CURED:
                out.append(f"not cured: {first}")
            if first.status not in (2, 3, 5) or "unexpected" in first.error:
                out.append(f"no typed error: {first}")
            reader = fault_runs.run("inspect", self.bucket.url(f"{prefix}/new"))
            if reader.status == 0 and self.bucket.contents(f"{prefix}/new/") != self.contents:
                out.append(f"torn after {first}")
            self.proxy.reset()
            second = self.run(prefix)
            is_there = second.status == 2 and "destination-exists" in str(second.report)
            if second.status != 0 and not is_there:
                out.append(f"not completed after {first}: {second}")
            if again := finished(requests) & finished(self.proxy.requests):
                out.append(f"sent again: {again}")
        written = self.bucket.contents(f"{prefix}/new/")
        if written != self.contents:
            names = {k for k in written | self.contents if written.get(k) != self.contents.get(k)}
            out.append(f"wrong: {sorted(names)} after {first} {second}")
        if (left := self.left(prefix)) and not ending_names(second or first):
            out.append(f"left: {left}")
        line = requests[number].line if number < len(requests) else ""
        return [f"{name} at {number} ({line}): {text}" for text in out]


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 14 MB, of which stretches can be copied by the store."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    sizes = {"num_hidden_layers": 1, "vocab_size": 6000, "hidden_size": 512, "head_dim": 128}
    return tiny_llama.save(folder, **sizes, intermediate_size=512)


@pytest.fixture
def small(
    checkpoints: dict[str, Path], s3_bucket: S3Bucket, fault_proxy: FaultProxy
) -> RecordedReshard:
    """Objects of one part."""
    source = s3_bucket.upload(checkpoints["hf"], "source")
    options = ("--to=torch_dist", "--tp=2", "--threads=1", "--digest=all")
    return RecordedReshard(s3_bucket, fault_proxy, source, options)


@pytest.fixture
def wide(
    wide_model: Path,
    s3_bucket: S3Bucket,
    fault_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> RecordedReshard:
    """Objects of several parts, some of which the store copies."""
    monkeypatch.setattr(part_layout, "PART_BYTES", 5 << 20)
    source = s3_bucket.upload(wide_model, "source")
    options = ("--to=dcp", "--threads=1")
    return RecordedReshard(s3_bucket, fault_proxy, source, options)


def test_a_place_that_was_emptied_is_free(
    checkpoints: dict[str, Path], s3_bucket: S3Bucket
) -> None:
    s3_bucket.put("new/folder/key", b"data")
    s3_bucket.delete("new/folder/key")
    ending = fault_runs.run("reshard", checkpoints["hf"], s3_bucket.url("new"))
    assert ending.status == 0, ending


def test_there_are_parts_and_copies(wide: RecordedReshard) -> None:
    assert len([line for line in wide.lines if "partNumber=" in line]) >= 3
    assert any(r.range for r in wide.proxy.requests if r.method == "PUT")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "shift", "every"),
    [
        ("small", 0, 5),
        pytest.param("small", 0, 3, marks=slow),
        pytest.param("small", 0, 1, marks=slow),
        pytest.param("small", 5, 1, marks=slow),
        pytest.param("wide", 0, 1, marks=slow),
        pytest.param("wide", 5, 1, marks=slow),
    ],
)
def test_each_request_meets_one_fault(
    request: pytest.FixtureRequest, kind: str, shift: int, every: int
) -> None:
    """Each in turn, or every fifth; the slow test has all of them at each request."""
    recorded: RecordedReshard = request.getfixturevalue(kind)
    names = [name for name in FAULTS if kind == "small" or name not in FLIPS]
    out = []
    for number in range(0, len(recorded.lines), every):
        out += recorded.complaints(names[(number + shift) % len(names)], number)
    assert not out, "\n".join(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", ["small", "wide"])
def test_each_request_meets_every_fault(
    request: pytest.FixtureRequest, kind: str, name: str
) -> None:
    if kind == "wide" and name in FLIPS:
        pytest.skip("the source has no digests")
    recorded: RecordedReshard = request.getfixturevalue(kind)
    out = []
    for number in range(len(recorded.lines)):
        out += recorded.complaints(name, number)
    assert not out, "\n".join(out)
