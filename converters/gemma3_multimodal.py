"""Gemma 3 from 4B up, as it ships: the text model of `gemma3` beside a vision tower."""

from megtool.convert import LLAVA_NAMES, LLAVA_TOWERS, Family, Nested

FAMILY = Family(
    name="gemma3_multimodal",
    architectures=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3",),
    nested=Nested(
        texts={"gemma3_text": "gemma3"},
        names=LLAVA_NAMES,
        towers=LLAVA_TOWERS,
        # Published files leave out what transformers has as a default.
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "vocab_size": 262208,
        },
        verbatim=("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
    ),
)
