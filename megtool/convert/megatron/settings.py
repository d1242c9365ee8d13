"""Megatron's args that change what a model computes and that megtool cannot describe.

Every arg is read, without effect on the function, or listed here with the condition under which it
matters (`megtool.convert.megatron.arg_table` has the first two). Sources: megatron-core 0.16.1 and
0.19.2, and Megatron-LM's main branch of August 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megtool.convert.config.compressed import COMPRESSED_ATTENTION
from megtool.convert.megatron.activation_args import other_function
from megtool.convert.megatron.arg_table import NO_EFFECT, READ
from megtool.convert.megatron.arg_values import plain_value
from megtool.convert.megatron.hybrid_pattern import pattern_of
from megtool.convert.megatron.rotary_args import INTERPOLATION, interpolation, is_llama3
from megtool.errors import MappingError
from megtool.spec.feed_forward import ROUTER_SCORES

Condition = Callable[[Any, Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """An arg that changes the function where `matters` holds of its value and the other args.

    `effect` says what it changes, as a clause. An arg that is read may have a value that is not.
    """

    name: str
    effect: str
    matters: Condition


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSetting:
    """An unsupported arg of a checkpoint, with its value."""

    name: str
    value: Any
    effect: str


def _has_experts(args: Mapping[str, Any]) -> bool:
    return bool(args.get("num_experts"))


def _is_latent(args: Mapping[str, Any]) -> bool:
    return bool(args.get("multi_latent_attention"))


def _is_rotated_hybrid(args: Mapping[str, Any]) -> bool:
    is_rotated = args.get("position_embedding_type") == "rope" and not _is_latent(args)
    return is_rotated and pattern_of(args) is not None


def _is_legacy(args: Mapping[str, Any]) -> bool:
    """Return whether the model is one of Megatron-LM's before megatron-core."""
    if args.get("use_legacy_models") is not None:
        return bool(args["use_legacy_models"])
    return not args.get("use_mcore_models")


def _is_true(value: Any, args: Mapping[str, Any]) -> bool:
    return bool(value)


def _of_experts(condition: Condition = lambda value, _: value is not None) -> Condition:
    return lambda value, args: _has_experts(args) and condition(value, args)


def _drops_tokens(value: Any, args: Mapping[str, Any]) -> bool:
    return value is not None and value >= 0


def _reaches_ahead(value: Any, args: Mapping[str, Any]) -> bool:
    """Return whether a window is neither of tokens before alone, nor the same on both sides."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return value is not None and value is not False
    left, right = value
    return left >= 0 and right != 0 and not (right == left and _is_encoder(args))


def _is_encoder(args: Mapping[str, Any]) -> bool:
    return bool(args.get("bidirectional"))


def _is_custom_spec(value: Any, args: Mapping[str, Any]) -> bool:
    """Return whether the modules of layers are none of megatron-core's."""
    parts = value if isinstance(value, list | tuple) else (value,)
    return bool(value) and not str(parts[0]).startswith("megatron.core.")


def _lacks_layers(value: Any, args: Mapping[str, Any]) -> bool:
    return bool(value) and not args.get("heterogeneous_layers_config_encoded_json")


def _interpolates_too(value: Any, args: Mapping[str, Any]) -> bool:
    kind = args.get("position_embedding_type")
    return bool(is_llama3(args) and interpolation(args) is not None and kind in (None, "rope"))


_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn")


def _balances_otherwise(value: Any, args: Mapping[str, Any]) -> bool:
    kinds = value if isinstance(value, list | tuple) else (value,)
    return any(kind not in (None, *_BALANCING) for kind in kinds)


UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        name="moe_expert_capacity_factor",
        effect="tokens beyond the capacity of an expert do not reach it",
        matters=_of_experts(_drops_tokens),
    ),
    Unsupported(
        name="moe_expert_rank_capacity_factor",
        effect="tokens beyond the capacity of a rank do not reach its experts",
        matters=_of_experts(),
    ),
    Unsupported(
        name="moe_input_jitter_eps",
        effect="the router's input is multiplied by random numbers, in evaluation as well",
        matters=_of_experts(_is_true),
    ),
    Unsupported(
        name="moe_router_force_load_balancing",
        effect="tokens go to random experts",
        matters=_of_experts(_is_true),
    ),
    Unsupported(
        name="moe_router_force_biased",
        effect="tokens go to experts that a random bias chooses",
        matters=_of_experts(),
    ),
    Unsupported(
        name="moe_router_load_balancing_type",
        effect="the router chooses experts in another way",
        matters=_of_experts(_balances_otherwise),
    ),
    Unsupported(
        name="moe_router_score_function",
        effect="the router's scores are another function of its logits",
        matters=_of_experts(lambda v, _: v is not None and v not in ROUTER_SCORES),
    ),
    Unsupported(
        name="moe_mlp_glu_interleave_size",
        effect="the rows of gates and of the other half alternate in blocks",
        matters=_of_experts(),
    ),
    Unsupported(
        name="moe_shared_expert_glu_interleave_size",
        effect="the rows of gates and of the other half alternate in blocks",
        matters=_of_experts(),
    ),
    Unsupported(
        name="softmax_type",
        effect="attention has another softmax",
        matters=lambda v, _: v not in (None, "vanilla", "off-by-one", "learnable"),
    ),
    Unsupported(
        name="window_size",
        effect="tokens attend to others after them, or not to themselves",
        matters=_reaches_ahead,
    ),
    Unsupported(
        name="activation_func",
        effect="MLPs have another activation than the other args say",
        matters=lambda _, args: other_function(args),
    ),
    Unsupported(
        name="use_rope_scaling",
        effect="rotary embedding is both scaled and interpolated",
        matters=_interpolates_too,
    ),
    Unsupported(
        name="rotary_interleaved",
        effect="latent attention turns elements in another order",
        matters=lambda v, args: bool(v) and _is_latent(args),
    ),
    Unsupported(
        name="rotary_interleaved",
        effect="hybrid models turn pairs of elements by angles that are laid out for halves",
        matters=lambda v, args: bool(v) and _is_rotated_hybrid(args),
    ),
    Unsupported(
        name="position_embedding_type",
        effect="latent attention turns heads, and embeddings of positions are added as well",
        matters=lambda v, args: (
            v == "learned_absolute"
            and _is_latent(args)
            and args.get("experimental_attention_variant") != COMPRESSED_ATTENTION
        ),
    ),
    Unsupported(
        name="mla_down_proj_fusion",
        effect="two projections of latent attention are one",
        matters=lambda v, args: bool(v) and _is_latent(args),
    ),
    Unsupported(
        name="dsa_indexer_scoring_relu",
        effect="an indexer's scores are not cut off at 0",
        matters=lambda v, args: v is False and bool(args.get("dsa_indexer_n_heads")),
    ),
    Unsupported(
        name="dsa_indexer_k_norm_epsilon",
        effect="the norm of an indexer's keys has another epsilon than 1e-6",
        matters=lambda v, args: (
            v not in (None, 1e-6, 1e-5) and bool(args.get("dsa_indexer_n_heads"))
        ),
    ),
    Unsupported(
        name="mtp_hsm",
        effect="layers of multi-token prediction mix hidden states",
        matters=lambda v, args: bool(v) and bool(args.get("mtp_num_layers")),
    ),
    Unsupported(
        name="apply_residual_connection_post_layernorm",
        effect="residuals are taken after norms, in models before megatron-core",
        matters=lambda v, args: bool(v) and _is_legacy(args),
    ),
    Unsupported(
        name="spec",
        effect="layers are made of modules outside of megatron-core",
        matters=_is_custom_spec,
    ),
    Unsupported(
        name="yaml_cfg",
        effect="a YAML file describes the model, and not the args",
        matters=_is_true,
    ),
    Unsupported(
        name="heterogeneous_layers_config_path",
        effect="a file, which the args do not hold, describes each layer",
        matters=_lacks_layers,
    ),
)
"""All such args."""

_KNOWN = frozenset((*READ, *(s.name for s in UNSUPPORTED), *frozenset().union(*NO_EFFECT.values())))
_READ_AS_PLAIN = frozenset((*READ, *(s.name for s in UNSUPPORTED)))
_SHOWN = 8


def plain_args(args: Mapping[str, Any], dropped: Collection[str] = ()) -> dict[str, Any]:
    """Return args with plain values for those that matter here, and without those `dropped`.

    Dropping one name of an interpolation drops the other, since both say one thing.
    """
    gone = {*dropped}
    if gone & {*INTERPOLATION}:
        gone |= {*INTERPOLATION}
    out = {name: value for name, value in args.items() if name not in gone}
    out |= {name: plain_value(out[name]) for name in _READ_AS_PLAIN & out.keys()}
    if out.get("num_experts") is None and "num_moe_experts" in out:
        out["num_experts"] = out["num_moe_experts"]
    return out


def find_unsupported(args: Mapping[str, Any]) -> list[FoundSetting]:
    """Return the args, of plain values, that change the function and cannot be described."""
    return [
        FoundSetting(name=s.name, value=args[s.name], effect=s.effect)
        for s in UNSUPPORTED
        if s.name in args and s.matters(args[s.name], args)
    ]


def find_unknown(args: Iterable[str]) -> list[str]:
    """Return the names that no release of Megatron known here has."""
    return sorted(n for n in args if n not in _KNOWN and not n.startswith("_"))


def describe_unknown(names: Collection[str]) -> str:
    """Return a sentence about unknown args."""
    shown = ", ".join(sorted(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    what = "setting is" if len(names) == 1 else "settings are"
    return f"{len(names)} {what} unknown to this version, and not read: {shown}"


def refusal(settings: Collection[FoundSetting]) -> MappingError:
    """Return the error that names unsupported settings, and the way out."""
    texts = "; ".join(f"{s.name} is {s.value!r:.60}: {s.effect}" for s in settings)
    drop = " ".join(f"--drop-setting {s.name}" for s in settings)
    return MappingError(
        f"the checkpoint's args change the model in a way that megtool does not support: {texts}",
        hint=f"{drop} reads the model as if it were not set; Megatron's own formats keep it",
        error_id="unsupported-setting",
    )
