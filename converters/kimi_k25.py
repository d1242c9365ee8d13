"""Kimi K2.5 and 2.6: the text model of Kimi K2 beside a vision tower."""

from megtool.convert import LLAVA_NAMES, Family, Nested, Tower, tower_modules

FAMILY = Family(
    name="kimi_k25",
    architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    model_types=("kimi_k25", "kimi_k2_5"),
    nested=Nested(
        texts={"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"},
        names=LLAVA_NAMES,
        towers=(
            Tower(
                "vision_tower.",
                also=("model.vision_tower.",),
                ends=(
                    *tower_modules("patch_embed.proj", "encoder.final_layernorm"),
                    "patch_embed.pos_emb.weight",
                ),
            ),
            Tower(
                "mm_projector.",
                also=("model.mm_projector.",),
                ends=tower_modules("pre_norm", "proj.0", "proj.2"),
            ),
        ),
        verbatim=("rope_parameters", "rope_scaling", "rope_theta"),
    ),
)
