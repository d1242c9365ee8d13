"""The two halves of what latent attention projects keys and values with.

llama.cpp multiplies queries by the one half and what they attend to by the other, and keeps the two
apart; a model has them in one matrix, head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megtool.convert.language.canonical import Weight
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement, narrow, refine
from megtool.tensors.sharded import GlobalTensor

_WHOLE, _KEYS, _VALUES = "kv_up.weight", "k_up.weight", "v_up.weight"
_ATTN = "layers.{l}.attn."

HALVES_OF_KV: Mapping[str, Weight] = MappingProxyType(
    {
        _ATTN + _KEYS: Weight(("num_heads * qk_nope_head_dim", "kv_lora_rank"), "l in attn_layers"),
        _ATTN + _VALUES: Weight(("num_heads * v_head_dim", "kv_lora_rank"), "l in attn_layers"),
    }
)
"""Their names, beside the canonical ones."""


def split_latent(
    canonical: Mapping[str, GlobalTensor], placements: Mapping[str, Placement], config: ModelConfig
) -> tuple[dict[str, GlobalTensor], dict[str, Placement]]:
    """The tensors, and where they lie in the source, with the two halves in place of the whole.

    Raises:
        MappingError: heads are not in one piece in the source.
    """
    heads, keys, values = (
        config.attention.num_heads,
        config.latent.qk_nope_head_dim,
        config.attention.v_head_dim,
    )
    tensors, places = dict(canonical), dict(placements)
    for name in canonical:
        if not name.endswith(_WHOLE):
            continue
        whole, placement = tensors.pop(name), places.pop(name)
        view = (heads, keys + values, config.latent.kv_lora_rank)
        cut, _ = refine(placement, Placement.identity(name, view))
        if cut.shape != view:
            raise MappingError(
                f"{name!r} is stored in pieces of {cut.shape}, not head by head", tensor=name
            )
        for half, (lo, hi) in ((_KEYS, (0, keys)), (_VALUES, (keys, keys + values))):
            own = name.removesuffix(_WHOLE) + half
            part = narrow(cut, (0, lo, 0), (heads, hi, config.latent.kv_lora_rank))
            places[own] = replace(part, canonical=own)
            shape = (heads * (hi - lo), config.latent.kv_lora_rank)
            tensors[own] = replace(whole, name=own, shape=shape)
    return tensors, places
