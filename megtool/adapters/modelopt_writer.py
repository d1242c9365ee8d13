"""Updates of a model's weights as an adapter that ModelOpt's own LoRA for Megatron loads.

Every layer has the same modules, rank and scale (`megtool.adapters.fuse.fuse_layers`), and its own
tensors `lora_a_default` and `lora_b_default`, as ModelOpt 0.47 saves them with the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megtool.adapters.fuse import EXPERTS, fuse_layers
from megtool.convert.families.family import Family
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.transport.weight_update import WeightUpdate

_NAME = "default"
_INITIALIZERS = {
    "lora_a_init": "torch.nn.init.kaiming_uniform_",
    "lora_b_init": "torch.nn.init.zeros_",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeloptAdapter:
    """An adapter to write: tensors by name, and the configuration of ModelOpt's mode `peft`.

    `rounded` are modules of which elements were rounded, because scales differ.
    """

    tensors: Mapping[str, Tensor]
    mode: Mapping[str, Any]
    rank: int
    rounded: tuple[str, ...] = ()


def make_modelopt_adapter(
    updates: Mapping[str, WeightUpdate], config: ModelConfig, family: Family | None
) -> ModeloptAdapter:
    """The adapter that adds `updates` to canonical weights.

    Raises:
        MappingError: a weight is none of a linear layer in Megatron's decoder, or of an expert.
    """
    fused = fuse_layers(updates, config, family, program="ModelOpt")
    if experts := [module for module in fused.modules if EXPERTS in module]:
        raise MappingError(
            f"the adapter changes {experts[0]}: ModelOpt's adapters of experts are not written",
            hint="--to bridge or peft; megtool reshard --adapter merges it",
            error_id="unsupported-adapter",
        )
    tensors = {
        f"decoder.layers.{n}.{module}.lora_{side}_{_NAME}.weight": getattr(update, part)
        for module, of_layers in fused.modules.items()
        for n, (update,) in of_layers.items()
        for side, part in (("a", "down"), ("b", "up"))
    }
    settings = {"enable": True, "rank": fused.rank, "scale": fused.scale, **_INITIALIZERS}
    patterns = {"*": settings | {"enable": False}}
    patterns |= {f"*.layers.*.{module}": settings for module in fused.modules}
    mode = {
        "adapter_name": _NAME,
        "adapter_cfg": patterns,
        "adapter_type": "lora",
        "freeze_base_model": True,
        "freeze_lora_weights": False,
    }
    return ModeloptAdapter(
        tensors=tensors,
        mode={"config": mode, "metadata": {}},
        rank=fused.rank,
        rounded=fused.rounded,
    )
