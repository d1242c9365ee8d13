"""What an EAGLE-3 draft head, which is trained beside a frozen model, does not go with."""

from __future__ import annotations

from megtool.options.effects import excludes
from megtool.train.options.model_facts import HAS_TOKENS, IS_DECODER

DEFAULT_HEAD = "default"
"""What `--eagle` is in place of a recipe, for ModelOpt's defaults at the sizes of SRC."""
_NO_DROPOUT = "the head learns from the states that the model has without dropout"

TRAINS_HEAD = (
    IS_DECODER,
    HAS_TOKENS,
    *excludes(
        {
            "lora_rank": "LoRA trains adapters of the model",
            "qat": "the model is not trained",
            "teacher": "the model itself is the teacher",
            "fp8_recipe": "the head is trained in the model's dtype",
            "te_precision_config_file": "the head is trained in the model's dtype",
            "fp8_param_gather": "the head is trained in the model's dtype",
            "freeze": "the model's weights are frozen, and the head is trained whole",
            "hidden_dropout": _NO_DROPOUT,
            "attention_dropout": _NO_DROPOUT,
            "moe_router_bias_update_rate": "routers are not trained",
            "to=hf": "the head is saved in Hugging Face's format, in eagle/",
            "cuda_graph_impl": "passes are not captured as graphs",
            "data_parallel_sharding_strategy=optim_grads": "the head is not sharded",
            "data_parallel_sharding_strategy=optim_grads_params": "the head is not sharded",
            "packing": "the head's attention knows no ends of texts",
        }
    ),
)
"""The conditions of `--eagle`."""
