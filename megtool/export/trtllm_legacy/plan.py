"""Plan a legacy TensorRT-LLM checkpoint: its files, and the placements and feeds that fill it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.console import several
from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import MappingError, listed
from megtool.export.trtllm_legacy.absorbed_queries import AbsorbedQueryFeed
from megtool.export.trtllm_legacy.config import RankModule, build_config_json, build_quantization
from megtool.export.trtllm_legacy.families import FAMILIES
from megtool.export.trtllm_legacy.layout import check_family, plan_rank_layout
from megtool.export.trtllm_legacy.placements import BoxPlacements, RankNormPlusOne
from megtool.export.trtllm_legacy.quantized_tensors import plan_quantized_module
from megtool.export.trtllm_legacy.quantized_weights import QuantizedWeights
from megtool.export.trtllm_legacy.rank_files import RankFileTensor, plan_rank_files
from megtool.export.trtllm_legacy.ranks import (
    AbsorbedQueries,
    RankLayout,
    RankTensor,
    list_rank_tensors,
)
from megtool.plan.copies import DroppedItem
from megtool.spec.model_config import ModelConfig
from megtool.tensors.catalogue import Catalogue, Destination
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import TensorFeed
from megtool.transport.constant_feed import ConstantFeed

_F32 = named_dtype("float32")
_SIXTEEN = ("bfloat16", "float16")
_KV_ALGOS = ("FP8", "INT8")
_AWQ = ("W4A16_AWQ", "W4A8_AWQ")
_AWQ_ROWS = 64  # engines want so many rows of the head at once (ModelOpt pads to them too)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyModel:
    """What is exported: its family by name, its configuration, where its canonical tensors lie
    (`placements`) and how large they are; `architecture` is what its config.json calls it.

    `algo` is a format the engine is to make of plain weights itself, when it loads them: of all
    that config.json does not exclude.
    """

    family: str | None
    config: ModelConfig
    placements: Mapping[str, Placement]
    shapes: Mapping[str, tuple[int, ...]]
    architecture: str | None = None
    algo: str = ""


@dataclass(slots=True, kw_only=True)
class TrtllmLegacyPlan:
    """All that `planner.build_plan` is given, and what a report says."""

    destination: Destination
    pieces: BoxPlacements
    feeds: list[TensorFeed]
    dropped: list[DroppedItem]
    algo: str
    kv_algo: str | None
    exact: int = 0
    requantized: int = 0
    plain: int = 0
    notes: list[str] = field(default_factory=list)


def plan_trtllm_legacy(
    model: LegacyModel,
    catalogue: Catalogue,
    weights: QuantizedWeights | None,
    *,
    tp: int,
    pp: int,
    ep: int = 1,
    dtype: DType,
    reasons: Mapping[str, str],
) -> TrtllmLegacyPlan:
    """Plan the checkpoint of `model`, whose tensors lie in `catalogue`.

    `weights` are its quantized ones (with `model.algo`, those that an engine is to quantize and are
    plain in `catalogue`). `reasons` say why stored tensors are left out.

    Raises:
        MappingError: no legacy model computes it, or a format is none of legacy engines.
        LayoutError: `tp`, `pp` or `ep` does not divide it.
        FormatError: scales are missing.
    """
    check_family(model.family, model.config)
    return _Planner(model, catalogue, weights, dtype).plan(tp, pp, ep, reasons)


class _Planner:
    def __init__(
        self,
        model: LegacyModel,
        catalogue: Catalogue,
        weights: QuantizedWeights | None,
        dtype: DType,
    ) -> None:
        self.model, self.catalogue, self.weights = model, catalogue, weights
        self.dtype = dtype
        self.pieces = BoxPlacements(stored=model.placements, shapes=model.shapes)
        self.file_tensors: list[RankFileTensor] = []
        self.feeds: list[TensorFeed] = []
        self.constants: list[tuple[GlobalTensor, NDArray[np.generic]]] = []
        self.norms: dict[str, list[GlobalTensor]] = defaultdict(list)
        self.queries: dict[AbsorbedQueries, list[GlobalTensor]] = defaultdict(list)
        self.modules: list[RankModule] = []
        self.routers: list[str] = []
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.left_out: dict[str, str] = {}

    def plan(self, tp: int, pp: int, ep: int, reasons: Mapping[str, str]) -> TrtllmLegacyPlan:
        """Everything."""
        config, weights = self.model.config, self.weights
        algos = {h.module.algo for h in weights.rows.values()} if weights else set()
        cut = plan_rank_layout(
            config,
            tp=tp,
            pp=pp,
            ep=ep,
            vocab_multiple=_AWQ_ROWS if algos & set(_AWQ) else 1,
            requirements=weights.requirements() if weights and not self.model.algo else (),
        )
        # Engines have one table for both where they find no head; stages far apart cannot.
        shares = config.embedding.tied_embeddings and self.model.family == "gemma" and pp == 1
        for tensor in list_rank_tensors(cut, self.model.placements, shares_table=shares):
            self._add(tensor)
        self._check_used()
        kv_algo = self._plan_kv_cache(cut)
        for canonical, tensors in self.norms.items():
            placement = self._add_source(canonical)
            stored = self.catalogue[placement.stored].dtype
            read_as = stored if stored.name in _SIXTEEN else _F32
            self.feeds.append(
                RankNormPlusOne(placement=placement, dtype=read_as, tensors=tuple(tensors))
            )
        for queries, tensors in self.queries.items():
            self._add_queries(queries, tensors)
        if self.constants:
            self.feeds.append(ConstantFeed(values=tuple(self.constants)))
        quantization, quant_cfg = build_quantization(self.modules, self.routers, kv_algo)
        if self.model.algo:
            # Engines hold these patterns against names of modules, and of weights.
            quantization["exclude_modules"] = [
                f"{n}*" for n in quantization.get("exclude_modules", ())
            ]
        small = {
            "config.json": build_config_json(
                str(self.model.family),
                cut,
                dtype=self.dtype.name,
                architecture=self.model.architecture,
                shares_table=shares,
                quantization=quantization,
            )
        }
        if quant_cfg is not None:
            small["quant_cfg.json"] = quant_cfg
        self._add_notes(cut)
        coded = len(weights.rows) if weights and not self.model.algo else 0
        changed = len(weights.requantized) if weights else 0
        linear = {b for b in self.used if b.endswith(".weight") and len(self.model.shapes[b]) == 2}
        return TrtllmLegacyPlan(
            destination=plan_rank_files(self.file_tensors, tp * pp, small),
            pieces=self.pieces,
            feeds=self.feeds,
            dropped=self._dropped(reasons),
            algo=str(quantization["quant_algo"] or ""),
            kv_algo=kv_algo,
            exact=coded - changed,
            requantized=changed,
            plain=len(linear) - coded,
            notes=self.notes,
        )

    def _add(self, tensor: RankTensor) -> None:
        """A tensor of a rank, quantized or not."""
        self.used.update(b.canonical for b in tensor.boxes)
        if tensor.is_plain and self.weights is not None:
            self._check_plain(tensor, self.weights)
        module = self.weights.module_of(tensor) if self.weights else None
        if tensor.is_linear or tensor.module == "lm_head":
            self.modules.append(RankModule(rank=tensor.rank, name=tensor.module, quantized=module))
        if tensor.is_router:
            self.routers.append(tensor.module)
        if module is not None and self.weights is not None and not self.model.algo:
            _check_filled(tensor)
            planned = plan_quantized_module(tensor, module, self.weights, self.dtype)
            self.file_tensors += planned.file_tensors
            self.constants += planned.constants
            self.feeds += planned.feeds
            for feed in planned.feeds:
                for p in feed.reads:
                    self.pieces.add_whole(p.stored, self.catalogue[p.stored].shape)
            return
        rows, *inner = tensor.shape
        shape = (tensor.experts, rows // tensor.experts, *inner) if tensor.experts else tensor.shape
        dtype = _F32 if tensor.is_float32 else self.dtype
        target = GlobalTensor(name=tensor.stored, shape=tensor.shape, dtype=dtype)
        self.file_tensors.append(
            RankFileTensor(rank=tensor.rank, name=tensor.name, shape=shape, tensor=target)
        )
        if tensor.queries is not None:
            self.queries[tensor.queries].append(target)
        elif tensor.plus_one:
            self.norms[tensor.boxes[0].canonical].append(target)
        else:
            self.pieces.add(target, tensor.boxes)

    def _check_plain(self, tensor: RankTensor, weights: QuantizedWeights) -> None:
        """Weights that others are computed of are not quantized.

        Raises:
            MappingError: some are; the hint names the rule of a recipe that keeps them.
        """
        wrong = [b.canonical for b in tensor.boxes if b.canonical in weights.rows]
        if wrong:
            raise MappingError(
                f"{wrong[0].removesuffix('.weight')} is quantized, and latent attention of legacy "
                f"TensorRT-LLM has it plain, in {tensor.name!r}",
                tensor=weights.rows[wrong[0]].module.name,
                hint="quantize it again with a rule that keeps the attention's projections before "
                "its output, or export the plain checkpoint",
                error_id="unsupported-by-engine",
            )

    def _add_queries(self, queries: AbsorbedQueries, tensors: list[GlobalTensor]) -> None:
        """Tensors of products and what they are made of; weights of 16 bits are read as such."""
        placements = tuple(self._add_source(n) for n in (queries.query, queries.key_value))
        stored = {self.catalogue[p.stored].dtype for p in placements}
        dtype = stored.pop() if len(stored) == 1 else _F32
        self.feeds.append(
            AbsorbedQueryFeed(
                placements=placements,
                queries=queries,
                dtype=dtype if dtype.name in _SIXTEEN else _F32,
                tensors=tuple(tensors),
            )
        )

    def _add_source(self, canonical: str) -> Placement:
        """A canonical tensor that a feed reads."""
        placement = self.model.placements[canonical]
        self.pieces.source[canonical] = placement
        return placement

    def _plan_kv_cache(self, cut: RankLayout) -> str | None:
        """The scales of keys and values, which every rank of a stage has."""
        weights = self.weights
        if weights is None or weights.folder.kv_algo is None:
            return None
        algo = weights.folder.kv_algo
        if self.model.config.latent.kv_lora_rank:
            raise MappingError(
                f"the KV cache is quantized to {algo}, and legacy TensorRT-LLM keeps what latent "
                "attention caches in 16 bits",
                hint="quantize with a recipe that keeps the KV cache, or --to trtllm",
                error_id="unsupported-by-engine",
            )
        if algo not in _KV_ALGOS:
            raise MappingError(
                f"a KV cache of {algo} is none of legacy TensorRT-LLM",
                hint=f"known: {', '.join(_KV_ALGOS)}; quantize the cache to FP8",
                error_id="unsupported-by-engine",
            )
        num_raised = 0
        for rank in range(cut.tp * cut.pp):
            for local in range(cut.layers):
                number = cut.global_layer(rank, local)
                scales = self._kv_cache_scales(number)
                if algo == "FP8" and min(scales) < 1:
                    num_raised += 1
                if algo == "FP8":
                    scales = tuple(max(x, 1.0) for x in scales)
                k, v = scales
                prefix = f"transformer.layers.{local}.attention"
                for name, value in (("k", k), ("v", v), ("kv", max(k, v))):
                    full = f"{prefix}.{name}_cache_scaling_factor"
                    tensor = GlobalTensor(name=f"rank{rank}/{full}", shape=(1,), dtype=_F32)
                    self.file_tensors.append(
                        RankFileTensor(rank=rank, name=full, shape=(1,), tensor=tensor)
                    )
                    self.constants.append((tensor, np.array([value], np.float32)))
        if num_raised:
            self.notes.append(
                "scales of the KV cache below 1 are written as 1, as ModelOpt does for this format "
                "(FP8 has room below)"
            )
        return algo

    def _kv_cache_scales(self, number: int) -> tuple[float, ...]:
        """The scales of keys and of values of a layer; ones where none are stored."""
        if self.weights is None:
            return (1.0, 1.0)
        for projection in ("k", "v"):
            stored = self.model.placements[f"layers.{number}.attn.{projection}.weight"].stored
            attention = stored.rsplit(".", 2)[0]
            if names := self.weights.folder.kv_cache_scales.get(attention):
                return tuple(float(self.weights.read_vector(n).max()) for n in names)
        return (1.0, 1.0)

    def _check_used(self) -> None:
        """Every weight has a place, but those of multi-token prediction, which are left out."""
        unused = [n for n in self.model.placements if ":" not in n and n not in self.used]
        further = [n for n in unused if n.startswith("mtp.")]
        unused = [n for n in unused if not n.startswith("mtp.")]
        if unused:
            raise MappingError(
                f"{listed(unused)}: legacy TensorRT-LLM's {self.model.family} has no such tensors",
                tensor=unused[0],
                hint="newer TensorRT-LLM loads Hugging Face folders: --to trtllm",
                error_id="unsupported-by-engine",
            )
        if further:
            self.notes.append(
                "multi-token prediction is left out "
                f"({several(self.model.config.mtp.num_mtp_layers, 'layer')}, "
                f"{several(len(further), 'tensor')}): legacy TensorRT-LLM's {self.model.family} "
                "has none"
            )
            stored = {self.model.placements[n].stored for n in further}
            self.left_out = dict.fromkeys(stored, "multi-token prediction, which legacy has not")

    def _dropped(self, reasons: Mapping[str, str]) -> list[DroppedItem]:
        used = {p.stored for p in self.pieces.source.values()}
        return [
            DroppedItem(
                name=t.name,
                reason=reasons.get(t.name)
                or self.left_out.get(t.name)
                or "its value stands elsewhere, or legacy has no place",
                num_bytes=t.num_bytes,
            )
            for t in self.catalogue.tensors
            if t.name not in used
        ]

    def _add_notes(self, cut: RankLayout) -> None:
        c = self.model.config
        if note := FAMILIES[str(self.model.family)].note:
            self.notes.append(note)
        if c.window.window_size:
            self.notes.append(
                f"attention is limited to {c.window.window_size} tokens, which legacy engines are "
                "told when they run: --max_attention_window_size"
            )
        if cut.vocab_rows != c.embedding.vocab_size:
            self.notes.append(
                f"the vocabulary of {c.embedding.vocab_size} is padded to {cut.vocab_rows} rows "
                "with zeros"
            )
        if self.weights is not None:
            self.notes += self.weights.folder.notes


def _check_filled(tensor: RankTensor) -> None:
    """Rows of zeros have no codes.

    Raises:
        MappingError: some rows of a quantized head would pad the vocabulary.
    """
    if sum(b.hi[0] - b.lo[0] for b in tensor.boxes) < tensor.shape[0]:
        raise MappingError(
            f"{tensor.module} is quantized, and the vocabulary is to be padded",
            tensor=tensor.module,
            hint="quantize it again and keep the head",
        )
