"""llama.cpp's architecture of each family, the names of its tensors, and what it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.convert.families.detection import family
from megtool.convert.families.family import Family
from megtool.convert.language.mapping import Cat, Row
from megtool.errors import MappingError
from megtool.export.gguf import tables
from megtool.export.gguf.architecture import (
    BIASED,
    BIASED_OUTPUTS,
    EXACT_GELU,
    IGNORES_WINDOW,
    NORMALIZED,
    OTHER_HEADS,
    PARTLY_MOE,
    SCALED_LOGITS,
    SWITCHES,
    UNNORMALIZED,
    UNTIED,
    Architecture,
    Choice,
    Limit,
    differs_from_every,
    granite_keys,
    lacks_rope_elsewhere,
    list_sections,
    list_windows,
    standing_pairs,
    written,
)
from megtool.export.gguf.compressed_architectures import COMPRESSED
from megtool.export.gguf.expert_architectures import MOES
from megtool.export.gguf.gemma_architectures import GEMMAS
from megtool.export.gguf.hybrid_architectures import HYBRIDS
from megtool.export.gguf.latent_architectures import LATENTS
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_TIED: Limit = (
    lambda c: c.embedding.tied_embeddings,
    "llama.cpp has an output matrix beside the embedding",
)

_NORMED_HEADS: Limit = (
    lambda c: c.norms.qk_norm != (c.num_layers >= 64),
    "llama.cpp normalizes queries and keys in models of 64 layers and more, and in no others",
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


def _rotates_elsewhere(c: ModelConfig) -> bool:
    """Other layers than those with a window have rotary embedding."""
    without = tuple(map(bool, c.positions.no_rope_layers or [0] * c.num_layers))
    return tuple(not w for w in list_windows(c)) != without


_SCATTERED_ROPE: Limit = (
    _rotates_elsewhere,
    "llama.cpp rotates in layers with a window and in no others",
)


def _temperature_keys(c: ModelConfig) -> dict[str, Any]:
    """By what queries are scaled as positions grow."""
    if not c.attention.attn_temperature_scale:
        return {}
    return {
        "attention.temperature_scale": float(c.attention.attn_temperature_scale),
        "attention.temperature_length": c.attention.attn_temperature_floor,
    }


def _unequal_keys(c: ModelConfig) -> dict[str, Any]:
    """Sizes layer by layer, 0 where there is no attention or no MLP."""
    layers = c.by_layer()

    def of(name: str, having: frozenset[int]) -> list[int]:
        return [x.get(name) * (i in having) for i, x in enumerate(layers)]

    return {
        "attention.head_count": of("num_heads", layer_sets.attn_layers(c)),
        "attention.head_count_kv": of("num_kv_heads", layer_sets.attn_layers(c)),
        "feed_forward_length": of("ffn_hidden_size", layer_sets.dense_layers(c)),
    }


def _section_keys(c: ModelConfig) -> dict[str, Any]:
    """How many pairs turn by each of three positions."""
    return {"rope.dimension_sections": list_sections(c, (16, 24, 24))}


_VISION_SECTIONS = (24, 20, 20)
_STANDING: Limit = (
    lambda c: standing_pairs(c, _VISION_SECTIONS) > 0,
    "llama.cpp does not turn the pairs of a head, the slowest, that mrope_section leaves over",
)


def _vision_keys(c: ModelConfig) -> dict[str, Any]:
    """The layers, too, that add what the vision tower makes of them."""
    vision = c.extra.get("vision_config") or {}
    deep = len(vision.get("deepstack_visual_indexes") or ())
    return {
        "rope.dimension_sections": list_sections(c, _VISION_SECTIONS),
        "n_deepstack_layers": deep,
    }


_OTHER_PERIOD: Limit = (
    lambda c: bool(c.window.window_size) and differs_from_every(4)(c),
    "llama.cpp has a window in all but every fourth layer",
)
_OTHER_BASE: Limit = (
    lambda c: c.positions.rope_local_base not in (None, c.positions.rope_base),
    "llama.cpp turns by one rope_theta in all layers",
)


def _window_keys(c: ModelConfig) -> dict[str, Any]:
    """Which layers have a window, and multipliers that are all one."""
    return granite_keys(c) | {"attention.sliding_window_pattern": list(list_windows(c))}


_STEEPER: Limit = (
    lambda c: c.positions.alibi_bias_max != 8,
    "llama.cpp has slopes of one over two to at most 8 (alibi_bias_max)",
)


def _no_sinks(c: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Sinks that get no share of what is attended to: exp(-1e30) is 0."""
    sinks = np.full(c.attention.num_heads, -1e30, np.float32)
    return {f"blk.{i}.attn_sinks.weight": sinks for i in range(c.num_layers)}


