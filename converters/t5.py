"""T5 and Flan-T5: an encoder, and a decoder that attends to it, with relative positions."""

from megtool.convert import (
    HF_T5,
    MEGATRON_T5,
    T5_LIMITS,
    T5_WEIGHTS,
    Default,
    Family,
    Noted,
    t5_keys,
)

FAMILY = Family(
    name="t5",
    architectures=("T5ForConditionalGeneration",),
    model_types=("t5",),
    traits={"norm": "rmsnorm", "position_embedding": "relative", "softmax_scale": 1.0},
    head_unties=True,
    vocabulary=T5_WEIGHTS,
    ignores={
        "is_decoder": "the class has both stacks",
    },
    config=(
        *t5_keys("relu"),
        # T5 scales the states that logits are made of; T5 1.1 and Flan-T5 do not, which their
        # config.json says by embeddings that are not tied, or since transformers 5 by a key.
        Noted(
            "scale_decoder_outputs",
            "logit_scale",
            Default("hidden_size ** -0.5 if tied_embeddings else 1.0"),
            "hidden_size ** -0.5 if x else 1.0",
            null=1.0,
        ),
    ),
    hf=HF_T5,
    megatron=MEGATRON_T5,
    limits=T5_LIMITS,
)
