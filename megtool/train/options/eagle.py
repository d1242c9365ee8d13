"""Options of EAGLE-3: a draft head that is trained beside a frozen model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megtool.errors import LayoutError, UsageError
from megtool.options.field import Options, flag, option

DEFAULT_HEAD = "default"
"""What `--eagle` is in place of a recipe, for ModelOpt's defaults at the sizes of SRC."""

_CONFLICTS = {
    "lora_rank": "LoRA trains adapters of the model",
    "qat": "the model is not trained",
    "teacher": "the model itself is the teacher",
    "fp8_recipe": "the head is trained in the model's dtype",
    "te_precision_config_file": "the head is trained in the model's dtype",
    "fp8_param_gather": "the head is trained in the model's dtype",
    "freeze": "the model's weights are frozen, and the head is trained whole",
    "hidden_dropout": "the head learns from the states that the model has without dropout",
    "attention_dropout": "the head learns from the states that the model has without dropout",
    "moe_router_bias_update_rate": "routers are not trained",
}
"""Options that go with no draft head, and why."""


@dataclass(frozen=True, kw_only=True)
class EagleOptions(Options):
    """Which draft head is trained."""

    eagle: str | None = option(
        "Speculative decoding",
        "Train an EAGLE-3 draft head through ModelOpt instead of the model's weights: ModelOpt's "
        "recipe of it, or default.",
        metavar="RECIPE",
    )


def check_eagle(s: Any) -> None:
    """Check what a `TrainConfig` has beside a draft head.

    Raises:
        UsageError: an option excludes it.
        LayoutError: ranks have parts of a model, or of rows.
    """
    if s.eagle is None:
        return
    for name, reason in _CONFLICTS.items():
        if getattr(s, name):
            raise UsageError(f"--eagle and {flag(name)} exclude each other: {reason}")
    for is_given, text in (
        (s.to == "hf", "--to hf: the head is saved in Hugging Face's format, in eagle/"),
        (s.cuda_graph_impl != "none", "--cuda-graph-impl: passes are not captured as graphs"),
        (s.is_fully_sharded, f"--data-parallel-sharding-strategy {s.sharding_strategy}"),
    ):
        if is_given:
            raise UsageError(f"--eagle excludes {text}")
    if s.is_packed:
        raise UsageError(
            "--eagle and --packing exclude each other: the head's attention knows no ends of texts",
            hint="leave out --packing",
        )
    sizes = {axis: getattr(s.layout, axis) for axis in ("tp", "pp", "cp")}
    if wrong := [f"{axis}={size}" for axis, size in sizes.items() if size > 1]:
        raise LayoutError(
            f"--eagle at {', '.join(wrong)}: each process has whole states and logits",
            hint="--tp 1 --pp 1 --cp 1; --dp splits the rows",
        )
