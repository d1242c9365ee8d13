"""The names of modules' extra states (of Transformer Engine and ModelOpt) in checkpoints.

A module's `_extra_state` is a sharded object, `<module>._extra_state/shard_<offsets>_<sizes>`: with
layers stacked the layer is an offset, with one key per layer a part of the module's name, and the
expert is an offset or (`singleton_local_shards`) a part of the name too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megtool.convert.families.nested import MEGATRON_PREFIX
from megtool.convert.megatron.names import split_state
from megtool.convert.megatron.sections import joined
from megtool.convert.megatron.sharding import is_tower
from megtool.megatron_state.extra_states.te_state import is_empty
from megtool.megatron_state.saved_objects import read_object
from megtool.pickles.reader import Inert, find_references
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor

EMPTY = "an empty extra state"
SUFFIX = "._extra_state"

_NAME = re.compile(r"(.+)\._extra_state/shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)")
_STACKED = re.compile(r"((?:module\.)*(?:language_model\.)?(?:decoder|encoder)\.layers\.)(?!\d)")
_STACKED_TOWER = re.compile(r"vision_model\.decoder\.(?:layers|deepstack_merger_list)\.(?!\d)")
_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.+)")
_EXPERTS = ".experts.experts."
_AMAX = re.compile(r"_quantizer(\.\d+)?\.(_amax|_global_amax)$")
_SINGLE = re.compile(r"(.+\.experts\.experts\.)(\d+)\.(.+)")
_EMPTY_BYTES = 4096
_SITES = (
    "linear_qkv",
    "linear_q",  # of attention to an encoder
    "linear_kv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_wq_b",  # of an indexer
    "linear_wk",
    "linear_weights_proj",
    "k_norm",
    "eh_proj",
    "in_proj",  # of Mamba-2 mixers, delta rules, short convolutions
    *("beta_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),  # of Kimi delta attention
    "out_proj",
    "out_norm",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "post_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
    "patch_norm",  # of a vision tower's mergers
    "enorm",
    "hnorm",
    "final_layernorm",
    "final_norm",
)
_MEGATRON_TOWER = ("vision_model.merger.", "vision_model.decoder.")
_HYBRID_NORM = "decoder.final_norm.weight"


@dataclass(frozen=True, slots=True)
class Site:
    """The owner of a state: a module, by its name with one key per layer, and an expert."""

    module: str
    expert: int | None = None

    @property
    def layer(self) -> int | None:
        """The number of its layer; None for a module outside the layers."""
        match = _LAYER.fullmatch(self.module)
        return int(match[2]) if match else None


def is_extra_state(name: str) -> bool:
    """Whether the object is a module's extra state."""
    return f"{SUFFIX}/shard_" in name


def is_amax_buffer(name: str) -> bool:
    """Whether a stored tensor is an amax of a ModelOpt quantizer, and no part of the model."""
    return _AMAX.search(name) is not None


def is_quantizer_buffer(name: str) -> bool:
    """Whether a stored tensor is an amax or a smoothing scale of a ModelOpt quantizer."""
    return is_amax_buffer(name) or name.endswith("_quantizer._pre_quant_scale")


