"""Every layout against one process that holds the whole model: norm, clipping, zeros, updates."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megtool.model.layers.param_attributes import mark
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.grad_norm import clip_coefficient, is_counted_on_rank, local_statistics
from megtool.optim.optimizer import Optimizer
from megtool.optim.param_groups import ParamInfo
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.optim.segments import Segment, Span
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ALONE, Group, ProcessGroups
from tests.support.worlds.gloo_world import run_world

EXPERTS = 4
STAGES = 2
STEPS = 3


def numbers(shape: tuple[int, ...], *words: object) -> Tensor:
    """Numbers that only depend on what they are for."""
    g = torch.Generator().manual_seed(zlib.crc32(repr(words).encode()))
    out = torch.randn(shape, generator=g)
    return torch.where(out.abs() < 0.1, 0.0, out)  # some zeros to count


def part(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size, dim)[group.rank].clone()


def whole_shapes(layout: ParallelConfig) -> dict[str, tuple[int, ...]]:
    """The model: a tied embedding, and on each of two layers a split matrix and alike vectors."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (8, 6)}
    for i in range(STAGES):
        shapes |= {f"layers.{i}.fc1.weight": (8, 6), f"layers.{i}.fc2.weight": (6, 8)}
        shapes |= {f"layers.{i}.norm": (6,), f"layers.{i}.fc2.bias": (6,)}
        shapes |= {f"layers.{i}.experts.{e}.weight": (4, 6) for e in range(EXPERTS)}
    return shapes


def local_model(groups: ProcessGroups) -> dict[str, nn.Parameter]:
    """This rank's parameters, cut from the whole ones and marked."""
    out: dict[str, nn.Parameter] = {}
    for name, shape in whole_shapes(groups.parallel).items():
        words = name.split(".")
        stage = int(words[1]) * groups.pp.size // STAGES if words[0] == "layers" else 0
        tied = words[0] == "embedding" and groups.pp.size > 1
        if stage != groups.pp.rank and not (tied and groups.pp.is_last):
            continue
        value = numbers(shape, name)
        if "experts" in words:
            each = EXPERTS // groups.ep.size
            if int(words[3]) // each == groups.ep.rank:
                p = nn.Parameter(part(value, groups.etp, 1))
                out[name] = mark(p, split_dim=1 if groups.etp.size > 1 else None, expert=True)
        elif words[-1] in ("norm", "bias"):
            out[name] = mark(nn.Parameter(value), partial=words[-1] == "norm")
        else:
            dim = 1 if "fc2" in words else 0
            p = nn.Parameter(part(value, groups.tp, dim))
            out[name] = mark(p, split_dim=dim, tied=tied, copy=tied and groups.pp.is_last)
    return out


def local_gradient(name: str, groups: ProcessGroups, step: int) -> Tensor:
    """What this rank's backward pass would give: its part of the whole gradient, or its share."""
    shape = whole_shapes(groups.parallel)[name]
    if "experts" in name:
        share = numbers(shape, name, step) / groups.expert_dp.size
        return part(share, groups.etp, 1)
    share = numbers(shape, name, step) / groups.replicas.size
    if "norm" in name:
        return share / groups.tp.size
    if "bias" in name:
        return share
    if "embedding" in name and groups.pp.size > 1:
        share = share / 2
    return part(share, groups.tp, 1 if "fc2" in name else 0)


def make(
    kind: str, model: dict[str, nn.Parameter], groups: ProcessGroups, **given: Any
) -> Optimizer:
    settings = OptimizerConfig(**{"lr": 1e-2, "log_num_zeros_in_grad": True, **given})
    if kind == "plain":
        return ReplicatedOptimizer(model.items(), settings, groups)
    return DistributedOptimizer(model.items(), settings, groups)


def train(groups: ProcessGroups, kind: str, **given: Any) -> tuple[Any, dict[str, Tensor]]:
    model = local_model(groups)
    optimizer = make(kind, model, groups, **given)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.begin(1)
        given_gradients = [p * local_gradient(name, groups, step) for name, p in model.items()]
        torch.cat([x.flatten() for x in given_gradients]).sum().backward()
        optimizer.finish(torch.tensor(1.0))
        result = optimizer.step(1e-2, 0.1)
        results.append((result.grad_norm, result.num_zeros))
    return results, {name: p.detach() for name, p in model.items()}


def on_a_rank(rank: int, size: int, layout: ParallelConfig, kind: str, given: Any) -> Any:
    groups = ProcessGroups.start(layout)
    results, model = train(groups, kind, **given)
    where = {axis: getattr(groups, axis).rank for axis in ("tp", "ep", "etp", "pp")}
    groups.stop()
    return results, {name: x.numpy() for name, x in model.items()}, where


LAYOUTS = [
    ParallelConfig(tp=2),
    ParallelConfig(pp=2),
    ParallelConfig(ep=2, dp=2),
    ParallelConfig(tp=2, pp=2),
    ParallelConfig(tp=2, dp=2),
    ParallelConfig(tp=2, ep=2, etp=1),
    ParallelConfig(tp=2, dp=2, ep=2),
    ParallelConfig(cp=2, ep=2, dp=2),
]


def said(layout: ParallelConfig) -> str:
    axes = ("tp", "pp", "ep", "etp", "cp", "dp")
    return " ".join(f"{a}{n}" for a in axes if (n := getattr(layout, a)) > 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=said)
def test_layouts_step_as_one_process_does(layout: ParallelConfig) -> None:
    compare(layout, "plain", {"clip_grad": 1.0})


