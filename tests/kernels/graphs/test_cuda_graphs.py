"""A rehearsal lets good functions pass and names the broken rule of bad ones; graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megtool.errors import GraphRuleError, MissingPackageError, UsageError
from megtool.kernels.dispatch import use
from megtool.kernels.experts.grouped_gemm import grouped_linear, permute, unpermute
from megtool.kernels.graphs.cuda_graphs import CudaGraphs
from megtool.kernels.vocabulary.cross_entropy import linear_cross_entropy
from tests.support.emulated import graph_rules
from tests.support.emulated.graph_rules import GraphRuleChecker, graphed
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world

Function = Callable[..., Any]


class Scene:
    """What a function can touch outside of its arguments."""

    def __init__(self, device: str = "cpu") -> None:
        self.weight = torch.ones(4, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.calls = 0
        self.kept: list[Tensor] = []

    def count_unseen(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x

    def learn(self, x: Tensor) -> Tensor:
        """A backward pass into a gradient that nobody has made before."""
        self.weight.requires_grad_()
        (x * self.weight).sum().backward()
        return x

    def branch(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    def advance(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count

    def number(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls

    def flow(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.relu() if self.calls % 2 else x.sigmoid()

    def less(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.relu().relu() if self.calls < 3 else x.relu()

    def keep(self, x: Tensor) -> Tensor:
        self.kept.append(x * 2)
        return x

    def masked_write(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x > 0] = 0.0
        return x


BAD: dict[str, tuple[Function, str, str]] = {
    "item": (lambda s, x: x * x.sum().item(), "no waiting", "Tensor.item"),
    "if": (Scene.branch, "no waiting", "Tensor.__bool__"),
    "tolist": (lambda s, x: x + sum(x.tolist()), "no waiting", "Tensor.tolist"),
    "numpy": (lambda s, x: x + float(x.numpy()[0]), "no waiting", "Tensor.numpy"),
    "cpu": (lambda s, x: x.cpu(), "no waiting", "Tensor.cpu"),
    "to": (lambda s, x: x.to("cpu"), "no waiting", 'Tensor.to("cpu")'),
    "to device": (lambda s, x: x.to(device="cpu"), "no waiting", 'Tensor.to("cpu")'),
    "str": (lambda s, x: x * len(str(x)), "no waiting", "Tensor.__repr__"),
    "format": (lambda s, x: x * len(f"{x}"), "no waiting", "Tensor.__format__"),
    "inv": (lambda s, x: torch.linalg.inv(x.diag()), "no waiting", "_linalg_check_errors"),
    "solve": (lambda s, x: torch.linalg.solve(x.diag(), x), "no waiting", "_linalg_check_errors"),
    "eigh": (lambda s, x: torch.linalg.eigvalsh(x.diag()), "no waiting", "aten::_linalg_eigh"),
    "split": (lambda s, x: x.tensor_split(s.count[None])[1], "no waiting", "tensor_split"),
    "unseen count": (Scene.count_unseen, "a repeatable result", "aten::add_.Tensor"),
    "no gradient": (Scene.learn, "a repeatable result", "aten::add_.Tensor"),
    "equal": (lambda s, x: x if torch.equal(x, x) else -x, "no waiting", "aten::equal"),
    "nonzero": (lambda s, x: x.nonzero(), "no shapes", "aten::nonzero"),
    "mask": (lambda s, x: x[x > 0], "no shapes", "aten::index"),
    "write by mask": (Scene.masked_write, "no shapes", "aten::index_put_"),
    "tensor": (lambda s, x: x + torch.tensor([1.0, 2, 3, 4]), "no data", "torch.tensor"),
    "number": (Scene.number, "the same numbers", "aten::mul"),
    "flow": (Scene.flow, "the same operations", "was aten::sigmoid"),
    "less": (Scene.less, "the same operations", "is missing"),
    "keep": (Scene.keep, "kept outside", "aten::mul"),
    "advance": (Scene.advance, "a repeatable result", "output 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_rule_is_named(name: str) -> None:
    function, rule, operation = BAD[name]
    scene = Scene()
    run = GraphRuleChecker(lambda x: function(scene, x))
    with pytest.raises(GraphRuleError) as caught:
        [run(torch.randn(4)) for _ in range(4)]
    assert rule in caught.value.message
    assert operation in caught.value.message
    assert caught.value.hint


def test_a_replaced_storage_is_found() -> None:
    scene = Scene()
    run = GraphRuleChecker(lambda x: x * scene.weight)
    run(torch.ones(4))
    scene.weight.fill_(3.0)
    assert torch.equal(run(torch.ones(4)), torch.full((4,), 3.0)), "new values are fine"
    scene.weight = torch.ones(4)
    with pytest.raises(GraphRuleError, match="the same storages"):
        run(torch.ones(4))


def layered(device: str) -> tuple[Function, Function]:
    """A function of everything that is allowed, and the plain one."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, device=device).requires_grad_(False)
    table = torch.arange(64.0, device=device).view(8, 8)

    def function(x: Tensor, at: Tensor, mask: Tensor | None) -> dict[str, Any]:
        y = layer(x).relu() + table[at]
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return {"y": y, "more": (y.argmax(-1), [y.sum()])}

    return function, graphed(function, device)


