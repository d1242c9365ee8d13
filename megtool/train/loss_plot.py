"""A plot of a run's loss as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from megtool.console import single_line
from megtool.errors import MissingPackageError
from megtool.storage.files import Files

PLOT_FILE = "loss.png"
_SMOOTHED = 0.9
_MANY = 40


def plot_loss(
    path: Path,
    losses: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, float]] = (),
    *,
    title: str = "",
) -> None:
    """Draw the loss of every step and of evaluations, with a running mean if there are many steps.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "the loss curve needs the matplotlib package", hint="pip install 'megtool[train]'"
        ) from e
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen
    axes = figure.subplots()
    is_smoothed = len(losses) > _MANY
    if losses:
        steps, values = zip(*losses, strict=True)
        axes.plot(steps, values, color="#4c78a8", alpha=0.35 if is_smoothed else 1, label="loss")
        if is_smoothed:
            axes.plot(steps, smooth(values), color="#4c78a8", label="loss, running mean")
    if evaluations:
        steps, values = zip(*evaluations, strict=True)
        axes.plot(steps, values, "o-", color="#f58518", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    if title:
        axes.set_title(single_line(title), parse_math=False)  # it is the name of a folder
    if losses or evaluations:
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    Files().replace_file(path, image.getvalue(), f".{path.name}.new")


def smooth(values: Sequence[float], weight_of_past: float = _SMOOTHED) -> list[float]:
    """The exponential moving average, with bias correction."""
    out: list[float] = []
    total = weight = 0.0
    for value in values:
        total = weight_of_past * total + (1 - weight_of_past) * value
        weight = weight_of_past * weight + (1 - weight_of_past)
        out.append(total / weight)
    return out
