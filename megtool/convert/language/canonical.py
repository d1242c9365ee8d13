"""The canonical tensors: one name each, unfused, unstacked, unpadded, with their shapes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megtool.convert.language.expression import Expression, evaluate, names_in
from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Weight:
    """A canonical tensor: its symbolic shape, and the layers that have one.

    `flag` names the ModelConfig field that says whether this optional tensor exists; without one
    the tensor has to be there wherever `when` holds. `keeps_dtype` says that no cast of the model's
    weights touches it.
    """

    shape: tuple[Expression, ...]
    when: Expression = True
    flag: str | None = None
    keeps_dtype: bool = False


_HIDDEN = ("hidden_size",)
_Q = "num_heads * (qk_nope_head_dim + qk_rope_head_dim or head_dim)"
_K, _V = "num_kv_heads * head_dim", "num_kv_heads * (v_head_dim or head_dim)"
_D = "head_dim"
_ATTN, _MIXER = "l in attn_layers", "l in mixer_layers"
_MLA = f"kv_lora_rank and {_ATTN}"
_GQA = f"not kv_lora_rank and not is_compressed and {_ATTN}"
_KEY = f"l not in shared_kv_layers and {_GQA}"
_VALUE = f"l not in tied_value_layers and {_KEY}"
_LOW_RANK_Q = f"q_lora_rank and {_ATTN}"
_DENSE, _MOE = "l in dense_layers", "l in moe_layers"
_LAYERNORM = "norm == 'layernorm' and norm_bias and norm_weight"
_QK_BIAS = f"qk_norm and qk_norm_of == 'head' and {_LAYERNORM}"
_QK_NORM = "({} if qk_norm_of == 'all' else 1) * head_dim"
_ATTN_NORM = "norm_weight and pre_norms and (first_attn_norm or l > 0)"
_MLP_NORM = "norm_weight and pre_norms and not shared_norm"
_FEEDS = "l in dense_layers or l in moe_layers"
_SHARED = "shared_ffn_hidden_size and l in moe_layers"
_EXPERT_IN = "moe_latent_size or hidden_size"
_MAMBA, _DELTA = "l in mamba_layers", "l in delta_layers"
_INNER, _STATE = "mamba_num_heads * mamba_head_dim", "mamba_num_groups * mamba_state_dim"
_CONV, _KDA = "l in conv_layers", "l in kda_layers"
_KEYS = "linear_num_key_heads * linear_key_head_dim"
_VALUES = "linear_num_value_heads * linear_value_head_dim"

_VOCABULARY_ROWS = ("vocab_size", "hidden_size")
_TWO_PROJECTIONS = "mtp_hidden_first or hyper_streams"

_LAYER, _MTP, _INNER_MTP = "layers.{l}.", "mtp.{m}.", "mtp.{m}.layers.{k}."
_INDEX = re.compile(r"\{(\w+)\}")
_L = re.compile(r"\bl\b")
_L_IN = re.compile(r"\bl in (\w+)_layers\b")
_DIGITS = re.compile(r"\d+")


@functools.cache
def as_mtp(text: Expression) -> Expression:
    """A name or a condition of layers as that of the layers of multi-token prediction.

    Megatron's GPTModel builds them like the last layer, and HybridModel by a pattern of their own.
    """
    if not isinstance(text, str):
        return text
    text = _L_IN.sub(r"has_mtp_\1", text.replace(_LAYER, _MTP))
    return _L.sub("num_layers - 1", text)


@functools.cache
def as_inner_mtp(text: Expression) -> Expression:
    """The same for the numbered layers (`k`) inside a layer of multi-token prediction, each of
    which is one branch of `mtp_kind`: `CanonicalModel.value` knows which."""
    if isinstance(text, str):
        text = text.replace(_LAYER, _INNER_MTP)
    return f"k >= 0 and ({as_mtp(text)})"


# Parameters of a state's decay, which published files keep in float32 beside bfloat16 weights.
_MIXERS: Mapping[str, Weight] = MappingProxyType(
    {
        **{
            f"layers.{{l}}.mamba.in_{part}.weight": Weight((rows, "hidden_size"), _MAMBA)
            for part, rows in (
                ("z", _INNER),
                ("x", _INNER),
                ("B", _STATE),
                ("C", _STATE),
                ("dt", "mamba_num_heads"),
            )
        },
        **{
            f"layers.{{l}}.mamba.conv_{part}.{kind}": Weight(
                (rows, 1, "mamba_conv_kernel") if kind == "weight" else (rows,), _MAMBA
            )
            for kind in ("weight", "bias")
            for part, rows in (("x", _INNER), ("B", _STATE), ("C", _STATE))
        },
        **{
            f"layers.{{l}}.mamba.{name}": Weight(("mamba_num_heads",), _MAMBA, keeps_dtype=True)
            for name in ("A_log", "D", "dt_bias")
        },
        "layers.{l}.mamba.norm.weight": Weight((_INNER,), f"mamba_norm and {_MAMBA}"),
        "layers.{l}.mamba.out.weight": Weight(("hidden_size", _INNER), _MAMBA),
        **{
            f"layers.{{l}}.delta.{part}.weight": Weight((rows, "hidden_size"), _DELTA)
            for part, rows in (
                ("q", _KEYS),
                ("k", _KEYS),
                ("v", _VALUES),
                ("z", _VALUES),
                ("b", "linear_num_value_heads"),
                ("a", "linear_num_value_heads"),
            )
        },
        **{
            f"layers.{{l}}.delta.conv_{part}.weight": Weight(
                (rows, 1, "linear_conv_kernel"), _DELTA
            )
            for part, rows in (("q", _KEYS), ("k", _KEYS), ("v", _VALUES))
        },
        **{
            f"layers.{{l}}.delta.{name}": Weight(
                ("linear_num_value_heads",), _DELTA, keeps_dtype=True
            )
            for name in ("A_log", "dt_bias")
        },
        "layers.{l}.delta.norm.weight": Weight(("linear_value_head_dim",), _DELTA),
        "layers.{l}.delta.o.weight": Weight(("hidden_size", _VALUES), _DELTA),
        **{
            f"layers.{{l}}.kda.{part}.weight": Weight((rows, columns), _KDA)
            for part, rows, columns in (
                ("q", _KEYS, "hidden_size"),
                ("k", _KEYS, "hidden_size"),
                ("v", _VALUES, "hidden_size"),
                ("b", "linear_num_value_heads", "hidden_size"),
                ("f_down", "linear_key_head_dim", "hidden_size"),
                ("f_up", _KEYS, "linear_key_head_dim"),
                ("g_down", "linear_value_head_dim", "hidden_size"),
                ("g_up", _VALUES, "linear_value_head_dim"),
                ("o", "hidden_size", _VALUES),
            )
        },
        **{
            f"layers.{{l}}.kda.conv_{part}.weight": Weight((rows, 1, "linear_conv_kernel"), _KDA)
            for part, rows in (("q", _KEYS), ("k", _KEYS), ("v", _VALUES))
        },
        "layers.{l}.kda.A_log": Weight(("linear_num_value_heads",), _KDA, keeps_dtype=True),
        "layers.{l}.kda.dt_bias": Weight((_KEYS,), _KDA, keeps_dtype=True),
        "layers.{l}.kda.norm.weight": Weight(("linear_value_head_dim",), _KDA),
        **{
            f"layers.{{l}}.short_conv.{part}.{kind}": Weight(
                shape if kind == "weight" else _HIDDEN,
                _CONV,
                flag=None if kind == "weight" else "short_conv_bias",
            )
            for kind in ("weight", "bias")
            for part, shape in (
                *((f"in_{x}", ("hidden_size", "hidden_size")) for x in ("B", "C", "x")),
                ("conv_x", ("hidden_size", 1, "short_conv_taps")),
                ("out", ("hidden_size", "hidden_size")),
            )
        },
    }
)

# What ranks the tokens before a token. Published files have the weights of its heads in float32.
_INDEX_OF = "layers.{l}.attn.index_"
_INDEXED = "l in index_layers"
_KEYED = f"not is_compressed and {_INDEXED}"
_INDEXER: Mapping[str, Weight] = MappingProxyType(
    {
        _INDEX_OF + "q.weight": Weight(
            ("index_num_heads * index_head_dim", "q_lora_rank"), _INDEXED
        ),
        _INDEX_OF + "k.weight": Weight(("index_head_dim", "hidden_size"), _KEYED),
        _INDEX_OF + "k_norm.weight": Weight(("index_head_dim",), _KEYED),
        _INDEX_OF + "k_norm.bias": Weight(("index_head_dim",), _KEYED),
        _INDEX_OF + "heads.weight": Weight(
            ("index_num_heads", "hidden_size"), _INDEXED, keeps_dtype=True
        ),
    }
)

# DeepSeek-V4: one head of keys that are values too, compressed keys, an output projection in
# groups, residuals side by side. Published files have all but matrices in float32.
_COMPRESSED, _HEAVY = f"is_compressed and {_ATTN}", "l in heavy_layers"
_STREAMS = "hyper_streams"
_MIXED = "(2 + hyper_streams) * hyper_streams"


_HYPER_HEAD: tuple[tuple[str, tuple[Expression, ...]], ...] = (
    ("weight", ("hyper_streams", "hyper_streams * hidden_size")),
    ("bias", ("hyper_streams",)),
    ("scale", (1,)),
)

_HYPER: tuple[tuple[str, tuple[Expression, ...]], ...] = (
    ("weight", (_MIXED, "hyper_streams * hidden_size")),
    ("bias", (_MIXED,)),
    ("scale_pre", (1,)),
    ("scale_post", (1,)),
    ("scale_res", (1,)),
)


def _compressor(begin: str, size: str, ratio: str, when: str) -> dict[str, Weight]:
    """What makes one key, or one series of two, of every `ratio` tokens."""
    return {
        f"{begin}kv.weight": Weight((size, "hidden_size"), when),
        f"{begin}gate.weight": Weight((size, "hidden_size"), when),
        f"{begin}bias": Weight((ratio, size), when, keeps_dtype=True),
    }


_COMPRESSION: Mapping[str, Weight] = MappingProxyType(
    {
        "layers.{l}.attn.kv.weight": Weight((_D, "hidden_size"), _COMPRESSED),
        "layers.{l}.attn.kv_norm.weight": Weight((_D,), _COMPRESSED),
        "layers.{l}.attn.o_down.weight": Weight(
            ("out_groups * out_lora_rank", "num_heads * head_dim // out_groups"), _COMPRESSED
        ),
        **_compressor("layers.{l}.attn.heavy_", _D, "heavy_ratio", _HEAVY),
        "layers.{l}.attn.heavy_norm.weight": Weight((_D,), _HEAVY),
        **_compressor(
            "layers.{l}.attn.overlap_", f"2 * {_D}", "4", f"is_compressed and {_INDEXED}"
        ),
        "layers.{l}.attn.overlap_norm.weight": Weight((_D,), f"is_compressed and {_INDEXED}"),
        **_compressor(
            _INDEX_OF + "overlap_", "2 * index_head_dim", "4", f"is_compressed and {_INDEXED}"
        ),
        _INDEX_OF + "overlap_norm.weight": Weight(
            ("index_head_dim",), f"is_compressed and {_INDEXED}"
        ),
        **{
            f"layers.{{l}}.{branch}_hyper.{part}": Weight(shape, _STREAMS, keeps_dtype=True)
            for branch in ("attn", "mlp")
            for part, shape in _HYPER
        },
        "layers.{l}.mlp.router.experts_of_tokens": Weight(
            ("vocab_size", "num_experts_per_token"), "l in hash_layers", keeps_dtype=True
        ),
    }
)
_LAYERS_AND_ENDS: Mapping[str, Weight] = MappingProxyType(
    {
        "embed.weight": Weight(("vocab_size", "hidden_size")),
        "positions.weight": Weight(
            ("max_positions + position_offset", "hidden_size"), "position_embedding == 'learned'"
        ),
        "token_types.weight": Weight(("num_token_types", "hidden_size"), "num_token_types"),
        "embed_norm.weight": Weight(_HIDDEN, "embedding_norm and norm_weight"),
        "embed_norm.bias": Weight(_HIDDEN, f"embedding_norm and {_LAYERNORM}"),
        "layers.{l}.attn_norm.weight": Weight(_HIDDEN, f"{_ATTN_NORM} and {_MIXER}"),
        "layers.{l}.attn_norm.bias": Weight(_HIDDEN, f"{_ATTN_NORM} and {_LAYERNORM} and {_MIXER}"),
        "layers.{l}.attn.q.weight": Weight((_Q, "hidden_size"), f"not q_lora_rank and {_ATTN}"),
        "layers.{l}.attn.k.weight": Weight((_K, "hidden_size"), _KEY),
        "layers.{l}.attn.v.weight": Weight((_V, "hidden_size"), _VALUE),
        "layers.{l}.attn.q.bias": Weight((_Q,), _GQA, flag="qkv_bias"),
        "layers.{l}.attn.k.bias": Weight((_K,), _KEY, flag="qkv_bias"),
        "layers.{l}.attn.v.bias": Weight((_V,), _VALUE, flag="qkv_bias"),
        "layers.{l}.attn.gate.weight": Weight((_Q, "hidden_size"), f"attn_output_gate and {_ATTN}"),
        "layers.{l}.attn.q_norm.weight": Weight(
            (_QK_NORM.format("num_heads"),), f"qk_norm_of != 'each' and {_GQA}", flag="qk_norm"
        ),
        "layers.{l}.attn.k_norm.weight": Weight(
            (_QK_NORM.format("num_kv_heads"),), f"qk_norm_of != 'each' and {_KEY}", flag="qk_norm"
        ),
        "layers.{l}.attn.q_norm.bias": Weight((_D,), f"{_QK_BIAS} and {_GQA}"),
        "layers.{l}.attn.k_norm.bias": Weight((_D,), f"{_QK_BIAS} and {_KEY}"),
        "layers.{l}.attn.q_norms.{h}.weight": Weight(
            (_D,), f"qk_norm_of == 'each' and {_GQA}", flag="qk_norm"
        ),
        "layers.{l}.attn.k_norms.{g}.weight": Weight(
            (_D,), f"qk_norm_of == 'each' and {_KEY}", flag="qk_norm"
        ),
        "layers.{l}.attn.q_down.weight": Weight(("q_lora_rank", "hidden_size"), _LOW_RANK_Q),
        "layers.{l}.attn.q_down_norm.weight": Weight(("q_lora_rank",), _LOW_RANK_Q, flag="qk_norm"),
        "layers.{l}.attn.q_up.weight": Weight((_Q, "q_lora_rank"), _LOW_RANK_Q),
        "layers.{l}.attn.kv_down.weight": Weight(
            ("kv_lora_rank + qk_rope_head_dim", "hidden_size"), _MLA
        ),
        "layers.{l}.attn.kv_down_norm.weight": Weight(("kv_lora_rank",), _MLA, flag="qk_norm"),
        "layers.{l}.attn.kv_up.weight": Weight(
            ("num_heads * (qk_nope_head_dim + v_head_dim)", "kv_lora_rank"), _MLA
        ),
        "layers.{l}.attn.sinks": Weight(("num_heads",), "l in sink_layers", flag="attn_sinks"),
        "layers.{l}.attn.o.weight": Weight(
            ("hidden_size", "out_groups * out_lora_rank or num_heads * (v_head_dim or head_dim)"),
            _ATTN,
        ),
        "layers.{l}.attn.o.bias": Weight(_HIDDEN, _ATTN, flag="attn_out_bias"),
        **_INDEXER,
        **_COMPRESSION,
        **_MIXERS,
        "layers.{l}.mlp_norm.weight": Weight(_HIDDEN, f"{_MLP_NORM} and ({_FEEDS})"),
        "layers.{l}.mlp_norm.bias": Weight(_HIDDEN, f"{_MLP_NORM} and {_LAYERNORM} and ({_FEEDS})"),
        "layers.{l}.mlp.gate.weight": Weight(
            ("ffn_hidden_size", "hidden_size"), f"gated and {_DENSE}"
        ),
        "layers.{l}.mlp.gate.bias": Weight(
            ("ffn_hidden_size",), f"gated and {_DENSE}", flag="mlp_bias"
        ),
        "layers.{l}.mlp.up.weight": Weight(("ffn_hidden_size", "hidden_size"), _DENSE),
        "layers.{l}.mlp.up.bias": Weight(("ffn_hidden_size",), _DENSE, flag="mlp_bias"),
        "layers.{l}.mlp.down.weight": Weight(("hidden_size", "ffn_hidden_size"), _DENSE),
        "layers.{l}.mlp.down.bias": Weight(_HIDDEN, _DENSE, flag="mlp_bias"),
        "layers.{l}.mlp.router.weight": Weight(("num_experts", "hidden_size"), _MOE),
        "layers.{l}.mlp.router.bias": Weight(("num_experts",), _MOE, flag="router_bias"),
        "layers.{l}.mlp.router.expert_bias": Weight(
            ("num_experts",),
            f"not l in hash_layers and {_MOE}",
            flag="router_expert_bias",
            keeps_dtype=True,
        ),
        "layers.{l}.mlp.latent_in.weight": Weight(
            ("moe_latent_size", "hidden_size"), f"moe_latent_size and {_MOE}"
        ),
        "layers.{l}.mlp.latent_out.weight": Weight(
            ("hidden_size", "moe_latent_size"), f"moe_latent_size and {_MOE}"
        ),
        "layers.{l}.mlp.experts.{e}.gate.weight": Weight(
            ("moe_ffn_hidden_size", _EXPERT_IN), f"gated and {_MOE}"
        ),
        "layers.{l}.mlp.experts.{e}.up.weight": Weight(("moe_ffn_hidden_size", _EXPERT_IN), _MOE),
        "layers.{l}.mlp.experts.{e}.down.weight": Weight((_EXPERT_IN, "moe_ffn_hidden_size"), _MOE),
        "layers.{l}.mlp.experts.{e}.gate.bias": Weight(
            ("moe_ffn_hidden_size",), f"gated and {_MOE}", flag="mlp_bias"
        ),
        "layers.{l}.mlp.experts.{e}.up.bias": Weight(
            ("moe_ffn_hidden_size",), _MOE, flag="mlp_bias"
        ),
        "layers.{l}.mlp.experts.{e}.down.bias": Weight(_HIDDEN, _MOE, flag="mlp_bias"),
        "layers.{l}.mlp.shared.router.weight": Weight(
            (1, "hidden_size"), _SHARED, flag="shared_expert_gate"
        ),
        "layers.{l}.mlp.shared.gate.weight": Weight(
            ("shared_ffn_hidden_size", "hidden_size"), f"gated and {_SHARED}"
        ),
        "layers.{l}.mlp.shared.up.weight": Weight(
            ("shared_ffn_hidden_size", "hidden_size"), _SHARED
        ),
        "layers.{l}.mlp.shared.down.weight": Weight(
            ("hidden_size", "shared_ffn_hidden_size"), _SHARED
        ),
        **{f"hyper_head.{x}": Weight(s, _STREAMS, keeps_dtype=True) for x, s in _HYPER_HEAD},
        "norm.weight": Weight(_HIDDEN, "final_norm and norm_weight"),
        "norm.bias": Weight(_HIDDEN, f"final_norm and {_LAYERNORM}"),
        "transform.weight": Weight(("hidden_size", "hidden_size"), "masked_head"),
        "transform.bias": Weight(_HIDDEN, "masked_head", flag="head_dense_bias"),
        "transform_norm.weight": Weight(_HIDDEN, "masked_head"),
        "transform_norm.bias": Weight(_HIDDEN, f"masked_head and {_LAYERNORM}"),
        "head.weight": Weight(
            ("vocab_size", "hidden_size"), "not tied_embeddings and not num_labels"
        ),
        "head.bias": Weight(("vocab_size",), "masked_head and not num_labels", flag="head_bias"),
        "score_dense.weight": Weight(("hidden_size", "hidden_size"), "num_labels and score_dense"),
        "score_dense.bias": Weight(_HIDDEN, "num_labels and score_dense"),
        "score.weight": Weight(("num_labels", "hidden_size"), "num_labels"),
        "score.bias": Weight(("num_labels",), "num_labels and score_bias"),
    }
)

VOCABULARY: Mapping[str, Weight] = MappingProxyType(
    {
        **_LAYERS_AND_ENDS,
        **{
            name.replace(_LAYER, _MTP): replace(p, when=as_mtp(p.when))
            for name, p in _LAYERS_AND_ENDS.items()
            if name.startswith(_LAYER)
        },
        **{
            name.replace(_LAYER, _INNER_MTP): replace(p, when=as_inner_mtp(p.when))
            for name, p in _LAYERS_AND_ENDS.items()
            if name.startswith(_LAYER)
        },
        "mtp.{m}.embed_norm.weight": Weight(_HIDDEN, "norm_weight"),
        "mtp.{m}.embed_norm.bias": Weight(_HIDDEN, _LAYERNORM),
        "mtp.{m}.hidden_norm.weight": Weight(_HIDDEN, "norm_weight"),
        "mtp.{m}.hidden_norm.bias": Weight(_HIDDEN, _LAYERNORM),
        "mtp.{m}.proj.weight": Weight(
            ("hidden_size", "2 * hidden_size"), "not mtp_hidden_first and not hyper_streams"
        ),
        "mtp.{m}.embed_proj.weight": Weight(("hidden_size", "hidden_size"), _TWO_PROJECTIONS),
        "mtp.{m}.hidden_proj.weight": Weight(("hidden_size", "hidden_size"), _TWO_PROJECTIONS),
        **{
            f"mtp.{{m}}.hyper_head.{x}": Weight(s, _STREAMS, keeps_dtype=True)
            for x, s in _HYPER_HEAD
        },
        "mtp.{m}.embed.weight": Weight(_VOCABULARY_ROWS, flag="mtp_own_embedding"),
        "mtp.{m}.head.weight": Weight(_VOCABULARY_ROWS, flag="mtp_own_head"),
        "mtp.{m}.norm.weight": Weight(_HIDDEN, "norm_weight"),
        "mtp.{m}.norm.bias": Weight(_HIDDEN, _LAYERNORM),
    }
)

DOMAINS = MappingProxyType(
    {
        "l": "num_layers",
        "e": "num_experts",
        "h": "num_heads",
        "g": "num_kv_heads",
        "m": "num_mtp_layers",
        "d": "num_decoder_layers",
        "k": "num_mtp_inner",
    }
)
_OF_MTP = tuple(name for name in layer_sets.DERIVED if name.startswith("has_mtp_"))


def indices_in(pattern: str) -> tuple[str, ...]:
    """The index names of a pattern, in order: `layers.{l}.experts.{e}` gives `('l', 'e')`."""
    return tuple(_INDEX.findall(pattern))


def fill_in(pattern: str, index: Mapping[str, int]) -> str:
    """The pattern with the indices that `index` knows put in."""
    for name, value in index.items():
        pattern = pattern.replace(f"{{{name}}}", str(value))
    return pattern


@dataclass(frozen=True, slots=True)
class CanonicalModel:
    """The vocabulary at one configuration: which tensors there are, and their shapes.

    `blocks` are the tensor ranks whose rows lie one after the other where tensors have several
    parts, each rank's with all of them (see `mapping.Blocks`).
    """

    config: ModelConfig
    vocabulary: Mapping[str, Weight] = field(default_factory=lambda: VOCABULARY)
    blocks: int = 1
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _layers: dict[int, CanonicalModel] = field(default_factory=dict, repr=False)
    _branches: dict[int, dict[str, bool]] = field(default_factory=dict, repr=False)
    _values: dict[tuple[str, tuple[Any, ...]], int] = field(default_factory=dict, repr=False)
    _indices: dict[tuple[Any, ...], list[dict[str, int]]] = field(default_factory=dict, repr=False)

    def at(self, index: Mapping[str, int]) -> CanonicalModel:
        """The vocabulary with the sizes of the layer `l` of an index, or of those of multi-token
        prediction (`m`); itself where none vary."""
        if not self.config.layer_sizes or not {"l", "m"} & index.keys():
            return self
        layer = index.get("l", layer_sets.mtp_size_layer(self.config))
        if layer not in self._layers:
            config = self.config.at_layer(layer)
            self._layers[layer] = CanonicalModel(config, self.vocabulary, self.blocks)
        return self._layers[layer]

    def shape(self, pattern: str) -> tuple[int, ...]:
        """Shape of the canonical tensors that follow `pattern`.

        Raises:
            MappingError: the vocabulary has no such pattern.
        """
        if pattern not in self._shapes:
            if pattern not in self.vocabulary:
                raise MappingError(
                    f"{pattern!r} is not a canonical tensor",
                    hint="name one of megtool.convert.language.canonical, or add it to the "
                    "family's own",
                )
            weight = self.vocabulary[pattern]
            self._shapes[pattern] = tuple(int(self.value(n)) for n in weight.shape)
        return self._shapes[pattern]

    def value(self, text: Expression, index: Mapping[str, int] | None = None) -> int:
        """An expression's value at this configuration.

        With `k` in the index, what layers of multi-token prediction have (`has_mtp_attn`) is said
        of the layer with this number inside them.
        """
        if not isinstance(text, str):
            return text
        if index is not None and "k" in index:
            index = {**index, **self._inner(index["k"])}
        key = text, tuple([index.get(n) for n in names_in(text)]) if index else ()
        if key not in self._values:
            self._values[key] = evaluate(text, self.config, index)
        return self._values[key]

    def _inner(self, number: int) -> dict[str, bool]:
        if number not in self._branches:
            branch = self.config.with_fields(mtp_kind=self.config.mtp.mtp_kind[number])
            self._branches[number] = {name: layer_sets.DERIVED[name](branch) for name in _OF_MTP}
        return self._branches[number]

    def size(self, index: str) -> int:
        """How many values the index `l`, `e`, `m`, `d` or `k` takes."""
        if index not in DOMAINS:
            raise MappingError(
                f"the index {index!r} is unknown", hint=f"known: {', '.join(DOMAINS)}"
            )
        return self.value(DOMAINS[index])

    def each(self, names: tuple[str, ...], when: Expression = True) -> Iterator[dict[str, int]]:
        """Every combination of the named indices for which `when` is true."""
        needed = tuple(n for n in names if n in names_in(when))
        free = tuple(n for n in names if n not in needed)
        for some in self._combinations(needed):
            if self.value(when, some):
                for more in self._combinations(free):
                    index = {**some, **more}
                    yield {n: index[n] for n in names}

    def _combinations(self, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
        if not names:
            yield {}
            return
        for i in range(self.size(names[0])):
            for tail in self._combinations(names[1:]):
                yield {names[0]: i, **tail}

    def keeps_dtype(self, name: str) -> bool:
        """Whether the canonical tensor `name` (or pattern) is excluded from casts."""
        patterns = (_INDEX.sub("#", n) for n, w in self.vocabulary.items() if w.keeps_dtype)
        return _DIGITS.sub("#", _INDEX.sub("#", name)) in patterns

    def names(self, pattern: str) -> list[str]:
        """All canonical tensors of a pattern that this model has, in order."""
        return [name for name, _ in self.indexed_names(pattern)]

    def indexed_names(self, pattern: str) -> Iterator[tuple[str, dict[str, int]]]:
        """The tensors of `names`, each with the values of its indices."""
        indices, when = indices_in(pattern), self.vocabulary[pattern].when
        key = indices, when
        if key not in self._indices:
            self._indices[key] = list(self.each(indices, when))
        for index in self._indices[key]:
            yield fill_in(pattern, index), dict(index)
