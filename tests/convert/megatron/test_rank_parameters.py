"""What ranks hold: every element as often as its tensor is repeated, and what `shard` says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megtool.convert.language.binding import Binding
from megtool.convert.language.canonical import CanonicalModel
from megtool.convert.megatron.names import EMBEDDING, OUTPUT, PER_LAYER, STACKED
from megtool.convert.megatron.rank_parameters import Parameter, RankPlace, rank_parameters
from megtool.convert.megatron.sharding import shard
from megtool.dtypes import dtype
from megtool.errors import LayoutError
from megtool.megatron_state.optimizer.box_runs import split_into_boxes
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import Mesh
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.trained import canonical_tensors, config
from tests.support.errors import raises
from tests.support.models.parameter_models import MODELS as KINDS

MODELS = {
    **KINDS,
    "tied": {"tied_embeddings": True},
    "all experts": {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8},
}


def stored(model: ModelConfig) -> list[GlobalTensor]:
    canonical = {
        n: GlobalTensor(name=n, shape=s, dtype=dtype("bfloat16"))
        for n, s in canonical_tensors(model).items()
    }
    table = STACKED if layer_sets.is_homogeneous(model) else PER_LAYER
    return list(Binding(table, CanonicalModel(model)).write(canonical, pad_to=16).tensors)


def layouts(draw: st.DrawFn, model: ModelConfig) -> ParallelConfig:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([1, 2, 4])) if model.moe.num_experts else 1
    etp = draw(st.sampled_from([1, 2, tp])) if model.moe.num_experts else tp
    vpp = 2 if pp == 2 and draw(st.booleans()) else 1
    try:
        return ParallelConfig(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=8 // tp)
    except LayoutError:
        assume(False)
        raise


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_element_is_held_as_often_as_its_tensor(name: str, data: Any) -> None:
    model = config(**MODELS[name])
    parallel = layouts(data.draw, model)
    tensors = stored(model)
    ranks = rank_parameters(tensors, model, parallel)
    held: dict[str, np.ndarray[Any, Any]] = {}
    for found in ranks.values():
        for p in found:
            count = held.setdefault(p.key, np.zeros(p.shape, np.int64))
            total = 0
            for (lo, hi), position in split_into_boxes(p, 0, p.numel):
                count[tuple(map(slice, lo, hi))] += 1
                total += int(np.prod([h - x for x, h in zip(lo, hi, strict=True)]))
                assert position < p.numel
            assert total == p.numel == int(np.prod(p.local_shape))
    for key, count in held.items():
        times = set(np.unique(count).tolist())
        assert len(times) == 1, key
        ranks_of_it = parallel.etp if ".experts.experts." in key else parallel.tp
        homes = 2 if key == EMBEDDING and model.embedding.tied_embeddings and parallel.pp > 1 else 1
        assert times <= {homes, homes * ranks_of_it}, key
    assert sum(c.size for c in held.values()) == sum(t.numel for t in tensors)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_norms_without_weights_are_no_tensors_anywhere(norm: Any) -> None:
    """Not in layers of multi-token prediction either: what a decoder has is what is expected."""
    model = config(norm=norm, norm_weight=False, num_mtp_layers=2)
    (found,) = rank_parameters(stored(model), model, ParallelConfig()).values()
    own = {n for n, _ in Decoder(model).named_parameters()}
    assert {p.key for p in found} == own
    assert any("eh_proj" in n for n in own)
    assert not any("norm" in n for n in own)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25)
@given(data=st.data())
def test_ranks_hold_what_sharding_gives_them(name: str, data: Any) -> None:
    """`shard` says which rank writes each box: that rank's place holds it."""
    model = config(**MODELS[name])
    parallel = layouts(data.draw, model)
    tensors = stored(model)
    places = rank_parameters(tensors, model, parallel)
    mesh = Mesh(parallel)
    where: dict[tuple[int, bool], set[tuple[str, tuple[int, ...]]]] = {}
    for place, found in places.items():
        for p in found:
            for rank in _ranks(mesh, parallel, place, p):
                for box in p.boxes:
                    where.setdefault((rank, p.is_expert), set()).add((p.key, *_flat(box)))  # type: ignore[arg-type]
    shards = shard(tensors, parallel, config=model)
    for number, lo, hi, owner in zip(
        shards.tensor.tolist(),
        shards.boxes.lo.tolist(),
        shards.boxes.hi.tolist(),
        shards.owner.tolist(),
        strict=True,
    ):
        t = tensors[number]
        lo, hi = lo[: len(t.shape)], hi[: len(t.shape)]
        for key, a, b in _per_layer(t, lo, hi):
            is_expert = ".experts.experts." in key
            boxes = where[owner, is_expert]
            assert any(
                k == key and _inside(a, b, rest)
                for k, *rest in boxes  # type: ignore[misc]
            ), (key, a, b, owner)


