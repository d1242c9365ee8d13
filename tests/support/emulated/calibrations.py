"""Calibrations on the emulated GPU: the same bits as without graphs, and how many are replays.

python -m tests.support.emulated.calibrations LIBRARY KERNELS DTYPE FOLDER RECIPES [FAMILY ...]

`RECIPES` are separated by commas. It prints a line of JSON for each family and recipe: runs of
layers that were replays, of all, as the device has counted them; what the calibration itself tells;
and what went wrong, if anything.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tests.support.emulated.device import start

start(Path(sys.argv[1]))

import torch  # noqa: E402

from megtool.kernels.dispatch import Implementation, use  # noqa: E402
from megtool.model.batch import Batch  # noqa: E402
from megtool.model.stacks.layer import TransformerLayer  # noqa: E402
from megtool.quant.calibration import graphed_layer  # noqa: E402
from tests.support.models import family_models  # noqa: E402
from tests.support.quant.calibrated import Case, case, saved_bytes  # noqa: E402

ROWS, WIDTH, PLAIN, PACKED = 2, 16, 16, 16


def batches(vocab: int) -> list[Batch]:
    """Whole rows, and rows of several documents, by turns, and a last one with padding."""
    draw = torch.Generator().manual_seed(0)
    out = []
    for number in range(PLAIN + PACKED + 1):
        tokens = torch.randint(0, vocab, (ROWS, WIDTH), generator=draw)
        if number == PLAIN + PACKED:
            valid = torch.ones_like(tokens, dtype=torch.bool)
            valid[:, -5:] = False
            out.append(Batch(tokens_BS=tokens, valid_BS=valid))
        elif number % 2:
            cut = int(torch.randint(1, WIDTH, (), generator=draw))
            documents = (torch.arange(WIDTH) >= cut).long().expand(ROWS, WIDTH)
            places = torch.arange(WIDTH) - documents * cut
            out.append(Batch(tokens_BS=tokens, positions_BS=places, documents_BS=documents))
        else:
            out.append(Batch(tokens_BS=tokens))
    return out


class Counts:
    """Calls of layers, and replays of graphs, as the device sees them."""

    def __init__(self) -> None:
        self.calls = self.replays = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while it lasts."""
        graph = torch.cuda.CUDAGraph
        forward, replay = TransformerLayer.forward, graph.replay

        def count_call(*args: Any) -> Any:
            self.calls += 1
            return forward(*args)

        def count_replay(*args: Any) -> None:
            self.replays += 1
            replay(*args)

        TransformerLayer.forward, graph.replay = count_call, count_replay  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            TransformerLayer.forward, graph.replay = forward, replay  # type: ignore[method-assign]


class Lines(logging.Handler):
    """What is told."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line about graphs."""
        self.lines.append(record.getMessage())


def calibrate_both_ways(made: Case, dtype: str, folder: Path) -> dict[str, Any]:
    """Calibrate without graphs, and with them; the bits have to be the same."""
    most, counts, told = graphed_layer.MIN_GRAPH_REPEATS, Counts(), Lines()
    graphed_layer.MIN_GRAPH_REPEATS = 1 << 30
    try:
        eager = saved_bytes(made.run(device="cuda", dtype=dtype), folder / "eager")
    finally:
        graphed_layer.MIN_GRAPH_REPEATS = most
    logger = logging.getLogger("megtool.quant.calibration.sequential")
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    try:
        with counts.counting():
            found = made.run(device="cuda", dtype=dtype)
    finally:
        logger.removeHandler(told)
    assert saved_bytes(found, folder / "graphed") == eager, "other bits than without graphs"
    return {
        "replays": counts.replays,
        "runs": counts.replays + counts.calls,
        "told": told.lines,
        "tokens": found.num_tokens,
    }


def main(kernels: Implementation, dtype: str, folder: Path, recipes: list[str]) -> None:
    """Calibrate families with recipes."""
    torch.set_num_threads(1)
    for family in sys.argv[6:]:
        model = family_models.save(family, folder / family)
        for recipe in recipes:
            row: dict[str, Any] = {"family": family, "recipe": recipe, "error": None}
            try:
                size = 32 if recipe.startswith("int4") else None
                made = case(model, recipe, batches=batches(200), group_size=size)
                with use(kernels):
                    row |= calibrate_both_ways(made, dtype, folder / f"{family}-{recipe}")
            except Exception:
                row["error"] = traceback.format_exc()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(cast(Implementation, sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5].split(","))
