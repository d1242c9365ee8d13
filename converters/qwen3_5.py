"""Qwen3.5 and 3.6, dense, as they ship: the text model of `qwen3_5_text` beside a vision tower."""

from megtool.convert import QWEN_VISION, QWEN_VISION_ENDS, Family, Nested, Tower

FAMILY = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForConditionalGeneration",),
    model_types=("qwen3_5",),
    nested=Nested(
        texts={"qwen3_5_text": "qwen3_5_text"},
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
        # The sections of rotary embedding for images: text has one position in all of them.
        verbatim=("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
    ),
    limits=(
        (
            True,
            "Megatron-Bridge has the vision tower of Qwen3.5 as Megatron layers, and so has "
            "torch_dist; in rank files its tensors have the names of Hugging Face's model",
        ),
    ),
)
