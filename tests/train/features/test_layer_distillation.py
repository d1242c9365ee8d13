"""Distillation layer by layer against torch's and ModelOpt's loss, recomputed, and on ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import LayoutError, MappingError, UsageError
from megtool.model.batch import Batch
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.model.stacks.recompute import recompute
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features.distillation import DistillationFeature
from megtool.train.features.layer_distillation import choose_pairs, pair_layers
from tests.support.errors import raises
from tests.support.models.taught_decoders import DEEP, LABELS, STUDENT, TEACHER, TOKENS, build
from tests.support.worlds.gloo_world import run_world

PAIRS = "0:1,1:3"
SHALLOW = STUDENT.with_fields(num_layers=2)


def passes(
    groups: ProcessGroups, *, sp: bool = False, again: str | None = None, layers: str | None = PAIRS
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of hidden states alone."""
    torch.set_num_threads(1)
    student = build(SHALLOW, groups, 1, sp).train()
    if again:
        recompute(student, again)  # type: ignore[arg-type]
    teaching = DistillationFeature(
        student,
        build(DEEP, groups, 2),
        num_microbatches=2,
        weight=0.0,
        hidden_weight=3.0,
        layers=layers,
    )
    schedule = PipelineSchedule(student, num_microbatches=2, objective=teaching.objective)
    with teaching.around_passes(0, batch := Batch(tokens_BS=TOKENS)):
        loss, _ = schedule.step(batch, LABELS)
    assert not student.decoder.layers["0"]._forward_hooks
    return float(loss), {n: p.grad for n, p in student.named_parameters() if p.grad is not None}


def states(config: Any, seed: int, numbers: list[int]) -> tuple[Any, list[Tensor]]:
    """A model, and its states behind layers."""
    decoder = build(config, ProcessGroups.alone(), seed)
    batch = Batch(tokens_BS=TOKENS)
    frame = decoder.frame(batch)
    x_TH, out = decoder.embed(batch, frame), []
    for number in range(config.num_layers):
        x_TH = decoder.decoder.layers[str(number)](x_TH, frame)
        out.append(x_TH)
    return decoder, [out[n] for n in numbers]


def test_the_loss_is_torchs_and_modelopts() -> None:
    loss, grads = passes(ProcessGroups.alone())
    student, own = states(SHALLOW, 1, [0, 1])
    _, taught = states(DEEP, 2, [1, 3])
    kept = LABELS.flatten() != -100
    one = torch.ones(1)
    terms = [
        F.cosine_embedding_loss(a[kept], b[kept].detach(), one, reduction="sum")
        for a, b in zip(own, taught, strict=True)
    ]
    data_loss, _ = student.loss(Batch(tokens_BS=TOKENS), LABELS)
    expected = data_loss + 3.0 * sum(terms) / 2
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, p in student.named_parameters():
        assert torch.allclose(grads[name], p.grad, rtol=1e-3, atol=1e-4), name

    from modelopt.torch.distill.plugins.megatron import HiddenStateCosineLoss

    settings = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    theirs = HiddenStateCosineLoss(settings)
    for term, a, b in zip(terms, own, taught, strict=True):
        per_token, _ = _as_pair(theirs(a.view(4, 6, -1), b.view(4, 6, -1)))
        found = per_token.transpose(0, 1).flatten()[kept].sum()
        assert float(found.detach()) == pytest.approx(float(term.detach()), rel=1e-5)


def _as_pair(value: Any) -> tuple[Tensor, Any]:
    return (value[0], value[1:]) if isinstance(value, tuple) else (value, None)


@pytest.mark.parametrize("again", ["full", "selective"])
def test_recomputed_layers_find_the_same(again: str) -> None:
    loss, grads = passes(ProcessGroups.alone())
    found, theirs = passes(ProcessGroups.alone(), again=again)
    assert found == loss
    assert all(torch.equal(grads[name], theirs[name]) for name in grads)


def on_ranks(rank: int, size: int, sp: bool) -> Any:
    return passes(ProcessGroups.start(ParallelConfig(tp=size)), sp=sp)


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_ranks_find_the_same(sp: bool) -> None:
    loss, grads = passes(ProcessGroups.alone())
    for rank, (found, theirs) in enumerate(run_world(on_ranks, 2, sp)):
        assert found == pytest.approx(loss, rel=1e-5)
        for name, dim in (
            ("decoder.layers.0.self_attention.linear_proj.weight", 1),
            ("decoder.layers.1.mlp.linear_fc2.weight", 1),
            ("embedding.word_embeddings.weight", 0),
        ):
            part = grads[name].chunk(2, dim)[rank]
            assert torch.allclose(theirs[name], part, rtol=1e-3, atol=1e-4), name


def test_layers_are_paired_by_depth() -> None:
    assert pair_layers(2, 4) == [(0, 1), (1, 3)]
    assert pair_layers(4, 2) == [(1, 0), (3, 1)]
    assert pair_layers(3, 7) == [(0, 2), (1, 4), (2, 6)]
    assert pair_layers(3, 3) == [(0, 0), (1, 1), (2, 2)]
    assert choose_pairs(SHALLOW, DEEP, None) == choose_pairs(SHALLOW, DEEP, "0:1,1:3")
    assert passes(ProcessGroups.alone(), layers=None)[0] == passes(ProcessGroups.alone())[0]


def test_what_cannot_be_compared_is_refused() -> None:
    with raises(MappingError, "48", "32", hint="--distill-hidden-weight"):
        choose_pairs(STUDENT, TEACHER.with_fields(hidden_size=48), None)
    with raises(MappingError, "layer 4", "teacher has 4", hint="0 to 3"):
        choose_pairs(SHALLOW, DEEP, "0:4")
    with raises(UsageError, "'1-2'", hint="3:7"):
        choose_pairs(SHALLOW, DEEP, "1-2")
    one = build(SHALLOW, ProcessGroups.alone(), 1)
    staged = replace(one.groups, parallel=ParallelConfig(pp=2))
    one.groups = staged
    with raises(LayoutError, "pp=2", hint="--pp 1"):
        DistillationFeature(one, one, num_microbatches=1, hidden_weight=1.0)
