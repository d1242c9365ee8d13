"""Parallel linear layers on real gloo processes against the same layers in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megtool.errors import LayoutError
from megtool.model.layers.linear import ColumnLinear, RowLinear, VocabEmbedding, vocab_logits
from megtool.model.layers.norm import NormSpec
from megtool.model.layers.param_attributes import (
    finish_gradients,
    is_marked,
    mark,
    sum_over_replicas,
)
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import reduce_from, scatter_rows
from megtool.parallel.process_groups import ALONE, Group, ProcessGroups
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world

V, H, FFN = 48, 16, 32


class Small(nn.Module):
    """Embedding, two residual MLPs of each kind of norm, tied logits: every layer of linear.py."""

    def __init__(self, group: Group, sequence_parallel: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        how: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
        sp: dict[str, Any] = {**how, "sequence_parallel": sequence_parallel}
        self.embedding = VocabEmbedding(V, H, group, **sp)
        plain, centered = NormSpec(), NormSpec(kind="layernorm", zero_centered=True)
        self.up = ColumnLinear(H, FFN, group, norm=plain, bias=True, **sp)
        self.down = RowLinear(FFN, H, group, bias=True, **sp)
        self.up2 = ColumnLinear(H, FFN, group, norm=centered, **sp)
        self.down2 = RowLinear(FFN, H, group, **sp)

    def forward(self, tokens_T: Tensor) -> Tensor:
        x_TH = self.embedding(tokens_T)
        x_TH = x_TH + self.down(F.gelu(self.up(x_TH)))
        x_TH = x_TH + self.down2(F.gelu(self.up2(x_TH)))
        return vocab_logits(
            x_TH,
            self.embedding.weight,
            self.group,
            vocab_size=V - 3,
            sequence_parallel=self.sequence_parallel,
        )


def whole(dtype: torch.dtype) -> Small:
    torch.manual_seed(2)
    module = Small(ALONE, False, dtype)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module


def part(value: Tensor, like: nn.Parameter, group: Group) -> Tensor:
    """A rank's part of a whole tensor, as the parameter's marks say."""
    if not is_marked(like, "tensor_model_parallel"):
        return value
    return value.chunk(group.size, like.partition_dim)[group.rank]  # type: ignore[attr-defined]


def same_as_one_process(rank: int, size: int) -> None:
    groups = ProcessGroups.start(ParallelConfig(tp=size))
    tokens_T = torch.randint(0, V - 3, (12,), generator=torch.Generator().manual_seed(3))
    labels_T = tokens_T.roll(-1)
    for dtype, tolerance in (
        (torch.float32, 2e-6),
        (torch.bfloat16, 0.06),
    ):
        one = whole(dtype)
        logits = one(tokens_T)
        F.cross_entropy(logits.float(), labels_T, reduction="sum").backward()
        wanted = dict(one.named_parameters())
        for sequence_parallel in (False, True):
            mine = Small(groups.tp, sequence_parallel, dtype)
            for name, p in mine.named_parameters():
                p.data.copy_(part(wanted[name].data, p, groups.tp))
            own = mine(tokens_T)
            with torch.inference_mode():
                assert torch.equal(mine(tokens_T), own)
            assert error(own, logits) < tolerance, (dtype, sequence_parallel)
            F.cross_entropy(own.float(), labels_T, reduction="sum").backward()
            finish_gradients(mine, groups)
            for name, p in mine.named_parameters():
                grad = wanted[name].grad
                assert p.grad is not None
                assert grad is not None
                off = error(p.grad, part(grad, p, groups.tp))
                assert off < tolerance, (name, dtype, sequence_parallel, off)


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference, over the largest value."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("size", [2, 4])
def test_logits_and_gradients_equal_one_process(size: int) -> None:
    run_world(same_as_one_process, size)


class Watch(TorchDispatchMode):
    """Calls `before` with every operator's name and how often it came, then runs it."""

    def __init__(self, before: Callable[[str, int], None]) -> None:
        super().__init__()
        self.before, self.seen = before, dict[str, int]()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        self.seen[name] = self.seen.get(name, 0) + 1
        self.before(name, self.seen[name])
        return func(*args, **(kwargs or {}))


