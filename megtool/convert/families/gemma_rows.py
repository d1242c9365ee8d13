"""Mapping rows of Gemma 4's variants: experts beside an MLP, keys and values that layers share."""

from __future__ import annotations

from megtool.convert.families.decoder_rows import stacked_experts
from megtool.convert.language.mapping import Dropped, Row, Table

_LAYER, _SHARED, _EXPERT = "model.layers.{l}.", "layers.{l}.mlp.shared.", "layers.{l}.mlp.experts"

HF_EXPERTS_BESIDE_MLP: Table = (
    *(
        Row(f"{_LAYER}mlp.{name}_proj.weight", f"{_SHARED}{name}.weight", when="l in moe_layers")
        for name in ("gate", "up", "down")
    ),
    *(
        Row(f"{_LAYER}{stored}.weight", f"layers.{{l}}.{ours}.weight", when="l in moe_layers")
        for stored, ours in (
            ("pre_feedforward_layernorm", "mlp.shared.norm"),
            ("post_feedforward_layernorm_1", "mlp.shared.post_norm"),
            ("pre_feedforward_layernorm_2", "mlp_norm"),
            ("post_feedforward_layernorm_2", "mlp.post_norm"),
            ("router.proj", "mlp.router"),
        )
    ),
    Row(_LAYER + "router.scale", "layers.{l}.mlp.router.scale"),
    Row(_LAYER + "router.per_expert_scale", "layers.{l}.mlp.router.expert_scale"),
    *stacked_experts(_LAYER + "experts.", plain=True),
    *(
        Row(f"{_LAYER}experts.{{e}}.{name}_proj.weight", f"{_EXPERT}.{{e}}.{name}.weight")
        for name in ("gate", "up", "down")
    ),
)

_OWN = "l not in shared_kv_layers"
HF_SHARED_KV_ATTENTION: Table = (
    *(
        Row(
            f"{_LAYER}self_attn.{name}_proj.{part}",
            f"layers.{{l}}.attn.{name}.{part}",
            when=_OWN if name in "kv" else True,
        )
        for part in ("weight", "bias")
        for name in "qkvo"
    ),
    Row(_LAYER + "self_attn.q_norm.weight", "layers.{l}.attn.q_norm.weight"),
    Row(_LAYER + "self_attn.k_norm.weight", "layers.{l}.attn.k_norm.weight", when=_OWN),
    # Published files have these for layers that attend to keys and values of an earlier one.
    *(
        Dropped(
            f"model.layers.*.self_attn.{name}.weight",
            "keys and values of a layer that attends to those of an earlier one",
            when="shared_kv_layers",
        )
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ),
)
