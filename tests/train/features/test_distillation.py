"""Distillation against torch's own divergence, at any chunk, and on tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import LayoutError, MappingError, UsageError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule, build_stages
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from megtool.train.features.distillation import (
    DistillationFeature,
    check_vocabularies,
    plan_teacher_layout,
)
from tests.support.errors import raises
from tests.support.models.taught_decoders import DEEP, LABELS, STUDENT, TEACHER, TOKENS, build
from tests.support.worlds.gloo_world import run_world


def check_logged(teaching: DistillationFeature, loss: float) -> None:
    """The losses that a step logs, mixed, are the loss of its passes."""
    logged = teaching.end_step()
    mean = sum(
        weight * logged.get(name, 0.0)
        for name, weight in (("data_loss", 1 - teaching.weight), ("distill_loss", teaching.weight))
    )
    assert mean * int((LABELS != -100).sum()) == pytest.approx(loss, rel=1e-5)


def passes(
    groups: ProcessGroups,
    weight: float,
    sp: bool = False,
    models: tuple[ModelConfig, ModelConfig] = (STUDENT, TEACHER),
) -> tuple[float, dict[str, Tensor]]:
    torch.set_num_threads(1)
    student = build(models[0], groups, 1, sp).train()
    teaching = DistillationFeature(
        student, build(models[1], groups, 2), num_microbatches=2, temperature=2.0, weight=weight
    )
    schedule = PipelineSchedule(student, num_microbatches=2, objective=teaching.objective)
    with teaching.around_passes(0, batch := Batch(tokens_BS=TOKENS)):
        loss, _ = schedule.step(batch, LABELS)
    check_logged(teaching, float(loss))
    grads = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    return float(loss), grads


def staged(config: ModelConfig, groups: ProcessGroups, seed: int) -> list[Decoder]:
    """The stage of a model whose numbers do not depend on the layout."""
    whole = build(config, ProcessGroups.alone(), seed).state_dict()
    stages = build_stages(config, groups, device="cpu")
    for stage in stages:
        stage.load_state_dict({n: whole[n] for n in stage.state_dict()})
    return stages


def in_stages(rank: int, size: int, layout: dict[str, int]) -> Any:
    """`passes` with pipeline stages, with a teacher of as many layers and with another."""
    torch.set_num_threads(1)
    groups = ProcessGroups.start(ParallelConfig(**layout))
    out = []
    for taught in (DEEP, TEACHER):
        theirs = replace(groups, parallel=plan_teacher_layout(groups.parallel, DEEP, taught))
        stages = staged(DEEP, groups, 1)
        teaching = DistillationFeature(
            stages[-1],
            staged(taught, theirs, 2),
            num_microbatches=2,
            temperature=2.0,
            weight=0.7,
        )
        for stage in stages:
            stage.train()
        schedule = PipelineSchedule(stages, num_microbatches=2, objective=teaching.objective)
        with teaching.around_passes(0, batch := Batch(tokens_BS=TOKENS)):
            loss, _ = schedule.step(batch, LABELS)
        check_logged(teaching, float(loss))
        named = [(n, p.grad) for s in stages for n, p in s.named_parameters()]
        out.append((float(loss), {n: g for n, g in named if g is not None}))
    return out


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, pytest.param({"pp": 2, "vpp": 2}, marks=pytest.mark.slow)]
)
def test_pipeline_stages_find_the_same(layout) -> None:
    found = run_world(in_stages, 2, layout)
    for number, taught in enumerate((DEEP, TEACHER)):
        loss, grads = passes(ProcessGroups.alone(), 0.7, models=(DEEP, taught))
        seen = set[str]()
        for of_rank in found:
            theirs, held = of_rank[number]
            assert theirs == pytest.approx(loss, rel=1e-5)
            for name, grad in held.items():
                assert torch.allclose(grad, grads[name], rtol=1e-4, atol=1e-4), name
            seen |= held.keys()
        assert seen == grads.keys()


def on_ranks(rank: int, size: int, sp: bool) -> Any:
    return passes(ProcessGroups.start(ParallelConfig(tp=size)), 0.7, sp)


def test_both_losses_are_mixed_over_microbatches() -> None:
    loss, grads = passes(ProcessGroups.alone(), 0.7)
    student, teacher = (
        build(STUDENT, ProcessGroups.alone(), 1),
        build(TEACHER, ProcessGroups.alone(), 2),
    )
    batch = Batch(tokens_BS=TOKENS)
    logits, wanted = student(batch).flatten(0, 1), LABELS.flatten()
    expected = teacher(batch).flatten(0, 1).detach()
    kept = wanted != -100
    kl = F.kl_div(
        F.log_softmax(logits[kept] / 2, 1),
        F.log_softmax(expected[kept] / 2, 1),
        reduction="sum",
        log_target=True,
    )
    total = 0.3 * F.cross_entropy(logits, wanted, reduction="sum") + 0.7 * 4 * kl
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    for name, p in student.named_parameters():
        assert torch.allclose(grads[name], p.grad, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_ranks_find_the_same(sp) -> None:
    loss, grads = passes(ProcessGroups.alone(), 0.7)
    for rank, (found, theirs) in enumerate(run_world(on_ranks, 2, sp)):
        assert found == pytest.approx(loss, rel=1e-5)
        name = "output_layer.weight"
        assert torch.allclose(theirs[name], grads[name].chunk(2)[rank], rtol=1e-3, atol=1e-4)
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        assert torch.allclose(theirs[name], grads[name].chunk(2, 1)[rank], rtol=1e-3, atol=1e-4)


def test_what_cannot_be_taught_is_refused() -> None:
    with pytest.raises(MappingError, match="vocabulary has 150"):
        check_vocabularies(STUDENT, TEACHER.with_fields(vocab_size=150))
    one = build(STUDENT, ProcessGroups.alone(), 1)
    three = TEACHER.with_fields(num_layers=3)
    with raises(LayoutError, "pp=2", "3 layers"):
        plan_teacher_layout(ParallelConfig(pp=2), STUDENT, three)
    with pytest.raises(UsageError, match="temperature 0"):
        DistillationFeature(one, one, num_microbatches=1, temperature=0.0)


def test_a_teacher_that_ranks_do_not_divide_is_named() -> None:
    odd = TEACHER.with_fields(num_heads=3, num_kv_heads=3, head_dim=8)
    with raises(LayoutError, "tp=2", "num_heads=3", hint="1, 3"):
        plan_teacher_layout(ParallelConfig(tp=2), STUDENT, odd)
    experts = {"num_experts": 6, "num_experts_per_token": 2, "moe_ffn_hidden_size": 16}
    mixed = TEACHER.with_fields(**experts)
    with raises(LayoutError, "ep=4", "num_experts=6"):
        plan_teacher_layout(ParallelConfig(ep=4, tp=1), mixed, mixed)
    # One without experts stands on all ranks of the student's.
    found = plan_teacher_layout(ParallelConfig(ep=2, tp=2, etp=1), mixed, TEACHER)
    assert (found.tp, found.ep, found.etp, found.dp) == (2, 1, 2, 1)
