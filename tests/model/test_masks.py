"""Masks against their definition, key by key."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.kernels.attention.mask import AttentionSizes, Mask
from megtool.model.batch import Batch
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.masks import Masks
from megtool.spec.model_config import ModelConfig


def config(**more: Any) -> ModelConfig:
    return ModelConfig.from_fields(
        num_layers=4,
        hidden_size=8,
        ffn_hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=9,
        **more,
    )


def defined(
    query: int, key: int, row: int, *, window: int, chunk: int, places: Any, valid: Any, docs: Any
) -> bool:
    """May the query of a row attend to the key? `places` are positions, of all keys."""
    if query == key:
        return True
    near = not window or sum(valid[row][key + 1 : query + 1]) < window  # padding takes no place
    same_chunk = not chunk or places[row][query] // chunk == places[row][key] // chunk
    return bool(
        key < query
        and valid[row][key]
        and near
        and same_chunk
        and docs[row][query] == docs[row][key]
    )


@given(data=st.data())
@settings(max_examples=60)
def test_masks_are_what_they_are_defined_to_be(data: st.DataObject) -> None:
    rows, past, new = (data.draw(st.integers(*ends)) for ends in ((1, 3), (0, 5), (1, 6)))
    window, chunk = (data.draw(st.sampled_from((0, 1, 3, 20))) for _ in range(2))
    count = past + new
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    padded = data.draw(st.booleans())
    valid = [data.draw(flags) if padded else [True] * count for _ in range(rows)]
    packed = not past and data.draw(st.booleans())
    docs = [[0] * count] * rows
    if packed:
        docs = [sorted(data.draw(st.integers(0, 2)) for _ in range(count)) for _ in range(rows)]
    made = config(
        window_size=window,
        window_skip_freq=2 if window else None,
        attn_chunk_size=chunk,
        no_rope_layers=(0, 0, 0, 1),
    )
    tokens = torch.ones(rows, count, dtype=torch.int64)
    valid_BS = torch.tensor(valid) if padded else None
    places = (torch.tensor(valid).cumsum(1) - 1).clamp_min(0).tolist()

    def batch(span: slice) -> Batch:
        return Batch(
            tokens_BS=tokens[:, span],
            valid_BS=None if valid_BS is None else valid_BS[:, span],
            documents_BS=torch.tensor(docs) if packed else None,
        )

    if past or (data.draw(st.booleans()) and not packed):
        cache = ContiguousCache(
            made, num_rows=rows, max_tokens=count + 2, graphable=data.draw(st.booleans())
        )
        if past:
            cache.begin(batch(slice(past)))
            cache.advance()
        span = cache.begin(batch(slice(past, None)))
    else:
        span = KeySpan.fresh(batch(slice(None)))
    masks = Masks(made, span, documents_BS=batch(slice(None)).documents_BS)
    for layer in range(4):
        mask = masks.of(layer)
        allowed = mask.square(new, span.num_keys, tokens.device)
        shape = (rows, new, span.num_keys)
        got = (
            torch.ones(shape, dtype=torch.bool) if allowed is None else allowed[:, 0].expand(shape)
        )
        check_parts(mask, AttentionSizes(new, span.num_keys, tokens.device), got)
        for row in range(rows):
            for q in range(new):
                want = [
                    k < count
                    and defined(
                        past + q,
                        k,
                        row,
                        window=window if (layer + 1) % 2 else 0,
                        chunk=0 if layer == 3 else chunk,
                        places=places,
                        valid=valid,
                        docs=docs,
                    )
                    for k in range(span.num_keys)
                ]
                assert got[row, q].tolist() == want


def check_parts(mask: Mask, sizes: AttentionSizes, whole_BSL: torch.Tensor) -> None:
    """Tiles, and masks of fewer keys, are parts of the whole mask."""
    start, stop = sizes.num_keys // 3, max(sizes.num_keys // 3 + 1, sizes.num_keys - 1)
    parts = [(slice(start, stop), mask.among(start, stop, sizes))]
    parts += [(slice(n, None, 3), mask.every(n, 3, sizes)) for n in range(min(3, sizes.num_keys))]
    for keys, part in parts:
        want = whole_BSL[..., keys]
        fewer = AttentionSizes(sizes.num_queries, want.shape[-1], sizes.device)
        assert tiled(part, fewer, want.shape).equal(want)
    assert tiled(mask, sizes, whole_BSL.shape).equal(whole_BSL)


def tiled(mask: Mask, sizes: AttentionSizes, shape: torch.Size) -> torch.Tensor:
    """A mask put together from its tiles."""
    out = torch.zeros(shape, dtype=torch.bool)
    for low in range(0, sizes.num_queries, 2):
        rows = slice(low, min(low + 2, sizes.num_queries))
        for keys, seen in mask.tiles(rows, sizes, 3):
            out[:, rows, keys] = True if seen is None else seen[:, 0]
    return out


def test_layers_alike_share_one_mask_and_plain_ones_have_none() -> None:
    tokens = torch.ones(2, 7, dtype=torch.int64)
    masks = Masks(config(window_size=3, window_skip_freq=2), KeySpan.fresh(Batch(tokens_BS=tokens)))
    assert masks.of(0) is masks.of(2)
    assert masks.of(1) is masks.of(3)
    assert masks.of(1).is_causal
    assert masks.of(1).is_plain
    sizes = AttentionSizes(7, 7, tokens.device)
    biases = [masks.of(n).square_bias(sizes, torch.float32) for n in (0, 2)]
    assert biases[0] is biases[1]
    longer = Masks(config(window_size=7), KeySpan.fresh(Batch(tokens_BS=tokens)))
    assert longer.of(0).is_plain
    single = Masks(config(), KeySpan.fresh(Batch(tokens_BS=tokens[:, :1])))
    assert not single.of(0).is_causal
    assert single.of(0).is_plain
