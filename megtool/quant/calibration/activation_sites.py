"""Points: where activations are looked at, and which modules each of them feeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megtool.config import ModelConfig
from megtool.quant.recipes.modules import ModuleInfo, find_fused_name

SiteKind = Literal["input", "kv_cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSite:
    """The one input that `modules` (canonical names, in the model's order) all multiply.

    `name` is that of `fused_with` (`layers.3.attn.qkv`, `layers.3.mlp.down`; before latent
    attention `layers.3.attn.down`, whatever reads it), or of the KV cache (`layers.3.attn.kv`),
    whose `width` is that of keys and values together. `norm` is the canonical norm whose output the
    input is and that nothing else reads, so that factors may be folded into it; empty where there
    is none. `expert` is the number of the one expert that sees the input. `together` are
    modules that a Hugging Face folder stores in one tensor, a tuple for each such tensor.
    """

    name: str
    kind: SiteKind
    layer: int | None
    modules: tuple[str, ...]
    width: int
    norm: str = ""
    expert: int | None = None
    stored_groups: tuple[tuple[str, ...], ...] = ()


def list_activation_sites(
    modules: Iterable[ModuleInfo], config: ModelConfig
) -> tuple[ActivationSite, ...]:
    """The points of a model's layers and head, in the model's order.

    Embeddings, norms and layers of multi-token prediction have none, and of mixtures the router has
    one of its own.
    """
    groups: dict[str, list[ModuleInfo]] = defaultdict(list)
    for m in modules:
        if m.kind in ("linear", "kv_cache") and "mtp" not in m.roles:
            groups[_site_name(m, config)].append(m)
    return tuple(_make_site(name, fed, config) for name, fed in groups.items())


ATTN_NORM_READERS = ("q", "k", "v", "gate", "q_down", "kv_down")


def map_norm_readers(
    sites: Iterable[ActivationSite], modules: Iterable[ModuleInfo]
) -> dict[str, tuple[str, ...]]:
    """The linear modules that multiply what comes out of a norm, by norm.

    Those of points, and of a mixture also its router and its experts, whose point has no norm:
    factors may go into a norm only where all of these take them up.
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
        if m.name.rpartition(".")[0] == f"{layer}.attn" and last in ATTN_NORM_READERS:
            out[f"{layer}.attn_norm"][m.name] = None
        elif m.name.startswith(f"{layer}.mlp.") and last != "down":
            mlp_norm = f"{layer}.mlp_norm"  # else one norm is before both
            out[mlp_norm if mlp_norm in names else f"{layer}.attn_norm"][m.name] = None
    return {norm: tuple(fed) for norm, fed in out.items()}


def _site_name(module: ModuleInfo, config: ModelConfig) -> str:
    """The point whose numbers a module multiplies, or holds.

    Queries of latent attention that are projected directly read what keys and values are made of,
    and gates of attention what queries are.
    """
    parent, _, last = module.name.rpartition(".")
    if module.kind == "kv_cache":
        return module.name
    if parent.endswith(".attn"):
        if config.kv_lora_rank and last in ("q", "q_down", "kv_down"):
            return f"{parent}.down"
        if last == "gate":
            return f"{parent}.qkv"
    return find_fused_name(module)


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
        norm="" if is_cache else _foldable_norm(name, first, config),
        expert=expert,
        stored_groups=() if is_cache else _stored_groups(readers),
    )


def _stored_groups(readers: Iterable[ModuleInfo]) -> tuple[tuple[str, ...], ...]:
    """Modules by the tensor they are stored in, where that holds several."""
    groups: dict[str, list[str]] = defaultdict(list)
    for m in readers:
        for stored in m.names_in("hf")[:1]:
            groups[stored].append(m.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _foldable_norm(name: str, module: ModuleInfo, config: ModelConfig) -> str:
    """The norm before a module that feeds nothing else."""
    parent, _, last = name.rpartition(".")
    if module.layer is None:
        return "norm" if module.name == "head" else ""
    layer = f"layers.{module.layer}"
    if parent == f"{layer}.attn":
        if last in ("qkv", "down"):
            return f"{layer}.attn_norm"
        inner = {"q_up": "q_down_norm", "kv_up": "kv_down_norm"}
        return f"{parent}.{inner[last]}" if last in inner and config.qk_norm else ""
    # A mixture's norm also feeds its router, and all experts at once.
    return f"{layer}.mlp_norm" if name == f"{layer}.mlp.fc1" else ""
