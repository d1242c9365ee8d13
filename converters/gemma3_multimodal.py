"""Gemma 3 from 4B up, as it ships: the text model of `gemma3` beside a vision tower."""

from megtool.convert import LLAVA_NAMES, Family, Nested, llava_towers, tower_modules

FAMILY = Family(
    name="gemma3_multimodal",
    architectures=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3",),
    nested=Nested(
        texts={"gemma3_text": "gemma3"},
        names=LLAVA_NAMES,
        towers=llava_towers(
            (
                *tower_modules("embeddings.patch_embedding", "post_layernorm"),
                "embeddings.position_embedding.weight",
            ),
            ("mm_input_projection_weight", "mm_soft_emb_norm.weight"),
        ),
        # Published files leave out what transformers has as a default.
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "vocab_size": 262208,
        },
        ignored=("final_logit_softcapping",),
        verbatim=("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
    ),
)
