"""Tensors under their own names: Retro, neither one decoder nor an encoder and a decoder."""

from __future__ import annotations

import pytest

from megtool.convert.identity import as_they_are, under_same_names
from megtool.convert.megatron.names import is_encoder_decoder, is_retro
from megtool.dtypes import dtype
from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.errors import raises

LAYER = "decoder.layers.5."
ENCODER = f"{LAYER}cross_attention.encoder.layers.0."
SHAPES = {
    "embedding.word_embeddings.weight": (64, 32),
    f"{LAYER}input_layernorm.weight": (32,),
    f"{LAYER}self_attention.linear_qkv.weight": (96, 32),
    f"{LAYER}cross_attention.attn.linear_q.bias": (32,),
    f"{LAYER}cross_attention.attn.linear_kv.weight": (64, 32),
    f"{LAYER}cross_attention.attn.linear_proj.weight": (32, 32),
    f"{ENCODER}cross_attention.attn.linear_q.weight": (32, 32),
    f"{ENCODER}pre_mlp_layernorm.norm.bias": (32,),
    f"{ENCODER}mlp.linear_fc2.weight": (32, 48),
}
CUTS = {"linear_qkv.weight": 0, "linear_q.bias": 0, "linear_kv.weight": 0, "linear_q.weight": 0}
CUTS |= {"linear_proj.weight": 1, "linear_fc2.weight": 1, "word_embeddings.weight": 0}


def tensors(prefix: str = "") -> list[GlobalTensor]:
    kind = dtype("float32")
    return [GlobalTensor(name=prefix + n, shape=s, dtype=kind) for n, s in SHAPES.items()]


@pytest.mark.parametrize("prefix", ["", "model.module.", "optimizer.state.exp_avg."])
def test_it_is_told_apart(prefix: str) -> None:
    names = [t.name for t in tensors(prefix)]
    assert is_retro(names)
    assert not is_encoder_decoder(names)
    assert not is_retro(["decoder.layers.cross_attention.linear_q.weight"])
    assert is_encoder_decoder(["decoder.layers.cross_attention.linear_q.weight"])


def test_ranks_of_tensor_parallelism_cut_the_encoder_too() -> None:
    view = as_they_are(tensors(), None)
    assert f"{LAYER}self_attention.linear_qkv.layer_norm_weight" in view.canonical
    assert f"{ENCODER}pre_mlp_layernorm.norm.bias" in view.canonical
    target = under_same_names(view, None, None, ParallelConfig(tp=2), 16)
    assert target.shards is not None
    for number, t in enumerate(target.tensors):
        shapes = target.shards.boxes.shape[target.shards.of(number)]
        dim = next((d for end, d in CUTS.items() if t.name.endswith(end)), None)
        want = list(t.shape)
        if dim is not None:
            want[dim] //= 2
        assert shapes[:, : len(want)].tolist() == [want] * (1 if dim is None else 2), t.name


def test_there_are_no_stages() -> None:
    with raises(LayoutError, "pp=2", hint="omit --pp"):
        under_same_names(as_they_are(tensors(), None), None, None, ParallelConfig(pp=2), 16)