def _windowed_llama(_: Family, c: ModelConfig) -> Architecture:
    """Llama with windows in some layers, as a Granite that has them, whose multipliers are one and
    whose sinks do nothing: `llama` itself has no windows."""
    if not c.window.window_size:
        return _ARCHITECTURES["llama"](family("llama"), c)
    return written(
        "granite_swa",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        scales_logits=True,
        has_window=True,
        factors="llama3",
        keys=_window_keys,
        constants=_no_sinks,
    )(_, c)


def _swash_keys(c: ModelConfig) -> dict[str, Any]:
    """Multipliers, which layers have a window, and which turn."""
    out = granite_keys(c) | {"attention.sliding_window_pattern": list(list_windows(c))}
    if c.moe.num_experts:
        out |= {"feed_forward_length": c.moe.moe_ffn_hidden_size}
    if c.positions.no_rope_layers is None:
        return out
    return out | {"attention.rope_pattern": [not flag for flag in c.positions.no_rope_layers]}


_SHARED = "layers.{l}.mlp.shared."
_GRANITE_SWASH = written(
    "granite_swa",
    tables.NORMS,
    tables.PAIRED_ATTENTION,
    tables.MLP,
    tuple(row for row in tables.EXPERTS if isinstance(row, Row) and "_shexp" not in row.stored),
    (
        Row(
            "blk.{l}.ffn_up_shexp.weight",
            Cat(_SHARED + "gate.weight", _SHARED + "up.weight"),
            when="shared_ffn_hidden_size and l in moe_layers",
        ),
        Row("blk.{l}.ffn_down_shexp.weight", _SHARED + "down.weight"),
    ),
    scales_logits=True,
    has_window=True,
    runs=("sinks", "residual_scale", "no_rope"),
    keys=_swash_keys,
    limits=(
        (lambda c: not c.window.window_size, "llama.cpp has a window in some layers"),
        _OTHER_BASE,
    ),
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
                lambda c: bool(c.window.window_size) != (c.num_layers == 64),
                "llama.cpp has windows in models of 64 layers and in no others",
            ),
            (
                lambda c: bool(c.window.window_size) and differs_from_every(4)(c),
                "llama.cpp has a window in all but every fourth layer",
            ),
            (lambda c: bool(c.window.window_size) and _rotates_elsewhere(c), _SCATTERED_ROPE[1]),
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
    "granite_swa": _GRANITE_SWASH,
    "granitemoe_swa": _GRANITE_SWASH,
    "smollm3": written(
        "smollm3",
        tables.NORMS,
        tables.PAIRED_ATTENTION,
        tables.MLP,
        runs=("no_rope",),
        limits=(
            (lacks_rope_elsewhere(4), "llama.cpp has no rotary embedding in every fourth layer"),
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
    "qwen3_vl": _of_table("qwen3vl", keys=_vision_keys, oddities=(_STANDING,)),
    "qwen3_vl_moe": _of_table(
        "qwen3vlmoe", PARTLY_MOE, UNNORMALIZED, keys=_vision_keys, oddities=(_STANDING,)
    ),
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
                lambda c: not layer_sets.attn_layers(c) <= layer_sets.dense_layers(c),
                "llama.cpp has no layers of attention without an MLP",
            ),
        ),
    ),
    "gpt_neox": written(
        "gptneox",
        tables.NORMS,
        tables.FUSED_ATTENTION,
        tables.MLP,
        keys=lambda c: {"use_parallel_residual": c.residual.parallel_residual},
        limits=(_TIED,),
        oddities=(EXACT_GELU,),
    ),
    "nemotron": written(
        "nemotron", tables.NORMS, tables.ATTENTION, tables.MLP, norms_plus_one=True
    ),
    "apertus": written(
        "apertus",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        factors="llama3",
        lists=tuple(
            (f"xielu.{name}", f"layers.{{l}}.mlp.xielu.{name}")
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        ),
        limits=(BIASED,),
    ),
    "falcon": written(
        "falcon",
        tables.FALCON_NORMS,
        tables.FUSED_ATTENTION,
        tables.MLP,
        limits=(
            BIASED,
            (
                lambda c: not c.residual.parallel_residual,
                "llama.cpp has attention and MLP in parallel, the model one after the other",
            ),
        ),
        oddities=(EXACT_GELU,),
    ),
    "glm": written("chatglm", tables.NORMS, tables.ATTENTION, tables.FUSED_MLP),
    "helium": written("llama", tables.NORMS, tables.ATTENTION, tables.MLP),
    "hunyuan_v1_dense": written("hunyuan-dense", tables.NORMS, tables.ATTENTION, tables.MLP),
    "olmo": written("olmo", tables.PAIRED_ATTENTION, tables.MLP, limits=(BIASED,)),
    "openelm": written(
        "openelm",
        tables.NORMS,
        tables.FUSED_ATTENTION,
        tables.MLP,
        keys=_unequal_keys,
        limits=(UNTIED,),
    ),
    "phi": written(
        "phi2",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        limits=(_TIED, OTHER_HEADS),
        oddities=(EXACT_GELU,),
    ),
    "stablelm": written(
        "stablelm",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        limits=(_TIED, OTHER_HEADS, BIASED_OUTPUTS),
    ),
    "cwm": _windowed_llama,
    "ministral": _windowed_llama,
    "bloom": written("bloom", tables.NORMS, tables.FUSED_ATTENTION, tables.MLP, limits=(_STEEPER,)),
    "mpt": written(
        "mpt",
        tables.NORMS,
        tables.FUSED_ATTENTION,
        tables.MLP,
        keys=lambda c: {"attention.max_alibi_bias": float(c.positions.alibi_bias_max)},
        oddities=(EXACT_GELU,),
    ),
    "gpt_bigcode": written(
        "starcoder", tables.NORMS, tables.FUSED_ATTENTION, tables.MLP, limits=(EXACT_GELU,)
    ),
    "jais2": written("jais2", tables.NORMS, tables.ATTENTION, tables.MLP),
    "gpt2": written("gpt2", tables.NORMS, tables.FUSED_ATTENTION, tables.MLP, limits=(EXACT_GELU,)),
}


_CHOICES = {**_ARCHITECTURES, **MOES, **GEMMAS, **HYBRIDS, **LATENTS, **COMPRESSED}


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
    if config.head.num_labels:
        raise MappingError(
            "the model scores labels, and is not exported to GGUF",
            hint="--to hf writes a folder, which vLLM and transformers load",
            error_id="unsupported-by-engine",
        )
    text = find_text_family(model, config)
    name = model.name if model.name in _CHOICES else text.name
    if name not in _CHOICES and (config.bidirectional or config.num_decoder_layers):
        raise MappingError(
            f"the model is of family {model.name!r}, which has an encoder: only decoders are "
            "exported to GGUF",
            hint="--to hf writes a folder, of which llama.cpp's own convert_hf_to_gguf.py makes a "
            "file if it knows the class",
            error_id="unsupported-by-engine",
        )
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