def _ranks(mesh: Mesh, parallel: ParallelConfig, place: RankPlace, p: Parameter) -> list[int]:
    if p.is_expert:
        return [
            int(mesh.expert_rank(etp=place.tp, ep=place.ep, edp=r, pp=place.stage))
            for r in range(max(parallel.expert_dp, 1))
        ]
    return [
        int(mesh.rank(tp=place.tp, cp=c, dp=d, pp=place.stage))
        for d in range(parallel.dp)
        for c in range(parallel.cp)
    ]


def _flat(box: Any) -> tuple[Any, ...]:
    return tuple(box)


def _inside(lo: list[int], hi: list[int], box: Any) -> bool:
    return all(x <= a and b <= y for x, a, b, y in zip(box[0], lo, hi, box[1], strict=True))


def _per_layer(
    t: GlobalTensor, lo: list[int], hi: list[int]
) -> list[tuple[str, list[int], list[int]]]:
    head, dot, rest = t.name.partition(".layers.")
    if not dot or rest.partition(".")[0].isdigit():
        return [(t.name, lo, hi)]
    return [(f"{head}.layers.{k}.{rest}", lo[1:], hi[1:]) for k in range(lo[0], hi[0])]


@pytest.mark.parametrize(
    ("layout", "says"),
    [({"tp": 3}, "tp=3"), ({"pp": 3}, "pp=3"), ({"ep": 3, "dp": 3}, "ep=3"), ({"pp": 8}, "pp=8")],
    ids=str,
)
def test_impossible_layouts_say_what_is_possible(layout: dict[str, int], says: str) -> None:
    model = config(**MODELS["all experts"])
    with raises(LayoutError, match=says, hint=True):
        rank_parameters(stored(model), model, ParallelConfig(**layout))


EMBEDDINGS = {  # keys of real GPTModels: tests/peers/test_chunks.py builds them
    ("Etttt|mL", False): {(0, 0): [EMBEDDING], (1, 0): [EMBEDDING, OUTPUT]},
    ("Etttt|mL", True): {(0, 0): [EMBEDDING], (1, 0): [EMBEDDING, OUTPUT]},
    ("E|tttt|m|L", False): {(0, 0): [EMBEDDING], (0, 1): [EMBEDDING], (1, 1): [OUTPUT]},
    ("Ett|tt|m|L", True): {(0, 0): [EMBEDDING], (2, 0): [EMBEDDING], (3, 0): [OUTPUT]},
}


@pytest.mark.parametrize(("layout", "tied"), EMBEDDINGS)
def test_chunks_with_an_embedding(layout: str, tied: bool) -> None:
    model = config(num_mtp_layers=1, tied_embeddings=tied)
    pp = 2 if layout != "Ett|tt|m|L" else 4
    parallel = ParallelConfig(pp=pp, pipeline_layout=layout)
    found: dict[tuple[int, int], list[str]] = {}
    unused = set()
    for place, parameters in rank_parameters(stored(model), model, parallel).items():
        names = [p.module_key for p in parameters if p.module_key in (EMBEDDING, OUTPUT)]
        if names:
            found[place.stage, place.chunk] = names
        unused |= {(place.stage, p.module_key) for p in parameters if p.is_unused}
    assert found == EMBEDDINGS[layout, tied]
    assert unused == ({(1, OUTPUT)} if layout == "Etttt|mL" and tied else set())
