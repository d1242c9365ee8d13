"""Updates of a model's weights in PEFT's format, which `PeftModel.from_pretrained` loads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megtool.adapters.fuse import FusedUpdate, fuse, group_updates
from megtool.adapters.peft import PARAMETERS, PREFIX, SAY_TRANSPOSED
from megtool.adapters.weight_slices import DialectWeights, MatrixSlice
from megtool.convert.families.family import Family
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.transport.weight_update import WeightUpdate

_PARTS = {"gate": PARAMETERS[0], "up": PARAMETERS[0], "down": PARAMETERS[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """An adapter to write: PEFT's tensors by name, and what adapter_config.json says.

    `rounded` are modules of which elements were rounded, because scales differ in them.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    rounded: tuple[str, ...] = ()

    @property
    def config_file(self) -> bytes:
        """adapter_config.json."""
        return (json.dumps(dict(self.config), indent=2) + "\n").encode()


@dataclass(slots=True, kw_only=True)
class _Module:
    """A module or parameter with matrices: its name in the model, `a` and `b` as PEFT has them."""

    name: str
    a: Tensor
    b: Tensor
    rank: int
    scale: float
    parameter: str | None = None
    is_exact: bool = True


class PeftNames:
    """The places of canonical weights in a model of transformers.

    Raises:
        MappingError: the family is not known.
    """

    def __init__(self, config: ModelConfig, family: Family) -> None:
        self.config, self.family = config, family
        self.weights = DialectWeights(config, family, "hf")
        self._experts: dict[str, dict[str, MatrixSlice]] = {}
        self._swapped: set[str] = set()

    def slice_of(self, canonical: str) -> MatrixSlice:
        """The position of a weight in that of a module, or in a parameter of all experts.

        Raises:
            MappingError: the family does not store it as rows and columns of a matrix.
        """
        if ".experts." not in canonical:
            return self.weights.slice_of(canonical)
        layer = canonical.partition(".experts.")[0]
        if layer not in self._experts:
            self._experts[layer] = self._expert_slices(layer)
        slices = self._experts[layer]
        if canonical not in slices:
            raise MappingError(f"the model has no weight {canonical!r}", tensor=canonical)
        return slices[canonical]

    def _expert_slices(self, layer: str) -> dict[str, MatrixSlice]:
        """The positions of all experts' weights of a layer, by canonical name."""
        gated = ("gate", "up") if self.config.mlp.gated else ("up",)
        out: dict[str, MatrixSlice] = {}
        for parts in (gated, ("down",)):
            first = self.weights.slice_of(f"{layer}.experts.0.{parts[0]}.weight")
            if first.expert is None:
                module = first.stored.partition(".experts.")[0] + ".experts"
                slices = self.weights.expert_slices(module, parts)
                # transformers has all experts in two parameters of one module, however stored.
                name = module.replace("block_sparse_moe", "mlp")
                stored = f"{name}.{_PARTS[parts[0]]}"
            else:
                slices, stored = self.weights.slices(first.stored), first.stored
                if stored.rpartition(".")[2] not in PARAMETERS:
                    raise MappingError(
                        f"{self.family.name} has its experts in {stored}, which PEFT does not wrap",
                        tensor=first.canonical,
                        error_id="unsupported-adapter",
                    )
                if first.is_transposed and self.family.name not in SAY_TRANSPOSED:
                    self._swapped.add(stored)
            out |= {s.canonical: replace(s, stored=stored) for s in slices}
        return out

    def is_swapped(self, parameter: str) -> bool:
        """Whether a parameter of all experts has inputs before outputs without telling PEFT, which
        has A and B the other way round then."""
        return parameter in self._swapped

    def are_transposed(self, modules: Iterable[str]) -> bool:
        """Whether some modules store inputs before outputs (`Conv1D`)."""
        return any(self.weights.slices(f"{m}.weight")[0].is_transposed for m in modules)

    def shorten(self, modules: Iterable[str]) -> set[str]:
        """Names for `target_modules`: those in a layer (`self_attn.q_proj`) of modules that are
        adapted in all layers, and others in full."""
        modules = set(modules)
        stored = (w.removesuffix(".weight") for w in self.weights.stored)
        partial = {name_in_layer(m) for m in stored if m not in modules}
        return {m if (name := name_in_layer(m)) in partial else name for m in modules}


def make_peft_adapter(
    updates: Mapping[str, WeightUpdate],
    names: PeftNames,
    *,
    base: str | None = None,
    dropout: float = 0.0,
) -> PeftAdapter:
    """The adapter that adds `updates` to canonical weights.

    `base` is the path of the base model, `dropout` that of training.

    Raises:
        MappingError: the family does not store a weight as rows and columns of a matrix; an
            embedding's update has a tied head; or some experts of a layer have no update.
    """
    fused = {place: fuse(parts) for place, parts in group_updates(updates, names.slice_of).items()}
    modules = _dense_modules(names, fused, updates) + _expert_modules(names, fused)
    inner = {m.name for m in modules if m.parameter == PARAMETERS[0]} & {
        m.name for m in modules if m.parameter == PARAMETERS[1]
    }
    tensors: dict[str, Tensor] = {}
    for module in modules:
        name = f"{PREFIX}{module.name}"
        if module.parameter == PARAMETERS[0] and module.name in inner:
            name += ".base_layer"  # PEFT wraps a module's second parameter around the first
        if module.parameter == _EMBEDDING:
            tensors |= {f"{name}.lora_embedding_A": module.a, f"{name}.lora_embedding_B": module.b}
        else:
            tensors |= {f"{name}.lora_A.weight": module.a, f"{name}.lora_B.weight": module.b}
    return PeftAdapter(
        tensors=tensors,
        config=_config(names, modules, base, dropout),
        rounded=tuple(m.name for m in modules if not m.is_exact),
    )


