"""Which models' passes are recorded as graphs, and what is done where one cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megtool.inference.cuda_graph import SPARE_SLOTS, GraphedHidden, GraphedStep
from megtool.inference.evaluation.perplexity import hidden_of
from megtool.inference.forward import Forward
from megtool.model.batch import Batch
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.emulated.graph_rules import check_graphs
from tests.support.models.tiny_decoder import SIZES, make_decoder, random_batch

EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 48}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
LONG |= {"original_max_position_embeddings": 8}
NTK = {"rope_type": "dynamic", "factor": 3.0}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "dense": ({}, True),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", **LONG}}, True),
    "dynamic": ({"rope_scaling": NTK, "max_positions": 8}, True),
    "experts": (EXPERTS, True),
    "experts of 50": (EXPERTS | {"moe_ffn_hidden_size": 50}, False),
}


@pytest.fixture(autouse=True)
def _no_gpu() -> Iterator[None]:
    with check_graphs():
        yield


def forward_of(name: str) -> Forward:
    return Forward(make_decoder(ModelConfig.from_fields(**SIZES | CASES[name][0])))


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_what_is_recorded_is_what_can_be(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The rehearsal of graphs agrees with what a model says of itself; results are the same."""
    forward, can = forward_of(name), CASES[name][1]
    assert forward.is_graphable == can
    prompt, tokens = random_batch(2, 6), random_batch(2, 4)
    steps = {}
    with caplog.at_level("INFO", "megtool"):
        for graphable in (False, True):
            cache = forward.rows_cache(
                num_rows=2, max_tokens=16 + SPARE_SLOTS * graphable, graphable=graphable
            )
            forward.last_logits(Batch(tokens_BS=prompt), cache)
            step = GraphedStep(forward, cache) if graphable else None
            found = []
            for column in tokens.split(1, 1):
                if step is None:
                    logits = forward.last_logits(Batch(tokens_BS=column), cache)
                    assert logits is not None
                else:
                    logits = step(column)
                found.append(logits.clone())
            steps[graphable] = torch.stack(found)
            assert graphable or cache.length == 10
            assert cache.offset == 10
            assert step is None or step.num_replays == (4 if can else 0)
    torch.testing.assert_close(steps[True], steps[False], rtol=1e-4, atol=1e-5)
    said = [r for r in caplog.records if "without CUDA graphs" in r.message]
    assert len(said) == (0 if can else 1)
    assert all(r.levelname == "INFO" and "Tensor.tolist" in r.message for r in said)


@torch.inference_mode()
def test_windows_fall_back_once(caplog: pytest.LogCaptureFixture) -> None:
    forward = forward_of("experts of 50")
    assert hidden_of(forward, graphed=True) == forward.hidden
    hidden = GraphedHidden(forward)
    with caplog.at_level("INFO", "megtool"):
        for length in (5, 7):
            batch = Batch(tokens_BS=random_batch(2, length))
            assert torch.equal(hidden(batch), forward.hidden(batch))  # type: ignore[arg-type]
    assert hidden.num_replays == 0
    assert sum("without CUDA graphs" in r.message for r in caplog.records) == 1


def test_tokens_that_change_ranks_are_not_recorded() -> None:
    """Their numbers are exchanged on the host."""
    pair = Group(ranks=(0, 1), rank=0)
    alone = ProcessGroups.alone()
    groups = ProcessGroups(parallel=alone.parallel, ep=pair, world=pair)
    config = ModelConfig.from_fields(**SIZES | EXPERTS)
    assert not Forward(make_decoder(config, groups=groups)).is_graphable
