"""umT5: mT5 with relative positions of its own in every layer."""

from megtool.convert import (
    HF_T5,
    MEGATRON_T5,
    MT5_SIZES,
    T5_LIMITS,
    T5_WEIGHTS,
    Default,
    Family,
    Noted,
    t5_keys,
)

FAMILY = Family(
    name="umt5",
    architectures=("UMT5ForConditionalGeneration",),
    model_types=("umt5",),
    traits={
        "norm": "rmsnorm",
        "position_embedding": "relative",
        "relative_per_layer": True,
        "softmax_scale": 1.0,
    },
    head_unties=True,
    vocabulary=T5_WEIGHTS,
    ignores={
        "is_decoder": "the class has both stacks",
    },
    config=(
        *t5_keys("gated-gelu", **MT5_SIZES),
        # Published models say `false`, as releases of transformers before 5 wrote it; transformers
        # 5 scales the states that logits are made of in any case.
        Noted(
            "tie_word_embeddings",
            "logit_scale",
            Default("hidden_size ** -0.5"),
            "hidden_size ** -0.5 if x else 1.0",
        ),
    ),
    hf=HF_T5,
    megatron=MEGATRON_T5,
    limits=(
        (
            True,
            "Megatron's T5 has one table of relative positions for all layers of a stack, and this "
            "model has one in every layer: Megatron does not load it",
        ),
        *T5_LIMITS,
    ),
)
