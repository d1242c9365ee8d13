"""Frequencies against transformers' own functions, and which layers turn by which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

transformers = pytest.importorskip("transformers")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from megtool.model.positions.rotary import Rotary, has_rotation  # noqa: E402
from tests.support.emulated.graph_rules import graphed  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
ORIGINAL = {"original_max_position_embeddings": 512}
KINDS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "yarn", "factor": 8.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 12, "beta_slow": 2, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "truncate": False, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.1, **ORIGINAL},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.6, **ORIGINAL},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        **ORIGINAL,
    },
]


def config(**more: Any) -> ModelConfig:
    sizes: dict[str, Any] = dict(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=9,
        max_positions=4096,
    )
    return ModelConfig.from_fields(**sizes | more)


@pytest.mark.parametrize("length", [100, 513, 4096, 9000])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: ",".join(map(str, k.values()))[:40])
def test_frequencies(kind: dict[str, Any], base: float, length: int) -> None:
    theirs = transformers.LlamaConfig(**SIZES, rope_parameters={**kind, "rope_theta": base})
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind["rope_type"]](theirs, seq_len=length)
    rotary = Rotary(config(rope_base=base, rope_scaling=kind))
    found = rotary.frequencies(length, is_local=False)
    torch.testing.assert_close(found.per_position, inv_freq, rtol=1e-6, atol=0)
    assert found.scale == pytest.approx(scale)
    positions = torch.tensor([[0, 1, length - 1]])
    cos, sin = rotary.rotation(positions)
    angles = positions[..., None] * inv_freq
    angles = torch.cat((angles, angles), -1)  # up to 9000, of which float32 holds three decimals
    torch.testing.assert_close(cos, angles.cos() * scale, rtol=0, atol=1e-3)
    torch.testing.assert_close(sin, angles.sin() * scale, rtol=0, atol=1e-3)


def test_layers_turn_by_their_own_base_or_not_at_all() -> None:
    made = config(
        rope_base=1e6,
        rope_local_base=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        window_size=3,
        window_skip_freq=3,
        no_rope_layers=(0, 1, 0, 0),
        rotary_percent=0.5,
    )
    assert [has_rotation(made, i) for i in range(4)] == [True, False, True, True]
    assert [made.window.has_window(i) for i in range(4)] == [True, True, False, True]
    rotary, positions = Rotary(made), torch.arange(5)[None]
    local, none, whole, same = (rotary.of(i, positions) for i in range(4))
    assert none is None
    assert local is same
    assert local is not None
    assert whole is not None
    assert local.cos_BSR.shape == (1, 5, 8)
    torch.testing.assert_close(local.sin_BSR[0, :, 0], torch.arange(5.0).sin())
    torch.testing.assert_close(whole.sin_BSR[0, :, 0], (torch.arange(5.0) / 8).sin())


def test_pairs_side_by_side() -> None:
    halves = Rotary(config()).rotation(torch.arange(6)[None])
    pairs = Rotary(config(rope_interleaved=True)).rotation(torch.arange(6)[None])
    for a, b in zip(halves, pairs, strict=True):
        assert torch.equal(a[..., :8], b[..., 0::2])
        assert torch.equal(b[..., 0::2], b[..., 1::2])


@pytest.mark.parametrize("kind", [k for k in KINDS if k["rope_type"] in ("dynamic", "longrope")])
def test_a_row_turns_by_its_own_length(kind: dict[str, Any]) -> None:
    """Whatever its neighbors are, without a look at the host, so that a graph can hold it."""
    rotary = Rotary(config(rope_scaling=kind, max_positions=512))
    short, long = torch.arange(4)[None], torch.arange(600, 604)[None]
    both = rotary.rotation(torch.cat((short, long)))
    for row, positions in enumerate((short, long)):
        alone = rotary.rotation(positions)
        for one, many in zip(alone, both, strict=True):
            assert torch.equal(one[0], many[row])
    assert not torch.equal(rotary.rotation(long).cos_BSR, Rotary(config()).rotation(long).cos_BSR)
    step = graphed(lambda positions: tuple(rotary.rotation(positions)), "cpu")
    for positions in (short, long):  # one recorded graph, which has to choose anew
        for one, many in zip(rotary.rotation(positions), step(positions), strict=True):
            assert torch.equal(one, many)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "strange"}, "of the kind 'strange'"),
        ({"rope_type": "linear"}, "'linear' lacks 'factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "'longrope' lacks 'long_factor'"),
    ],
)
def test_what_is_missing_is_named(scaling: dict[str, Any], said: str) -> None:
    with pytest.raises(MappingError, match=said):
        Rotary(config(rope_scaling=scaling))


def test_each_length_has_its_own_scale() -> None:
    """Phi-MoE says one for short rows and one for long ones; position 0 shows it."""
    scaling = {**KINDS[-1], "short_mscale": 1.2, "long_mscale": 1.3}
    rotary = Rotary(config(rope_scaling=scaling))
    positions = torch.tensor([[0, 511], [0, 512]])
    cos = rotary.rotation(positions).cos_BSR
    assert cos[:, 0, 0].tolist() == pytest.approx([1.2, 1.3])
    assert cos[1, 1, 0] == pytest.approx(1.3 * torch.tensor(512.0).cos().item(), abs=1e-4)


def test_heads_may_turn_backwards() -> None:
    positions = torch.arange(5)[None]
    ahead, back = (Rotary(config(rope_reversed=r)).rotation(positions) for r in (False, True))
    assert torch.equal(ahead.cos_BSR, back.cos_BSR)
    assert torch.equal(ahead.sin_BSR, -back.sin_BSR)
