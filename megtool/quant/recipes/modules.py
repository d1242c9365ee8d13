"""The modules of a model that a recipe decides about, independent of the parallel layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from megtool.convert.dialects import CanonicalView, write_side
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

Kind = Literal["linear", "embedding", "norm", "kv_cache"]
KINDS: tuple[Kind, ...] = ("linear", "embedding", "norm", "kv_cache")
ROLES = (
    "qkv",
    "proj",
    "fc1",
    "fc2",
    "router",
    "state_gate",
    "expert",
    "shared_expert",
    "embedding",
    "lm_head",
    "kv",
    "mtp",
)
SCHEMES = ("canonical", "hf", "megatron")
"""The naming schemes that patterns can match."""

BLOCKS = "_blocks"
"""The suffix of gpt-oss's MXFP4 experts: all of a layer in one tensor,
`[experts, rows, groups, 16]`, with scales in a `_scales` tensor."""

_LAYER = re.compile(r"layers\.(\d+)\.")
_BY_LAST = {
    **dict.fromkeys(("q", "k", "v", "z", "q_down", "q_up", "kv_down", "kv_up", "kv"), "qkv"),
    # Betas and alphas of gated delta nets, betas and both gates of Kimi delta attention.
    **dict.fromkeys(("b", "a", "f_down", "f_up", "g_down", "g_up"), "state_gate"),
    **dict.fromkeys(("in_z", "in_x", "in_B", "in_C", "in_dt"), "qkv"),
    **dict.fromkeys(("o", "o_down", "out"), "proj"),
    "gate": "fc1",
    "up": "fc1",
    "down": "fc2",
    "router": "router",
    # What chooses the tokens that attention is limited to, as a router chooses experts.
    **dict.fromkeys(("index_q", "index_k", "index_heads"), "router"),
    # What several keys are compressed to one by: published files have it in 16 bits.
    **dict.fromkeys(
        (f"{x}_{y}" for x in ("heavy", "overlap", "index_overlap") for y in ("kv", "gate")),
        "router",
    ),
    # What layers read beside the residual: small, and of a size of its own.
    **dict.fromkeys(("layer_proj", "input_gate", "input_proj"), "router"),
    # What scores labels stands in the output layer's place, which engines have in 16 bits.
    **dict.fromkeys(("head", "score", "score_dense"), "lm_head"),
}
_EMBEDDINGS = ("embed", "positions", "token_types", "layer_embed")
_HYPER = ("attn_hyper", "mlp_hyper", "hyper_head")
"""What mixes residuals side by side: float32 numbers that no engine has a linear layer for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """One module of the model under its canonical name, such as `layers.3.attn.q`.

    `layer` is the layer number in the whole model, None for MTP layers; `num_layers` is that of the
    model. `shape` is the weight's, [out, in]. `num_bytes` is its present size. The KV cache of a
    layer is a module too, `layers.3.attn.kv`, with the `shape` of one token. `names` are its names
    in other schemes.
    """

    name: str
    kind: Kind
    roles: frozenset[str]
    layer: int | None
    num_layers: int
    shape: tuple[int, ...]
    num_bytes: int
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return prod(self.shape)

    def names_in(self, scheme: str) -> tuple[str, ...]:
        """The names in one of `SCHEMES`."""
        return (self.name,) if scheme == "canonical" else tuple(self.names.get(scheme, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """All modules of a model in order; `other_bytes` are biases and other tensors without rules.

    Parts of a model that are not text have no modules: they are never quantized.
    """

    modules: tuple[ModuleInfo, ...]
    other_bytes: int
    schemes: tuple[str, ...]


def list_modules(view: CanonicalView) -> Modules:
    """List the modules of a model from its canonical tensors, without optimizer state.

    Raises:
        MappingError: the model is unknown, so tensors have no canonical names.
    """
    config = view.config
    if view.dialect == "identity" or config is None:
        raise MappingError(
            "a recipe needs the names of a known model",
            hint="--family NAME sets the model family, --like FOLDER uses its config.json",
            error_id="no-model-config",
        )
    stored = {s: _stored_names(view, s) for s in ("hf", "megatron")}
    modules: list[ModuleInfo] = []
    other_bytes = 0
    towers = frozenset(view.towers())
    for name, tensor in sorted(view.canonical.items(), key=lambda item: _sort_key(item[0])):
        if ":" in name:  # optimizer state
            continue
        if name in towers:
            other_bytes += tensor.num_bytes
            continue
        module, _, last = name.rpartition(".")
        if last != "weight" or len(tensor.shape) > 2 or module.rpartition(".")[2] in _HYPER:
            other_bytes += tensor.num_bytes
            continue
        kind, roles = _classify(module, len(tensor.shape))
        names = {
            s: _module_names(stored_names[name], s, module)
            for s, stored_names in stored.items()
            if name in stored_names
        }
        modules.append(
            ModuleInfo(
                name=module,
                kind=kind,
                roles=roles,
                layer=_layer(module),
                num_layers=config.num_layers,
                shape=tuple(tensor.shape),
                num_bytes=tensor.num_bytes,
                names=names,
            )
        )
        if completes_kv(module):
            modules.append(_kv_cache(modules[-1], config))
    return Modules(
        modules=tuple(modules),
        other_bytes=other_bytes,
        schemes=("canonical", *(s for s, stored_names in stored.items() if stored_names)),
    )


_ORDER = [
    "embed",
    "positions",
    "token_types",
    *("layer_embed", "layer_proj", "layer_norm"),
    "layers",
    "norm",
    "head",
    "mtp",
    "attn_norm",
    "attn",
    "delta",
    "kda",
    "mamba",
    "short_conv",
    *("in_z", "in_x", "in_B", "in_C", "in_dt"),
    "q",
    "k",
    "v",
    "z",
    "b",
    "a",
    *("f_down", "f_up", "g_down", "g_up"),
    "gate",
    "q_down",
    "q_up",
    "kv_down",
    "kv_up",
    "kv",
    *("index_q", "index_k", "index_k_norm", "index_heads"),
    *("o_down", "o"),
    "mlp_norm",
    "mlp",
    "router",
    "shared",
    "experts",
    "up",
    "down",
]


def _sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """The sort key of a tensor: its position in the model."""
    parts = name.split(".")
    ranks = ((_ORDER.index(p) if p in _ORDER else len(_ORDER)) for p in parts)
    return tuple(
        (0, int(p), "") if p.isdecimal() else (1, rank, p)
        for p, rank in zip(parts, ranks, strict=True)
    )


def completes_kv(module: str) -> bool:
    """Whether the module produces values, or the latent of latent attention, for the KV cache."""
    return module.endswith((".attn.v", ".attn.kv_down"))


def _kv_cache(after: ModuleInfo, config: ModelConfig) -> ModuleInfo:
    """The KV cache of the layer whose last key or value projection is `after`."""
    rows = after.shape[0]
    if not after.name.endswith("kv_down"):
        of_values = config.attention.v_head_dim
        rows += rows // of_values * config.attention.head_dim if of_values else rows
    hf = tuple(n.rpartition(".")[0] for n in after.names_in("hf"))
    return ModuleInfo(
        name=after.name.rpartition(".")[0] + ".kv",
        kind="kv_cache",
        roles=frozenset({"kv"} | (after.roles & {"mtp"})),
        layer=after.layer,
        num_layers=config.num_layers,
        shape=(rows,),
        num_bytes=2 * rows,
        names={"hf": hf},
    )


def _classify(module: str, num_dims: int) -> tuple[Kind, frozenset[str]]:
    """The kind and roles of a module by its canonical name."""
    parts = module.split(".")
    extra = {"mtp"} if parts[0] == "mtp" else set()
    if num_dims < 2 or parts[-1].startswith("conv_") or parts[-1].endswith("_norms"):
        return "norm", frozenset(extra)
    if parts[-1] in _EMBEDDINGS:
        return "embedding", frozenset(extra | {"embedding"})
    role = _BY_LAST.get(parts[-1])
    if parts[-2:] == ["attn", "gate"]:  # Megatron fuses it with queries, keys and values
        role = "qkv"
    roles = extra | ({role} if role else set())
    if "experts" in parts:
        roles.add("expert")
    elif "shared" in parts and role != "router":
        roles.add("shared_expert")
    return "linear", frozenset(roles)


def _layer(module: str) -> int | None:
    match = _LAYER.match(module)
    return int(match[1]) if match else None


def _stored_names(side: CanonicalView, dialect: str) -> dict[str, str]:
    """Stored names by canonical names in a dialect; empty if the family has none."""
    if dialect == "hf" and side.family is None:
        return {}
    family = side.family.for_codes if side.family is not None else None
    try:
        target = write_side(side, dialect=dialect, family=family, per_layer=True)
    except MappingError:
        return {}
    return {name: p.stored for name, p in target.placements.items()}


_MEGATRON_EXPERTS = re.compile(r"\.experts\.experts\.")


def _module_names(stored: str, scheme: str, module: str) -> tuple[str, ...]:
    """The module names of a stored tensor.

    Megatron builds experts as one grouped layer or one by one; both names are given, the latter
    with the expert's number in the whole model.
    """
    name = stored.removesuffix(".weight").removesuffix(BLOCKS)
    if scheme == "megatron" and ".experts." in module:
        expert = module.split(".experts.")[1].split(".")[0]
        return (
            _MEGATRON_EXPERTS.sub(".experts.", name),
            _MEGATRON_EXPERTS.sub(f".experts.local_experts.{expert}.", name),
        )
    return (name,)


_OWN_TENSOR = re.compile(r"\.experts\.\d+\.")


def is_in_expert_blocks(module: ModuleInfo) -> bool:
    """Whether the module's codes are stored with those of other experts in `BLOCKS`."""
    names = module.names_in("hf")
    return "expert" in module.roles and bool(names) and not _OWN_TENSOR.search(names[0])


def is_rotary(module: ModuleInfo) -> bool:
    """Whether RoPE applies to the module: engines may permute the rows of queries and keys."""
    return "qkv" in module.roles and module.name.endswith((".attn.q", ".attn.k"))


def find_fused_name(module: ModuleInfo) -> str:
    """The name of the fused layer that engines run; fused siblings have the same name."""
    parent, _, last = module.name.rpartition(".")
    if parent.endswith(".delta") and last in ("q", "k", "v", "z"):
        return f"{parent}.qkvz"
    if parent.endswith((".mamba", ".short_conv")) and last != "out":
        return f"{parent}.in"
    if "state_gate" in module.roles and parent.endswith(".delta"):
        return f"{parent}.ba"
    if module.roles & {"qkv"} and last in ("q", "k", "v", "gate"):
        return f"{parent}.qkv"
    if module.roles & {"qkv"} and last in ("q_down", "kv_down", "kv"):
        return f"{parent}.down"
    if "fc1" in module.roles:
        return f"{parent}.fc1"
    return module.name


def suggest(word: str, choices: Iterable[str]) -> str:
    """A hint with the most similar choices, or a few of them."""
    from difflib import get_close_matches

    listed = sorted(set(choices))
    close = get_close_matches(word, listed, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(listed[:12]) + (" ..." if len(listed) > 12 else "")
