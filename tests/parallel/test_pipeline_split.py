"""Layers on pipeline stages, by every rule that Megatron-Core has, compared with its functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig, pipeline_chunks
from megtool.parallel.pipeline_split import (
    Pipeline,
    compact,
    divisors,
    even_text,
    flags,
    layout_text,
    near,
    splits,
)

DEEPSEEK = "Et*3|(tt|)*29,m|L"


@dataclass(frozen=True, slots=True)
class Case:
    """A split of layers, in the words of both."""

    layers: int
    pp: int
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: str | None = None
    mtp: int = 0

    def pipeline(self) -> Pipeline:
        parallel = ParallelConfig(
            pp=self.pp,
            vpp=0 if self.layout is not None else self.vpp,
            first_stage_layers=self.first,
            last_stage_layers=self.last,
            account_for_embedding=self.embedding,
            account_for_loss=self.loss,
            pipeline_layout=self.layout,
        )
        return Pipeline.of(parallel)


def megatrons(case: Case) -> list[list[range]] | None:
    """What megatron-core builds, `[stage][chunk]`, or None where it refuses."""
    import torch
    from megatron.core import parallel_state as state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = TransformerConfig(
            num_layers=case.layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=case.first,
            num_layers_in_last_pipeline_stage=case.last,
            account_for_embedding_in_pipeline_split=case.embedding,
            account_for_loss_in_pipeline_split=case.loss,
            pipeline_model_parallel_layout=case.layout,
            mtp_num_layers=case.mtp or None,
        )
        vpp = config.virtual_pipeline_model_parallel_size
        state.set_virtual_pipeline_model_parallel_world_size(vpp)
        out: list[list[range]] = []
        for stage in range(case.pp):
            state.set_pipeline_model_parallel_rank(stage)
            out.append([])
            for chunk in range(vpp or 1):
                at = {"vp_stage": chunk if vpp else None, "pp_rank": stage}
                start = get_transformer_layer_offset(config, **at)
                out[-1].append(range(start, start + get_num_layers_to_build(config, **at)))
    except (AssertionError, ValueError, ZeroDivisionError):
        return None
    finally:
        state.set_virtual_pipeline_model_parallel_world_size(None)
        state.set_pipeline_model_parallel_rank(None)
    # It lets an outer stage take more layers than there are, and others a negative number.
    sizes = [len(layers) for row in out for layers in row]
    return out if sum(sizes) == case.layers else None


def ours(case: Case) -> list[list[range]] | None:
    try:
        pipeline = case.pipeline()
        chunks = range(pipeline.vpp)
        rows = [[pipeline.layers_of(case.layers, s, c) for c in chunks] for s in range(pipeline.pp)]
    except LayoutError as error:
        assert error.hint
        return None
    return rows if pipeline.layout is None or pipeline.num_mtp == case.mtp else None


def plain(rows: list[list[range]] | None) -> list[list[list[int]]] | None:
    return rows and [[list(layers) for layers in row] for row in rows]


def every_uneven_case() -> Iterator[Case]:
    outer = (None, *range(1, 9))
    for layers, pp, vpp in product(range(1, 18), range(2, 6), (1, 2, 3)):
        for first, last in product(outer, outer):
            yield Case(layers, pp, vpp, first=first, last=last)


@pytest.mark.peers
@pytest.mark.slow
def test_every_small_split_equals_megatrons() -> None:
    pytest.importorskip("megatron.core")
    uneven = list(every_uneven_case())
    counted = [
        Case(layers, pp, vpp, embedding=e, loss=last)
        for layers, pp, vpp in product(range(1, 26), range(1, 8), (1, 2, 3))
        for e, last in product((False, True), (False, True))
        if pp > 1 or vpp == 1
    ]
    taken = 0
    for case in uneven + counted:
        expected = plain(megatrons(case))
        assert plain(ours(case)) == expected, case
        taken += expected is not None
    assert taken > 900


@pytest.mark.peers
@given(st.data())
def test_uneven_splits_equal_megatrons(data: Any) -> None:
    pytest.importorskip("megatron.core")
    vpp, pp = data.draw(st.integers(1, 3)), data.draw(st.integers(3, 9))
    sizes = st.one_of(st.none(), st.integers(1, 6).map(lambda n: n * vpp), st.integers(1, 12))
    first, last = data.draw(sizes), data.draw(sizes)
    each = data.draw(st.integers(0, 4)) * vpp
    layers = sum(each if n is None else n for n in (first, last)) + (pp - 2) * each
    layers = max(1, layers + data.draw(st.sampled_from([0, 0, 0, 0, 1, -1])))
    case = Case(layers, pp, vpp, first=first, last=last)
    assert plain(ours(case)) == plain(megatrons(case))


@st.composite
def explicit(draw: Any) -> Case:
    """Mostly layouts as they should be, with a letter too many or in the wrong place here or there.

    Virtual stages of a single stage are left out: Megatron's training refuses them.
    """
    pp = draw(st.integers(1, 5))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    rows = draw(st.lists(st.text("t", max_size=3), min_size=pp * vpp, max_size=pp * vpp))
    anywhere = st.integers(0, len(rows) - 1)
    mtp = draw(st.integers(0, 2))
    rows[draw(st.one_of(st.just(-1), st.just(-min(2, len(rows))), anywhere))] += "m" * mtp
    if draw(st.integers(0, 4)) == 0:
        rows[draw(anywhere)] += draw(st.sampled_from("EmLt"))
    rows[0] = "E" + rows[0]
    rows[draw(st.one_of(st.just(-1), st.just(-1), anywhere))] += "L"
    layers = max(1, sum(row.count("t") for row in rows) + draw(st.sampled_from([0, 0, 0, 1])))
    return Case(layers, pp, vpp, layout=compact(rows), mtp=mtp)


@pytest.mark.peers
@given(explicit())
@example(Case(61, 16, 2, layout=DEEPSEEK, mtp=1))
@example(Case(2, 3, layout="Et||tL"))
@example(Case(2, 3, layout="|Et|tL"))
def test_explicit_layouts_equal_megatrons(case: Case) -> None:
    pytest.importorskip("megatron.core")
    assert plain(ours(case)) == plain(megatrons(case))


@pytest.mark.peers
@given(st.text("Etm|,()*23L", max_size=14))
@example(DEEPSEEK)
@example("(t*2|)*3E")
@example("|*3")
@example("((t)*2|)*2")
@example("(t)*2*3")
def test_layouts_are_read_as_megatron_reads_them(text: str) -> None:
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    try:
        rows = core.PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        with pytest.raises(LayoutError):
            pipeline_chunks(text)
        return
    assert pipeline_chunks(text) == tuple("".join(letters[x.name] for x in row) for row in rows)
    assert pipeline_chunks(layout_text([[x.name for x in row] for row in rows])) == (
        pipeline_chunks(text)
    )


@pytest.mark.peers
@pytest.mark.parametrize("layout", [None, DEEPSEEK, "Et*3|(tt|)*28ttm||L"])
def test_multi_token_prediction_is_where_megatron_has_it(layout: str | None) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
    from megatron.core.transformer.transformer_config import TransformerConfig

    layers = 64 if layout is None else sum(c.count("t") for c in pipeline_chunks(layout))
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_dtype=np.float32,
        pipeline_model_parallel_size=16 if layout else 8,
        pipeline_model_parallel_layout=layout,
        mtp_num_layers=1,
    )
    pp = config.pipeline_model_parallel_size
    pipeline = Case(layers, pp, layout=layout).pipeline()
    assert get_mtp_ranks(list(range(pp)), config) == [pipeline.mtp[0]]


def test_chunks_of_the_deepseek_layout() -> None:
    pipeline = Case(61, 16, layout=DEEPSEEK).pipeline()
    assert pipeline.vpp == 2
    assert pipeline.layers_of(61, 0, 0) == range(3)
    assert pipeline.layers_of(61, 15, 0) == range(31, 33)
    assert pipeline.layers_of(61, 0, 1) == range(33, 35)
    assert list(pipeline.layers_of(61, 15, 1)) == []
    assert pipeline.embedding == (0, 0)
    assert pipeline.mtp == (14, 1)
    assert pipeline.loss == (15, 1)
    assert pipeline.norm(61, has_mtp=True) == (13, 1)
    assert pipeline.norm(61) == (15, 1)


@given(st.integers(1, 90), st.integers(1, 12), st.integers(1, 3))
def test_both_ways_agree(layers: int, pp: int, vpp: int) -> None:
    for pipeline in splits(layers, pp, vpp):
        stage, chunk = pipeline.stage_of_layer(layers), pipeline.chunk_of_layer(layers)
        assert stage.dtype == chunk.dtype == np.int64
        found = [
            (s, c)
            for i in range(layers)
            for s, c in [(int(stage[i]), int(chunk[i]))]
            if i in pipeline.layers_of(layers, s, c)
        ]
        assert len(found) == layers
        assert pipeline.sizes(layers).sum() == layers
        assert pipeline.sizes(layers).shape == (vpp, pp)


@given(st.integers(1, 90), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2))
def test_a_layout_of_its_own_is_balanced(layers: int, pp: int, vpp: int, mtp: int) -> None:
    shape = Pipeline(pp=pp, vpp=vpp)
    made = Pipeline(pp=pp, vpp=vpp, layout=even_text(layers, shape, mtp))
    sizes = made.sizes(layers)
    assert sizes.max() - sizes.min() <= 1
    assert made.num_mtp == mtp


@given(st.lists(st.text("EtmL", max_size=6), min_size=1, max_size=20))
def test_short_text_says_the_same(rows: list[str]) -> None:
    assert pipeline_chunks(compact(rows)) == tuple(rows)


@pytest.mark.parametrize(
    ("case", "said", "hint"),
    [
        (Case(61, 8), "pp=8 does not divide num_layers=61", "--first-stage-layers 5"),
        (Case(61, 8), "pp=8", "--first-stage-layers 7 --last-stage-layers 6"),
        (Case(61, 8), "pp=8", "--pipeline-layout 'Et*7|t*7|(t*8|)*5t*7L'"),
        (Case(62, 8), "num_layers=62", "--account-for-embedding --account-for-loss"),
        (Case(61, 8, embedding=True), "num_layers=61 + 1 for the embedding", "1, 2, 31, 62"),
        (Case(8, 4, 3), "vpp=3 does not divide the 2 layers", "sizes that do: 1, 2"),
        (Case(61, 8, first=4), "leaves 57 of 61 layers for 7", "--first-stage-layers 5"),
        (Case(4, 3, first=9), "leaves -5 of 4", "--pipeline-layout"),
        (Case(12, 4, first=4, last=8), "leaves 0 of 12 layers for 2", "an even split"),
        (Case(12, 4, 2, first=3), "vpp=2 does not divide the 3", "--pipeline-layout"),
        (Case(4, 3, layout="Et|t|tL"), "3 layers (t), and the model 4", "'Et|tt|tL'"),
        (Case(2, 2, layout="tE|tL"), "not a Megatron pipeline layout", "one E, before"),
        (Case(2, 2, layout="Et|Lt"), "not a Megatron pipeline layout", "one L, after"),
        (Case(2, 2, layout="Em|ttL"), "not a Megatron pipeline layout", "after the last t"),
        (Case(2, 2, layout="Ettm|mL"), "not a Megatron pipeline layout", "every m in one chunk"),
        (
            Case(2, 2, layout="Et|tm||L"),
            "not a Megatron pipeline layout",
            "the last 2 of its 4 chunks",
        ),
        (Case(3, 1_000_000_000), "pp=1000000000", "sizes that do: 1, 3"),
    ],
)
def test_impossible_splits_name_possible_ones(case: Case, said: str, hint: str) -> None:
    with pytest.raises(LayoutError) as error:
        case.pipeline().sizes(case.layers)
    assert said in error.value.message
    assert hint in str(error.value.hint), error.value.hint


def test_names_in_lists() -> None:
    assert layout_text([["embedding", " Decoder "], ["decoder"], ["mtp", "loss"]]) == "Et|t|mL"
    with pytest.raises(LayoutError, match="'encoder'"):
        layout_text([["embedding", "encoder"]])


def test_flags_and_sizes() -> None:
    assert flags(Pipeline(pp=4)) == ""
    assert flags(Pipeline(pp=4, first=3, last=2)) == "--first-stage-layers 3 --last-stage-layers 2"
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert near(divisors(720), 7, 4) == "5, 6, 8, 9, ..."
    assert near([], 3) == "none"
