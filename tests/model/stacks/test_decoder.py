"""The decoder: names, packed documents, stages, padding on both sides, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megtool.convert.dialects import read_side
from megtool.dtypes import dtype
from megtool.errors import LayoutError, MappingError, UsageError
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.stacks import decoder as module
from megtool.model.stacks.decoder import Decoder, StageLayers, check_direction, rows_of_rank
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.errors import raises
from tests.support.models.tiny_decoder import SIZES, make_decoder, random_batch

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": True, "qkv_bias": True, "qk_norm": True},
    {"norm": "layernorm", "position_embedding": "learned", "gated": False, "mlp_bias": True},
    {"attn_output_gate": True, "attn_out_bias": True, "attn_sinks": True},
]


@pytest.mark.parametrize("more", VARIANTS, ids=str)
def test_parameters_are_megatrons(more: dict[str, Any]) -> None:
    """Every name and shape is one that a Megatron checkpoint of the model has, and none is missing.

    The reader of checkpoints knows both.
    """
    config = ModelConfig.from_fields(**SIZES | more)
    decoder = Decoder(config)
    assert {p.device.type for p in decoder.parameters()} == {"meta"}
    held = [
        GlobalTensor(name=n, shape=tuple(p.shape), dtype=dtype("float32"))
        for n, p in decoder.named_parameters()
    ]
    side = read_side(held, dialect="megatron", config=config)
    assert side.dropped == []
    assert {p.stored for p in side.placements.values()} == {t.name for t in held}


def test_documents_are_read_as_if_alone() -> None:
    decoder, tokens = (
        make_decoder(ModelConfig.from_fields(**SIZES, window_size=5)),
        random_batch(2, 12),
    )
    lengths = ((5, 7), (1, 11))
    documents = torch.tensor([[0] * a + [1] * b for a, b in lengths])
    positions = torch.tensor([[*range(a), *range(b)] for a, b in lengths])
    packed = decoder(Batch(tokens_BS=tokens, documents_BS=documents, positions_BS=positions))
    for row, (a, _) in enumerate(lengths):
        for part in (slice(a), slice(a, None)):
            alone = decoder(Batch(tokens_BS=tokens[row : row + 1, part]))
            assert (packed[row, part] - alone[0]).abs().max() < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    decoder, tokens = (
        make_decoder(ModelConfig.from_fields(**SIZES, window_size=5, window_skip_freq=2)),
        random_batch(2, 9),
    )
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, slice(3) if side == "left" else slice(6, None)] = False
    got = decoder(Batch(tokens_BS=tokens, valid_BS=valid))
    last = decoder(Batch(tokens_BS=tokens, valid_BS=valid), last_only=True)
    for row in range(2):
        alone = decoder(Batch(tokens_BS=tokens[row][valid[row]][None]))[0]
        assert (got[row][valid[row]] - alone).abs().max() < 1e-5
        assert (last[row, 0] - alone[-1]).abs().max() < 1e-5
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("more", VARIANTS, ids=str)
def test_stages_in_a_row_are_the_whole(more: dict[str, Any]) -> None:
    config = ModelConfig.from_fields(**SIZES | more)
    whole, tokens = make_decoder(config), random_batch(2, 7)
    stages = [
        StageLayers(layers=(0,), head=False),
        StageLayers(layers=(1, 2), embedding=False, head=False),
        StageLayers(layers=(3,), embedding=False),
    ]
    x_TH: Any = None
    names: list[str] = []
    for stage in stages:
        decoder = make_decoder(config, stage=stage)
        frame = decoder.frame(batch := Batch(tokens_BS=tokens))
        x_TH = decoder.embed(batch, frame) if stage.embedding else x_TH
        x_TH = decoder.finish(decoder.run(x_TH, frame))
        names += [n for n, _ in decoder.named_parameters()]
    assert torch.equal(decoder.logits(x_TH).view(2, 7, -1), whole(batch))
    assert set(names) == {n for n, _ in whole.named_parameters()}
    with pytest.raises(UsageError, match="this stage has no embedding"):
        decoder(batch)


def test_many_logits_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, tokens = (
        make_decoder(ModelConfig.from_fields(**SIZES, logit_softcap=3.0, logit_scale=0.5)),
        random_batch(2, 9),
    )
    decoder.requires_grad_(True)
    labels = tokens.roll(-1, 1)
    found = []
    for limit in (1 << 30, 0):
        monkeypatch.setattr(module, "KEPT_LOGITS_BYTES", limit)
        decoder.zero_grad()
        total, count = decoder.loss(Batch(tokens_BS=tokens), labels)
        total.backward()
        found.append((total.detach(), decoder.output_weight.grad.clone()))
        assert count == 18
    assert (found[0][0] - found[1][0]).abs() < 1e-4
    assert (found[0][1] - found[1][1]).abs().max() < 1e-5


@pytest.mark.parametrize("more", VARIANTS, ids=str)
def test_bfloat16(more: dict[str, Any]) -> None:
    """Half precision is as near to float32 as its eight bits allow."""
    config = ModelConfig.from_fields(**SIZES | more)
    want = make_decoder(config)(Batch(tokens_BS=random_batch(2, 9)))
    got = make_decoder(config, dtype=torch.bfloat16)(Batch(tokens_BS=random_batch(2, 9)))
    assert got.dtype == torch.bfloat16
    assert (got - want).abs().mean() < 0.04 * want.abs().mean()


def test_layers_are_called_as_modules() -> None:
    """Loaders on demand put tensors in before a layer runs, and take them out after it."""
    decoder = make_decoder(ModelConfig.from_fields(**SIZES))
    seen: list[str] = []
    for name, layer in decoder.decoder.layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: seen.append(f"in {name}"))
        layer.register_forward_hook(lambda *_, name=name: seen.append(f"out {name}"))
    decoder(Batch(tokens_BS=random_batch(1, 3)))
    assert seen == [f"{way} {i}" for i in range(4) for way in ("in", "out")]


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (-1, "holds token -1, and the model has a vocabulary of 101"),
        (101, "holds token 101"),  # the embedding has 128 rows
        (5000, "holds token 5000"),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused(token: int, said: str) -> None:
    tokens = random_batch(2, 5)
    tokens[1, 3] = token
    with pytest.raises(UsageError, match=said) as caught:
        make_decoder(ModelConfig.from_fields(**SIZES))(Batch(tokens_BS=tokens))
    assert caught.value.hint == "ids go from 0 to 100: is the tokenizer another model's?"


def test_positions_that_were_not_learned_are_refused() -> None:
    config = ModelConfig.from_fields(**SIZES, position_embedding="learned")
    decoder, tokens = make_decoder(config), random_batch(1, 33)
    with raises(UsageError, "32", "32 positions"):
        decoder(Batch(tokens_BS=tokens))
    padded = Batch(tokens_BS=tokens, valid_BS=torch.arange(33)[None] < 32)
    assert decoder(padded).shape == (1, 33, 101)
    cache = ContiguousCache(config, num_rows=1, max_tokens=64)
    decoder(Batch(tokens_BS=tokens[:, :30]), cache)
    with pytest.raises(UsageError, match="at position 32"):
        decoder(Batch(tokens_BS=tokens[:, 30:]), cache)
    assert make_decoder(ModelConfig.from_fields(**SIZES))(Batch(tokens_BS=tokens)).shape == (
        1,
        33,
        101,
    )


def test_what_no_single_stack_of_layers_has_is_refused() -> None:
    with pytest.raises(MappingError, match="position_embedding is 'relative'"):
        Decoder(ModelConfig.from_fields(**SIZES, position_embedding="relative"))


def test_an_encoder_has_no_cache_and_no_context_parallelism() -> None:
    config = ModelConfig.from_fields(**SIZES, bidirectional=True)
    decoder, tokens = make_decoder(config), random_batch(1, 8)
    with raises(UsageError, "generates no text", hint="megtool evaluate"):
        decoder(Batch(tokens_BS=tokens), ContiguousCache(config, num_rows=1, max_tokens=8))
    with raises(LayoutError, "cp is 2", hint="--tp and --pp"):
        check_direction(config, ParallelConfig(cp=2))
    check_direction(ModelConfig.from_fields(**SIZES), ParallelConfig(cp=2), has_cache=True)


def test_tokens_of_an_encoder_see_those_behind_them() -> None:
    """All of them, or those within a window, but neither padding nor other texts."""
    tokens, places = random_batch(1, 12), torch.arange(12)
    for window in (0, 3):
        decoder = make_decoder(
            ModelConfig.from_fields(**SIZES, bidirectional=True, window_size=window)
        )
        layers = decoder.config.num_layers
        with torch.no_grad():
            want = decoder(Batch(tokens_BS=tokens))
            for changed in (0, 5, 11):
                other = tokens.clone()
                other[0, changed] = (other[0, changed] + 1) % 101
                differs = (decoder(Batch(tokens_BS=other)) != want).any(-1)[0]
                near = (places - changed).abs() <= layers * (window - 1 if window else 12)
                assert torch.equal(differs, near), (window, changed)
            cut = decoder(Batch(tokens_BS=tokens[:, :7]))
            valid = decoder(Batch(tokens_BS=tokens, valid_BS=places[None] < 7))[:, :7]
            texts = decoder(Batch(tokens_BS=tokens, documents_BS=(places[None] >= 7).long()))
        assert torch.allclose(valid, cut, atol=1e-5)
        assert torch.allclose(texts[:, :7], cut, atol=1e-5)


def test_sequence_parallelism_says_what_it_shares_out() -> None:
    groups = ProcessGroups(parallel=ParallelConfig(tp=2), tp=Group(ranks=(0, 1)))
    decoder = Decoder(
        ModelConfig.from_fields(**SIZES), groups, device="cpu", sequence_parallel=True
    )
    with raises(
        LayoutError,
        "tp=2",
        "B*S = 21 tokens",
        hint="multiple of tp: 22 tokens, or go without sequence parallelism",
    ) as caught:
        decoder.frame(Batch(tokens_BS=random_batch(3, 7)))
    assert caught.value.hint is not None
    with raises(
        LayoutError, "B*S /", "= 6 tokens", hint="multiple of tp * cp: 16 tokens"
    ) as caught:
        rows_of_rank(6, 4, cp=2)
    assert caught.value.hint is not None
