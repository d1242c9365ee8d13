"""Shards of states: a part on each rank, types of parameters, and other numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megtool.model.batch import Batch
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.parallel.process_groups import ProcessGroups
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import (
    CLIPPED,
    DECAY,
    LR,
    PLAIN,
    data,
    named,
    stages_of,
    start,
    torch_training,
    training,
)


def memory(rank: int, size: int, settings: OptimizerConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of distinct storages that a rank's optimizer holds, beside the parameters' buffers."""
    _, optimizer = training("biases", start(), steps=1, settings=settings, dtype=dtype)
    kinds: dict[str, dict[int, int]] = {"main": {}, "exp_avg": {}, "exp_avg_sq": {}, "low": {}}
    live = {buffer.params.untyped_storage().data_ptr() for buffer in optimizer.buffers}
    for segment in optimizer.segments:
        held = {"main": segment.main, "low": segment.low, **segment.states}
        for name, tensor in held.items():
            if tensor is not None and tensor.untyped_storage().data_ptr() not in live:
                storage = tensor.untyped_storage()
                kinds[name][storage.data_ptr()] = storage.nbytes()
    sizes = {
        "numel": sum(f.parameter.numel() for f in optimizer.param_infos),
        "padded": sum(buffer.params.numel() for buffer in optimizer.buffers),
    }
    return {**sizes, **{name: sum(found.values()) for name, found in kinds.items()}}


@pytest.mark.parametrize(
    ("dtype", "how", "bytes_each"),
    [
        (torch.float32, {}, {"main": 0, "exp_avg": 4, "exp_avg_sq": 4, "low": 0}),
        (torch.bfloat16, {}, {"main": 4, "exp_avg": 4, "exp_avg_sq": 4, "low": 0}),
        (
            torch.bfloat16,
            {"store_param_remainders": True, "exp_avg_dtype": "bf16"},
            {"main": 0, "exp_avg": 2, "exp_avg_sq": 2, "low": 2},
        ),
    ],
)
def test_a_rank_holds_its_share(
    dtype: torch.dtype, how: dict[str, Any], bytes_each: dict[str, int]
) -> None:
    found = run_world(memory, 2, replace(PLAIN, **how), dtype)
    for name, each in bytes_each.items():
        held = [ranks[name] for ranks in found]
        assert found[0]["numel"] * each <= sum(held) <= found[0]["padded"] * each, name
        assert all(n <= found[0]["padded"] * each / 2 for n in held), name


def half(rank: int, size: int) -> None:
    """bf16 parameters: fp32 sums and main parameters, whatever is sent."""
    groups = start()
    alone, _ = training(
        "biases", ProcessGroups.alone(), steps=5, microbatches=size, dtype=torch.bfloat16
    )
    got, _ = training("biases", groups, steps=5, dtype=torch.bfloat16)
    for key, value in alone.parameters.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(got.parameters[key], value), key
    sent, optimizer = training(
        "biases",
        groups,
        steps=5,
        dtype=torch.bfloat16,
        settings=replace(PLAIN, grad_reduce_in_bf16=True),
    )
    assert {buffer.grads.dtype for buffer in optimizer.buffers} == {torch.bfloat16}
    # One microbatch for each rank: bf16 gradients go over the wire as autograd gave them.
    for key, value in alone.parameters.items():
        assert torch.equal(sent.parameters[key], value), key
    exact, optimizer = training(
        "biases",
        groups,
        steps=5,
        dtype=torch.bfloat16,
        settings=replace(PLAIN, store_param_remainders=True),
    )
    for key, value in alone.parameters.items():
        off = (exact.parameters[key].float() - value.float()).abs()
        assert bool((off <= value.float().abs() / 128 + 1e-6).all()), key


def test_bf16_parameters_have_fp32_main_ones() -> None:
    run_world(half, 2)


def muon(rank: int, size: int) -> None:
    """Matrices are put together for their update, and give every rank the same."""
    how = replace(PLAIN, optimizer="muon")
    alone, _ = training("biases", ProcessGroups.alone(), steps=3, microbatches=size, settings=how)
    got, _ = training("biases", start(), steps=3, settings=how)
    for key, value in alone.parameters.items():
        assert torch.equal(got.parameters[key], value), key


def test_muon_updates_whole_matrices_from_shards() -> None:
    run_world(muon, 2)


