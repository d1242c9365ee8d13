"""Mistral Small 3.1 and later, and Ministral 3: a text model of Mistral's beside a vision tower."""

from megtool.convert import LLAVA_NAMES, Family, Nested, llava_towers

FAMILY = Family(
    name="mistral3",
    architectures=("Mistral3ForConditionalGeneration",),
    model_types=("mistral3",),
    nested=Nested(
        texts={"mistral": "llama", "ministral3": "ministral3", "mistral4": "mistral4"},
        names=LLAVA_NAMES,
        towers=llava_towers(
            ("ln_pre.weight", "patch_conv.weight"),
            (
                "norm.weight",
                "patch_merger.merging_layer.weight",
                "linear_1.weight",
                "linear_2.weight",
            ),
        ),
        # What transformers' own configuration of the whole model has where a key is absent.
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
        },
        verbatim=("rope_parameters", "rope_scaling", "rope_theta"),
    ),
)
