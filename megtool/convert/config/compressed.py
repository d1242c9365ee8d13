"""DeepSeek-V4's layers in config.json and in Megatron's args, both ways.

A layer attends to compressed keys by a ratio of its own, and in the first layers a table chooses
the experts. Sources: transformers' `deepseek_v4`; Megatron's args of its development branch (0.20)
and what Megatron-Bridge sets for it (models/deepseek/deepseek_v4_bridge.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting, num_layers
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.spec.sparse_attention import OVERLAP_RATIO

COMPRESSED_ATTENTION = "dsv4_hybrid"
"""Megatron's `experimental_attention_variant` of models with compressed keys."""

_WINDOWED = "sliding_attention"
_OVERLAPS, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_WINDOWED: 0, _OVERLAPS: OVERLAP_RATIO, _HEAVY: 128}
_HASH, _SCORED = "hash_moe", "moe"


@dataclass(frozen=True, slots=True)
class CompressRatios(Setting):
    """How many tokens are compressed to one key, layer by layer, in all notations.

    `layer_types` names a kind for each layer, and `compress_rates` (or a key for each kind) its
    ratio; `compress_ratios` has the numbers, further ones being those of multi-token prediction.
    The keys are preserved verbatim.
    """

    reads_keys: ClassVar[tuple[str, ...]] = (
        "layer_types",
        "compress_ratios",
        "compress_rates",
        "compress_rate_csa",
        "compress_rate_hca",
    )

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """One number for each layer."""
        into["compress_ratios"] = _ratios(stored, num_layers(into))
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """All notations, unless what was kept says the same."""
        ratios = config.compression.compress_ratios or (0,) * config.num_layers
        keys = ("layer_types", "compress_ratios")
        is_kept = any(config.extra.get(k) is not None for k in keys)
        if is_kept and _is_said(config, ratios):
            return
        heavy = config.compression.heavy_layers
        into["compress_ratios"] = [*ratios, *(0,) * config.mtp.num_mtp_layers]
        into["layer_types"] = [
            _HEAVY if i in heavy else _OVERLAPS if r else _WINDOWED for i, r in enumerate(ratios)
        ]
        into["compress_rates"] = {
            _OVERLAPS: OVERLAP_RATIO,
            _HEAVY: config.compression.heavy_ratio or _RATES[_HEAVY],
        }


def _is_said(config: ModelConfig, ratios: tuple[int, ...]) -> bool:
    """Whether the keys that were kept say these ratios."""
    try:
        return _ratios(config.extra, config.num_layers) == ratios
    except MappingError:  # of another number of layers
        return False


def _ratios(stored: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    rates = {**_RATES, **(stored.get("compress_rates") or {})}
    for kind, key in ((_OVERLAPS, "compress_rate_csa"), (_HEAVY, "compress_rate_hca")):
        if stored.get(key) is not None:
            rates[kind] = stored[key]
    kinds, ratios = stored.get("layer_types"), stored.get("compress_ratios")
    if kinds is None and ratios is not None:
        return _numbers(ratios, layers)
    if kinds is None:
        kinds = [_HEAVY] * min(layers, 2) + [
            _OVERLAPS if i % 2 else _HEAVY for i in range(max(layers - 2, 0))
        ]
    is_list = isinstance(kinds, list | tuple) and len(kinds) >= layers
    if not is_list or any(not isinstance(k, str) or k not in _RATES for k in kinds):
        raise MappingError(
            f"layer_types is {str(kinds)[:80]}",
            hint=f"{', '.join(_RATES)} for each of {layers} layers",
        )
    if _OVERLAPS in kinds[:layers] and rates[_OVERLAPS] != OVERLAP_RATIO:
        raise MappingError(
            f"the configuration says compress_rates={rates[_OVERLAPS]!r} for {_OVERLAPS}, but the "
            f"family knows {OVERLAP_RATIO}",
            error_id="unsupported-model",
        )
    return tuple(rates[k] for k in kinds[:layers])


def _numbers(ratios: Any, layers: int) -> tuple[int, ...]:
    is_list = isinstance(ratios, list | tuple) and len(ratios) >= layers
    if not is_list or not all(type(r) is int and r >= 0 for r in ratios):
        raise MappingError(
            f"compress_ratios is {str(ratios)[:80]}", hint=f"a number for each of {layers} layers"
        )
    if any(ratios[layers:]):
        raise MappingError(
            f"compress_ratios is {str(ratios)[:80]}, and the layers after the first {layers} "
            "compress keys, too",
            hint="layers of multi-token prediction have a window alone",
            error_id="unsupported-model",
        )
    return tuple(ratios[:layers])


@dataclass(frozen=True, slots=True)
class HashLayers(Setting):
    """In how many layers, the first ones, a table chooses the experts: a number, or a list with the
    kind of each. The keys are preserved verbatim."""

    reads_keys: ClassVar[tuple[str, ...]] = ("mlp_layer_types", "num_hash_layers")

    default: int = 3

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Their number."""
        into["num_hash_layers"] = self._count(stored, num_layers(into))
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Both, unless what was kept says the same."""
        layers, count = config.num_layers, config.router.num_hash_layers
        kinds = config.extra.get("mlp_layer_types")
        is_kept = kinds is not None or config.extra.get("num_hash_layers") is not None
        fits = kinds is None or (isinstance(kinds, list | tuple) and len(kinds) == layers)
        if is_kept and fits and self._count(config.extra, layers) == count:
            return
        into["num_hash_layers"] = count
        into["mlp_layer_types"] = [_HASH] * count + [_SCORED] * (layers - count)

    def _count(self, stored: Mapping[str, Any], layers: int) -> int:
        kinds, count = stored.get("mlp_layer_types"), stored.get("num_hash_layers")
        if kinds is None:
            count = self.default if count is None else count
            if type(count) is not int or count < 0:
                raise MappingError(f"num_hash_layers is {count!r:.40}", hint="a number of layers")
            return min(count, layers)
        is_list = isinstance(kinds, list | tuple) and len(kinds) >= layers
        kinds = list(kinds[:layers]) if is_list else []
        count = kinds.count(_HASH)
        if not is_list or kinds != [_HASH] * count + [_SCORED] * (layers - count):
            raise MappingError(
                f"mlp_layer_types is {str(stored['mlp_layer_types'])[:80]}",
                hint=f"{_HASH} for the first of {layers} layers, and {_SCORED} for the others",
                error_id="unsupported-model",
            )
        return count


_PART, _YARN_FACTOR = 64 / 512, "attention_factor"


_ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "compress_rope_theta",
    "partial_rotary_factor",
    "qk_rope_head_dim",
)


