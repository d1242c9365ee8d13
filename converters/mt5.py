"""mT5: T5 1.1 for many languages, whose output layer is a matrix of its own."""

from megtool.convert import (
    HF_T5,
    MEGATRON_T5,
    MT5_SIZES,
    T5_LIMITS,
    T5_WEIGHTS,
    Family,
    t5_keys,
)

FAMILY = Family(
    name="mt5",
    architectures=("MT5ForConditionalGeneration",),
    model_types=("mt5",),
    traits={"norm": "rmsnorm", "position_embedding": "relative", "softmax_scale": 1.0},
    head_unties=True,
    vocabulary=T5_WEIGHTS,
    config=t5_keys("gated-gelu", **MT5_SIZES),
    ignores={
        "is_decoder": "the class has both stacks",
    },
    hf=HF_T5,
    megatron=MEGATRON_T5,
    limits=T5_LIMITS,
)
