"""A rank's own tensors against slices of the whole model's, of any model, layout and source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megtool.convert.dialects import CanonicalView, DialectNaming, read_side, write_side
from megtool.convert.language.binding import Binding
from megtool.convert.language.canonical import CanonicalModel
from megtool.convert.megatron.names import PER_LAYER, STACKED
from megtool.convert.megatron.rank_parameters import rank_parameters
from megtool.convert.rank_tensors import LocalView, RankCoordinates, local_side, local_tensors
from megtool.dtypes import dtype
from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.rank_slices import Arrays, slice_tensors
from tests.support.checkpoints.trained import canonical_tensors, config
from tests.support.models.parameter_models import MODELS as KINDS

MODELS: dict[str, dict[str, Any]] = {
    **KINDS,
    "tied": {"tied_embeddings": True},
    "one kv head": {"num_kv_heads": 1},
    "gated attention": {"attn_output_gate": True},
    "all experts": {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8},
    "latent": {
        "num_kv_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": 8,
        "moe_layer_freq": (0, 1, 1, 1),
    },
}


def source_of(model: ModelConfig, *, stacked: bool) -> tuple[CanonicalView, Arrays]:
    """Megatron's tensors of a model, no two elements alike within one."""
    canonical = {
        n: GlobalTensor(name=n, shape=s, dtype=dtype("float32"))
        for n, s in canonical_tensors(model).items()
    }
    table = STACKED if stacked and layer_sets.is_homogeneous(model) else PER_LAYER
    tensors = Binding(table, CanonicalModel(model)).write(canonical, pad_to=8).tensors
    arrays = {
        t.name: np.arange(1 + 1000 * k, 1 + 1000 * k + t.numel).reshape(t.shape)
        for k, t in enumerate(tensors)
    }
    return read_side(list(tensors), dialect="megatron", config=model), arrays


def index(p: Placement) -> tuple[np.ndarray[Any, Any], ...]:
    grids = np.indices(p.shape)
    out = [np.full(p.shape, b) for b in p.base]
    for j, (d, m) in enumerate(zip(p.dims, p.mults, strict=True)):
        out[d] = out[d] + grids[j] * m
    return tuple(out)


def assembled(local: LocalView, arrays: Arrays) -> Arrays:
    """What the parts say the rank holds; every element is written once."""
    out = {t.name: np.full(t.shape, -1) for t in local.tensors}
    for name, to in local.target.items():
        at = local.source[name]
        assert (out[to.stored][index(to)] == -1).all()
        out[to.stored][index(to)] = arrays[at.stored][index(at)]
    for fill in local.fills:
        assert (out[fill.placement.stored][index(fill.placement)] == -1).all()
        out[fill.placement.stored][index(fill.placement)] = fill.value
    assert all((a >= 0).all() for a in out.values())
    return out


def seats(parallel: ParallelConfig) -> list[RankCoordinates]:
    """Every rank of a layout, dense and expert places paired as they come."""
    experts = [(ep, etp) for ep in range(parallel.ep) for etp in range(parallel.etp)]
    return [
        RankCoordinates(stage=stage, tp=tp, ep=ep, etp=etp)
        for stage in range(parallel.pp)
        for k, (ep, etp) in enumerate(experts * parallel.tp)
        if (tp := k % parallel.tp) < parallel.tp
    ]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12)
@given(data=st.data())
def test_a_rank_holds_its_slices(name: str, data: Any, carry: Callable[..., Arrays]) -> None:
    model = config(**MODELS[name])
    draw = data.draw
    sizes: dict[str, int] = {a: draw(st.sampled_from([1, 2, 4]), label=a) for a in ("tp", "pp")}
    if model.moe.num_experts:
        sizes |= {"ep": draw(st.sampled_from([1, 2, 4])), "etp": draw(st.sampled_from([1, 2]))}
    try:
        parallel = ParallelConfig(**sizes)
        source, arrays = source_of(model, stacked=draw(st.booleans(), label="stacked"))
        target = write_side(
            source,
            dialect="megatron",
            parallel=parallel,
            per_layer=True,
            options=DialectNaming(divisible_by=5),
        )
        ranks = rank_parameters(target.tensors, model, parallel)
    except LayoutError:
        assume(False)
        raise
    whole = carry(source, arrays, target)
    seat = draw(st.sampled_from(seats(parallel)), label="seat")
    tensors = local_tensors(ranks, seat)
    local = local_side(tensors.values(), source, target)
    got = assembled(local, arrays)
    want = slice_tensors(target, whole, model, parallel, seat)
    assert got.keys() == want.keys() == tensors.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)


def test_a_tied_embedding_is_on_both_ends() -> None:
    model = config(tied_embeddings=True)
    parallel = ParallelConfig(pp=2, tp=2)
    source, arrays = source_of(model, stacked=True)
    target = write_side(source, dialect="megatron", parallel=parallel, per_layer=True)
    ranks = rank_parameters(target.tensors, model, parallel)
    held = []
    for stage in range(2):
        tensors = local_tensors(ranks, RankCoordinates(stage=stage, tp=1))
        local = local_side(tensors.values(), source, target)
        held.append(assembled(local, arrays)["embedding.word_embeddings.weight"])
    np.testing.assert_array_equal(*held)


def test_types_are_given_by_name() -> None:
    source, _ = source_of(config(), stacked=True)
    target = write_side(source, dialect="megatron", per_layer=True)
    ranks = rank_parameters(target.tensors, config(), ParallelConfig())
    tensors = local_tensors(ranks, RankCoordinates())
    half = {n: dtype("bfloat16") for n in tensors}
    local = local_side(tensors.values(), source, target, dtypes=half)
    assert {t.dtype.name for t in local.tensors} == {"bfloat16"}