def fp16(rank: int, size: int) -> list[float]:
    """An overflow on one rank alone: all skip the step, and halve the scale."""
    groups = start()
    stages = stages_of("biases", groups, dtype=torch.float16)
    settings = replace(PLAIN, initial_loss_scale=2.0**10, hysteresis=1)
    optimizer = DistributedOptimizer(named(stages), settings, groups, chunks=stages)
    scales = []
    for step in range(3):
        before = [p.detach().clone() for _, p in named(stages)]
        optimizer.zero_grad()
        optimizer.begin(1)
        tokens_BS, labels_BS = data(step)
        mine = slice(4 * rank, 4 * rank + 4)
        loss, _ = stages[0].loss(Batch(tokens_BS=tokens_BS[mine]), labels_BS[mine])
        if (rank, step) == (1, 1):
            loss = loss * float("inf")
        optimizer.scale_loss(loss).backward()
        optimizer.finish((labels_BS != -100).sum())
        result = optimizer.step(LR, DECAY)
        after = [p for _, p in named(stages)]
        same = all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert result.ok == (step != 1)
        assert same == (step == 1)
        assert (result.first_nonfinite or "").endswith("(rank 0)" if step == 1 else "")
        scales.append(optimizer.loss_scale)
    return scales


def test_an_overflow_on_one_rank_skips_on_all() -> None:
    assert run_world(fp16, 2) == [[2.0**10, 2.0**9, 2.0**9]] * 2


Pieces = list[tuple[str, str, int, int, list[float]]]


def save(rank: int, size: int, how: dict[str, int], steps: int) -> tuple[Pieces, dict[str, Any]]:
    """What the ranks hold after some steps, as plain numbers."""
    _, optimizer = training("tied", start(**how), steps=steps, settings=CLIPPED)
    pieces = [
        (p.state, p.parameter, p.start, p.stop, p.tensor.tolist()) for p in optimizer.pieces()
    ]
    return pieces, optimizer.small_state()


def resume(rank: int, size: int, states: dict[Any, list[float]], small: dict[str, Any]) -> None:
    """Steps from a state on, against those of one process that never stopped."""
    groups = start()

    def restore(_: Any, optimizer: DistributedOptimizer) -> None:
        optimizer.load(lambda state, name: torch.tensor(states[state, name]))
        optimizer.load_small_state(small)

    want = torch_training("tied", steps=6, passes=1, clip=CLIPPED.clip_grad)
    got, optimizer = training("tied", groups, steps=3, settings=CLIPPED, first=3, made=restore)
    assert optimizer.num_steps == 6
    assert got.losses == pytest.approx(want.losses[3:], rel=1e-5)
    for key, value in want.parameters.items():
        assert float((got.parameters[key] - value).abs().max()) < 1e-5, key


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_states_move_to_other_numbers_of_replicas(before: int, after: int) -> None:
    saved = run_world(save, before, {}, 3)
    numels = {name: p.numel() for name, p in named(stages_of("tied", ProcessGroups.alone()))}
    wanted = {(s, name) for s in ("main", "exp_avg", "exp_avg_sq") for name in numels}
    states = {key: [float("nan")] * numels[key[1]] for key in wanted}
    count = 0
    for pieces, _ in saved:
        for state, name, first, stop, values in pieces:
            states[state, name][first:stop] = values
            count += stop - first
    assert count == 3 * sum(numels.values())  # each element once
    run_world(resume, after, states, saved[0][1])


def test_weights_that_are_loaded_later_become_main_parameters() -> None:
    groups = ProcessGroups.alone()
    stages = stages_of("biases", groups, dtype=torch.bfloat16)
    optimizer = DistributedOptimizer(named(stages), PLAIN, groups, chunks=stages)
    name, p = named(stages)[3]
    p.data = torch.full_like(p, 0.5)  # as loaders do: not into the buffer, but in its place
    optimizer.reload_parameters()
    pieces = {piece.parameter: piece for piece in optimizer.pieces() if piece.state == "main"}
    assert torch.equal(pieces[name].tensor, torch.full((p.numel(),), 0.5))
    bounds = optimizer.buffers[0].params
    assert bounds.data_ptr() <= p.data_ptr() < bounds.data_ptr() + 2 * bounds.numel()
    assert bool((p == 0.5).all())
