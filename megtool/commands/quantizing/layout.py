"""Quantize layout: the stored tensors that quantised modules become, and what fills them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megtool.checkpoint.feed import Feed
from megtool.commands.opened import Opened
from megtool.commands.target import Target
from megtool.errors import CalibrationError, MappingError, UsageError
from megtool.quant.recipes.match import Decision
from megtool.quant.treatment import Floats, Settlement, Treatment
from megtool.quant.writing.given import Folded, Given
from megtool.quant.writing.hf_config import Layer, quantization
from megtool.quant.writing.pack import Weight, feeds_of, grain_of, taken_as
from megtool.quant.writing.stored import Held, caches_of, held_of, input_scale
from megtool.tensors.box import strides
from megtool.tensors.relation import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(slots=True, kw_only=True)
class Piece:
    """A canonical weight in a stored module: its decision, its treatment, its first row there."""

    decision: Decision
    treatment: Treatment
    weight: Weight
    at: int
    amax: float = 0.0


@dataclass(slots=True, kw_only=True)
class StoredModule:
    """A stored module that is to be quantised: several canonical ones where a family has them in
    one tensor."""

    name: str
    tensor: GlobalTensor
    pieces: list[Piece] = field(default_factory=list)

    @property
    def smoothed(self) -> Floats | None:
        """Factors of columns that are to be stored."""
        first = self.pieces[0].treatment
        return first.columns if first.stores_columns else None


def treatments_of(decisions: Sequence[Decision], settlement: Settlement) -> dict[str, Treatment]:
    """The treatment of every module that is quantised.

    Raises:
        CalibrationError: one has none, or one for another format.
    """
    out: dict[str, Treatment] = {}
    for d in decisions:
        if d.format is None or not d.format.algo:
            continue
        found = settlement.treatments.get(d.module.name)
        if found is None or found.format.algo != d.format.algo:
            has = f"one for {found.format.algo}" if found else "none"
            raise CalibrationError(
                f"{d.module.name} is to be {d.format.algo}, and of treatments it has {has}",
                hint="the calibration is of another recipe: run it anew",
            )
        out[d.module.name] = found
    return out


def stored_modules(
    opened: Opened,
    decisions: Sequence[Decision],
    treatments: Mapping[str, Treatment],
    target: Target,
) -> list[StoredModule]:
    """The stored modules that are to be quantised, in the order of the files.

    Raises:
        MappingError: see `check_storable`.
    """
    tensors = {t.name: t for t in target.side.tensors}
    out: dict[str, StoredModule] = {}
    for d in decisions:
        if d.module.name not in treatments:
            continue
        name = f"{d.module.name}.weight"
        to = target.side.placements[name]
        tensor = tensors[to.stored]
        if why := misplaced(d, to, tensor):
            raise _refusal([(d, tensor, why)], is_all=False)
        weight = Weight(
            placement=opened.placement_of(name),
            shape=(d.module.shape[0], d.module.shape[1]),
            dtype=taken_as(tensor.dtype),
            treatment=treatments[d.module.name],
        )
        stored = out.setdefault(
            tensor.name, StoredModule(name=tensor.name.removesuffix(".weight"), tensor=tensor)
        )
        stored.pieces.append(
            Piece(decision=d, treatment=treatments[d.module.name], weight=weight, at=to.base[0])
        )
    shared: dict[str, list[str]] = defaultdict(list)
    for name, p in target.side.placements.items():
        shared[p.stored].append(name)
    for stored in out.values():
        _check_together(stored, shared[stored.tensor.name])
    return [out[t.name] for t in target.side.tensors if t.name in out]


def check_places(decisions: Sequence[Decision], target: Target) -> None:
    """Refuse weights that lie otherwise than as consecutive whole rows of a stored tensor.

    Raises:
        MappingError: with all of them, and whether any of the family's could be quantised.
    """
    tensors = {t.name: t for t in target.side.tensors}
    taken = [d for d in decisions if d.format is not None and d.format.algo]
    wrong = []
    for d in taken:
        to = target.side.placements[f"{d.module.name}.weight"]
        if why := misplaced(d, to, tensors[to.stored]):
            wrong.append((d, tensors[to.stored], why))
    if wrong:
        raise _refusal(wrong, is_all=len(wrong) == len(taken))


def _refusal(wrong: Sequence[tuple[Decision, GlobalTensor, str]], *, is_all: bool) -> MappingError:
    """All weights that cannot be stored as codes, by the names they have in every layer."""
    alike: dict[str, list[str]] = defaultdict(list)
    for d, _, why in wrong:
        name = ".".join("*" if p.isdecimal() else p for p in d.module.name.split("."))
        if name not in alike[why]:
            alike[why].append(name)
    first, tensor, _ = wrong[0]
    label = first.format.label if first.format else ""
    told = "; ".join(f"{', '.join(names)} {why}" for why, names in alike.items())
    globs = ", ".join(name for names in alike.values() for name in names)
    hint = f"keep them by a rule before the others: - {{match: {{glob: [{globs}]}}, format: keep}}"
    if is_all:
        hint = "no weight of this family can be written so: nothing is left to quantise"
    return MappingError(
        f"{len(wrong):,} weights are to be quantised ({first.module.name} to {label}), and a "
        f"Hugging Face folder of this family stores them so that no engine loads codes: {told}",
        tensor=tensor.name,
        hint=hint,
    )


def misplaced(d: Decision, to: Placement, tensor: GlobalTensor) -> str:
    """How a weight lies, if not as consecutive whole rows of the stored tensor; else empty."""
    why = ""
    if len(tensor.shape) != 2:
        why = "stacked with others"
    elif not tensor.name.endswith(".weight"):
        why = f"as {tensor.name!r}, for which loaders have no scales"
    else:
        apart = (tensor.shape[1], 1)
        lies = [m * apart[k] for m, k in zip(to.mults, to.dims, strict=True)]
        plain = all(
            n == 1 or a == b for n, a, b in zip(to.shape, lies, strides(to.shape), strict=True)
        )
        if not plain or to.base[1] or d.module.shape[1] != tensor.shape[1]:
            across = any(k == 0 and n > 1 for n, k in zip(to.shape[-1:], to.dims[-1:], strict=True))
            why = "transposed" if across else "interleaved with others"
    return why


def _check_together(stored: StoredModule, held: Sequence[str]) -> None:
    """Weights that lie in one tensor are quantised as one."""
    first = stored.pieces[0]
    found = {p.decision.module.name for p in stored.pieces}
    missing = [name for name in held if name.removesuffix(".weight") not in found]
    differ = [
        p.decision.module.name
        for p in stored.pieces
        if (p.treatment.format.algo, p.treatment.format.group_size)
        != (first.treatment.format.algo, first.treatment.format.group_size)
        or p.treatment.stores_columns != first.treatment.stores_columns
        or not np.array_equal(_ones(p), _ones(first))
    ]
    if missing or differ:
        other = (missing or differ)[0].removesuffix(".weight")
        raise MappingError(
            f"{first.decision.module.name} is to be {first.decision.label}, and {other}, which is "
            "stored in the same tensor, "
            + ("is kept" if missing else "has another format or other factors"),
            tensor=stored.tensor.name,
            hint="give all of them one format, or keep all of them",
        )
    for p in stored.pieces:
        grain = grain_of(p.weight)
        if p.at % grain:
            raise MappingError(
                f"{p.decision.module.name} begins at row {p.at} of the tensor it is stored in, "
                f"and {p.decision.label} packs {grain} rows together",
                tensor=stored.tensor.name,
                hint="keep it by a rule before the others, or take another format",
            )


def _ones(piece: Piece) -> Floats:
    columns = piece.treatment.columns
    return np.ones(piece.weight.shape[1], np.float32) if columns is None else columns


def tensors_of(stored: StoredModule, *, checked: bool = True) -> list[Held]:
    """The tensors of a module; `checked` asks for what calibration has to know."""
    first = stored.pieces[0]
    inputs = [s for p in stored.pieces if checked and (s := input_scale(p.treatment)) is not None]
    rows, width = stored.tensor.shape
    return held_of(
        stored.name,
        (rows, width),
        first.treatment.format,
        first.weight.dtype,
        amax=max(p.amax for p in stored.pieces),
        inputs=max(inputs, default=None),
        columns=first.treatment.columns if first.treatment.stores_columns else None,
    )


def feeds_of_module(stored: StoredModule, held: Sequence[Held]) -> list[Feed]:
    """What fills the tensors of one module."""
    computed = [(h.part.role, h.tensor) for h in held if h.part is not None and h.value is None]
    amax = max(p.amax for p in stored.pieces)
    out: list[Feed] = []
    for p in stored.pieces:
        weight = p.weight
        if p.treatment.format.algo == "FP8":  # one scale, of all that is stored as one
            weight = replace(weight, treatment=replace(p.treatment, amax=None))
        out += feeds_of(weight, computed, at=p.at, amax=amax)
    values = tuple((h.tensor, h.value) for h in held if h.value is not None)
    return [*out, Given(values=values)] if values else out


def folded_norms(opened: Opened, settlement: Settlement, target: Target) -> list[Folded]:
    """The norms that take factors."""
    tensors = {t.name: t for t in target.side.tensors}
    config = opened.side.config
    out: list[Folded] = []
    for norm, factors in settlement.norms.items():
        for last in ("weight", "bias"):
            name = f"{norm}.{last}"
            to = target.side.placements.get(name)
            if to is None and last == "bias":
                continue
            tensor = None if to is None else tensors[to.stored]
            fits = to is not None and tensor is not None and to.is_identity
            if to is None or tensor is None or not fits or tensor.shape != factors.shape:
                raise MappingError(
                    f"factors of {len(factors)} columns are to go into {name}, which is not there "
                    "or is no vector of so many",
                    tensor=name,
                    hint="the calibration is of another model",
                )
            out.append(
                Folded(
                    placement=opened.placement_of(name),
                    tensor=tensor,
                    factors=factors,
                    zero_centered=bool(
                        last == "weight" and config is not None and config.zero_centered_norm
                    ),
                )
            )
    return out


def cache_scales(decisions: Sequence[Decision], settlement: Settlement) -> list[Held]:
    """The scales of KV caches."""
    out: list[Held] = []
    for d in decisions:
        if d.format is None or not d.format.kv_algo:
            continue
        cache = settlement.caches.get(d.module.name)
        if cache is None:
            if d.format.constant:
                continue  # loaders take 1 where nothing is stored
            raise CalibrationError(
                f"{d.module.name} is to be {d.label}, and nothing is known about its values",
                hint="calibrate with data",
            )
        out += caches_of(d.module.called("hf")[0], cache)
    return out


def config_of(decisions: Sequence[Decision], modules: Sequence[StoredModule]) -> dict[str, Any]:
    """What config files say of all this."""
    caches = {d.format.kv_algo for d in decisions if d.format is not None and d.format.kv_algo}
    if len(caches) > 1:
        raise UsageError(
            f"KV caches of {' and '.join(sorted(caches))} in one model, and engines know one",
            hint="give all layers the same",
        )
    layers = [
        Layer(
            name=s.name,
            algo=s.pieces[0].treatment.format.algo,
            group_size=s.pieces[0].treatment.format.group_size,
            smoothed=s.smoothed is not None,
        )
        for s in modules
    ]
    quantised = {layer.name for layer in layers}
    kept: dict[str, None] = {}
    for d in decisions:
        if d.format is None and d.module.kind == "linear":
            kept.update(dict.fromkeys(d.module.called("hf")))
    if not any(d.module.name == "head" for d in decisions):
        kept["lm_head"] = None  # tied, and yet a module to engines
    if not kept:  # loaders of NVFP4 refuse an empty list
        embeddings = [d for d in decisions if d.module.kind == "embedding" and d.format is None]
        kept.update(dict.fromkeys(n for d in embeddings for n in d.module.called("hf")))
    return quantization(layers, [k for k in kept if k not in quantised], next(iter(caches), None))