def parse_site(name: str) -> Site | None:
    """The owner of the state that an object of this name is; None if its offsets fit none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    module = split_state(match[1])[2]
    offsets, sizes = ([int(n) for n in match[k].split(".")] for k in (2, 3))
    if len(offsets) != len(sizes) or any(a >= n for a, n in zip(offsets, sizes, strict=True)):
        return None
    if stacked := _STACKED.match(module):
        module = f"{stacked[1]}{offsets[0]}.{module[stacked.end() :]}"
        offsets, sizes = offsets[1:], sizes[1:]
    if single := _SINGLE.fullmatch(module):
        return Site(single[1] + single[3], int(single[2])) if not any(offsets) else None
    if _EXPERTS in module:
        return Site(module, offsets[0]) if len(offsets) == 1 else None
    return Site(module) if not any(offsets) else None


@dataclass(frozen=True, slots=True)
class StateNaming:
    """How a checkpoint names its extra states: with layers and experts stacked or not.

    A number is 0 where there is no such axis. `layers` are the layers of the model, counted one by
    one where they are stacked. Names begin with `prefix` if a larger model nests the text model.
    """

    stacked: int
    experts: int
    layers: frozenset[str]
    prefix: str = ""

    @classmethod
    def of(cls, tensors: Iterable[GlobalTensor]) -> StateNaming:
        """The naming of a checkpoint with these tensors."""
        stacked = experts = 0
        prefix = ""
        layers: set[str] = set()
        for t in tensors:
            if t.name.startswith("optimizer."):
                continue
            if t.name.startswith(MEGATRON_PREFIX):
                prefix = MEGATRON_PREFIX
            name = t.name.removeprefix(MEGATRON_PREFIX)
            is_stacked = _STACKED.match(name)
            if is_stacked:
                stacked = t.shape[0]
                layers |= {f"{is_stacked[1]}{i}" for i in range(stacked)}
            elif match := _LAYER.fullmatch(name):
                layers.add(match[1] + match[2])
            lead = 1 if is_stacked else 0
            if _stacks_experts(name) and len(t.shape) > lead:
                experts = t.shape[lead]
        return cls(stacked, experts, frozenset(layers), prefix)

    def has(self, site: Site) -> bool:
        """Whether the model has the layer and the expert."""
        match = _LAYER.fullmatch(site.module)
        known = match is None or match[1] + match[2] in self.layers
        return known and (site.expert is None or site.expert < self.experts)

    def name(self, site: Site) -> str:
        """The name of the object with the state of a site."""
        module, offsets, sizes = site.module, list[int](), list[int]()
        match = _LAYER.fullmatch(module)
        if match and self.stacked:
            module = match[1] + match[3]
            offsets, sizes = [int(match[2])], [self.stacked]
        if site.expert is not None:
            offsets, sizes = [*offsets, site.expert], [*sizes, self.experts]
        index = "_".join(".".join(map(str, x)) for x in (offsets or [0], sizes or [1]))
        return f"{self.prefix}{module}{SUFFIX}/shard_{index}"


def list_required_states(
    tensors: Sequence[GlobalTensor], existing: Collection[str]
) -> dict[str, None]:
    """The `_extra_state` objects that Megatron loads, one per layer, expert and module.

    Megatron's default strictness refuses a checkpoint that lacks one it loads, and ignores others.
    So every site that any version loads is named: the linear modules, attention itself (before core
    0.15), and the norms of Transformer Engine. Names in `existing` are left out.
    """
    names: dict[str, None] = {}
    for t in tensors:  # BERT's and T5's, which have a bias, HybridModel's; not a GPT's
        if f".{t.name}".endswith(".output_layer.bias") and not t.name.startswith("optimizer."):
            names[f"{t.name.removesuffix('.bias')}{SUFFIX}/shard_0_1"] = None
        elif f".{t.name}".endswith(f".{_HYBRID_NORM}") and not t.name.startswith("optimizer."):
            names[f"{t.name.removesuffix(_HYBRID_NORM)}output_layer{SUFFIX}/shard_0_1"] = None
    for t in joined(tensors):
        if t.name.startswith("optimizer.") or not t.name.endswith(".weight"):
            continue
        if is_tower(t.name) and not t.name.startswith(_MEGATRON_TOWER):
            continue
        module = t.name.removesuffix(".weight")
        site = module.rsplit(".", 1)[-1]
        is_stacked = _STACKED.match(t.name) or _STACKED_TOWER.match(t.name)
        lead = int(is_stacked is not None) + int(_stacks_experts(t.name))
        axes = t.shape[:lead] or (1,)
        sites = [module] if site in _SITES else []
        if site in ("linear_qkv", "linear_kv", "linear_kv_up_proj"):
            sites.append(module.replace(site, "core_attention"))
        for module_name in sites:
            for offsets in product(*map(range, axes)):
                index = f"{'.'.join(map(str, offsets))}_{'.'.join(map(str, axes))}"
                names[f"{module_name}{SUFFIX}/shard_{index}"] = None
    return {n: None for n in names if n not in existing}


def _stacks_experts(name: str) -> bool:
    """Whether a weight is of all experts, and not of a single one."""
    return _EXPERTS in name and _SINGLE.fullmatch(name) is None


def is_empty_state(catalogue: Catalogue, name: str) -> bool:
    """Whether the object is an empty `_extra_state`: None, or a tensor of 0 bytes."""
    if not is_extra_state(name):
        return False
    stored = catalogue.objects[name]
    is_long = stored.extent is not None and stored.extent[2] > _EMPTY_BYTES
    return not is_long and is_empty_value(read_object(catalogue, stored))


def is_empty_value(value: Any) -> bool:
    """Whether an extra state is empty: None, no bytes in a tensor or buffer, or a pickled None."""
    if value is None or is_empty(value):
        return True
    if isinstance(value, bytes):
        return not value
    is_tensor = isinstance(value, Inert) and value.name.startswith("torch._utils._rebuild")
    return is_tensor and not any(p.data for p in find_references(value))
