"""Gemma 4 as it ships: the text model of `gemma4` beside towers for images and sound."""

from megtool.convert import Family, Nested, Tower, tower_modules

FAMILY = Family(
    name="gemma4_multimodal",
    architectures=("Gemma4ForConditionalGeneration",),
    model_types=("gemma4",),
    nested=Nested(
        texts={"gemma4_text": "gemma4"},
        names=(("model.", ("model.language_model.",)), ("lm_head.", ("lm_head.",))),
        towers=(
            Tower(
                "vision_tower.",
                stored="model.vision_tower.",
                ends=(
                    "patch_embedder.input_proj.weight",
                    "patch_embedder.position_embedding_table",
                ),
            ),
            Tower(
                "embed_vision.",
                stored="model.embed_vision.",
                ends=("embedding_projection.weight",),
            ),
            Tower(
                "audio_tower.",
                stored="model.audio_tower.",
                is_required=False,
                projector="embed_audio.",
                ends=(
                    "subsample_conv_projection.layer0.conv.weight",
                    "subsample_conv_projection.layer0.norm.weight",
                    "subsample_conv_projection.layer1.conv.weight",
                    "subsample_conv_projection.layer1.norm.weight",
                    "subsample_conv_projection.input_proj_linear.weight",
                    *tower_modules("output_proj"),
                ),
            ),
            Tower(
                "embed_audio.",
                stored="model.embed_audio.",
                is_required=False,
                ends=("embedding_projection.weight",),
            ),
        ),
        verbatim=("rope_parameters",),
    ),
)
