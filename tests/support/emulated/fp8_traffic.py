"""What an FP8 linear layer launches and moves on the emulated GPU.

python -m tests.support.emulated.fp8_traffic LIBRARY

It prints a line of JSON for each recipe, micro-batch (the first and a later one of a step) and
direction: for every launch its operation and the bytes that it reads and writes. Views and
allocations are no launches. The emulated GPU has no products of blocks: blockwise and mxfp8
multiply in bfloat16 there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.emulated.device import start

start(Path(sys.argv[1]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from megtool.kernels.dispatch import use  # noqa: E402
from megtool.kernels.fp8 import cast_triton  # noqa: E402
from megtool.kernels.wgrad_accumulation import set_gradient_sum  # noqa: E402
from megtool.optim.fp8.amax_history import AmaxHistories  # noqa: E402
from megtool.optim.fp8.config import Fp8Config  # noqa: E402
from megtool.optim.fp8.linear import fp8_product  # noqa: E402
from megtool.optim.fp8.scaling import StepScope, make_scaling  # noqa: E402
from megtool.parallel.process_groups import ProcessGroups  # noqa: E402

TOKENS, INPUTS, OUTPUTS = 384, 256, 512
_READ_AND_WRITTEN = ("add_", "mul_")
_NO_LAUNCH = ("empty", "empty_strided", "empty_like", "detach", "alias", "_local_scalar_dense")


class Meter(TorchDispatchMode):
    """The launches since the last look: names, and bytes that they read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, int]] = []
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if not self.is_paused and not is_view and name not in _NO_LAUNCH:
            self.note(name, tree_leaves((args, kwargs, out)))
        return out

    def note(self, name: str, values: list[Any]) -> None:
        """Count a launch over the tensors among some values."""
        places = {
            (v.data_ptr(), v.shape): v.numel() * v.element_size()
            for v in values
            if isinstance(v, Tensor)
        }
        moved = sum(places.values())
        if name in _READ_AND_WRITTEN:
            moved += values[0].numel() * values[0].element_size()
        self.launches.append((name, moved))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing: Triton's interpreter copies to and from numpy."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def take(self) -> list[tuple[str, int]]:
        """The launches since the last look."""
        launches, self.launches = self.launches, []
        return launches


class Sum:
    """A sum of gradients in fp32, of which the first is written and the others are added."""

    def __init__(self, weight: Tensor) -> None:
        self.main = torch.empty(weight.shape, device=weight.device)
        self.is_empty = True

    def begin(self) -> tuple[Tensor, bool]:
        """The sum, and whether it is to be overwritten."""
        return self.main, self.is_empty

    def end(self) -> None:
        """A gradient was added."""
        self.is_empty = False


def measure(recipe: Any, meter: Meter) -> Iterator[dict[str, Any]]:
    settings = Fp8Config(fp8_recipe=recipe, fp8_amax_history_len=4)
    histories = None
    if recipe == "delayed":
        histories = AmaxHistories(1, settings, "cuda")
    scope = StepScope()
    scaling = make_scaling(settings, histories=histories, scope=scope)
    weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS).bfloat16().to("cuda"))
    x = torch.randn(TOKENS, INPUTS).bfloat16().to("cuda").requires_grad_()
    grad = torch.randn(TOKENS, OUTPUTS).bfloat16().to("cuda")
    if histories is not None:  # the first step is scaled by its own values
        fp8_product(x, weight, scaling).backward(grad)
        histories.end_step(ProcessGroups.alone("cuda"))
    weight.grad = None
    total = Sum(weight)
    set_gradient_sum(weight, total)  # type: ignore[arg-type]
    scope.begin()
    meter.take()
    for is_first in (True, False):
        x.grad = None
        with meter:
            y = fp8_product(x, weight, scaling)
        yield {"recipe": recipe, "first": is_first, "part": "forward", "launches": meter.take()}
        with meter:
            y.backward(grad)
        yield {"recipe": recipe, "first": is_first, "part": "backward", "launches": meter.take()}
    assert weight.grad is None


def main() -> None:
    """All recipes."""
    meter, launch = Meter(), cast_triton.launch

    def noted(body: Any, programs: int, device: Any, *args: Any, **meta: Any) -> None:
        with meter.pause():
            launch(body, programs, device, *args, **meta)
        if programs:
            meter.note(body.__name__, list(args))

    cast_triton.launch = noted  # type: ignore[assignment]
    torch.autograd.set_multithreading_enabled(False)
    with use("triton"):
        for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
            for line in measure(recipe, meter):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
