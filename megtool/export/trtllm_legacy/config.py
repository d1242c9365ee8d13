"""Build config.json and quant_cfg.json of a legacy TensorRT-LLM checkpoint.

Keys are those of TensorRT-LLM 1.x's `PretrainedConfig` and of its `LLaMAConfig`, `GPTConfig`,
`QWenConfig` and `GemmaConfig`, and those of `families`. ModelOpt 0.47 loses base and scaling of
rotary embedding where a config.json has them in `rope_parameters`, and engines then take 10000;
they stand here always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.errors import MappingError
from megtool.export.quantized_module import QuantizedModule
from megtool.export.trtllm_legacy.families import ACTIVATIONS, FAMILIES, LATENT
from megtool.export.trtllm_legacy.ranks import RankLayout
from megtool.quant.packed_tensors.hf_config import MIXED, PRODUCER
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModule:
    """A linear module as files name it, on one rank; `coded` is None where it is plain."""

    rank: int
    name: str
    quantized: QuantizedModule | None


def build_config_json(
    family: str,
    cut: RankLayout,
    *,
    dtype: str,
    architecture: str | None,
    shares_table: bool,
    quantization: Mapping[str, Any],
) -> bytes:
    """The file config.json; `architecture` is what the source's own config.json calls it."""
    c, known = cut.config, FAMILIES[family]
    out: dict[str, Any] = {
        "producer": PRODUCER,
        "architecture": architecture
        if architecture in known.architectures
        else known.architectures[0],
        "dtype": dtype,
        "logits_dtype": "float32",
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.attention.num_heads,
        "num_key_value_heads": c.attention.num_kv_heads,
        "hidden_size": c.hidden_size,
        "norm_epsilon": c.norms.norm_eps,
        "vocab_size": cut.vocab_size,
        "max_position_embeddings": c.positions.max_positions,
        "hidden_act": "swiglu"
        if layer_sets.moe_layers(c)
        else known.activation or ACTIVATIONS[c.mlp.activation],
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": shares_table,
        "tie_word_embeddings": c.embedding.tied_embeddings,
        "decoder": known.decoder,
    }
    if family not in LATENT:
        out |= _attention_keys(c)
    out |= known.keys(c)
    out["mapping"] = {"world_size": cut.tp * cut.pp, "tp_size": cut.tp, "pp_size": cut.pp}
    if layer_sets.moe_layers(c):
        out["mapping"] |= {"moe_tp_size": cut.moe_tp, "moe_ep_size": cut.ep}
    out["quantization"] = dict(quantization)
    return _encoded(out)


def _attention_keys(c: ModelConfig) -> dict[str, Any]:
    """Those of every family whose attention is not latent."""
    out: dict[str, Any] = {
        "head_size": c.attention.head_dim,
        "intermediate_size": c.moe.moe_ffn_hidden_size
        if layer_sets.moe_layers(c)
        else c.mlp.ffn_hidden_size,
        "position_embedding_type": _positions(c),
        "qk_layernorm": c.norms.qk_norm,
        "residual_mlp": False,
        "bias": c.attention.attn_out_bias,
        "attn_bias": c.attention.qkv_bias,
        "mlp_bias": c.mlp.mlp_bias,
        "rotary_pct": c.positions.rotary_percent,
        "rmsnorm": c.norms.norm == "rmsnorm",
        "lm_head_bias": False,
    }
    if c.positions.position_embedding == "rope":
        out |= {"rotary_base": c.positions.rope_base, "rotary_scaling": rotary_scaling(c)}
    if layer_sets.moe_layers(c):
        # 1: scores of the chosen experts add up to one (RENORMALIZE)
        out["moe"] = {
            "num_experts": c.moe.num_experts,
            "top_k": c.moe.num_experts_per_token,
            "normalization_mode": 1,
        }
    return out


def rotary_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """How rotary embedding is scaled; engines look for `type`, some releases for `rope_type`."""
    if not config.positions.rope_scaling:
        return None
    kind = config.positions.rope_scaling["rope_type"]
    return {"type": kind, **config.positions.rope_scaling}


def _positions(config: ModelConfig) -> str:
    return (
        "learned_absolute" if config.positions.position_embedding == "learned" else "rope_gpt_neox"
    )


def build_quantization(
    modules: Sequence[RankModule], routers: Sequence[str], kv_algo: str | None
) -> tuple[dict[str, Any], bytes | None]:
    """The `quantization` of config.json, and quant_cfg.json where modules differ.

    Raises:
        MappingError: layers that stages number alike have not one format.
    """
    entries = _by_name(modules)
    different = {json.dumps(s) for s in entries.values() if s}
    out: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": kv_algo}
    if not different:
        return out, None
    if len(different) == 1:
        out |= json.loads(next(iter(different)))
        excluded = {*(n for n, s in entries.items() if not s), *routers}
        if (
            "lm_head" not in entries
        ):  # the table of embeddings, which engines multiply by as by a head
            excluded.add("lm_head")
        out["exclude_modules"] = sorted(excluded)
        return out, None
    out["quant_algo"] = MIXED
    layers = {n: s for n, s in entries.items() if s}
    return out, _encoded({**out, "quantized_layers": layers})


def _by_name(modules: Sequence[RankModule]) -> dict[str, dict[str, Any]]:
    """What is said of every module; stages have modules of the same names."""
    smoothed = any(m.quantized is not None and m.quantized.is_smoothed for m in modules)
    out: dict[str, dict[str, Any]] = {}
    for m in modules:
        entry = _quantization_entry(m.quantized, smoothed)
        if out.setdefault(m.name, entry) != entry:
            raise MappingError(
                f"{m.name!r} is {entry.get('quant_algo', 'not quantized')} on rank {m.rank} and "
                f"{out[m.name].get('quant_algo', 'not quantized')} in a stage before it: stages "
                "number their layers from 0, and one list says how all are quantized",
                tensor=m.name,
                hint="export with pp 1, or give such layers one format",
            )
    return out


def _quantization_entry(module: QuantizedModule | None, smoothed: bool) -> dict[str, Any]:
    if module is None:
        return {}
    out: dict[str, Any] = {"quant_algo": module.algo}
    if module.group_size:
        out["group_size"] = module.group_size
    if module.algo in ("W4A16_AWQ", "W4A8_AWQ"):
        out |= {"has_zero_point": False, "pre_quant_scale": smoothed}
    return out


def _encoded(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=4, ensure_ascii=False) + "\n").encode()
