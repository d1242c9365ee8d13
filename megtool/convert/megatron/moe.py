"""Megatron's names for experts, latent attention and multi-token prediction, in every version.

`WRITTEN` are the rows for single layers of what megtool.convert.megatron.names lacks, `READ`
spellings that are accepted but never written: experts one by one (Megatron's
`singleton_local_shards`, legacy checkpoints, `fsdp_dtensor`), and gate and up rows apart, as `_w`
and `_v`.
Sources: megatron/core/transformer/{multi_latent_attention,multi_token_prediction}.py,
moe/{router,experts,shared_experts}.py and fsdp_dtensor_checkpoint.py of Megatron-LM.
"""

from __future__ import annotations

from megtool.convert.language.mapping import Cat, Row, Stacked, Table, in_inner_mtp, in_mtp
from megtool.convert.megatron import compressed as megatron_compressed

_L = "decoder.layers.{l}."
_A, _M = _L + "self_attention.", _L + "mlp."
_ATTN, _MLP = "layers.{l}.attn.", "layers.{l}.mlp."
_EXPERT, _SHARED = _MLP + "experts.{e}.", _MLP + "shared."
_DENSE, _MOE = "l in dense_layers", "l in moe_layers"
_ATTENTION = "l in attn_layers"
_MLA = f"kv_lora_rank and {_ATTENTION}"

_INDEXED = "l in index_layers"
INDEXER = ".core_attention.indexer."
"""What the names of an indexer's tensors have in them."""


def _latent_norm(linear: str, norm: str, ours: str, when: str) -> tuple[Row, Row]:
    """The norm of low-rank queries, or of keys and values.

    It is part of Transformer Engine's up-projection, and a module of its own in local layers, and
    where an indexer reads what it returns.
    """
    fused, own = f"{_A}{linear}.layer_norm_weight", f"{_A}{norm}.weight"
    name = f"{_ATTN}{ours}.weight"
    return (
        Row(fused, name, also=(own,), when=f"{when} and not index_num_heads"),
        Row(own, name, also=(fused,), when=f"{when} and index_num_heads"),
    )


WRITTEN: Table = (
    Row(
        _L + "input_layernorm.weight",
        "layers.{l}.attn_norm.weight",
        also=(_A + "linear_qkv_down_proj.layer_norm_weight",),
        when=f"(kv_lora_rank or is_compressed) and {_ATTENTION}",
    ),
    Row(_L + "input_layernorm.bias", "layers.{l}.attn_norm.bias", when=_MLA),
    Row(_A + "linear_q_proj.weight", _ATTN + "q.weight", when=f"{_MLA} and not q_lora_rank"),
    Row(_A + "linear_q_down_proj.weight", _ATTN + "q_down.weight", when="q_lora_rank"),
    *_latent_norm("linear_q_up_proj", "q_layernorm", "q_down_norm", "q_lora_rank"),
    Row(_A + "linear_q_up_proj.weight", _ATTN + "q_up.weight", when="q_lora_rank"),
    Row(_A + "linear_kv_down_proj.weight", _ATTN + "kv_down.weight", when=_MLA),
    *_latent_norm("linear_kv_up_proj", "kv_layernorm", "kv_down_norm", _MLA),
    Row(_A + "linear_kv_up_proj.weight", _ATTN + "kv_up.weight", when=_MLA),
    Row(_A + "core_attention.softmax_offset", _ATTN + "sinks", when="not is_compressed"),
    *(
        Row(f"{_A}core_attention.indexer.{stored}", f"{_ATTN}index_{name}", when=_INDEXED)
        for stored, name in (
            ("linear_wq_b.weight", "q.weight"),
            ("linear_wk.weight", "k.weight"),
            ("k_norm.weight", "k_norm.weight"),
            ("k_norm.bias", "k_norm.bias"),
            ("linear_weights_proj.weight", "heads.weight"),
        )
    ),
    Row(_M + "router.bias", _MLP + "router.bias", when=_MOE),
    Row(_M + "fc1_latent_proj.weight", _MLP + "latent_in.weight", when=_MOE),
    Row(_M + "fc2_latent_proj.weight", _MLP + "latent_out.weight", when=_MOE),
    Row(_M + "router.expert_bias", _MLP + "router.expert_bias", when=_MOE),
    Row(
        _M + "experts.experts.linear_fc1.bias",
        Stacked(Cat(_EXPERT + "gate.bias", _EXPERT + "up.bias"), "e"),
        when=f"gated and {_MOE}",
    ),
    Row(
        _M + "experts.experts.linear_fc1.bias",
        Stacked(_EXPERT + "up.bias", "e"),
        when=f"not gated and {_MOE}",
    ),
    Row(
        _M + "experts.experts.linear_fc2.bias",
        Stacked(_EXPERT + "down.bias", "e"),
        when=_MOE,
    ),
    Row(
        _M + "shared_experts.gate_weight",
        _SHARED + "router.weight",
        when=f"shared_ffn_hidden_size and {_MOE}",
    ),
)

