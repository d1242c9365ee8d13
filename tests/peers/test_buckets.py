"""Our buckets are those that real megatron-core makes of the same parameters."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megtool.tensors.buckets import fit, lay_out, padded
from tests.support.peers.forked_worlds import run_forked

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]


def random_case(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(1, 12)
    sizes = [rng.choice([rng.randint(1, 300), 64 * rng.randint(1, 6)]) for _ in range(count)]
    shared = [rng.random() < 0.1 for _ in range(count)]
    return {
        "numels": sizes,
        "shared": shared,
        "bucket_size": rng.choice([None, rng.randint(1, 900)]),
        "dp": rng.choice([1, 2, 3, 4, 6, 8, 48]),
        "busbw": rng.random() < 0.3,
    }


def test_buckets_are_megatrons() -> None:
    rng = random.Random(3)
    cases = [random_case(rng) for _ in range(400)]
    said = run_forked("bucket_world.py", json.dumps(cases))
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert len(lines) == len(cases)
    several = 0
    for case, line in zip(cases, lines, strict=True):
        theirs = json.loads(line)
        slots, sizes = lay_out(case["numels"], case["shared"], bucket_size=case["bucket_size"])
        assert [[s.bucket, s.start, s.numel] for s in slots] == theirs["slots"], case
        assert sizes == theirs["unpadded"], case
        wide = case["busbw"]
        assert [padded(n, case["dp"], for_bandwidth=wide) for n in sizes] == theirs["padded"], case
        assert fit(case["numels"], theirs["unpadded"]) == slots, case
        several += len(sizes) > 1
    assert several > 50
