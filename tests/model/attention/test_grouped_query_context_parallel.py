"""Context parallelism on real ranks: the numbers of one process, whatever may be attended to."""

from __future__ import annotations

import pytest
import torch

from megtool.errors import LayoutError
from megtool.kernels.attention.mask import Mask
from megtool.model.attention.grouped_query import attend
from megtool.model.batch import Batch
from megtool.model.cache.key_span import KeySpan
from megtool.model.masks import Masks, masks_of
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.context_parallel import own_tokens
from megtool.parallel.process_groups import Group
from megtool.spec.model_config import ModelConfig
from megtool.train.model.memory_estimate import meta_groups
from tests.support.worlds import context_layouts as ranks
from tests.support.worlds.gloo_world import run_world

CLOSE = 1e-5


def worst(size: int, jobs: list[ranks.Job]) -> dict[str, float]:
    """What is not close, on any rank."""
    found = run_world(ranks.verify_master_weights, size, jobs)
    assert all(len(one) == len(jobs) for one in found)
    return {k: v for one in found for k, v in one.items() if not v < CLOSE}


def test_two_ranks_have_the_numbers_of_one_process() -> None:
    jobs = [(name, "plain", {"cp": 2}, False) for name in ranks.MODELS]
    jobs += [(name, "padded left", {"cp": 2}, False) for name in ("by length", "windows and sinks")]
    jobs += [(name, "documents", {"cp": 2}, False) for name in ("grouped", "latent", "mamba")]
    assert worst(2, jobs) == {}


@pytest.mark.slow
def test_two_ranks_have_them_for_every_kind_of_batch() -> None:
    layouts = [{"cp": 2}, {"cp": 2, "ep": 2}]
    jobs = [
        (name, kind, layout, False)
        for layout in layouts
        for name, config in ranks.MODELS.items()
        for kind in ranks.BATCHES
        if "ep" not in layout or "num_experts" in config
    ]
    assert worst(2, jobs) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [
        ({"cp": 4}, False),
        ({"cp": 2, "tp": 2}, False),
        ({"cp": 2, "tp": 2}, True),
        ({"cp": 2, "pp": 2}, False),
        ({"cp": 2, "dp": 2}, False),
        ({"cp": 2, "tp": 2, "ep": 4, "etp": 1}, True),
        ({"cp": 4, "ep": 2, "etp": 2}, False),
    ],
    ids=str,
)
def test_four_ranks_have_the_numbers_of_one_process(layout, sequence_parallel) -> None:
    jobs = [
        (name, kind, layout, sequence_parallel)
        for name, config in ranks.MODELS.items()
        for kind in ("plain", "documents")
        if ("ep" not in layout or "num_experts" in config)
        and ("tp" not in layout or config.get("mamba_num_groups") != 1)
        and ("pp" not in layout or "shared_index_layers" not in config)
    ]
    assert worst(4, jobs) == {}


def test_rows_that_do_not_go_evenly_are_filled_up_to_be_read_and_a_cache_is_refused() -> None:
    for difference, refused in run_world(ranks.filled_up, 2, 13):
        assert difference < CLOSE
        assert "cp is 2, and a cache of keys and values is not shared" in refused


def test_rows_that_do_not_go_evenly_are_refused() -> None:
    decoder = Decoder(ModelConfig.from_fields(**ranks.DENSE), meta_groups(ParallelConfig(cp=2), 0))
    with pytest.raises(LayoutError, match="cp=2 cuts rows into 4 equal parts") as e:
        decoder.frame(Batch(tokens_BS=torch.ones(1, 14, dtype=torch.int64)))
    assert "12 or 16" in str(e.value)


@pytest.mark.parametrize("kind", ranks.BATCHES)
@pytest.mark.parametrize("name", ["grouped", "windows and sinks", "chunks"])
def test_the_masks_of_all_ranks_are_the_rows_of_the_whole_one(name, kind) -> None:
    config, (batch, _) = ModelConfig.from_fields(**ranks.MODELS[name]), ranks.batch_of(kind)
    span = KeySpan.fresh(batch)
    whole = Masks(config, span, documents_BS=batch.documents_BS)
    shape = (ranks.ROWS, 1, ranks.LENGTH, ranks.LENGTH)
    for layer in range(2):
        want = whole.of(layer).square(ranks.LENGTH, ranks.LENGTH, torch.device("cpu"))
        assert want is not None
        for rank in range(4):
            cp = Group(ranks=(0, 1, 2, 3), rank=rank)
            want_BSL = own_tokens(want.expand(shape)[:, 0], cp)
            parts = []
            for masks in masks_of(config, span, batch.documents_BS, cp):
                keys = masks.span.num_keys
                got = masks.of(layer).square(2, keys, torch.device("cpu"))
                assert got is not None
                rest = torch.zeros(ranks.ROWS, 1, 2, ranks.LENGTH - keys, dtype=torch.bool)
                parts.append(torch.cat((got.expand(ranks.ROWS, 1, 2, keys), rest), 3))
            assert torch.cat(parts, 2)[:, 0].equal(want_BSL)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_queries_behind_other_keys_are_causal_from_the_last(kv_heads) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 8, generator=generator)
    key, value = torch.randn(2, 2, kv_heads, 7, 8, generator=generator)
    own = torch.arange(4, 7)[None]
    listed = Mask(first_BS=torch.zeros_like(own), last_BS=own)
    want = attend(query, key, value, listed, scale=0.3)
    got = attend(query, key, value, Mask(is_causal=True), scale=0.3)
    torch.testing.assert_close(got, want)
    want = attend(query, key, value, listed, scale=0.3, softcap=1.0)
    got = attend(query, key, value, Mask(is_causal=True), scale=0.3, softcap=1.0)
    assert got.equal(want)
