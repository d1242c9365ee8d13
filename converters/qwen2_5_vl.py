"""Qwen2.5-VL: the text model of `qwen2` beside a vision tower."""

from megtool.convert import Family, Nested, Tower, tower_modules

FAMILY = Family(
    name="qwen2_5_vl",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    model_types=("qwen2_5_vl",),
    nested=Nested(
        texts={"qwen2_5_vl_text": "qwen2"},
        # Published files have `model.` and `visual.`; transformers 4.52 and later also the others.
        names=(("model.", ("model.", "model.language_model.")), ("lm_head.", ("lm_head.",))),
        towers=(
            Tower(
                "visual.",
                also=("model.visual.",),
                projector="visual.merger.",
                ends=(
                    *("patch_embed.proj.weight", "merger.ln_q.weight"),
                    *tower_modules("merger.mlp.0", "merger.mlp.2"),
                ),
            ),
        ),
        is_flat=True,
        defaults={
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "vocab_size": 152064,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
        # The sections of rotary embedding for images: text has one position in all of them.
        verbatim=("rope_parameters", "rope_scaling", "rope_theta"),
    ),
)
