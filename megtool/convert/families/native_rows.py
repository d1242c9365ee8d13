"""Mapping rows of files under the names that DeepSeek-V4's and Mistral Large 3's makers have.

Of DeepSeek-V4's, `attn.norm` for the norm of keys, and `model.` before a name, are of transformers'
own saves, and so are its modules' names (`self_attn.q_a_proj`), which it writes on request.
"""

from __future__ import annotations

from megtool.convert.families.decoder_rows import also_named, own_mtp_ends
from megtool.convert.language.mapping import Cat, Dropped, Row, Stacked, Table, in_mtp

_L = "layers.{l}."
_A, _S, _O = _L + "attn.", _L + "self_attn.", _L + "attn."
_F, _M = _L + "ffn.", _L + "mlp."
_EXPERT = _M + "experts.{e}."
_HYPER = (("fn", "weight"), ("base", "bias"), ("scale", "scale"))
_COMPRESSOR = (
    ("wkv.weight", "kv.weight", "kv_proj.weight"),
    ("wgate.weight", "gate.weight", "gate_proj.weight"),
    ("ape", "bias", "position_bias"),
    ("norm.weight", "norm.weight", "kv_norm.weight"),
)
_OVERLAPS = "is_compressed and l in index_layers"

_ATTENTION: Table = (
    *(
        Row(_A + stored, _O + ours, also=(_S + module,))
        for stored, ours, module in (
            ("wq_a.weight", "q_down.weight", "q_a_proj.weight"),
            ("q_norm.weight", "q_down_norm.weight", "q_a_norm.weight"),
            ("wq_b.weight", "q_up.weight", "q_b_proj.weight"),
            ("wkv.weight", "kv.weight", "kv_proj.weight"),
            ("attn_sink", "sinks", "sinks"),
            ("wo_a.weight", "o_down.weight", "o_a_proj.weight"),
            ("wo_b.weight", "o.weight", "o_b_proj.weight"),
        )
    ),
    Row(
        _A + "kv_norm.weight",
        _O + "kv_norm.weight",
        also=(_A + "norm.weight", _S + "kv_norm.weight"),
    ),
    *(
        Row(
            f"{_A}compressor.{stored}",
            f"{_O}{kind}_{ours}",
            also=(f"{_S}compressor.{module}",),
            when=when,
        )
        for kind, when in (("heavy", "l in heavy_layers"), ("overlap", _OVERLAPS))
        for stored, ours, module in _COMPRESSOR
    ),
    *(
        Row(
            f"{_A}indexer.{stored}", f"{_O}index_{ours}", also=(f"{_S}compressor.indexer.{module}",)
        )
        for stored, ours, module in (
            *((f"compressor.{s}", f"overlap_{o}", m) for s, o, m in _COMPRESSOR),
            ("wq_b.weight", "q.weight", "q_b_proj.weight"),
            ("weights_proj.weight", "heads.weight", "scorer.weights_proj.weight"),
        )
    ),
)

