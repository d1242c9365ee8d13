"""Llama 4 as it ships: the text model of `llama4` beside a vision tower."""

from megtool.convert import LLAVA_NAMES, Family, Nested, Tower

FAMILY = Family(
    name="llama4_multimodal",
    architectures=("Llama4ForConditionalGeneration",),
    model_types=("llama4",),
    nested=Nested(
        texts={"llama4_text": "llama4"},
        names=LLAVA_NAMES,
        towers=(
            Tower("vision_model.", also=("model.vision_model.",)),
            Tower("multi_modal_projector.", also=("model.multi_modal_projector.",)),
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
