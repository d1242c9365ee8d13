"""What overlaps in a model's passes: the order of calls, the memory that goes, the same results."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.layers import linear
from megtool.model.moe import experts
from megtool.model.stacks import pipeline_stage
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.model.stacks.pipeline_stage import order_1f1b
from megtool.options.config_file import build_options
from megtool.train.options.config import TrainConfig
from megtool.train.options.overlap import OverlapOptions, let_overlap
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import data, stages_of, start

Result = tuple[float, dict[str, torch.Tensor], list[str]]


def take_step(
    stages: list[Decoder], dp: Any, log: list[str], *, microbatches: int = 1, **how: Any
) -> Result:
    """The loss and all gradients of a step, and what was logged."""
    schedule = PipelineSchedule(stages, num_microbatches=microbatches, **how)
    tokens_BS, labels_BS = (t.chunk(dp.size)[dp.rank] for t in data(0))
    total, _ = schedule.step(Batch(tokens_BS=tokens_BS), labels_BS)
    named = [(n, p) for stage in stages for n, p in stage.named_parameters()]
    return float(total), {n: p.grad.clone() for n, p in named if p.grad is not None}, log


def same(results: list[Result], others: list[Result]) -> None:
    """Losses and gradients of all ranks are equal to the last bit."""
    for (loss, grads, _), (other_loss, other_grads, _) in zip(results, others, strict=True):
        assert loss == other_loss
        assert grads.keys() == other_grads.keys()
        assert all(torch.equal(g, other_grads[n]) for n, g in grads.items())


def experts_step(rank: int, size: int, sizes: dict[str, int], options: dict[str, bool]) -> Result:
    log: list[str] = []
    groups = start(**sizes)
    is_split = "tp" in sizes
    stages = stages_of("experts", groups, sequence_parallel=is_split)
    let_overlap(stages, build_options(TrainConfig, sizes | options).overlap)
    exchange = dist.all_to_all_single

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            log.append("wait")
            self.work.wait()

    def logged_exchange(*args: Any, **how: Any) -> Any:
        work = exchange(*args, **how)
        log.append("start" if how.get("async_op") else "exchange")
        return Work(work) if how.get("async_op") else work

    def logged(kind: type, name: str, text: str) -> None:
        method = getattr(kind, name)

        def call(self: Any, *args: Any) -> torch.Tensor:
            log.append(text)
            out: torch.Tensor = method(self, *args)
            out.register_hook(lambda _: log.append(f"{text}'"))
            return out

        setattr(kind, name, call)

    dist.all_to_all_single = logged_exchange
    logged(experts.SharedExperts, "expand", "expand")
    logged(experts.SharedExperts, "contract", "contract")
    logged(experts.Experts, "forward", "experts")
    return take_step(stages, groups.dp, log)


SHARED = {"moe_shared_expert_overlap": True}
FORWARD = ["start", "expand", "wait", "experts", "start", "contract", "wait"]
BACKWARD = ["start", "contract'", "wait", "experts'", "start", "expand'", "wait"]


def test_shared_experts_are_computed_while_tokens_are_on_their_way() -> None:
    plain, overlapped = (run_world(experts_step, 2, {"ep": 2}, o) for o in ({}, SHARED))
    same(plain, overlapped)
    for _, _, log in overlapped:
        assert log == ["exchange", *FORWARD, *BACKWARD]  # of counts, and then of tokens
    assert not any(word in ("start", "wait") for _, _, log in plain for word in log)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 2}])
def test_shared_experts_overlap_beside_tensor_parallelism(sizes: dict[str, int]) -> None:
    more = {"sequence_parallel": True}
    size = 2 if sizes["etp"] == 1 else 4
    plain, overlapped = (run_world(experts_step, size, sizes, more | o) for o in ({}, SHARED))
    same(plain, overlapped)
    assert all(log.count("start") == 4 for _, _, log in overlapped)


def columns_step(rank: int, size: int, options: dict[str, bool]) -> Result:
    """A step of tensor-parallel ranks that share out tokens; messages and products are logged."""
    log: list[str] = []
    groups = start(tp=size)
    stages = stages_of("biases", groups, sequence_parallel=True)
    let_overlap(stages, OverlapOptions(**options))
    gather, multiply, send = linear.start_gather, torch.addmm, dist.batch_isend_irecv

    def logged_gather(*args: Any) -> Any:
        log.append("gather")
        return gather(*args)

    def logged_multiply(*args: Any, **how: Any) -> Any:
        log.append("multiply")
        return multiply(*args, **how)

    def logged_send(messages: Any) -> Any:
        log.append("send")
        works = send(messages)

        class Work:
            def wait(self) -> None:
                log.append("wait")
                for work in works:
                    work.wait()

        return [Work()]

    linear.start_gather, torch.addmm, dist.batch_isend_irecv = (  # type: ignore[assignment]
        logged_gather,
        logged_multiply,
        logged_send,
    )
    return take_step(stages, groups.dp, log)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_are_multiplied_as_they_arrive(size: int) -> None:
    plain, overlapped = (
        run_world(columns_step, size, {"tp_comm_overlap": o}) for o in (False, True)
    )
    for (loss, grads, _), (other_loss, other_grads, _) in zip(plain, overlapped, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        for name, grad in grads.items():
            assert torch.allclose(grad, other_grads[name], rtol=1e-5, atol=1e-6), name
    layer = ["send"] * (size - 1) + ["multiply"] + ["wait", "multiply"] * (size - 1)
    for (_, _, log), (_, _, other) in zip(plain, overlapped, strict=True):
        forward = other[: 4 * len(layer)]  # two products of each layer
        assert forward == layer * 4
        assert log.count("gather") - other.count("gather") == 4
        assert "send" not in log


def pipeline_step(
    rank: int, size: int, sizes: dict[str, int], overlap: bool | None, frees: bool
) -> tuple[Result, list[int]]:
    """A step of four micro batches; also how many outputs are in memory at backward passes."""
    from torch.distributed.pipelining import PipelineStage, schedules

    log: list[str] = []
    outputs: list[weakref.ref[Any]] = []
    alive: list[int] = []
    groups = start(**sizes)
    stages = stages_of("deep", groups)
    advance, send = Decoder.advance, schedules._batch_p2p
    if not frees:
        pipeline_stage.FreeingStage = PipelineStage  # type: ignore[misc]
    kind = pipeline_stage.FreeingStage
    go_back = kind.backward_one_chunk

    def logged_advance(self: Decoder, *args: Any) -> Any:
        log.append("F")
        out = advance(self, *args)
        outputs.extend(weakref.ref(x.untyped_storage()) for x in out)
        return out

    def logged_backward(self: Any, *args: Any, **how: Any) -> Any:
        log.append("B")
        alive.append(sum(ref() is not None for ref in outputs))
        return go_back(self, *args, **how)

    def logged_send(ops: Any, desc: str | None = None) -> Any:
        if ops:
            log.append("+".join(sorted(op.op.__name__ for op in ops)))
        return send(ops, desc=desc)

    Decoder.advance = logged_advance  # type: ignore[method-assign]
    kind.backward_one_chunk = logged_backward  # type: ignore[method-assign]
    schedules._batch_p2p = logged_send
    return take_step(stages, groups.dp, log, microbatches=4, overlap_p2p=overlap), alive


def pipeline(sizes: dict[str, int], overlap: bool | None, *, frees: bool = True) -> Any:
    found = run_world(pipeline_step, 2, sizes, overlap, frees)
    return [result for result, _ in found], [alive for _, alive in found]


def test_messages_of_stages_go_together_or_overlap_with_passes() -> None:
    together, _ = pipeline({"pp": 2}, None)
    apart, _ = pipeline({"pp": 2}, True)
    same(together, apart)
    both = "irecv+isend"
    assert together[0][2] == [
        "F",
        "isend",
        "F",
        both,
        "B",
        "F",
        both,
        "B",
        "F",
        both,
        "B",
        "irecv",
        "B",
    ]
    assert both not in apart[0][2]
    assert [x for x in apart[0][2] if x in "FB"] == [x for x in together[0][2] if x in "FB"]


@pytest.mark.slow
def test_messages_of_virtual_stages_overlap_or_go_together() -> None:
    sizes = {"pp": 2, "vpp": 2}
    apart, _ = pipeline(sizes, None)
    together, _ = pipeline(sizes, False)
    same(together, apart)
    assert any("irecv+isend" in log for _, _, log in together)
    assert not any("irecv+isend" in log for _, _, log in apart)
    order = [[x for x in log if x in "FB"] for _, _, log in together]
    assert order == [[x for x in log if x in "FB"] for _, _, log in apart]


def test_outputs_are_freed_when_they_are_sent() -> None:
    held, most = pipeline({"pp": 2}, None, frees=False)
    freed, least = pipeline({"pp": 2}, None)
    same(held, freed)
    assert max(most[0]) >= 2
    assert max(least[0]) < max(most[0])


def test_a_stage_begins_with_a_forward_pass_for_each_stage_behind_it() -> None:
    assert order_1f1b(2, 3) == {
        0: ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        1: ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    }
    assert order_1f1b(3, 1) == {n: [f"{n}F0", f"{n}B0"] for n in range(3)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_comm_overlap": True}, "without --sequence-parallel"),
        (SHARED, "without --ep"),
        ({"overlap_p2p_communication": False}, "without --pp"),
        (
            {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True, "fp8_recipe": "delayed"},
            "one scale for all rows",
        ),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_options(TrainConfig, options)
