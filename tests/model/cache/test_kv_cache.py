"""The caches: decoding in any portions, padded, in blocks or recorded, is the whole pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache, EntrySize
from megtool.model.cache.paged import PagedCache
from megtool.model.stacks.decoder import Decoder
from megtool.spec.model_config import ModelConfig
from tests.support.emulated.graph_rules import graphed
from tests.support.errors import raises

CONFIG = ModelConfig.from_fields(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=101,
    window_size=6,
    window_skip_freq=3,
)
TOLERANCE = 2e-5


def model(config: ModelConfig = CONFIG) -> Decoder:
    decoder = Decoder(config, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return decoder.requires_grad_(False)


DECODER = model()


def text(rows: int, length: int, seed: int = 1) -> Any:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(tokens: Any, **more: Any) -> Any:
    return DECODER(Batch(tokens_BS=tokens, **more))


@given(portions=st.lists(st.integers(1, 6), min_size=1, max_size=6), padding=st.integers(0, 3))
@settings(max_examples=15)
def test_portions_of_any_size(portions: list[int], padding: int) -> None:
    tokens = text(2, sum(portions) + padding)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, :padding] = False
    portions = [portions[0] + padding, *portions[1:]]
    want = whole(tokens, valid_BS=valid)
    for graphable in (False, True):
        cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=48, graphable=graphable)
        storage = cache.keys[0].data_ptr()
        at = 0
        for size in portions:
            fresh = valid[:, at : at + size] if padding and not at else None
            got = DECODER(Batch(tokens_BS=tokens[:, at : at + size], valid_BS=fresh), cache)
            real = valid[:, at : at + size]
            assert (got - want[:, at : at + size])[real].abs().max() < TOLERANCE
            at += size
        assert cache.keys[0].data_ptr() == storage
        assert int(cache.offset) == at


def test_padding_on_the_right_leaves_a_gap_that_nobody_sees() -> None:
    tokens, answers = text(2, 5), text(2, 3, seed=2)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, 3:] = False
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=8)
    last = DECODER(Batch(tokens_BS=tokens, valid_BS=valid), cache, last_only=True)
    rest = DECODER(Batch(tokens_BS=answers), cache)
    for row, length in ((0, 3), (1, 5)):
        alone = torch.cat((tokens[row, :length], answers[row]))[None]
        want = DECODER(Batch(tokens_BS=alone))
        assert (last[row] - whole(tokens[row : row + 1, :length])[0, -1]).abs().max() < TOLERANCE
        assert (rest[row] - want[0, length:]).abs().max() < TOLERANCE


def test_a_decoding_step_is_recorded_and_replayed() -> None:
    """The rules of CUDA graphs, as the rehearsal watches them: shapes, storages, no look inside."""
    tokens = text(2, 12)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, :2] = False
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=16, graphable=True)
    DECODER(Batch(tokens_BS=tokens[:, :6], valid_BS=valid[:, :6]), cache)
    step = graphed(
        lambda new: DECODER(Batch(tokens_BS=new), cache, last_only=True), "cpu", state=cache.state
    )
    want = whole(tokens, valid_BS=valid)
    for at in range(6, 12):
        got = step(tokens[:, at : at + 1])
        assert (got[:, 0] - want[:, at]).abs().max() < TOLERANCE
    assert int(cache.offset) == 12


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), block=st.sampled_from((1, 4, 16))
)
@settings(max_examples=15)
def test_sequences_in_blocks(lengths: list[int], block: int) -> None:
    """Sequences of unequal length start together, go on in other rows, and leave."""
    texts = {i: text(1, n + 6, seed=i)[0] for i, n in enumerate(lengths)}
    cache = PagedCache(CONFIG, num_blocks=1 + 4 * 16 // block, block_size=block)
    free = cache.pool.num_free
    longest = max(lengths)
    prompts = torch.zeros(len(lengths), longest, dtype=torch.int64)
    for i, n in enumerate(lengths):
        prompts[i, :n] = texts[i][:n]
    cache.choose(list(enumerate(lengths)))
    out = DECODER(Batch(tokens_BS=prompts), cache)
    want = {i: whole(t[None])[0] for i, t in texts.items()}
    for i, n in enumerate(lengths):
        assert (out[i, :n] - want[i][:n]).abs().max() < TOLERANCE
    for step in range(6):
        rows = [i for i in reversed(texts) if (i + step) % 3 or len(texts) == 1]
        if not rows:
            continue
        cache.choose([(i, 1) for i in rows])
        at = {i: cache.lengths[i] for i in rows}
        new = torch.stack([texts[i][at[i] : at[i] + 1] for i in rows])
        out = DECODER(Batch(tokens_BS=new), cache)
        for row, i in enumerate(rows):
            assert (out[row, 0] - want[i][at[i]]).abs().max() < TOLERANCE
    for i in texts:
        cache.release(i)
    assert cache.pool.num_free == free
    assert not cache.blocks


@pytest.mark.parametrize("kind", ["longrope", "learned"])
def test_padding_in_blocks_stands_at_no_place_beyond_its_row(kind: str) -> None:
    """Neither does it make a short row a long one, nor does it need a learned position."""
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 8,
    }
    facts = {"rope_scaling": scaling} if kind == "longrope" else {"position_embedding": "learned"}
    decoder = model(CONFIG.with_fields(max_positions=12, **facts))
    tokens = text(2, 12)
    cache = PagedCache(decoder.config, num_blocks=8, block_size=4)
    cache.choose([(0, 12), (1, 5)])
    out = decoder(Batch(tokens_BS=tokens), cache)
    assert (out[1, :5] - decoder(Batch(tokens_BS=tokens[1:, :5]))[0]).abs().max() < TOLERANCE
    cache.choose([(1, 2)])
    decoder(Batch(tokens_BS=tokens[1:, 5:7]), cache)
    cache.release(0)
    cache.choose([(1, 1)])
    decoder(Batch(tokens_BS=torch.full((1, 6), 7)), cache)  # room for 5 more, and 1 is real


def test_blocks_run_out() -> None:
    cache = PagedCache(CONFIG, num_blocks=3, block_size=4)
    cache.choose([(7, 5)])
    with raises(UsageError, "1 blocks", "0", "3"):
        cache.choose([(7, 1), (8, 1)])
    assert cache.lengths.keys() == {7}
    with pytest.raises(UsageError, match="a sequence is in two rows"):
        cache.choose([(7, 1), (7, 1)])
    with raises(UsageError, "2 rows", "1 sequences"):
        DECODER(Batch(tokens_BS=text(2, 5)), cache)


def test_states_go_back_within_a_revertible_pass_alone() -> None:
    sizes = {"mamba_num_heads": 2, "mamba_head_dim": 4, "mamba_num_groups": 1}
    kinds = {"layer_kinds": ("M-", "*-", "M-"), "mamba_state_dim": 4, "mamba_conv_kernel": 4}
    decoder = model(CONFIG.with_fields(window_size=0, window_skip_freq=None, **sizes, **kinds))
    tokens = text(2, 6)
    expected = decoder(Batch(tokens_BS=tokens))
    cache = PagedCache(decoder.config, num_blocks=5, block_size=4, num_sequences=2)
    cache.choose([(0, 3), (1, 3)])
    decoder(Batch(tokens_BS=tokens[:, :3]), cache)
    with raises(UsageError, "revertible"):
        cache.truncate({0: 2})
    cache.choose([(0, 2), (1, 2)], revertible=True)
    wrong = tokens[:, 3:5].clone()
    wrong[0] = wrong[1, 1] = 0
    decoder(Batch(tokens_BS=wrong), cache)
    with raises(UsageError, "revertible"):
        cache.truncate({1: 4, 0: 2})
    assert cache.lengths == {0: 5, 1: 5}
    cache.truncate({0: 3, 1: 4})
    cache.choose([(0, 3), (1, 2)])
    rows = torch.stack((tokens[0, 3:], torch.cat((tokens[1, 4:], tokens[1, :1]))))
    found = decoder(Batch(tokens_BS=rows), cache)
    torch.testing.assert_close(found[0], expected[0, 3:], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found[1, :2], expected[1, 4:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (Batch(tokens_BS=text(3, 2)), "3 rows do not fit into a cache of 2"),
        (Batch(tokens_BS=text(2, 9)), "9 tokens after 0 do not fit into a cache of 8"),
        (
            Batch(tokens_BS=text(2, 4), documents_BS=torch.zeros(2, 4, dtype=torch.int64)),
            "packed documents cannot have a cache",
        ),
    ],
)
def test_what_does_not_fit_is_said(batch: Batch, said: str) -> None:
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=8)
    with pytest.raises(UsageError, match=said):
        DECODER(batch, cache)


def test_a_cache_is_used_again() -> None:
    cache = ContiguousCache(CONFIG, num_rows=1, max_tokens=8)
    first = DECODER(Batch(tokens_BS=text(1, 8)), cache)
    cache.reset()
    valid = torch.tensor([[False] * 2 + [True] * 6])
    DECODER(Batch(tokens_BS=text(1, 8, seed=5), valid_BS=valid), cache)
    cache.reset()
    assert torch.equal(DECODER(Batch(tokens_BS=text(1, 8)), cache), first)


def test_ranks_that_share_a_head_keep_a_copy_each() -> None:
    assert EntrySize.of(CONFIG, 2) == EntrySize(num_heads=1, key_size=8, value_size=8)
    assert EntrySize.of(CONFIG, 4) == EntrySize(num_heads=1, key_size=8, value_size=8)
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=4, tp=4, layers=(1,))
    assert cache.num_bytes == 2 * 2 * 4 * 8 * 4
