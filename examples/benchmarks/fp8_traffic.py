"""Bytes and passes of a linear layer in FP8, beside bfloat16 and Transformer Engine; when it pays.

    python examples/benchmarks/fp8_traffic.py
    python examples/benchmarks/fp8_traffic.py --tokens 8192 --micro-batches 8

It counts, and times nothing: every pass over a matrix, with what it reads and writes, of one layer
`[O, I]` for T tokens in one micro-batch. megtool's own counts are those that
tests/emulated/test_fp8_traffic.py measures. The time follows from the peaks below: products at a
share of the peak, other passes at a share of the bandwidth, and a gap for each launch. No GPU has
confirmed it.

Transformer Engine's passes are read from its sources (2.20): `common/recipe/current_scaling.cu` (an
amax that is set to zero, one pass for it, and a scale), `common/transpose/cast_transpose.cu` (both
ways in one pass, with the amax), `quantize_transpose_vector_blockwise.cu`,
`quantize_transpose_square_blockwise.cu`, `common/cast/mxfp8/quantize_mxfp8.cuh` (one pass each),
and `pytorch/module/linear.py` (weights are cast in the first micro-batch, products of weights'
gradients add to `main_grad`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Engine = Literal["bf16", "megtool", "te"]
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
LAYERS = ((2048, 2048), (4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer `[outputs, inputs]` and the tokens of a micro-batch."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of input, weight and output."""
        return (
            self.tokens * self.inputs,
            self.outputs * self.inputs,
            self.tokens * self.outputs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A launch: bytes of matrices that it reads and writes, and operations if it is a product."""

    name: str
    moved: int
    products: int = 0
    in_fp8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Peaks of a GPU, dense, by its data sheet: bytes a second, FLOP/s in bf16 and FP8."""

    name: str
    bandwidth: float
    bf16: float
    fp8: float


H100 = Gpu(name="H100 SXM", bandwidth=3.35e12, bf16=989e12, fp8=1979e12)
B200 = Gpu(name="B200", bandwidth=8.0e12, bf16=2250e12, fp8=4500e12)
PRODUCT_SHARE, BANDWIDTH_SHARE, LAUNCH_SECONDS = 0.7, 0.8, 2e-6


def cast(name: str, size: int, engine: Engine, recipe: str) -> Iterator[Pass]:
    """Yield the passes that cast a matrix in bf16 both ways: two bytes read, two codes written.

    Launches over scales alone move nothing here.
    """
    if recipe == "tensorwise":
        yield Pass(name=f"amax of {name}", moved=2 * size)
        yield from [Pass(name="scale", moved=0)] * (2 if engine == "te" else 1)
    yield Pass(name=f"cast of {name}", moved=4 * size)
    if recipe == "delayed" and engine == "megtool":  # its amax into the history
        yield Pass(name="scale", moved=0)


def weight_gradient(shape: Shape, engine: Engine, recipe: str, *, is_first: bool) -> Iterator[Pass]:
    """Yield the passes of the weight's gradient into its sum in fp32."""
    x, w, y = shape.sizes
    width = 2 if engine == "bf16" else 1
    operands, flops = width * (x + y), 2 * shape.tokens * w
    in_fp8 = engine != "bf16"
    is_direct = engine != "megtool" or (is_first and recipe in ("delayed", "tensorwise"))
    if is_direct:
        moved = operands + (4 * w if is_first else 8 * w)
        yield Pass(name="wgrad", moved=moved, products=flops, in_fp8=in_fp8)
        return
    # PyTorch's FP8 products do not add to their output.
    yield Pass(name="wgrad", moved=operands + 2 * w, products=flops, in_fp8=in_fp8)
    yield Pass(name="sum of wgrad", moved=6 * w if is_first else 10 * w)


def passes(shape: Shape, engine: Engine, recipe: str, *, is_first: bool) -> dict[str, list[Pass]]:
    """Return the passes of a micro-batch, forward and backward; `is_first`: the first of a step."""
    x, w, y = shape.sizes
    flops, in_fp8 = 2 * shape.tokens * w, engine != "bf16"
    width = 1 if in_fp8 else 2
    forward: list[Pass] = []
    backward: list[Pass] = []
    if in_fp8:
        forward += cast("input", x, engine, recipe)
        if is_first:
            forward += cast("weight", w, engine, recipe)
        backward += cast("gradient", y, engine, recipe)
    forward.append(
        Pass(name="product", moved=width * (x + w) + 2 * y, products=flops, in_fp8=in_fp8)
    )
    backward.append(
        Pass(name="dgrad", moved=width * (y + w) + 2 * x, products=flops, in_fp8=in_fp8)
    )
    backward += weight_gradient(shape, engine, recipe, is_first=is_first)
    if engine == "megtool" and recipe == "mxfp8":
        # Scales of both operands are rounded to E8M0, then laid out in tiles.
        forward += [Pass(name="tiles of scales", moved=0)] * 4
        backward += [Pass(name="tiles of scales", moved=0)] * 8
    return {"forward": forward, "backward": backward}


def seconds(run: Pass, gpu: Gpu) -> float:
    """Return the time of a pass by the GPU's peaks."""
    peak = gpu.fp8 if run.in_fp8 else gpu.bf16
    moving = run.moved / (gpu.bandwidth * BANDWIDTH_SHARE)
    return LAUNCH_SECONDS + max(moving, run.products / (peak * PRODUCT_SHARE))


def step_seconds(
    shape: Shape, engine: Engine, recipe: str, gpu: Gpu, *, micro_batches: int
) -> float:
    """Return the time of a step of some micro-batches, forward and backward."""
    total = 0.0
    for is_first, count in ((True, 1), (False, micro_batches - 1)):
        both = passes(shape, engine, recipe, is_first=is_first)
        total += count * sum(seconds(p, gpu) for part in both.values() for p in part)
    return total


def traffic_table(shape: Shape) -> Iterator[str]:
    """Yield a table of passes and bytes per micro-batch."""
    yield "| | forward, first | backward, first | forward, later | backward, later |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    rows: list[tuple[Engine, str]] = [("bf16", "")]
    rows += [(engine, recipe) for recipe in RECIPES for engine in ("megtool", "te")]  # type: ignore[misc]
    for engine, recipe in rows:
        cells = []
        for is_first in (True, False):
            for part in passes(shape, engine, recipe, is_first=is_first).values():
                cells.append(f"{len(part)}, {sum(p.moved for p in part) / 1e6:,.0f} MB")
        name = {"bf16": "bf16", "megtool": f"{recipe}, megtool", "te": f"{recipe}, TE"}[engine]
        yield f"| {name} | {' | '.join(cells)} |"


def gain_table(tokens: int, micro_batches: int) -> Iterator[str]:
    """Yield a table of bf16's time divided by FP8's, by the model of time."""
    gpus = (H100, B200)
    names = [f"{recipe}, {gpu.name}" for gpu in gpus for recipe in RECIPES if runs_on(recipe, gpu)]
    yield f"| layer | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    for inputs, outputs in LAYERS:
        shape = Shape(tokens=tokens, inputs=inputs, outputs=outputs)
        cells = []
        for gpu in gpus:
            plain = step_seconds(shape, "bf16", "", gpu, micro_batches=micro_batches)
            for recipe in RECIPES:
                if runs_on(recipe, gpu):
                    ours = step_seconds(shape, "megtool", recipe, gpu, micro_batches=micro_batches)
                    cells.append(f"{plain / ours:.2f}")
        yield f"| {inputs} x {outputs} | {' | '.join(cells)} |"


def runs_on(recipe: str, gpu: Gpu) -> bool:
    """Return whether PyTorch multiplies FP8 with a recipe's scales on a GPU."""
    return recipe != ("mxfp8" if gpu is H100 else "blockwise")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    options = parser.parse_args()
    print(f"Passes and bytes of a micro-batch, {options.tokens} tokens, layer 4096 x 4096\n")
    shape = Shape(tokens=options.tokens, inputs=4096, outputs=4096)
    print("\n".join(traffic_table(shape)))
    print(f"\nTime of bf16 over FP8's, {options.micro_batches} micro-batches a step (a model)\n")
    print("\n".join(gain_table(options.tokens, options.micro_batches)))


if __name__ == "__main__":
    main()