_EMBEDDING = "embedding"


def _dense_modules(
    names: PeftNames,
    fused: Mapping[tuple[str, int | None], FusedUpdate],
    updates: Mapping[str, WeightUpdate],
) -> list[_Module]:
    out = []
    embedding = names.weights.slice_of("embed.weight").stored
    for (stored, _), update in fused.items():
        if stored.rpartition(".")[2] in PARAMETERS:
            continue
        a, b, parameter = update.down, update.up, None
        if stored == embedding:
            if names.config.embedding.tied_embeddings:
                raise MappingError(
                    "PEFT adds the update of an embedding to the embedding alone, and the model's "
                    "head is the same matrix",
                    tensor="embed.weight",
                    error_id="unsupported-adapter",
                )
            a, b, parameter = update.up.T.contiguous(), update.down.T.contiguous(), _EMBEDDING
        out.append(
            _Module(
                name=stored.removesuffix(".weight"),
                a=a,
                b=b,
                rank=update.rank,
                scale=update.scale,
                parameter=parameter,
                is_exact=update.is_exact,
            )
        )
    return out


def _expert_modules(
    names: PeftNames, fused: Mapping[tuple[str, int | None], FusedUpdate]
) -> list[_Module]:
    by_parameter: dict[str, dict[int, FusedUpdate]] = {}
    for (stored, expert), update in fused.items():
        if stored.rpartition(".")[2] in PARAMETERS and expert is not None:
            by_parameter.setdefault(stored, {})[expert] = update
    out = []
    for stored, of_experts in by_parameter.items():
        if len(of_experts) != names.config.moe.num_experts:
            raise MappingError(
                f"the adapter changes {len(of_experts)} of {names.config.moe.num_experts} experts, "
                "whose parameter is one in PEFT",
                tensor=stored,
                error_id="unsupported-adapter",
            )
        scale = of_experts[0].scale
        rank = max(u.rank for u in of_experts.values())
        ordered = [of_experts[e].with_scale(scale).with_rank(rank) for e in sorted(of_experts)]
        a_ERI, b_EOR = torch.stack([u.down for u in ordered]), torch.stack([u.up for u in ordered])
        if names.is_swapped(stored):
            a_ERI, b_EOR = b_EOR.transpose(1, 2), a_ERI.transpose(1, 2)
        module, _, parameter = stored.rpartition(".")
        out.append(
            _Module(
                name=module,
                a=a_ERI.flatten(0, 1),
                b=b_EOR.permute(1, 2, 0).flatten(1).contiguous(),
                rank=rank,
                scale=scale,
                parameter=parameter,
                is_exact=all(u.is_exact for u in ordered),
            )
        )
    return out


def _config(
    names: PeftNames, modules: Sequence[_Module], base: str | None, dropout: float
) -> dict[str, Any]:
    """adapter_config.json: the most frequent rank and scale, and patterns of the others."""
    rank = Counter(m.rank for m in modules).most_common(1)[0][0]
    scale = Counter(m.scale for m in modules).most_common(1)[0][0]
    alpha = _alpha(scale, rank)
    linears = [m for m in modules if m.parameter not in PARAMETERS]
    targets = names.shorten(m.name for m in linears)
    parameters = {
        f"{name_in_layer(m.name)}.{m.parameter}" for m in modules if m.parameter in PARAMETERS
    }
    has_parameters = bool(parameters)
    if parameters:
        # PEFT takes modules with these names for experts of transformers 4.
        mlps = {m for m in targets if m.startswith("mlp.") or ".mlp." in m}
        targets, parameters = targets - mlps, parameters | {f"{m}.weight" for m in mlps}
    ranks, alphas = {}, {}
    for module in modules:
        key = module.name
        if module.parameter in PARAMETERS:
            key += f".{module.parameter}"
        elif has_parameters and key not in targets and name_in_layer(key) not in targets:
            key += ".weight"
        key = key.replace(".", r"\.")
        if module.rank != rank:
            ranks[key] = module.rank
        if (own := _alpha(module.scale, module.rank)) != alpha:
            alphas[key] = own
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        # Of two parameters of a module, the first is the inner one.
        "target_parameters": sorted(parameters, reverse=True) or None,
        "fan_in_fan_out": names.are_transposed(m.name for m in linears),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def _alpha(scale: float, rank: int) -> float:
    """The alpha of which PEFT computes a scale, a whole number where one is."""
    alpha = scale * rank
    return round(alpha) if round(alpha) / rank == scale else alpha


def name_in_layer(module: str) -> str:
    """A module's name in its layer, such as `self_attn.q_proj`, which PEFT finds in all layers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else module