def check_layered(device: str) -> None:
    function, run = layered(device)
    for size in (3, 5, 3, 3, 5):
        x, at = torch.randn(size, 8, device=device), torch.randint(0, 8, (size,), device=device)
        for mask in (None, torch.rand(size, 8, device=device) > 0.5):
            found, expected = run(x, at, mask), function(x, at, mask)
            torch.testing.assert_close(found["y"], expected["y"])
            assert torch.equal(found["more"][0], expected["more"][0])
    assert len(run.captured) == 4  # type: ignore[attr-defined]


def check_state(device: str) -> None:
    """A counter advances once a call, though the warm-up ran it more often."""
    scene = Scene(device)
    run = graphed(scene.advance, device, state=[scene.count])
    assert [run(torch.ones(1, device=device)).item() for _ in range(4)] == [1, 2, 3, 4]


def check_step(device: str) -> None:
    """A whole training step: loss, backward into buffers that exist, update in place."""
    torch.manual_seed(0)
    weight = torch.randn(20, 8, device=device)
    weights = [weight.clone().requires_grad_(), weight.clone().requires_grad_()]
    for w in weights:
        w.grad = torch.zeros_like(w)

    def step(w: Tensor) -> Function:
        def run(x: Tensor, labels: Tensor) -> Tensor:
            assert w.grad is not None
            w.grad.zero_()
            loss = linear_cross_entropy(x, w, labels, vocab_size=17, chunk=8).mean()
            loss.backward()
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.5)
            return loss.detach()

        return run

    graph, plain = graphed(step(weights[0]), device, state=[weights[0]]), step(weights[1])
    for _ in range(3):
        x, labels = torch.randn(6, 8, device=device), torch.randint(0, 17, (6,), device=device)
        torch.testing.assert_close(graph(x, labels), plain(x, labels))
    torch.testing.assert_close(*weights)


CHECKS = [check_layered, check_state, check_step]


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_allowed_passes(check: Callable[[str], None]) -> None:
    check("cpu")


def test_a_failed_capture_leaves_the_state_as_it_was() -> None:
    scene = Scene()
    run = GraphRuleChecker(lambda x: scene.advance(x) * x.sum().item(), state=[scene.count])
    with pytest.raises(GraphRuleError, match=r"Tensor\.item"):
        run(torch.ones(1))
    assert scene.count == 0


@pytest.mark.gpu
def test_a_failed_capture_on_a_gpu_leaves_all_as_it_was() -> None:
    """The state, the stream, the random numbers, and what the next capture needs."""
    scene, one, here = Scene("cuda"), torch.ones(1, device="cuda"), torch.cuda.current_stream()
    run = CudaGraphs(
        lambda x: scene.advance(x) * torch.rand_like(x).sum().item(), state=[scene.count]
    )
    for _ in range(2):
        with pytest.raises(GraphRuleError, match=r"cannot be captured.*captur"):
            run(one)
        assert scene.count == 0
        assert torch.cuda.current_stream() == here
    assert scene.advance(one) == 1
    assert 0 < torch.rand(8, device="cuda").sum() < 8
    again = CudaGraphs(lambda x: x * 2, pool=run.pool)
    assert again(one) == 2
    assert again(one * 2) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_a_gpu_gives_the_same(check: Callable[[str], None]) -> None:
    check("cuda")