@pytest.mark.parametrize("kind", ["plain", "distributed"])
@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[4]], ids=said)
def test_layouts_step_as_one_process_does_with_muon(layout: ParallelConfig, kind: str) -> None:
    compare(layout, kind, {"optimizer": "muon"})


@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[6]], ids=said)
def test_shards_step_as_one_process_does(layout: ParallelConfig) -> None:
    compare(layout, "distributed", {"clip_grad": 1.0})


def compare(layout: ParallelConfig, kind: str, given: dict[str, Any]) -> None:
    wanted, whole = train(ProcessGroups.alone(), "plain", **given)
    size = layout.world_size
    for results, model, where in run_world(on_a_rank, size, layout, kind, given):
        for (norm, zeros), (one_norm, one_zeros) in zip(results, wanted, strict=True):
            assert norm == pytest.approx(one_norm, rel=1e-6)
            assert zeros == one_zeros
        for name, x in model.items():
            y = whole[name]
            if "experts" in name:
                y = part(y, Group(ranks=tuple(range(layout.etp)), rank=where["etp"]), 1)
            elif y.dim() == 2:
                dim = 1 if "fc2" in name else 0
                y = part(y, Group(ranks=tuple(range(layout.tp)), rank=where["tp"]), dim)
            # Adam's first steps have the gradient's sign, so sums in another order may show.
            torch.testing.assert_close(torch.from_numpy(x), y, rtol=0, atol=2e-6)


def filtered(rank: int, size: int, layout: ParallelConfig) -> tuple[list[str], list[str]]:
    """Names that are counted in the model-parallel group by us, and by megatron-core's filters."""
    layers = pytest.importorskip("megatron.core.tensor_parallel.layers")
    module = pytest.importorskip("megatron.core.transformer.module")

    groups = ProcessGroups.start(layout)
    optimizer = make("plain", local_model(groups), groups)
    ours, theirs = [], []
    for f in optimizer.param_infos:
        if is_counted_on_rank(f, groups, replicated=False):
            ours.append(f.name)
        tp = groups.etp if f.is_expert else groups.tp
        alone = groups.tp.handle if tp.handle is None else tp.handle
        single = tp.handle is None  # a group of one is no process group here: all are its first
        is_one = single or layers.param_is_not_tensor_parallel_duplicate(f.parameter, alone)
        if is_one and module.param_is_not_shared(f.parameter):
            theirs.append(f.name)
    groups.stop()
    return ours, theirs


@pytest.mark.peers
@pytest.mark.parametrize("layout", [LAYOUTS[3]], ids=said)
def test_what_is_counted_is_what_megatron_core_counts(layout: ParallelConfig) -> None:
    pytest.importorskip("megatron.core")
    for ours, theirs in run_world(filtered, layout.world_size, layout):
        assert ours == theirs
        assert ours


def test_long_gradients_lose_no_digits() -> None:
    p = nn.Parameter(torch.zeros(3_000_001))
    grad = torch.rand(p.numel(), generator=torch.Generator().manual_seed(0)) + 0.5
    groups = ProcessGroups.alone()
    optimizer = ReplicatedOptimizer([("w", p)], OptimizerConfig(), groups)
    optimizer.segments[0].grad = grad
    bad, squares, _ = local_statistics(optimizer.segments, groups).tolist()
    assert bad == 0
    assert squares**0.5 == pytest.approx(grad.double().norm().item(), rel=1e-6)


def test_a_segment_counts_by_its_spans() -> None:
    p, q, r = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    tied = ParamInfo(name="q", parameter=q, is_shared_copy=True)
    facts = [ParamInfo(name="p", parameter=p), tied, ParamInfo(name="r", parameter=r)]
    group = ReplicatedOptimizer([("p", p)], OptimizerConfig(), ProcessGroups.alone()).param_groups[
        0
    ]
    spans = tuple(Span(param_info=f, start=0, stop=4, offset=6 * i) for i, f in enumerate(facts))
    grad = torch.zeros(18)
    for i in range(3):
        grad[6 * i : 6 * i + 3] = 10.0**i
    segment = Segment(group=group, spans=spans, main=torch.zeros(18), grad=grad)
    groups = ProcessGroups.alone()
    wanted = pytest.approx([0.0, 30003.0, 2.0], rel=1e-6)
    assert local_statistics([segment], groups, count_zeros=True).tolist() == wanted
    grad[7] = torch.inf  # not counted in the norm, and not let pass
    assert local_statistics([segment], groups)[:2].tolist() == pytest.approx([1.0, 30003.0])


def test_the_coefficient_of_clipping_is_torchs() -> None:
    for norm in (0.3, 1.0, 1.5, 123.456):
        p = nn.Parameter(torch.zeros(1))
        p.grad = torch.tensor([norm])
        nn.utils.clip_grad_norm_([p], 1.0)
        assert torch.tensor([norm]).mul_(clip_coefficient(norm, 1.0)).equal(p.grad)
    assert clip_coefficient(0.0, 1.0) == 1.0


def test_alone_counts_everything_but_copies() -> None:
    p = nn.Parameter(torch.zeros(1))
    groups = ProcessGroups.alone()
    assert ALONE.is_first
    assert is_counted_on_rank(
        ParamInfo(name="p", parameter=p, is_tp_duplicate=True), groups, replicated=True
    )
    copy = ParamInfo(name="p", parameter=p, is_shared_copy=True)
    assert not is_counted_on_rank(copy, groups, replicated=True)
