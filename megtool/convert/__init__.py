"""Conversion between dialects: the language of mappings, and its interpreter.

From the top down: the files here; megatron; families; config; language.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megtool.convert.config.activation import Activation
from megtool.convert.config.blocks import BlockConfigs
from megtool.convert.config.compressed import CompressRatios, CompressRope, HashLayers
from megtool.convert.config.global_heads import GlobalHeads
from megtool.convert.config.indexer import IndexerTypes
from megtool.convert.config.keys import (
    Default,
    Derived,
    EmbeddingSwitch,
    Key,
    Larger,
    OneOf,
    Only,
    Refused,
)
from megtool.convert.config.rope import FixedRope, NoRope, Rope, RopeInWindows, RopeTemperature
from megtool.convert.config.scaled_layers import ScaledLayers
from megtool.convert.config.shared import GroupedHeads, LayerInputs, SharedKeys
from megtool.convert.config.windows import Chunks, Window
from megtool.convert.families.decoder_rows import (
    GGUF_DECODER,
    GGUF_EXPERTS,
    GGUF_SHARED_EXPERT,
    GGUF_WITHOUT_QK_NORMS,
    HF_ATTENTION,
    HF_EXPERT_BIAS,
    HF_EXPERTS,
    HF_FEED_FORWARD,
    HF_FUSED_MLP,
    HF_GATED_MLP,
    HF_HUNYUAN_QK_NORMS,
    HF_INDEXER,
    HF_LATENT_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    HF_POST_NORMS,
    HF_QK_NORMS,
    HF_SHARED_EXPERT,
    HF_SHARED_EXPERTS,
    HF_STACKED_EXPERTS,
    HF_XIELU,
    MEGATRON_EXPERT_POST_NORMS,
    MEGATRON_MASKED_MODEL,
    MEGATRON_POST_NORMS,
    MEGATRON_XIELU,
    POST_NORM_WEIGHTS,
    XIELU_WEIGHTS,
    also_named,
    hf_mtp,
    hf_outer_mtp,
    stacked_experts,
    with_bias,
)
from megtool.convert.families.family import Family
from megtool.convert.families.mixer_rows import (
    HF_DELTA_NET,
    HF_DELTA_NET_INPUTS,
    HF_GATED_ATTENTION,
    hf_mamba,
)
from megtool.convert.families.nested import LLAVA_NAMES, Nested, llava_towers, tower_modules
from megtool.convert.families.torchtitan_rows import (
    TORCHTITAN_ATTENTION,
    TORCHTITAN_BIASED_EXPERTS,
    TORCHTITAN_EXPERTS,
    TORCHTITAN_LATENT_ATTENTION,
    TORCHTITAN_MLP,
    TORCHTITAN_MODEL,
    TORCHTITAN_NORMS,
    TORCHTITAN_PAIRED_ATTENTION,
    torchtitan_mtp,
)
from megtool.convert.language.canonical import Weight
from megtool.convert.language.mapping import (
    Cat,
    Dropped,
    Grouped,
    Interleaved,
    Padded,
    Permuted,
    Qkv,
    Row,
    Stacked,
    Tower,
    Transposed,
    Unsqueezed,
    in_branches,
    in_inner_mtp,
    in_mtp,
)
from megtool.convert.language.tower_names import QWEN_VISION, QWEN_VISION_ENDS

if TYPE_CHECKING:
    from megtool.convert.config.attention import (
        LayerRopeBases,
        LocalLayers,
        MptAttention,
        MultiQuery,
        UnscaledScores,
    )
    from megtool.convert.config.layer_kinds import (
        EveryLayer,
        KindKey,
        LayerKinds,
        MambaHeads,
        MambaScales,
        MtpKind,
        NotedList,
        StepLimit,
    )
    from megtool.convert.config.moe import (
        Alike,
        Assumed,
        EitherKey,
        Implied,
        Inverted,
        MoeLayers,
        MoeSpan,
        Multiple,
        Noted,
        Nullable,
        ScoreNorm,
        Unless,
        UpTo,
    )
    from megtool.convert.config.short_conv import AdjustedFeedForward
    from megtool.convert.config.window_heads import WindowHeads
    from megtool.convert.families.gemma_rows import HF_EXPERTS_BESIDE_MLP, HF_SHARED_KV_ATTENTION
    from megtool.convert.families.granite_rows import (
        HF_GRANITE_EXPERTS,
        HF_GRANITE_NEW_EXPERTS,
        granite_shared_expert,
        granite_single_experts,
    )
    from megtool.convert.families.kimi_keys import KimiDeltaLayers
    from megtool.convert.families.kimi_rows import HF_KIMI_DELTA, HF_KIMI_LATENT, HF_KIMI_MLP
    from megtool.convert.families.lfm2_rows import (
        HF_LFM2_ATTENTION,
        HF_LFM2_EXPERTS,
        HF_LFM2_MLP,
        HF_LFM2_MODEL,
        HF_SHORT_CONV,
    )
    from megtool.convert.families.native_rows import HF_DEEPSEEK_V4, HF_MISTRAL_LARGE_3
    from megtool.convert.families.t5_rows import (
        HF_T5,
        MEGATRON_T5,
        MT5_SIZES,
        T5_LIMITS,
        T5_WEIGHTS,
        t5_keys,
    )

_LAZY = (
    "config.moe",
    "config.layer_kinds",
    "config.attention",
    "families.native_rows",
    "config.short_conv",
    "families.gemma_rows",
    "families.granite_rows",
    "families.lfm2_rows",
    "families.t5_rows",
    "families.kimi_keys",
    "families.kimi_rows",
    "config.window_heads",
)
"""Modules of few families, those that most use first."""


def __getattr__(name: str) -> Any:
    """Import what few families use when one does: making so many classes takes 10 ms."""
    for module in () if name.startswith("_") else _LAZY:
        home = importlib.import_module(f"{__name__}.{module}")
        if hasattr(home, name):
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