def test_experts_wait_for_nothing() -> None:
    """The dropless path can be captured: counts stay on the device."""
    weight = torch.randn(4, 8, 8)

    def function(x: Tensor, experts: Tensor, probs: Tensor) -> Tensor:
        rows, row_ids, counts = permute(x, experts, 4)
        return unpermute(grouped_linear(rows, weight, counts), row_ids, probs)

    run = GraphRuleChecker(function)
    for _ in range(2):
        run(torch.randn(5, 8), torch.rand(5, 4).topk(2).indices, torch.rand(5, 2))
    with pytest.raises(GraphRuleError, match=r"Tensor\.tolist"):  # the loop for other sizes
        GraphRuleChecker(lambda x: grouped_linear(x, weight[..., :3], torch.ones(4).long()))(
            torch.randn(4, 3)
        )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_put_back_may_advance(device: str) -> None:
    scene = Scene(device)
    counts = graphed(scene.count_unseen, device, undo=scene.count.zero_)
    for n in range(3):
        counts(torch.ones(4, device=device))
        assert scene.count.item() == n + 1


def test_an_undo_that_does_not_put_back_is_found() -> None:
    scene = Scene()
    with pytest.raises(GraphRuleError, match="a repeatable result"):
        GraphRuleChecker(scene.count_unseen, undo=lambda: None)(torch.ones(4))


def sums_of_ranks(rank: int, size: int) -> list[str]:
    """What is said of an all-reduce that lasts (none), and of one whose sum is kept (the last)."""
    dist.init_process_group("gloo")
    kept: list[Tensor] = []
    said: list[str] = []

    def total(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, async_op=True).wait()
        return y + 1

    def keep(x: Tensor) -> Tensor:
        kept.append(total(x))
        return kept[-1] + 1

    run = GraphRuleChecker(total)
    for _ in range(400):
        try:
            run(torch.ones(64))
        except GraphRuleError as error:  # go on: the other rank does
            said.append(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_rules, "PATIENCE_S", 0.1)
        with pytest.raises(GraphRuleError) as caught:
            GraphRuleChecker(keep)(torch.ones(64))
    return [*said, str(caught.value)]


def test_threads_of_collectives_may_let_go_a_moment_later() -> None:
    for said in run_world(sums_of_ranks, 2):
        assert len(said) == 1, said
        assert "no memory of the graph kept outside" in said[0]


def test_random_numbers_are_no_difference() -> None:
    run = GraphRuleChecker(lambda x: nn.functional.dropout(x, 0.5))
    assert not torch.equal(run(torch.ones(64)), run(torch.ones(64)))


def test_the_graphs_own_outputs_hold_until_the_next_call() -> None:
    run = GraphRuleChecker(lambda x: (x * 2, x > 0, x.long()), copies=False)
    first = run(torch.ones(2))
    second = run(torch.ones(2))
    assert first[0].isnan().all()
    assert not first[1].any()
    assert torch.equal(second[0], torch.full((2,), 2.0))


def test_other_kernels_are_another_graph() -> None:
    run = GraphRuleChecker(lambda x: x * 2)
    run(torch.ones(2))
    with use("triton"):
        run(torch.ones(2))
    with torch.no_grad():
        run(torch.ones(2))
    run(torch.ones(2, dtype=torch.float64))
    assert len(run.captured) == 4


def test_only_tensors_go_in_and_out() -> None:
    with pytest.raises(UsageError, match="not 3"):
        GraphRuleChecker(lambda x, n: x * n)(torch.ones(1), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not 'done'"):
        GraphRuleChecker(lambda x: (x, "done"))(torch.ones(1))


def test_graphs_need_a_gpu() -> None:
    if torch.cuda.is_available():
        with pytest.raises(UsageError, match="cpu"):
            CudaGraphs(lambda x: x)(torch.ones(1))
    else:
        with raises(MissingPackageError, id="missing-device"):
            CudaGraphs(lambda x: x)
