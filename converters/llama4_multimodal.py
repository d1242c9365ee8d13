"""Llama 4 as it ships: the text model of `llama4` beside a vision tower."""

from megtool.convert import LLAVA_NAMES, Family, Nested, llava_towers, tower_modules

FAMILY = Family(
    name="llama4_multimodal",
    architectures=("Llama4ForConditionalGeneration",),
    model_types=("llama4",),
    nested=Nested(
        texts={"llama4_text": "llama4"},
        names=LLAVA_NAMES,
        towers=llava_towers(
            (
                *("class_embedding", "positional_embedding_vlm", "patch_embedding.linear.weight"),
                *tower_modules("layernorm_pre", "layernorm_post"),
                *("vision_adapter.mlp.fc1.weight", "vision_adapter.mlp.fc2.weight"),
            ),
            ("linear_1.weight",),
            name="vision_model.",
        ),
        defaults={
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_local_experts": 16,
            "vocab_size": 202048,
        },
        verbatim=("rope_parameters", "rope_scaling", "rope_theta"),
    ),
)
