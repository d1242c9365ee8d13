"""Adam by Transformer Engine on a GPU, held against torch's, at every way to store the state.

Off a GPU it runs on the emulated one (`tests/emulated`), by Transformer Engine's own Python part.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.kernels.dispatch import use
from megtool.optim.config import OptimizerConfig
from megtool.optim.optimizer import Optimizer
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.optim.update_rules import Adam
from megtool.options.kernels import Implementation
from megtool.parallel.process_groups import ProcessGroups
from tests.support.models.small_models import Small, batches, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]
STORED = (
    {"store_param_remainders": False, "exp_avg_dtype": "fp32"},
    {"store_param_remainders": False, "exp_avg_dtype": "bf16"},
    {"store_param_remainders": True, "exp_avg_dtype": "fp32"},
    {"store_param_remainders": True, "exp_avg_dtype": "bf16"},
)


def start(by: Implementation, **settings: Any) -> tuple[Small, Optimizer]:
    """A bf16 model on a GPU and its optimizer."""
    model = Small(torch.bfloat16).cuda()
    with use(by):
        config = OptimizerConfig(lr=1e-2, **settings)
        groups = ProcessGroups.alone("cuda")
        optimizer = ReplicatedOptimizer(list(model.named_parameters()), config, groups)
    (rule,) = optimizer.updates.values()
    assert isinstance(rule, Adam)
    assert (rule.te is not None) == (by == "te")
    return model, optimizer


def train(model: Small, optimizer: Optimizer, steps: int, seed: int = 1) -> None:
    for x, y in batches(steps, seed=seed):
        assert train_step(optimizer, model, x.cuda(), y.cuda()).ok


def state_of(optimizer: Optimizer) -> dict[tuple[str, str, int], Tensor]:
    return {
        (p.state, p.parameter, p.start): p.tensor.detach().float().clone()
        for p in optimizer.pieces()
    }


def copy_state(optimizer: Optimizer, source: Optimizer) -> None:
    """What saving and resuming do."""
    stored = state_of(source)
    optimizer.load(lambda state, name: stored[state, name, 0])
    optimizer.num_steps = source.num_steps


def close(one: Optimizer, other: Optimizer, *, is_coarse: bool) -> None:
    ours, theirs = state_of(one), state_of(other)
    assert ours.keys() == theirs.keys()
    tolerance = 2e-2 if is_coarse else 1e-5
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, rtol=tolerance, atol=tolerance * 1e-1)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_it_updates_as_torch_does(stored: dict[str, Any]) -> None:
    ours, theirs = start("torch", **stored), start("te", **stored)
    kept = [t.data_ptr() for s in theirs[1].segments for t in s.states.values()]
    train(*ours, 5)
    train(*theirs, 5)
    close(ours[1], theirs[1], is_coarse=stored["exp_avg_dtype"] == "bf16")
    assert kept == [t.data_ptr() for s in theirs[1].segments for t in s.states.values()]
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("first", ["torch", "te"])
def test_a_run_resumes_by_the_other(first: Implementation, stored: dict[str, Any]) -> None:
    second: Implementation = "te" if first == "torch" else "torch"
    whole, before, after = start(first, **stored), start(first, **stored), start(second, **stored)
    train(*whole, 2)
    train(*whole, 2, seed=2)
    train(*before, 2)
    copy_state(after[1], before[1])
    train(*after, 2, seed=2)
    close(whole[1], after[1], is_coarse=stored["exp_avg_dtype"] == "bf16")


def test_its_memory_is_the_optimizers_own() -> None:
    """Nothing is kept between steps."""
    model, optimizer = start("te")
    train(model, optimizer, 1)
    (rule,) = optimizer.updates.values()
    assert isinstance(rule, Adam)
    assert rule.te is not None
    (inner,) = rule.te._optimizers.values()
    assert not inner.state
    assert not inner.param_groups[0]["params"]


def test_its_signature_is_the_one_that_is_called() -> None:
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    assert {
        *("params", "betas", "eps", "weight_decay", "master_weights", "store_param_remainders"),
        *("exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"),
    } <= set(inspect.signature(te.optimizers.FusedAdam).parameters)
