"""llama.cpp's architecture of each family, the names of its tensors, and what it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megtool.convert.families import Family, family
from megtool.errors import MappingError
from megtool.export.gguf import tables
from megtool.export.gguf.architecture import (
    BIASED,
    BIASED_OUTPUTS,
    EXACT_GELU,
    GROUPED,
    IGNORES_WINDOW,
    MIXED_LAYERS,
    NORMALIZED,
    OTHER_HEADS,
    PARTLY_MOE,
    SCALED_LOGITS,
    SIGMOID,
    SWITCHES,
    UNNORMALIZED,
    UNTIED,
    Architecture,
    Choice,
    Limit,
    differs_from_every,
    expert_keys,
    granite_keys,
    list_sections,
    list_windows,
    written,
)
from megtool.export.gguf.gemma_architectures import GEMMAS
from megtool.export.gguf.hybrid_architectures import HYBRIDS
from megtool.export.gguf.latent_architectures import LATENTS
from megtool.model_config import ModelConfig

_TIED: Limit = (lambda c: c.tied_embeddings, "llama.cpp has an output matrix beside the embedding")

_NORMED_HEADS: Limit = (
    lambda c: c.qk_norm or c.num_layers >= 64,
    "llama.cpp normalizes queries and keys in models of 64 layers and more",
)


def _of_table(
    name: str,
    *limits: Limit,
    factors: str = "",
    has_window: bool = False,
    scales_logits: bool = False,
    oddities: tuple[Limit, ...] = (),
    keys: Callable[[ModelConfig], Mapping[str, Any]] | None = None,
) -> Choice:
    """With the names that the family's own table has for reading."""
    return lambda family, c: Architecture(
        name=name,
        table=family.gguf,
        factors=factors,
        has_window=has_window,
        scales_logits=scales_logits,
        keys=keys,
        limits=limits,
        oddities=oddities,
    )


def _is_full(every: int) -> Callable[[ModelConfig], bool]:
    """Other layers than each n-th are without rotary embedding."""
    return lambda c: (
        tuple(map(bool, c.no_rope_layers or [0] * c.num_layers))
        != tuple((i + 1) % every == 0 for i in range(c.num_layers))
    )


def _rotates_elsewhere(c: ModelConfig) -> bool:
    """Other layers than those with a window have rotary embedding."""
    without = tuple(map(bool, c.no_rope_layers or [0] * c.num_layers))
    return tuple(not w for w in list_windows(c)) != without


_SCATTERED_ROPE: Limit = (
    _rotates_elsewhere,
    "llama.cpp rotates in layers with a window and in no others",
)


def _glm_moe_keys(c: ModelConfig) -> dict[str, Any]:
    """Layers of multi-token prediction are counted as layers."""
    out = expert_keys(c) | {"block_count": c.num_layers + c.num_mtp_layers}
    return out | ({"nextn_predict_layers": c.num_mtp_layers} if c.num_mtp_layers else {})


def _ernie_keys(c: ModelConfig) -> dict[str, Any]:
    """Which layers have experts, by a step."""
    return expert_keys(c) | {"interleave_moe_layer_step": 1}


def _temperature_keys(c: ModelConfig) -> dict[str, Any]:
    """By what queries are scaled as positions grow."""
    if not c.attn_temperature_scale:
        return {}
    return {
        "attention.temperature_scale": float(c.attn_temperature_scale),
        "attention.temperature_length": c.attn_temperature_floor,
    }


def _llama_4_keys(c: ModelConfig) -> dict[str, Any]:
    """Which layers have experts, by a step."""
    first = min(c.moe_layers, default=c.num_layers) + 1
    return {"interleave_moe_layer_step": first, "expert_gating_func": SIGMOID}


def _unequal_keys(c: ModelConfig) -> dict[str, Any]:
    """Sizes layer by layer, 0 where there is no attention or no MLP."""
    layers = [c.at_layer(i) for i in range(c.num_layers)]

    def of(name: str, having: frozenset[int]) -> list[int]:
        return [getattr(x, name) * (i in having) for i, x in enumerate(layers)]

    return {
        "attention.head_count": of("num_heads", c.attn_layers),
        "attention.head_count_kv": of("num_kv_heads", c.attn_layers),
        "feed_forward_length": of("ffn_hidden_size", c.dense_layers),
    }


def _section_keys(c: ModelConfig) -> dict[str, Any]:
    """How many pairs turn by each of three positions."""
    return {"rope.dimension_sections": list_sections(c, (16, 24, 24))}


def _vision_keys(c: ModelConfig) -> dict[str, Any]:
    """The layers, too, that add what the vision tower makes of them."""
    vision = c.extra.get("vision_config") or {}
    deep = len(vision.get("deepstack_visual_indexes") or ())
    return {
        "rope.dimension_sections": list_sections(c, (24, 20, 20)),
        "n_deepstack_layers": deep,
    }


def _is_stepped(c: ModelConfig) -> bool:
    step = min(c.moe_layers, default=0) + 1
    return c.moe_layers != frozenset(range(step - 1, c.num_layers, step))


