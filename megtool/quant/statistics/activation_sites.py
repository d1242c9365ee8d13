"""Activation sites: where activations are measured, and which modules each site feeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megtool.quant.recipes.modules import ModuleInfo, find_fused_name
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

SiteKind = Literal["input", "kv_cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSite:
    """The common input of `modules` (canonical names, in model order), or a KV cache.

    `name` is that of `find_fused_name` (`layers.3.attn.qkv`, `layers.3.mlp.down`; before latent
    attention `layers.3.attn.down`), or of the KV cache (`layers.3.attn.kv`), whose `width` is that
    of keys and values together, and `key_width` that of keys (of a latent: all). `norm` is the
    canonical norm that produces the input and feeds nothing else, so that a smoothing scale can be
    folded into it; empty if there is none. `expert` is the number of the expert that receives the
    input. `stored_groups` are modules that a Hugging Face folder stores in one tensor, a tuple per
    tensor.
    """

    name: str
    kind: SiteKind
    layer: int | None
    modules: tuple[str, ...]
    width: int
    key_width: int = 0
    norm: str = ""
    expert: int | None = None
    stored_groups: tuple[tuple[str, ...], ...] = ()

    @property
    def keys_and_values(self) -> tuple[slice, slice]:
        """The columns of keys and of values in a KV cache; a latent is both."""
        is_latent = self.key_width == self.width
        return slice(self.key_width), slice(0 if is_latent else self.key_width, None)


def list_activation_sites(
    modules: Iterable[ModuleInfo], config: ModelConfig
) -> tuple[ActivationSite, ...]:
    """List the activation sites of a model's layers and head, in model order.

    Embeddings, and what reads them for all layers (`layer_proj`), norms and multi-token prediction
    layers have none; routers have their own site.
    """
    groups: dict[str, list[ModuleInfo]] = defaultdict(list)
    for m in modules:
        is_outside = "mtp" in m.roles or m.name == "layer_proj"
        if m.kind in ("linear", "kv_cache") and not is_outside:
            groups[_site_name(m, config)].append(m)
    return tuple(_make_site(name, fed, config) for name, fed in groups.items())


ATTN_NORM_READERS = (
    *("q", "k", "v", "gate", "q_down", "kv_down", "kv", "index_k", "index_heads"),
    *(f"{x}_{y}" for x in ("heavy", "overlap", "index_overlap") for y in ("kv", "gate")),
)


def map_norm_readers(
    sites: Iterable[ActivationSite], modules: Iterable[ModuleInfo]
) -> dict[str, tuple[str, ...]]:
    """Map each norm to the linear modules that read its output.

    Includes the router and experts of MoE layers, whose sites have no norm: a smoothing scale may
    be folded into a norm only if all readers are scaled.
    """
    main_modules = [m for m in modules if "mtp" not in m.roles]
    names = {m.name for m in main_modules}
    out: dict[str, dict[str, None]] = defaultdict(dict)
    for site in sites:
        if site.norm:
            out[site.norm].update(dict.fromkeys(site.modules))
    for m in main_modules:
        if m.layer is None or m.kind != "linear":
            continue
        layer, last = f"layers.{m.layer}", m.name.rpartition(".")[2]
        parent = m.name.rpartition(".")[0]
        reads_attn = parent == f"{layer}.attn" and last in ATTN_NORM_READERS
        if reads_attn or _feeds_mixer(parent, last):
            out[f"{layer}.attn_norm"][m.name] = None
        elif m.name.startswith(f"{layer}.mlp.") and last != "down":
            mlp_norm = f"{layer}.mlp_norm"  # else one norm feeds both
            out[mlp_norm if mlp_norm in names else f"{layer}.attn_norm"][m.name] = None
    return {norm: tuple(fed) for norm, fed in out.items()}


def _site_name(module: ModuleInfo, config: ModelConfig) -> str:
    """The name of the site that a module reads, or that a KV cache is.

    In latent attention, directly projected queries share the input of keys and values; attention
    gates share the input of queries. All that goes into a Mamba-2 mixer is one site; gates of delta
    rules, which engines run by themselves, have their own.
    """
    parent, _, last = module.name.rpartition(".")
    if module.kind == "kv_cache":
        return module.name
    if parent.endswith(".attn"):
        if config.latent.kv_lora_rank and last in ("q", "q_down", "kv_down"):
            return f"{parent}.down"
        if last == "gate":
            return f"{parent}.qkv"
    if parent.endswith(".mamba") and last != "out":
        return f"{parent}.in"
    return find_fused_name(module)


def _feeds_mixer(parent: str, last: str) -> bool:
    """Whether it reads what goes into a delta rule or a Mamba-2 mixer."""
    inner = {".delta": ("o",), ".kda": ("o", "f_up", "g_up"), ".mamba": ("out",)}
    return any(parent.endswith(end) and last not in names for end, names in inner.items())


def _make_site(name: str, readers: list[ModuleInfo], config: ModelConfig) -> ActivationSite:
    first = readers[0]
    _, _, suffix = name.partition(".experts.")
    expert = int(suffix.split(".")[0]) if suffix else None
    is_cache = first.kind == "kv_cache"
    return ActivationSite(
        name=name,
        kind="kv_cache" if is_cache else "input",
        layer=first.layer,
        modules=tuple(m.name for m in readers),
        width=first.shape[0] if is_cache else first.shape[1],
        key_width=_key_width(first, config) if is_cache else 0,
        norm="" if is_cache else _foldable_norm(name, first, config),
        expert=expert,
        stored_groups=() if is_cache else _stored_groups(readers),
    )


def _key_width(cache: ModuleInfo, config: ModelConfig) -> int:
    """The columns of keys in a KV cache: all of a latent, which values are made of, too."""
    (width,) = cache.shape
    if config.latent.kv_lora_rank or cache.layer is None:
        return width
    sizes = config.at_layer(cache.layer).attention
    return width * sizes.head_dim // (sizes.head_dim + sizes.value_size)


def _stored_groups(readers: Iterable[ModuleInfo]) -> tuple[tuple[str, ...], ...]:
    """Group modules that are stored in one tensor."""
    groups: dict[str, list[str]] = defaultdict(list)
    for m in readers:
        for stored in m.names_in("hf")[:1]:
            groups[stored].append(m.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _foldable_norm(name: str, module: ModuleInfo, config: ModelConfig) -> str:
    """The norm that feeds only this site, or ""; none where norms have no weights."""
    if not config.norms.norm_weight:
        return ""
    parent, _, last = name.rpartition(".")
    if module.layer is None:
        return "norm" if module.name == "head" else ""
    layer = f"layers.{module.layer}"
    if module.layer in layer_sets.parallel_layers(config) and last in ("in", "qkv"):
        return ""
    if name == f"{layer}.mamba.in":
        return f"{layer}.attn_norm"
    if parent == f"{layer}.attn":
        if last in ("qkv", "down"):
            feeds_this_alone = config.norms.pre_norms and not config.norms.shared_norm
            feeds_this_alone = feeds_this_alone and not config.indexer.index_num_heads
            feeds_this_alone = feeds_this_alone and not config.compression.is_compressed
            return f"{layer}.attn_norm" if feeds_this_alone else ""
        inner = {"q_up": "q_down_norm", "kv_up": "kv_down_norm"}
        if config.indexer.index_num_heads:
            del inner["q_up"]  # the indexer reads it, too
        return f"{parent}.{inner[last]}" if last in inner and config.norms.qk_norm else ""
    # The norm of an MoE layer also feeds the router and all experts; that of a gated delta net its
    # gates.
    has_norm = config.norms.pre_norms and not config.norms.shared_norm
    return f"{layer}.mlp_norm" if name == f"{layer}.mlp.fc1" and has_norm else ""