# A part of an expert as (module, kind): its name in each spelling; `{}` is what comes after.
_SINGLE = (
    "experts.experts.{{e}}.{0}.{1}{2}",
    "experts.local_experts.{{e}}.{0}.{1}{2}",
    "experts.{0}.{1}{{e}}{2}",
)


def _single(module: str, kind: str, end: str = "") -> tuple[str, ...]:
    return tuple(_M + name.format(module, kind, end) for name in _SINGLE)


def _row(names: tuple[str, ...], word: Cat | str, when: str) -> Row:
    return Row(names[0], word, also=names[1:], when=when)


READ: Table = (
    *(
        row
        for kind in ("weight", "bias")
        for row in (
            _row(
                _single("linear_fc1", kind),
                Cat(_EXPERT + f"gate.{kind}", _EXPERT + f"up.{kind}"),
                f"gated and {_MOE}",
            ),
            _row(_single("linear_fc1", kind), _EXPERT + f"up.{kind}", f"not gated and {_MOE}"),
            _row(_single("linear_fc1", kind, "_w"), _EXPERT + f"gate.{kind}", _MOE),
            _row(_single("linear_fc1", kind, "_v"), _EXPERT + f"up.{kind}", _MOE),
            _row(_single("linear_fc2", kind), _EXPERT + f"down.{kind}", _MOE),
            Row(_M + f"linear_fc1.{kind}_w", _MLP + f"gate.{kind}", when=_DENSE),
            Row(_M + f"linear_fc1.{kind}_v", _MLP + f"up.{kind}", when=_DENSE),
        )
    ),
    Row(_M + "shared_experts.linear_fc1.weight_w", _SHARED + "gate.weight", when=_MOE),
    Row(_M + "shared_experts.linear_fc1.weight_v", _SHARED + "up.weight", when=_MOE),
    Row(
        _A + "linear_qkv_down_proj.weight",
        Cat(_ATTN + "q_down.weight", _ATTN + "kv_down.weight"),
        when="q_lora_rank and kv_lora_rank",
    ),
)


SINGLETONS: Table = (
    *(
        Row(
            f"{_M}shared_experts.linear_fc1.weight_{end}",
            f"{_SHARED}{name}.weight",
            when=f"gated and {_MOE}",
        )
        for end, name in (("w", "gate"), ("v", "up"))
    ),
    *(
        row
        for kind in ("weight", "bias")
        for row in (
            *(
                Row(f"{_M}{module}.{kind}_{end}", f"{ours}{name}.{kind}", when=f"gated and {when}")
                for module, ours, when in (
                    ("experts.experts.{e}.linear_fc1", _EXPERT, _MOE),
                    ("linear_fc1", _MLP, _DENSE),
                )
                for end, name in (("w", "gate"), ("v", "up"))
            ),
            Row(
                f"{_M}experts.experts.{{e}}.linear_fc1.{kind}",
                f"{_EXPERT}up.{kind}",
                when=f"not gated and {_MOE}",
            ),
            Row(f"{_M}experts.experts.{{e}}.linear_fc2.{kind}", f"{_EXPERT}down.{kind}", when=_MOE),
        )
    ),
)
"""Experts one by one, gate and up rows apart: Megatron's `singleton_local_shards`, as ModelOpt asks
for it (`sharded_state_dict` in modelopt 0.47's torch/opt/plugins/megatron.py)."""


def mtp_rows(layers: Table) -> tuple[Row, ...]:
    """Rows of the multi-token prediction layers, derived from the rows of the decoder's layers.

    Megatron calls the inner layer `transformer_layer` on disk, and newer releases
    `mtp_model_layer` in memory (so in what is not `torch_dist`). A HybridModel may have several
    layers inside, by number.
    """
    inner = (f"mtp.layers.{{m}}.{name}." for name in ("transformer_layer", "mtp_model_layer"))
    numbered = "mtp.layers.{m}.mtp_model_layer.layers.{k}."
    return (
        Row("mtp.layers.{m}.enorm.weight", "mtp.{m}.embed_norm.weight"),
        Row("mtp.layers.{m}.enorm.bias", "mtp.{m}.embed_norm.bias"),
        Row("mtp.layers.{m}.hnorm.weight", "mtp.{m}.hidden_norm.weight"),
        Row("mtp.layers.{m}.hnorm.bias", "mtp.{m}.hidden_norm.bias"),
        Row(
            "mtp.layers.{m}.eh_proj.weight",
            "mtp.{m}.proj.weight",
            when="not mtp_hidden_first and not hyper_streams",
        ),
        Row(
            "mtp.layers.{m}.eh_proj.weight",
            Cat("mtp.{m}.embed_proj.weight", "mtp.{m}.hidden_proj.weight", dim=1),
            when="mtp_hidden_first and not hyper_streams",
        ),
        *megatron_compressed.MTP,
        *in_mtp(layers, *((_L, name) for name in inner)),
        *in_inner_mtp(layers, (_L, numbered)),
        Row("mtp.layers.{m}.final_layernorm.weight", "mtp.{m}.norm.weight"),
        Row("mtp.layers.{m}.final_layernorm.bias", "mtp.{m}.norm.bias"),
    )
