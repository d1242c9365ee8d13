"""Options of LoRA: the adapters, and the base that they are trained on."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.errors import UsageError
from megtool.options.effects import excludes, requires, unused_with
from megtool.options.field import OptionCondition, Options, option
from megtool.train.options.model_facts import HAS_TOKENS, IS_DECODER

LORA = "LoRA"

_HAS_RANK = requires("lora_rank")
_TRAINS_ADAPTERS = OptionCondition(
    holds=lambda options, facts: options.lora_rank is not None,
    reason="without --lora-rank: packed weights are not trained",
    hint="--lora-rank N; without --qlora weights are decoded when they are loaded",
    is_conflict=True,
)


@dataclass(frozen=True, kw_only=True)
class LoraOptions(Options):
    """Which layers have adapters of which size, and how the frozen weights are held.

    Raises:
        UsageError: there is no such role of a layer.
    """

    lora_rank: int | None = option(
        LORA,
        "Train LoRA adapters of this rank instead of the model's weights.",
        metavar="N",
        minimum=1,
        needs=(
            *excludes({"fp8_param_gather": "only adapters are trained, and they are not in FP8"}),
            IS_DECODER,
            HAS_TOKENS,
        ),
    )
    lora_alpha: float | None = option(
        LORA, "Adapters are scaled by alpha / rank; default: 2 x rank.", above=0, needs=(_HAS_RANK,)
    )
    lora_dropout: float = option(
        LORA,
        "Dropout of the adapters' inputs.",
        0.0,
        minimum=0,
        below=1,
        needs=(
            *unused_with(
                {"qat": "whose merged weights are rounded, so that adapters have no inputs"}
            ),
            _HAS_RANK,
        ),
    )
    lora_target: str = option(
        LORA,
        "Layers with adapters: qkv (also of latent attention), proj, fc1, fc2 (also of experts).",
        "qkv,proj,fc1,fc2",
        metavar="LIST",
        needs=(_HAS_RANK,),
    )
    qlora: bool = option(
        LORA,
        "Keep packed weights of SRC packed, and decode those of a layer while it computes.",
        False,
        needs=(
            _TRAINS_ADAPTERS,
            *excludes(
                {
                    "qat": "",
                    "fp8_recipe": "",
                    "te_precision_config_file": "",
                    "kernels=te": "",
                    "cuda_graph_impl": "",
                    "data_parallel_sharding_strategy=optim_grads": "",
                    "data_parallel_sharding_strategy=optim_grads_params": "",
                }
            ),
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        roles = ("qkv", "proj", "fc1", "fc2")
        targets = [role.strip() for role in self.lora_target.split(",")]
        for n, role in enumerate(targets):
            if role not in roles:
                raise UsageError(f"--lora-target is {role!r}", hint=f"one of: {', '.join(roles)}")
            if role in targets[:n]:
                raise UsageError(f"--lora-target names {role!r} twice", hint=self.lora_target)
