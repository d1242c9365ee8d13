"""Which dimension of Megatron's tensors tensor parallelism cuts, and what every rank has whole."""

from __future__ import annotations

import re

TP_DIMS: tuple[tuple[str, int], ...] = (
    ("word_embeddings.weight", -2),
    ("layer_embeddings.weight", -2),
    ("output_layer.weight", -2),
    ("output_layer.bias", -1),
    ("linear_qkv.weight", -2),
    ("linear_qkv.bias", -1),
    ("linear_q_proj.weight", -2),
    ("linear_q_up_proj.weight", -2),
    ("linear_kv_up_proj.weight", -2),
    *(
        (f"cross_attention.{retro}linear_{name}", dim)
        for retro in ("", "attn.")
        for name, dim in (("q.weight", -2), ("q.bias", -1), ("kv.weight", -2), ("kv.bias", -1))
    ),
    ("core_attention.softmax_offset", -1),
    ("core_attention.attn_sink", -1),
    ("linear_o_group_proj", -2),
    ("linear_proj.weight", -1),
    ("linear_fc1.weight", -2),
    ("linear_fc1.bias", -1),
    ("linear_fc2.weight", -1),
    ("eh_proj.weight", -2),
    ("e_proj.weight", -2),
    ("h_proj.weight", -2),
    *(
        (f"{mixer}.{name}", dim)
        for mixer in ("mixer", "mamba_mixer")
        for name, dim in (
            ("A_log", -1),
            ("D", -1),
            ("dt_bias", -1),
            ("norm.weight", -1),
            ("out_proj.weight", -1),
            ("in_proj.weight", -2),
            *((f"in_proj.weight.{x}", -2) for x in ("z", "x", "B", "C", "dt")),
            *((f"conv1d{s}weight", -3) for s in "._"),
            *((f"conv1d{s}bias", -1) for s in "._"),
            *((f"conv1d.weight.{x}", -3) for x in ("x", "B", "C")),
            *((f"conv1d.bias.{x}", -1) for x in ("x", "B", "C")),
        )
    ),
    ("self_attention.in_proj.weight", -2),
    *(
        (f"self_attention.in_proj.weight.{x}", -2)
        for x in ("query", "key", "value", "z", "beta", "alpha")
    ),
    ("self_attention.conv1d.weight", -3),
    *((f"self_attention.conv1d.weight.{x}", -3) for x in ("query", "key", "value")),
    ("self_attention.A_log", -1),
    ("self_attention.dt_bias", -1),
    ("self_attention.out_proj.weight", -1),
    *((f"self_attention.{x}_proj.weight", -2) for x in ("beta", "f_b", "g_b")),
    *((f"short_conv.in_proj.weight{x}", -2) for x in ("", ".B", ".C", ".x")),
    *((f"short_conv.in_proj.bias{x}", -1) for x in ("", ".B", ".C", ".x")),
    ("short_conv.conv1d.weight", -3),
    ("short_conv.conv1d.bias", -1),
    ("short_conv.out_proj.weight", -1),
)
"""The dimension by the end of a name, counted from the last: leading axes do not matter."""

REPLICATED = re.compile(
    r"(?:^|[._])(?:\w*norm|layer_norm)[._](?:weight|bias)$"
    r"|\b(?:linear_(?:proj|fc2)|short_conv\.out_proj)\.bias$"
    r"|\blinear_(?:q|kv|qkv)_down_proj\.weight$"
    r"|\bindexer\.linear_(?:wq_b|wk|weights_proj)\.weight$"
    r"|\brouter\.\w+$"
    r"|\blinear_kv_proj\.weight$"
    r"|\bcompressor\.(?:linear_wkv\.weight|linear_wgate\.weight|ape)$"
    r"|\b(?:self_attention|mlp)_hyper_connection\.(?:mapping_proj\.weight|bias|alpha_\w+)$"
    r"|\bhc_head_(?:fn|base|scale)$"
    r"|\blayer_scalar$"
    r"|\bactivation_func\.(?:alpha_p|alpha_n|beta|eps)$"
    r"|\b(?:layer_proj|input_gate|input_proj)\.weight$"
    r"|\bfc[12]_latent_proj\.weight$"
    r"|\bself_attention\.[fg]_a_proj\.weight$"
    r"|\bshared_experts\.gate_weight$"
    r"|\b(?:position|tokentype)_embeddings\.weight$"
    r"|\brelative_attention_bias\.weight$"
    r"|\brotary_pos_emb\.inv_freq$"
    r"|^(?:lm_head\.dense|binary_head|pooler\.dense|score|score_dense)\.(?:weight|bias)$"
)
"""What every tensor rank has whole; of any other name it is not known whether it is cut."""
