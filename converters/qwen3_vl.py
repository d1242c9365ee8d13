"""Qwen3-VL, dense: the text model of `qwen3` beside a vision tower."""

from megtool.convert import QWEN_VISION, QWEN_VISION_ENDS, Family, Nested, Tower

FAMILY = Family(
    name="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    model_types=("qwen3_vl",),
    nested=Nested(
        texts={"qwen3_vl_text": "qwen3"},
        names=(("model.", ("model.language_model.",)), ("lm_head.", ("lm_head.",))),
        towers=(
            Tower(
                "visual.",
                stored="model.visual.",
                projector="visual.merger.",
                ends=QWEN_VISION_ENDS,
                entries="deepstack_visual_indexes",
                megatron=QWEN_VISION,
            ),
        ),
        defaults={
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "vocab_size": 151936,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
        },
        # The sections of rotary embedding for images: text has one position in all of them.
        verbatim=("rope_parameters", "rope_scaling", "rope_theta"),
    ),
    limits=(
        (
            True,
            "Megatron-Bridge has the vision tower of Qwen3-VL as Megatron layers, and so has "
            "torch_dist; in rank files its tensors have the names of Hugging Face's model",
        ),
    ),
)