def overlapped(rank: int, size: int, folder: str) -> list[str]:
    """Rank 1 joins each collective only when rank 0 has come to the product behind it.

    If rank 0 waited for a collective before that product, both would wait for ever.
    """
    groups, order = ProcessGroups.start(ParallelConfig(tp=size)), list[str]()
    for sequence_parallel in (False, True):
        layer = ColumnLinear(8, 4, groups.tp, sequence_parallel=sequence_parallel, device="cpu")
        nn.init.ones_(layer.weight)
        x = torch.ones(6 // (size if sequence_parallel else 1), 8, requires_grad=True)
        y = layer(x)
        places = [Path(folder, f"{sequence_parallel}{n}") for n in range(2)]

        def before(name: str, times: int, places: list[Path] = places) -> None:
            product = name == "mm"
            if rank == 0 and product:
                places[times - 1].touch()
            elif rank == 1 and not product and ("reduce" in name or "gather" in name):
                summing = "reduce" in name
                deadline = time.monotonic() + 60
                while not places[summing].exists():
                    assert time.monotonic() < deadline, f"{name} is not overlapped"
                    time.sleep(0.001)
            if product or "reduce" in name or "gather" in name:
                order.append(name)

        with Watch(before):
            y.backward(torch.ones_like(y))
        assert x.grad is not None
        assert layer.weight.grad is not None
        assert (x.grad == 4).all()  # of all columns
        assert (layer.weight.grad == 6).all()  # of all rows
    return order


def test_the_backward_pass_overlaps_collectives_with_products(tmp_path: Path) -> None:
    first, second = run_world(overlapped, 2, str(tmp_path))
    assert first == second
    reduce, gather = first[1], first[3]
    assert "allreduce" in reduce
    assert "allgather" in gather
    assert first == ["mm", reduce, "mm", gather, "mm", first[5], "mm"]
    assert "reduce_scatter" in first[5]


class Copies(nn.Module):
    """Parameters of every kind of mark, and one without."""

    def __init__(self) -> None:
        super().__init__()

        def one() -> nn.Parameter:
            return nn.Parameter(torch.ones(2))

        self.tied = mark(one(), split_dim=0, tied=True)
        self.expert = mark(one(), expert=True)
        self.unused = mark(one(), partial=True)
        self.small = mark(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), partial=True)
        self.plain = one()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def finished(rank: int, size: int) -> dict[str, list[float]]:
    out = {}
    for layout in ({"tp": 4}, {"pp": 4}, {"ep": 2, "dp": 4}):
        groups = ProcessGroups.start(ParallelConfig(**layout))
        module = Copies()
        for name, p in module.named_parameters():
            if name not in ("unused", "frozen"):
                p.grad = torch.full_like(p, 10.0**rank)
        finish_gradients(module, groups)
        sum_over_replicas(module, groups)
        assert module.frozen.grad is None
        grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert all((g == g[0]).all() for g in grads.values())
        axis = next(iter(layout))
        out |= {f"{axis} {name}": float(g[0]) for name, g in grads.items()}
    return out


def test_gradients_are_added_up_where_their_marks_say() -> None:
    first, second, _, last = run_world(finished, 4)
    assert first["tp tied"] == first["tp plain"] == 1
    assert first["tp small"] == last["tp small"] == 1112  # 1111 in bfloat16
    assert first["tp unused"] == 0
    assert first["pp tied"] == last["pp tied"] == 1001
    assert second["pp tied"] == second["pp plain"] == 10
    assert first["ep plain"] == second["ep plain"] == first["ep tied"] == 1111
    assert (first["ep expert"], second["ep expert"]) == (101, 1010)


def test_the_norm_may_come_first() -> None:
    layer = ColumnLinear(8, 4, bias=True, norm=NormSpec(eps=1e-3), device="cpu")
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(5, 8)
    assert layer.weight is not None
    normed = F.rms_norm(x, (8,), layer.layer_norm_weight, 1e-3)
    product = normed @ layer.weight.T
    torch.testing.assert_close(layer.normalize(x), normed)
    torch.testing.assert_close(layer(x), product + layer.bias)
    torch.testing.assert_close(layer.project(x), x @ layer.weight.T + layer.bias)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda g: ColumnLinear(8, 6, g), "group of 4 does not divide out_features=6"),
        (lambda g: RowLinear(6, 8, g), "group of 4 does not divide in_features=6"),
        (lambda g: VocabEmbedding(102, 8, g), "group of 4 does not divide padded_vocab=102"),
    ],
)
def test_a_size_that_tp_does_not_divide_is_named(
    make: Callable[[Group], nn.Module], said: str
) -> None:
    with raises(LayoutError, match=said, hint="sizes that do"):
        make(Group(ranks=(0, 1, 2, 3)))


def test_parameters_are_new_and_on_no_device_unless_asked() -> None:
    layer = ColumnLinear(8, 4, norm=NormSpec(kind="layernorm"), bias=True)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert set(dict(layer.named_parameters())) == {
        "weight",
        "bias",
        "layer_norm_weight",
        "layer_norm_bias",
    }
    assert scatter_rows(layer.weight, ALONE) is reduce_from(layer.weight, ALONE) is layer.weight
