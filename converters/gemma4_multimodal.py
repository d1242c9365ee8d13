"""Gemma 4 as it ships: the text model of `gemma4` beside towers for images and sound."""

from megtool.convert import Family, Nested, Tower

FAMILY = Family(
    name="gemma4_multimodal",
    architectures=("Gemma4ForConditionalGeneration",),
    model_types=("gemma4",),
    nested=Nested(
        texts={"gemma4_text": "gemma4"},
        names=(("model.", ("model.language_model.",)), ("lm_head.", ("lm_head.",))),
        towers=(
            Tower("vision_tower.", stored="model.vision_tower."),
            Tower("embed_vision.", stored="model.embed_vision."),
            Tower(
                "audio_tower.",
                stored="model.audio_tower.",
                is_required=False,
                projector="embed_audio.",
            ),
            Tower("embed_audio.", stored="model.embed_audio.", is_required=False),
        ),
        verbatim=("rope_parameters",),
    ),
)
