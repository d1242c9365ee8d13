"""State on the host: the same bits at every fraction, the same pieces, and less on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.optim.config import OptimizerConfig
from megtool.optim.cpu_offload import HybridDeviceOptimizer
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.optimizer import Optimizer
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.optim.segments import Segment
from megtool.parallel.process_groups import ProcessGroups
from tests.support.models.small_models import Small, batches, train_step
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import start

STEPS = 20
FRACTIONS = (0.0, 0.3, 0.5, 1.0)
KINDS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"optimizer": "sgd"}),
    (torch.float32, {"optimizer": "muon"}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"optimizer": "sgd", "sgd_momentum": 0.0}),
    (torch.bfloat16, {"store_param_remainders": True}),
    (torch.bfloat16, {"store_param_remainders": True, "exp_avg_dtype": "bf16"}),
    (torch.float16, {"initial_loss_scale": 2.0**20}),
]


def made(
    model: Small, groups: ProcessGroups, fraction: float, kind: str, chunk: int, **settings: Any
) -> Optimizer:
    """The optimizer with so much on the host; at 0 the inner one alone."""
    how = OptimizerConfig(**{"lr": 1e-2, "optimizer_offload_fraction": fraction, **settings})
    inner: ReplicatedOptimizer | DistributedOptimizer
    if kind == "plain":
        inner = ReplicatedOptimizer(model.named_parameters(), how, groups)
    else:
        inner = DistributedOptimizer(model.named_parameters(), how, groups, chunks=[model])
    return HybridDeviceOptimizer(inner, chunk_bytes=4 * chunk) if fraction else inner


def settled(optimizer: Optimizer) -> None:
    if isinstance(optimizer, DistributedOptimizer | HybridDeviceOptimizer):
        optimizer.wait_for_parameters()


def state_of(model: Small, optimizer: Optimizer) -> dict[tuple[str, str], Tensor]:
    """Parameters and states by name and parameter, whole as this rank has them."""
    out = {("parameter", n): p.detach().flatten().clone() for n, p in model.named_parameters()}
    for piece in optimizer.pieces():
        size = model.get_parameter(piece.parameter).numel()
        whole = out.setdefault((piece.state, piece.parameter), torch.zeros(size))
        whole[piece.start : piece.stop] = piece.tensor.float()
    return out


def trained(
    groups: ProcessGroups,
    fraction: float,
    kind: str,
    dtype: torch.dtype,
    settings: dict[str, Any],
    *,
    chunk: int = 64,
) -> tuple[dict[tuple[str, str], Tensor], list[float], Optimizer]:
    model = Small(dtype)
    optimizer = made(model, groups, fraction, kind, chunk, **settings)
    norms, rank, size = [], groups.replicas.rank, groups.replicas.size
    for x, y in batches(STEPS):
        rows, wanted = x.chunk(size)[rank], y.chunk(size)[rank]
        norms.append(train_step(optimizer, model, rows, wanted, microbatches=2).grad_norm)
    settled(optimizer)
    return state_of(model, optimizer), norms, optimizer


def check_fractions(
    groups: ProcessGroups, kind: str, kinds: Any = KINDS, fractions: tuple[float, ...] = FRACTIONS
) -> None:
    for dtype, settings in kinds:
        want, norms, _ = trained(groups, 0.0, kind, dtype, settings)
        for fraction in fractions[1:]:
            got, found, _ = trained(groups, fraction, kind, dtype, settings)
            assert str(found) == str(norms), (dtype, settings, fraction)  # nan is nan
            assert got.keys() == want.keys()
            for key, tensor in want.items():
                assert torch.equal(got[key], tensor), (dtype, settings, fraction, key)


@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_the_bits_do_not_depend_on_the_fraction(kind: str) -> None:
    check_fractions(ProcessGroups.alone(), kind)


def on_two(rank: int, size: int) -> None:
    groups = start()
    kinds = [KINDS[i] for i in (0, 1, 3, 5)]
    for kind in ("plain", "distributed"):
        check_fractions(groups, kind, kinds, (0.0, 0.5, 1.0))


def test_the_bits_do_not_depend_on_the_fraction_on_two_processes() -> None:
    run_world(on_two, 2)


def overlapped(rank: int, size: int) -> None:
    groups = start()
    lanes: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    lanes |= {"ddp_bucket_size": 40}
    want, _, _ = trained(groups, 0.0, "distributed", torch.bfloat16, lanes)
    got, _, hybrid = trained(groups, 0.5, "distributed", torch.bfloat16, lanes)
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
    assert isinstance(hybrid, HybridDeviceOptimizer)
    hybrid.close()


def test_overlap_with_backward_and_forward_stays() -> None:
    run_world(overlapped, 2)


@pytest.mark.parametrize("chunk", [1, 64, 150, 10_000])
def test_chunks_of_any_size_give_the_same_bits(chunk: int) -> None:
    groups = ProcessGroups.alone()
    want, _, _ = trained(groups, 0.0, "distributed", torch.bfloat16, {})
    got, _, _ = trained(groups, 0.5, "distributed", torch.bfloat16, {}, chunk=chunk)
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())


def device_bytes(optimizer: HybridDeviceOptimizer) -> int:
    """Memory of main parameters (that are not parameters) and states on the device."""
    on_host = {id(s.host_part) for s in optimizer.offloaded_segments}
    parameters = {f.parameter.untyped_storage().data_ptr() for f in optimizer.param_infos}
    return storage_bytes([s for s in optimizer.state_segments if id(s) not in on_host], parameters)


def host_bytes(optimizer: HybridDeviceOptimizer) -> int:
    """Memory of main parameters and states on the host."""
    return storage_bytes([s.host_part for s in optimizer.offloaded_segments], set())


def storage_bytes(segments: list[Segment], without: set[int]) -> int:
    """Bytes of the storages of segments, each counted once."""
    tensors = [t for s in segments for t in (s.main, s.high, s.low, *s.states.values())]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None
    }
    return sum(s.nbytes() for address, s in storages.items() if address not in without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remainders", [False, True])
def test_the_device_holds_the_rest_of_the_state(dtype: torch.dtype, remainders: bool) -> None:
    settings: dict[str, Any] = {"store_param_remainders": remainders}
    of_main = {torch.float32: 0, torch.bfloat16: 2 if remainders else 4}[dtype]
    each = of_main + 8
    for fraction in FRACTIONS[1:]:
        _, _, hybrid = trained(ProcessGroups.alone(), fraction, "distributed", dtype, settings)
        assert isinstance(hybrid, HybridDeviceOptimizer)
        numel = sum(s.numel for s in hybrid.segments)
        kept = sum(s.host_part.numel for s in hybrid.offloaded_segments)
        assert 0 <= fraction * numel - kept < 64 * len(hybrid.segments)
        assert device_bytes(hybrid) == each * (numel - kept)
        # fp32 parameters have no other copy than the one on the device, so the host needs its own.
        on_host = 4 if dtype == torch.float32 or remainders else of_main
        assert host_bytes(hybrid) == (on_host + 8) * kept


def test_whole_parameters_of_a_plain_optimizer_go_to_the_host() -> None:
    groups = ProcessGroups.alone()
    _, _, half = trained(groups, 0.5, "plain", torch.bfloat16, {})
    _, _, whole = trained(groups, 1.0, "plain", torch.bfloat16, {})
    assert isinstance(half, HybridDeviceOptimizer)
    assert isinstance(whole, HybridDeviceOptimizer)
    numel = sum(f.parameter.numel() for f in half.param_infos)
    kept = sum(s.host_part.numel for s in half.offloaded_segments)
    assert 0.3 * numel < kept <= 0.5 * numel
    assert device_bytes(half) == 12 * (numel - kept)
    assert device_bytes(whole) == 0


@pytest.mark.parametrize("kind", ["plain", "distributed"])
@pytest.mark.parametrize("settings", [{}, {"store_param_remainders": True}])
def test_a_state_goes_on_at_any_fraction(kind: str, settings: dict[str, Any]) -> None:
    """Saved at one fraction, loaded at another: the steps that follow are the same."""
    groups = ProcessGroups.alone()
    ends = []
    for first, then in ((0.0, 0.0), (0.0, 0.5), (1.0, 0.3), (0.5, 0.0)):
        model = Small(torch.bfloat16)
        optimizer = made(model, groups, first, kind, 64, **settings)
        steps = list(batches(6))
        for x, y in steps[:3]:
            train_step(optimizer, model, x, y)
        held, small = state_of(model, optimizer), optimizer.small_state()
        other = Small(torch.bfloat16)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        resumed = made(other, groups, then, kind, 64, **settings)
        resumed.load(lambda state, name, held=held: held[state, name])  # type: ignore[misc]
        resumed.load_small_state(small)
        assert torch.equal(other.fc1.weight, model.fc1.weight)
        for x, y in steps[3:]:
            train_step(resumed, other, x, y)
        ends.append(state_of(other, resumed))
    for end in ends[1:]:
        assert end.keys() == ends[0].keys()
        assert all(torch.equal(end[key], tensor) for key, tensor in ends[0].items())


@pytest.mark.parametrize("kind", ["plain", "distributed"])
@pytest.mark.parametrize("settings", [{}, {"store_param_remainders": True}])
def test_weights_that_were_loaded_later_are_taken_over(kind: str, settings: dict[str, Any]) -> None:
    model = Small(torch.bfloat16)
    optimizer = made(model, ProcessGroups.alone(), 0.5, kind, 64, **settings)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    optimizer.reload_parameters()
    mains = [piece.tensor for piece in optimizer.pieces() if piece.state == "main"]
    assert all((m == 0.25).all() for m in mains)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = Small(torch.bfloat16)
    optimizer = made(model, ProcessGroups.alone(), 0.5, "distributed", 64)
    before = state_of(model, optimizer)
    x, y = next(batches(1))
    assert not train_step(optimizer, model, x * float("nan"), y).ok
    after = state_of(model, optimizer)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_other_optimizers_are_refused() -> None:
    model = Small()
    settings = OptimizerConfig(optimizer_offload_fraction=0.5)
    plain = ReplicatedOptimizer(model.named_parameters(), settings, ProcessGroups.alone())
    hybrid = HybridDeviceOptimizer(plain)
    with pytest.raises(UsageError, match="HybridDeviceOptimizer"):
        HybridDeviceOptimizer(hybrid)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="already"):
        HybridDeviceOptimizer(plain)


def test_a_state_that_nobody_placed_cannot_be_used() -> None:
    """The inner optimizer alone, with a fraction: it fails, and does not keep all on the device."""
    model = Small()
    settings = OptimizerConfig(optimizer_offload_fraction=0.5)
    plain = ReplicatedOptimizer(model.named_parameters(), settings, ProcessGroups.alone())
    assert all(t.is_meta for s in plain.segments for t in s.states.values())
    alone = replace(settings, optimizer_offload_fraction=0.0)
    held = ReplicatedOptimizer(model.named_parameters(), alone, ProcessGroups.alone())
    assert not any(t.is_meta for s in held.segments for t in s.states.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["plain", "distributed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_curve_is_the_same_to_rounding(kind: str, dtype: torch.dtype) -> None:
    groups, ends = ProcessGroups.alone("cuda"), []
    for fraction in (0.0, 0.5, 1.0):
        model = Small(dtype).cuda()
        optimizer = made(model, groups, fraction, kind, 64)
        for x, y in batches(STEPS):
            train_step(optimizer, model, x.cuda(), y.cuda())
        mains = [p.tensor.cpu() for p in optimizer.pieces() if p.state == "main"]
        ends.append(torch.cat(mains).sort().values)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-3, atol=1e-3)