_EXPERTS: Table = (
    *(
        Row(_F + stored, _M + ours, also=(_M + module,))
        for stored, ours, module in (
            ("gate.weight", "router.weight", "gate.weight"),
            ("gate.bias", "router.expert_bias", "gate.e_score_correction_bias"),
            ("gate.tid2eid", "router.experts_of_tokens", "gate.tid2eid"),
            *(
                (
                    f"shared_experts.{x}.weight",
                    f"shared.{y}.weight",
                    f"shared_experts.{y}_proj.weight",
                )
                for x, y in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
            ),
        )
    ),
    *(
        Row(f"{_F}experts.{{e}}.{x}.weight", f"{_EXPERT}{y}.weight")
        for x, y in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
    Row(
        _M + "experts.gate_up_proj",
        Stacked(Cat(_EXPERT + "gate.weight", _EXPERT + "up.weight"), "e"),
    ),
    Row(_M + "experts.down_proj", Stacked(_EXPERT + "down.weight", "e")),
)


def _scales(branch: str) -> Cat:
    return Cat(*(f"{_L}{branch}_hyper.scale_{x}" for x in ("pre", "post", "res")))


_LAYERS: Table = (
    Row(_L + "attn_norm.weight", _L + "attn_norm.weight", also=(_L + "input_layernorm.weight",)),
    Row(
        _L + "ffn_norm.weight",
        _L + "mlp_norm.weight",
        also=(_L + "post_attention_layernorm.weight",),
    ),
    *_ATTENTION,
    *(
        Row(
            f"{_L}hc_{stored}_{part}",
            _scales(branch) if part == "scale" else f"{_L}{branch}_hyper.{ours}",
            also=(f"{_L}{stored}_hc.{part}",),
        )
        for stored, branch in (("attn", "attn"), ("ffn", "mlp"))
        for part, ours in _HYPER
    ),
    *_EXPERTS,
)

HF_DEEPSEEK_V4: Table = (
    Row("embed.weight", "embed.weight", also=("model.embed_tokens.weight",)),
    *also_named(_LAYERS, "layers.", "model.layers."),
    *(Row(f"hc_head_{x}", f"hyper_head.{y}", also=(f"model.hc_head.hc_{x}",)) for x, y in _HYPER),
    Row("norm.weight", "norm.weight", also=("model.norm.weight",)),
    Row("head.weight", "head.weight", also=("lm_head.weight",), when="not tied_embeddings"),
    Dropped(
        "head.weight",
        "a copy of the tied embedding",
        when="tied_embeddings",
        copy_of="embed.weight",
    ),
    *in_mtp(_LAYERS, (_L, "mtp.{m}.")),
    *(
        Row(f"mtp.{{m}}.{stored}.weight", f"mtp.{{m}}.{ours}.weight")
        for stored, ours in (
            ("enorm", "embed_norm"),
            ("hnorm", "hidden_norm"),
            ("e_proj", "embed_proj"),
            ("h_proj", "hidden_proj"),
            ("norm", "norm"),
        )
    ),
    *(Row(f"mtp.{{m}}.hc_head_{x}", f"mtp.{{m}}.hyper_head.{y}") for x, y in _HYPER),
    *own_mtp_ends("mtp.{m}.emb.tok_emb.weight", "mtp.{m}.head.weight"),
)

_PROJECTIONS = (("w1", "gate"), ("w2", "down"), ("w3", "up"))

# Mistral's own names, which are read and not written. Rotary pairs lie side by side in both.
HF_MISTRAL_LARGE_3: Table = (
    Row("tok_embeddings.weight", "embed.weight"),
    Row("norm.weight", "norm.weight"),
    Row("output.weight", "head.weight", when="not tied_embeddings"),
    *(
        Row(_L + stored, _L + ours)
        for stored, ours in (
            ("attention_norm.weight", "attn_norm.weight"),
            ("ffn_norm.weight", "mlp_norm.weight"),
            ("attention.wq.weight", "attn.q.weight"),
            ("attention.wq_a.weight", "attn.q_down.weight"),
            ("attention.q_a_norm.weight", "attn.q_down_norm.weight"),
            ("attention.wq_b.weight", "attn.q_up.weight"),
            ("attention.wkv_a_with_mqa.weight", "attn.kv_down.weight"),
            ("attention.kv_a_norm.weight", "attn.kv_down_norm.weight"),
            ("attention.wkv_b.weight", "attn.kv_up.weight"),
            ("attention.wo.weight", "attn.o.weight"),
            ("gate.weight", "mlp.router.weight"),
            *((f"feed_forward.{x}.weight", f"mlp.{y}.weight") for x, y in _PROJECTIONS),
            *((f"shared_experts.{x}.weight", f"mlp.shared.{y}.weight") for x, y in _PROJECTIONS),
        )
    ),
    *(Row(f"{_L}experts.{{e}}.{x}.weight", f"{_EXPERT}{y}.weight") for x, y in _PROJECTIONS),
)