_OTHER_PERIOD: Limit = (
    lambda c: bool(c.window_size) and differs_from_every(4)(c),
    "llama.cpp has a window in all but every fourth layer",
)
_OTHER_BASE: Limit = (
    lambda c: c.rope_local_base not in (None, c.rope_base),
    "llama.cpp turns by one rope_theta in all layers",
)
_LLAMA_4_LIMITS: tuple[Limit, ...] = (
    (_is_stepped, "llama.cpp has experts in every n-th layer, the model in others"),
    (_is_full(4), "llama.cpp has no rotary embedding in every fourth layer"),
    (lambda c: c.attn_chunk_size != 8192, "llama.cpp attends within chunks of 8192 tokens"),
    (
        lambda c: (c.attn_temperature_floor, c.attn_temperature_scale) != (8192, 0.1),
        "llama.cpp scales queries by 0.1 times a logarithm of every 8192 tokens",
    ),
    (
        lambda c: c.qk_l2_norm != (c.num_experts != 128),
        "llama.cpp normalizes queries and keys in models of other than 128 experts",
    ),
    (
        lambda c: c.shared_ffn_hidden_size != c.moe_ffn_hidden_size,
        "llama.cpp has a shared expert of the size of the others",
    ),
    BIASED,
)


_ARCHITECTURES: Mapping[str, Choice] = {
    "llama": _of_table("llama", factors="llama3", oddities=(IGNORES_WINDOW,)),
    "mixtral": _of_table(
        "llama", PARTLY_MOE, UNNORMALIZED, factors="llama3", oddities=(IGNORES_WINDOW,)
    ),
    "qwen2": _of_table("qwen2", oddities=(IGNORES_WINDOW,)),
    "qwen2_moe": _of_table("qwen2moe", PARTLY_MOE, NORMALIZED, oddities=(IGNORES_WINDOW,)),
    "qwen3": _of_table("qwen3", oddities=(IGNORES_WINDOW,)),
    "qwen3_moe": _of_table("qwen3moe", PARTLY_MOE, UNNORMALIZED, oddities=(IGNORES_WINDOW,)),
    "phi3": _of_table("phi3", factors="longrope", has_window=True),
    "olmo2": _of_table("olmo2", BIASED, _TIED, OTHER_HEADS),
    "seed_oss": _of_table("seed_oss", BIASED_OUTPUTS),
    "ernie4_5": _of_table("ernie4_5", BIASED_OUTPUTS),
    "cohere": _of_table(
        "command-r", BIASED, UNTIED, OTHER_HEADS, _NORMED_HEADS, scales_logits=True
    ),
    "glm4": written("glm4", tables.NORMS, tables.POST_NORMS, tables.ATTENTION, tables.FUSED_MLP),
    "exaone4": written(
        "exaone4",
        tables.POST_NORMS,
        tables.ATTENTION,
        tables.MLP,
        factors="llama3",
        has_window=True,
        runs=("no_rope",),
        limits=(
            (
                lambda c: bool(c.window_size) != (c.num_layers == 64),
                "llama.cpp has windows in models of 64 layers and in no others",
            ),
            (
                lambda c: bool(c.window_size) and differs_from_every(4)(c),
                "llama.cpp has a window in all but every fourth layer",
            ),
            (lambda c: bool(c.window_size) and _rotates_elsewhere(c), _SCATTERED_ROPE[1]),
        ),
    ),
    "cohere2": written(
        "cohere2",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        has_window=True,
        scales_logits=True,
        runs=("no_rope",),
        limits=(
            BIASED,
            UNTIED,
            OTHER_HEADS,
            (differs_from_every(4), "llama.cpp has a window in all but every fourth layer"),
            _SCATTERED_ROPE,
        ),
    ),
    "granite": written(
        "granite",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        scales_logits=True,
        runs=("residual_scale",),
        keys=granite_keys,
    ),
    "granitemoe": written(
        "granitemoe",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.EXPERTS,
        scales_logits=True,
        runs=("residual_scale",),
        keys=granite_keys,
    ),
    "olmoe": written(
        "olmoe",
        tables.NORMS,
        tables.ATTENTION,
        tables.EXPERTS,
        limits=(BIASED, OTHER_HEADS, GROUPED, NORMALIZED),
    ),
    "smollm3": written(
        "smollm3",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        runs=("no_rope",),
        limits=(
            (_is_full(4), "llama.cpp has no rotary embedding in every fourth layer"),
            IGNORES_WINDOW,
        ),
    ),
    "starcoder2": written(
        "starcoder2",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        limits=(EXACT_GELU,),
        oddities=(IGNORES_WINDOW,),
    ),
    "arcee": written("arcee", tables.NORMS, tables.PAIRED_ATTENTION, tables.MLP, limits=(BIASED,)),
    "dots1": written(
        "dots1",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        keys=expert_keys,
        limits=(BIASED, GROUPED, MIXED_LAYERS, IGNORES_WINDOW),
    ),
    "gpt_oss": written(
        "gpt-oss",
        tables.LATER_NORMS,
        tables.ATTENTION,
        tables.EXPERTS,
        has_window=True,
        rounds_yarn=True,
        runs=("sinks",),
        limits=(
            (differs_from_every(2), "llama.cpp has a window in every second layer"),
            (
                lambda c: c.activation_limit != 7,
                "llama.cpp limits what experts activate to 7 (swiglu_limit)",
            ),
        ),
        oddities=(
            (
                lambda c: (c.rope_scaling or {}).get("truncate") is False,
                "llama.cpp rounds the range of YaRN's ramp to whole frequencies",
            ),
        ),
    ),
    "minimax_m2": written(
        "minimax-m2", tables.NORMS, tables.ATTENTION, tables.EXPERTS, keys=expert_keys
    ),
    "olmo3": written(
        "olmo2",
        tables.POST_NORMS,
        tables.ATTENTION,
        tables.MLP,
        has_window=True,
        limits=(BIASED, _TIED, OTHER_HEADS, _OTHER_PERIOD, _OTHER_BASE),
    ),
    "ministral3": written(
        "mistral3",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        factors="llama3",
        yarn="mistral",
        keys=_temperature_keys,
        oddities=(IGNORES_WINDOW,),
    ),
    "llama4": written(
        "llama4",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        factors="llama3",
        runs=("no_rope",),
        keys=_llama_4_keys,
        limits=_LLAMA_4_LIMITS,
    ),
    "qwen3_vl": _of_table("qwen3vl", keys=_vision_keys),
    "qwen3_vl_moe": _of_table("qwen3vlmoe", PARTLY_MOE, UNNORMALIZED, keys=_vision_keys),
    "qwen2_5_vl": _of_table("qwen2vl", keys=_section_keys, oddities=(IGNORES_WINDOW,)),
    "mimo": lambda _, c: _ARCHITECTURES["qwen2"](family("qwen2"), c),
    "nemotron_nas": written(
        "deci",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        factors="llama3",
        keys=_unequal_keys,
        limits=(
            (
                lambda c: not c.attn_layers <= c.dense_layers,
                "llama.cpp has no layers of attention without an MLP",
            ),
        ),
    ),
    "gpt_neox": written(
        "gptneox",
        tables.NORMS,
        tables.FUSED_ATTENTION,
        tables.MLP,
        keys=lambda c: {"use_parallel_residual": c.parallel_residual},
        limits=(_TIED,),
        oddities=(EXACT_GELU,),
    ),
    "nemotron": written(
        "nemotron", tables.NORMS, tables.ATTENTION, tables.MLP, norms_plus_one=True
    ),
    "glm4_moe": written(
        "glm4moe",
        tables.with_mtp((*tables.LATER_NORMS, *tables.ATTENTION, *tables.MLP, *tables.EXPERTS)),
        has_mtp=True,
        keys=_glm_moe_keys,
        limits=(MIXED_LAYERS,),
    ),
    "ernie4_5_moe": written(
        "ernie4_5-moe",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        keys=_ernie_keys,
        limits=(MIXED_LAYERS,),
    ),
    "gpt2": written("gpt2", tables.NORMS, tables.FUSED_ATTENTION, tables.MLP, limits=(EXACT_GELU,)),
}


