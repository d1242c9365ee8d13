"""Gemma 4 without towers (12B): the dense text model of `gemma4` and what embeds other input."""

from megtool.convert import Family, Nested, Tower, tower_modules

FAMILY = Family(
    name="gemma4_unified",
    architectures=("Gemma4UnifiedForConditionalGeneration",),
    model_types=("gemma4_unified",),
    nested=Nested(
        texts={"gemma4_unified_text": "gemma4"},
        names=(("model.", ("model.language_model.",)), ("lm_head.", ("lm_head.",))),
        towers=(
            Tower(
                "vision_embedder.",
                stored="model.vision_embedder.",
                is_required=False,
                projector="embed_vision.",
                ends=(
                    *tower_modules("patch_dense", "patch_ln1", "patch_ln2", "pos_norm"),
                    "pos_embedding",
                ),
            ),
            Tower(
                "embed_vision.",
                stored="model.embed_vision.",
                is_required=False,
                ends=("embedding_projection.weight",),
            ),
            Tower(
                "embed_audio.",
                stored="model.embed_audio.",
                is_required=False,
                ends=("embedding_projection.weight",),
            ),
        ),
        defaults={"hidden_size_per_layer_input": 0, "sliding_window": 1024},
        verbatim=("rope_parameters",),
    ),
)