@dataclass(frozen=True, slots=True)
class CompressRope(Setting):
    """Rotary embedding of layers with compressed keys, and of those without: a base for each, and a
    scaling for the first, whose YaRN scales no cosines. The keys are preserved verbatim."""

    reads_keys: ClassVar[tuple[str, ...]] = _ROPE_KEYS

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Both bases, the part of a head that turns, and the scaling."""
        into |= _rope(stored, into["head_dim"])
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The keys that published files have, unless what was kept says the same."""
        is_kept = any(config.extra.get(k) is not None for k in _ROPE_KEYS)
        fields = ("rotary_percent", "rope_base", "compress_rope_base", "rope_scaling")
        values = {name: config.get(name) for name in fields}
        if is_kept and _rope(config.extra, config.attention.head_dim) == values:
            return
        scaling = dict(config.positions.rope_scaling or {})
        if scaling.get(_YARN_FACTOR) == 1.0:
            del scaling[_YARN_FACTOR]
        into |= {
            "rope_theta": config.positions.rope_base,
            "compress_rope_theta": config.compression.compress_rope_base,
            "rope_scaling": scaling or None,
            "partial_rotary_factor": config.positions.rotary_percent,
            "qk_rope_head_dim": int(config.attention.head_dim * config.positions.rotary_percent),
        }
        if is_kept:
            into["rope_parameters"] = None


_PARTS = ("partial_rotary_factor", "qk_rope_head_dim")


_UNREAD = ("short_mscale", "long_mscale", "truncate")  # truncate: beside the tables of both kinds