_CHOICES = {**_ARCHITECTURES, **GEMMAS, **HYBRIDS, **LATENTS}


def is_exported(model: Family) -> bool:
    """Whether models of the family are written as GGUF, or their text models are."""
    texts = model.nested.texts.values() if model.nested else ()
    return model.name in _CHOICES or any(name in _CHOICES for name in texts)


def find_text_family(model: Family, config: ModelConfig) -> Family:
    """The family of the text model, which is all that a GGUF file has; itself if it nests none."""
    if model.nested is None:
        return model
    return family(model.nested.text_family(config.extra))


def find_architecture(model: Family, config: ModelConfig) -> Architecture:
    """What llama.cpp calls this model.

    Raises:
        MappingError: it has no name for it here, or would compute something else.
    """
    text = find_text_family(model, config)
    name = model.name if model.name in _CHOICES else text.name
    if name not in _CHOICES:
        raise MappingError(
            f"the model is of family {model.name!r}, which is not exported to GGUF",
            hint=f"known: {', '.join(_CHOICES)}",
            error_id="unsupported-by-engine",
        )
    architecture = _CHOICES[name](text, config)
    for applies, words in architecture.limits:
        if applies(config):
            raise MappingError(
                f"a GGUF file of architecture {architecture.name!r} would be another model: "
                f"{words}",
                hint="--to hf writes it as it is",
                error_id="unsupported-by-engine",
            )
    scaled = () if architecture.scales_logits else (SCALED_LOGITS,)
    switches = [limit for name, limit in SWITCHES.items() if name not in architecture.runs]
    for applies, words in (*switches, *scaled):
        if applies(config):
            raise MappingError(
                f"the model has {words}, and llama.cpp's {architecture.name!r} has none",
                hint="--to hf writes it as it is",
                error_id="unsupported-by-engine",
            )
    return architecture


def list_oddities(architecture: Architecture, config: ModelConfig) -> Iterator[str]:
    """What llama.cpp does otherwise, and its own converter accepts."""
    return (words for applies, words in architecture.oddities if applies(config))
