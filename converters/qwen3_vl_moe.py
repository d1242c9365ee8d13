"""Qwen3-VL with experts: the text model of `qwen3_moe` beside a vision tower."""

from megtool.convert import (
    QWEN_VISION,
    QWEN_VISION_ENDS,
    Cat,
    Family,
    Nested,
    Row,
    Stacked,
    Tower,
    Transposed,
)

FAMILY = Family(
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    model_types=("qwen3_vl_moe",),
    nested=Nested(
        texts={"qwen3_vl_moe_text": "qwen3_moe"},
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
        # Files have all experts of a layer in two tensors, with columns as rows.
        first_rows=(
            Row(
                "model.layers.{l}.mlp.experts.gate_up_proj",
                Transposed(
                    Stacked(
                        Cat(
                            "layers.{l}.mlp.experts.{e}.gate.weight",
                            "layers.{l}.mlp.experts.{e}.up.weight",
                        ),
                        "e",
                    )
                ),
                when="l in moe_layers",
                plain=True,
            ),
            Row(
                "model.layers.{l}.mlp.experts.down_proj",
                Transposed(Stacked("layers.{l}.mlp.experts.{e}.down.weight", "e")),
                when="l in moe_layers",
                plain=True,
            ),
        ),
        defaults={
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "vocab_size": 151936,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "norm_topk_prob": True,
        },
        # The sections of rotary embedding for images: text has one position in all of them.
        verbatim=("rope_parameters", "rope_scaling", "rope_theta", "norm_topk_prob"),
        ignored=("norm_topk_prob",),
    ),
    limits=(
        (
            True,
            "Megatron-Bridge has the vision tower of Qwen3-VL as Megatron layers, and so has "
            "torch_dist; in rank files its tensors have the names of Hugging Face's model",
        ),
    ),
)