def _rope(stored: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    new, main = stored.get("rope_parameters") or {}, {}
    base = stored.get("compress_rope_theta") or 160000.0
    older = stored.get("rope_scaling") or {}
    is_nested = isinstance(new.get("main"), Mapping) and isinstance(new.get("compress"), Mapping)
    if is_nested:
        main, scaling = dict(new["main"]), dict(new["compress"])
        base = scaling.pop("rope_theta", None) or stored.get("rope_theta") or 10000.0
        if older:
            raise MappingError(
                "rope_scaling stands beside rope_parameters, and transformers lets it win",
                hint="one of the two",
                error_id="unsupported-setting",
            )
        outer = stored.get("partial_rotary_factor") or 1.0
        parts = {float(d.get("partial_rotary_factor") or outer) for d in (main, scaling)}
        if len(parts) > 1:
            raise MappingError(
                f"parts of heads that turn are {sorted(parts)}, by kinds of layers",
                hint="in this family heads of all layers turn in the same part",
                error_id="unsupported-setting",
            )
        scaling["partial_rotary_factor"] = parts.pop()
        stored = {k: v for k, v in stored.items() if k not in _PARTS}
    else:
        scaling = {k: v for k, v in (older or new).items() if k not in ("main", "compress")}
        scaling.pop("rope_theta", None)
        main = {}
    if main.get("rope_type", "default") != "default":
        raise MappingError(
            f"layers without compressed keys have a rotary scaling {main['rope_type']!r:.40}",
            hint="in this family only layers with compressed keys have one",
            error_id="unsupported-model",
        )
    part = stored.get("partial_rotary_factor") or scaling.get("partial_rotary_factor")
    if part is None and stored.get("qk_rope_head_dim"):
        part = stored["qk_rope_head_dim"] / head_dim
    scaling.pop("partial_rotary_factor", None)
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    kind = scaling.get("rope_type", "default")
    if kind == "yarn" and not is_nested:
        scaling.setdefault(_YARN_FACTOR, 1.0)
    scaling = {k: v for k, v in scaling.items() if k not in _UNREAD}
    return {
        "rotary_percent": float(_PART if part is None else part),
        "rope_base": float(main.get("rope_theta") or stored.get("rope_theta") or 10000.0),
        "compress_rope_base": float(base),
        "rope_scaling": None if kind == "default" else scaling,
    }


_SIZES = (
    ("q_lora_rank", "q_lora_rank"),
    ("head_dim", "v_head_dim"),
    ("out_groups", "o_groups"),
    ("out_lora_rank", "o_lora_rank"),
    ("window_size", "csa_window_size"),
)
_YARN = (
    ("factor", "rotary_scaling_factor"),
    ("original_max_position_embeddings", "original_max_position_embeddings"),
    ("beta_fast", "beta_fast"),
    ("beta_slow", "beta_slow"),
)
_RATIOS, _BASE, _TURNING = "csa_compress_ratios", "csa_compress_rotary_base", "qk_pos_emb_head_dim"


def compressed_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig that args of a model with compressed keys say; none for others.

    Raises:
        MappingError: sizes are missing.
    """
    streams: dict[str, Any] = {}
    if args.get("enable_hyper_connections") or args.get("enable_mhc_connections"):
        count = args.get("num_residual_streams") or args.get("mhc_num_residual_streams")
        streams["hyper_streams"] = int(count or 4)
        streams["hyper_iterations"] = int(args.get("mhc_sinkhorn_iterations") or 20)
    if args.get("moe_n_hash_layers"):
        streams["num_hash_layers"] = int(args["moe_n_hash_layers"])
    if args.get("experimental_attention_variant") != COMPRESSED_ATTENTION:
        return streams
    for name in (*(n for _, n in _SIZES), _TURNING, _RATIOS):
        if not args.get(name):
            raise MappingError(
                f"the args have compressed attention and lack {name!r}",
                hint="--like HF_FOLDER gives the model's configuration",
            )
    sizes = {field: int(args[name]) for field, name in _SIZES}
    scaling = None
    if args.get("rope_type", "yarn") == "yarn" and args.get(_YARN[0][1], 1.0) != 1:
        known = {ours: args[name] for ours, name in _YARN if args.get(name) is not None}
        scaling = {"rope_type": "yarn", **known, _YARN_FACTOR: 1.0}
    return {
        **streams,
        **sizes,
        "num_kv_heads": 1,
        "kv_lora_rank": 0,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "window_skip_freq": None,
        "rotary_percent": int(args[_TURNING]) / sizes["head_dim"],
        "rope_scaling": scaling,
        "compress_ratios": _numbers(args[_RATIOS], num_layers(args)),
        "compress_rope_base": float(args.get(_BASE) or 160000.0),
    }


def compressed_args(config: ModelConfig) -> dict[str, Any]:
    """Args from the fields that `compressed_fields` reads."""
    out: dict[str, Any] = {}
    if config.residual.hyper_streams:
        out |= {
            "enable_hyper_connections": True,
            "num_residual_streams": config.residual.hyper_streams,
            "mhc_sinkhorn_iterations": config.residual.hyper_iterations,
        }
    if config.router.num_hash_layers:
        out |= {
            "moe_n_hash_layers": config.router.num_hash_layers,
            "actual_vocab_size": config.embedding.vocab_size,
        }
    if config.compression.compress_ratios is None:
        return out
    turning, scaling = (
        int(config.attention.head_dim * config.positions.rotary_percent),
        config.positions.rope_scaling,
    )
    out |= {
        "experimental_attention_variant": COMPRESSED_ATTENTION,
        "multi_latent_attention": True,
        **{name: config.get(field) for field, name in _SIZES},
        "kv_lora_rank": config.attention.head_dim - turning,
        "qk_head_dim": config.attention.head_dim - turning,
        _TURNING: turning,
        "rotary_percent": 1.0,
        _RATIOS: [*config.compression.compress_ratios, *(0,) * config.mtp.num_mtp_layers],
        _BASE: config.compression.compress_rope_base,
        "window_size": None,
        "rope_type": "rope",
        "hetereogenous_dist_checkpoint": True,
    }
    if scaling is not None and scaling.get("rope_type") == "yarn":
        out |= {name: scaling[ours] for ours, name in _YARN if ours in scaling}
        out |= {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}
        out |= {"position_embedding_type": "rope"}
    return out
