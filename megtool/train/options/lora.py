"""Options of LoRA: the adapters, and the base that they are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megtool.errors import UsageError
from megtool.options.field import Options, option

LORA = "LoRA"


@dataclass(frozen=True, kw_only=True)
class LoraOptions(Options):
    """Which layers have adapters of which size, and how the frozen weights are held."""

    lora_rank: int | None = option(
        LORA,
        "Train LoRA adapters of this rank instead of the model's weights.",
        metavar="N",
        minimum=1,
    )
    lora_alpha: float | None = option(
        LORA, "Adapters are scaled by alpha / rank; default: 2 x rank."
    )
    lora_dropout: float = option(LORA, "Dropout of the adapters' inputs.", 0.0, minimum=0)
    lora_target: str = option(
        LORA,
        "Layers with adapters: qkv (also of latent attention), proj, fc1, fc2 (also of experts).",
        "qkv,proj,fc1,fc2",
        metavar="LIST",
    )
    qlora: bool = option(
        LORA,
        "Keep packed weights of SRC packed, and decode those of a layer while it computes.",
        False,
    )


def list_qlora_conflicts(s: Any) -> list[tuple[bool, str]]:
    """What a `TrainConfig` must not have with packed weights: whether it has it, and a message."""
    others = (
        ("--qat", s.qat is not None),
        ("--fp8-recipe", s.fp8_recipe is not None),
        ("--te-precision-config-file", s.te_precision_config_file is not None),
        ("--kernels te", s.kernels == "te"),
        ("--cuda-graph-impl", s.cuda_graph_impl != "none"),
        (f"--data-parallel-sharding-strategy {s.sharding_strategy}", s.is_fully_sharded),
    )
    return [
        (
            s.qlora and s.lora_rank is None,
            "--qlora without --lora-rank: packed weights are not trained; give --lora-rank, or "
            "leave out --qlora, and weights are decoded when they are loaded",
        ),
        *((s.qlora and given, f"--qlora and {name} exclude each other") for name, given in others),
    ]


def check_lora(s: Any) -> None:
    """Check the adapters of a `TrainConfig`.

    Raises:
        UsageError: a value is out of its range, or there is no such role.
    """
    if s.lora_alpha is not None and s.lora_alpha <= 0:
        raise UsageError(
            f"--lora-alpha is {s.lora_alpha:g}", hint="above 0; default: 2 x --lora-rank"
        )
    roles = ("qkv", "proj", "fc1", "fc2")
    if s.lora_rank is not None:
        roles_given = [role.strip() for role in s.lora_target.split(",")]
        for n, role in enumerate(roles_given):
            if role not in roles:
                raise UsageError(f"--lora-target is {role!r}", hint=f"one of: {', '.join(roles)}")
            if role in roles_given[:n]:
                raise UsageError(f"--lora-target names {role!r} twice", hint=s.lora_target)
