"""torchtitan's models on several ranks, parallelized by torchtitan, filled from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from tests.support.models.tiny_model import tiny_model
from tests.support.peers.torchtitan_models import CASES, SIZES, TOKENS, noisy
from tests.support.peers.torchtitan_world import compare_loads
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.peers

WORLDS: list[tuple[str, int, dict[str, int], str]] = [
    ("llama", 2, {}, "(Shard(dim=0),)"),
    ("wide llama", 4, {"tensor_parallel_degree": 2}, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
    ("qwen3 tied", 2, {}, "(Shard(dim=0),)"),
    ("qwen3_moe", 2, {}, "(Shard(dim=0),)"),
    ("deepseek_v3", 2, {"expert_parallel_degree": 2}, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
]
"""A model, the number of ranks, torchtitan's degrees of parallelism, and a placement they lead to.

Columns of a rank are 1 KiB where tensor parallelism cuts them: shorter runs would be read with the
gaps between them.
"""


@pytest.mark.parametrize(("case", "size", "degrees", "placement"), WORLDS)
def test_ranks_read_their_own_parts_and_train_on(
    case: str, size: int, degrees: dict[str, int], placement: str, tmp_path: Path
) -> None:
    """FSDP2, also with tensor and with expert parallelism, for three steps of training."""
    family, keys, _ = CASES[case]
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    tiny_model(family, hf, sizes=SIZES, fill=noisy, **keys)
    reshard(hf, megatron, to="torch_dist", tp=2, fsync=False)
    args: tuple[Any, ...] = case, degrees, hf, [hf, megatron], TOKENS
    for rank in run_world(compare_loads, size, *args, timeout_s=600.0):
        assert not rank["other"]
        assert max(rank["shares"]) <= 1.05
        assert rank["ours"] == [rank["own"]] * 2
        assert placement in rank["kinds"]
