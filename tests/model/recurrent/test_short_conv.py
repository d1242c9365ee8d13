"""The short convolution and the states of mixers: portions, padding and blocks are one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import LayoutError, UsageError
from megtool.model.batch import Batch
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.kv_cache import ContiguousCache, KVCache
from megtool.model.cache.paged import PagedCache
from megtool.model.cache.recurrent_state import Mixers, MixerSize
from megtool.model.forward_context import ForwardContext
from megtool.model.recurrent.short_conv import GatedShortConv, ShortConv
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from megtool.train.model.memory_estimate import meta_groups
from tests.support.errors import raises
from tests.support.worlds import context_layouts
from tests.support.worlds.gloo_world import run_world

CONFIG = ModelConfig.from_fields(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=101,
    layer_kinds=("M", "*-", "GE"),
    num_experts=2,
    mamba_num_heads=4,
    mamba_head_dim=4,
    mamba_state_dim=8,
    mamba_num_groups=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
)
CHANNELS = 48


def conv() -> ShortConv:
    module = ShortConv(CHANNELS, 4, bias=True, device="cpu").requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


CONV = conv()


def numbers(*shape: int, seed: int = 1) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(x: Any, cache: KVCache | None = None, real: Any = None, runs: Any = None) -> Any:
    """One pass of the layer with a Mamba mixer."""
    tokens = torch.zeros(x.shape[:2], dtype=torch.int64)
    batch = Batch(tokens_BS=tokens, valid_BS=real)
    span = KeySpan.fresh(batch) if cache is None else cache.begin(batch)
    frame = ForwardContext(
        num_rows=x.shape[0],
        num_tokens=x.shape[1],
        positions_BS=span.positions_BS,
        rotary=None,  # type: ignore[arg-type]
        masks=(),
        cache=cache,
        real_BS=span.real_BS,
        runs_BS=runs,
    )
    out = CONV(x, frame, 0)
    if cache is not None:
        cache.advance()
    return out


@given(portions=st.lists(st.integers(1, 5), min_size=1, max_size=6), padding=st.integers(0, 4))
@settings(max_examples=15)
def test_portions_of_any_size(portions: list[int], padding: int) -> None:
    x = numbers(2, sum(portions), CHANNELS)
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=64)
    got, at = [], 0
    for size in portions:
        real = None
        part = x[:, at : at + size]
        if padding and not at:  # on the left of one row, on the right of the other
            ends = numbers(2, padding, CHANNELS, seed=3)
            part = torch.stack((torch.cat((ends[0], part[0])), torch.cat((part[1], ends[1]))))
            real = torch.ones(2, size + padding, dtype=torch.bool)
            real[0, :padding] = real[1, size:] = False
        out = run(part, cache, real)
        got.append(out if real is None else torch.stack([out[0][real[0]], out[1][real[1]]]))
        at += size
    torch.testing.assert_close(torch.cat(got, 1), run(x))


def test_padding_without_a_cache_is_no_input() -> None:
    x, real = numbers(1, 6, CHANNELS), torch.tensor([[False, False, True, True, True, True]])
    torch.testing.assert_close(run(x, real=real)[:, 2:], run(x[:, 2:]))


def test_sequences_in_blocks_keep_their_states() -> None:
    x = numbers(3, 9, CHANNELS)
    cache = PagedCache(CONFIG, num_blocks=8, block_size=4, num_sequences=2)
    cache.choose([(0, 3), (7, 2)])
    first = run(x[:2, :3], cache)
    cache.choose([(7, 1)])
    second = run(x[1:2, 2:3], cache)
    with pytest.raises(UsageError, match="1 sequences begin, and there is room for the states of"):
        cache.choose([(8, 1)])
    cache.release(7)
    cache.choose([(8, 1), (0, 1)])
    third = run(torch.cat((x[2:, :1], x[:1, 3:4])), cache)
    want = run(x)
    torch.testing.assert_close(first[0], want[0, :3])
    torch.testing.assert_close(first[1, :2], want[1, :2])
    torch.testing.assert_close(second[0], want[1, 2:3])
    torch.testing.assert_close(third, torch.stack((want[2, :1], want[0, 3:4])))


def test_channels_of_a_part() -> None:
    x, part = numbers(1, 6, CHANNELS), torch.tensor([4, 5, 20])
    frame = ForwardContext(
        num_rows=1,
        num_tokens=6,
        positions_BS=torch.arange(6)[None],
        rotary=None,  # type: ignore[arg-type]
        masks=(),
    )
    got = CONV(x[:, :, part], frame, 0, channels=part)
    torch.testing.assert_close(got, CONV(x, frame, 0)[:, :, part])


def test_sizes_of_states_and_who_has_some() -> None:
    mixers = Mixers.of(CONFIG, range(3))
    assert mixers.sizes == {
        0: MixerSize(num_taps=4, num_channels=CHANNELS, recurrent=(4, 4, 8)),
        2: MixerSize(num_taps=4, num_channels=32, recurrent=(4, 3, 5)),
    }
    halves = Mixers.of(CONFIG, [0, 2], tp=2).sizes
    assert halves[0] == MixerSize(num_taps=4, num_channels=CHANNELS // 2, recurrent=(2, 4, 8))
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=4, dtype=torch.bfloat16)
    assert cache.keys.keys() == {1}
    assert cache.read_state(2, "recurrent").dtype == torch.float32
    assert cache.read_state(0, "conv").shape == (2, 3, CHANNELS)
    cache.write_state(0, "conv", torch.ones(2, 3, CHANNELS))
    assert any(state.any() for state in cache.state[4:])
    cache.reset()
    assert not any(state.any() for state in cache.state[4:])
    keys = 2 * 2 * 2 * 4 * 8 * 2
    states = 2 * (3 * 2 * (CHANNELS + 32) + 4 * (4 * 4 * 8 + 4 * 3 * 5))
    assert cache.num_bytes == keys + states


# ---- as a mixer of their own

GATED = ModelConfig.from_fields(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    layer_kinds=("c-", "*-"),
    short_conv_taps=3,
    short_conv_bias=True,
)


def test_a_gated_convolution_with_biases_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    theirs = modeling.Lfm2ShortConv(
        modeling.Lfm2Config(
            hidden_size=16,
            conv_L_cache=3,
            conv_bias=True,
            num_hidden_layers=1,
            layer_types=["conv"],
        ),
        0,
    )
    ours = GatedShortConv(GATED, 0, ProcessGroups.alone(), device="cpu")
    names = {"in_proj": "in_proj", "conv1d": "conv", "out_proj": "out_proj"}
    weights = theirs.state_dict()
    with torch.no_grad():
        ours.in_proj.layer_norm_weight.fill_(1.0)
        for name, parameter in ours.named_parameters():
            module, _, kind = name.partition(".")
            if not kind.startswith("layer_norm"):
                parameter.copy_(weights[f"{names[module]}.{kind}"])
    frame = ForwardContext(
        num_rows=2,
        num_tokens=7,
        positions_BS=torch.arange(7).expand(2, 7),
        rotary=None,  # type: ignore[arg-type]
        masks=(),
    )
    x_BSH = numbers(2, 7, 16)
    got = ours(x_BSH.flatten(0, 1), frame).view(2, 7, 16)
    want = theirs(ours.in_proj.normalize(x_BSH))
    torch.testing.assert_close(got, want)
    (got**2).sum().backward()
    (want**2).sum().backward()
    for module, stored in names.items():
        for kind in ("weight", "bias"):
            torch.testing.assert_close(
                ours.get_parameter(f"{module}.{kind}").grad,
                theirs.get_parameter(f"{stored}.{kind}").grad,
            )


def test_names_of_a_gated_convolution() -> None:
    decoder = Decoder(GATED)
    own = [n for n, _ in decoder.named_parameters() if n.startswith("decoder.layers.0.")]
    module = "decoder.layers.0.short_conv."
    assert [n.removeprefix(module) for n in own if n.startswith(module)] == [
        "in_proj.layer_norm_weight",
        "in_proj.weight",
        "in_proj.bias",
        "conv1d.weight",
        "conv1d.bias",
        "out_proj.weight",
        "out_proj.bias",
    ]
    assert Mixers.of(GATED, [0, 1], tp=2).sizes == {
        0: MixerSize(num_taps=3, num_channels=8, recurrent=(0, 0, 0))
    }


@pytest.mark.parametrize("layout", [{"tp": 3}, {"tp": 4, "cp": 8}], ids=str)
def test_channels_that_do_not_go_evenly_are_refused(layout: Any) -> None:
    with raises(LayoutError, "16 channels of gated short convolutions cannot be split over tp="):
        GatedShortConv(GATED, 0, meta_groups(ParallelConfig(**layout), 0))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=str)
def test_ranks_have_the_numbers_of_one_process(layout: dict[str, int]) -> None:
    jobs = [("short convolutions", kind, layout, "tp" in layout) for kind in ("plain", "documents")]
    jobs += [("short convolutions", "padded left", layout, False)]
    for differences in run_world(context_layouts.verify_master_weights, 2, jobs):
        assert {k: v for k, v in differences.items() if not v < 1e-5} == {}
