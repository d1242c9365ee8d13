"""One rank's tensors from any open checkpoint: planned once, loaded as often as needed.

The plan is the one that reshards: source tensors read as canonical ones, Megatron's per-layer
tensors made of them, and of these what the rank holds; only the destination is memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megtool.access.read_boxes import BUFFER_BYTES, BoxRead, BoxReader, PlannedReads
from megtool.console import Progress, silent
from megtool.convert.dialects import (
    CanonicalView,
    DialectNaming,
    TargetView,
    is_optimizer_state,
    write_side,
)
from megtool.convert.language.binding import missing, summarize
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.convert.megatron.names import is_encoder_decoder
from megtool.convert.megatron.rank_parameters import rank_parameters
from megtool.convert.rank_tensors import (
    LocalTensor,
    RankCoordinates,
    local_tensors,
)
from megtool.dtypes import DType, dtype
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.plan import memory
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)


class Weights:
    """The tensors of one rank by the names of its modules, of which any set can be loaded.

    `parallel` and `seat` say which rank it is. The vocabulary is padded with zeros to a multiple of
    `vocab_multiple` rows on each of the tensor ranks. Layers of multi-token prediction are among
    them where the caller `keeps_mtp`.

    Raises:
        LayoutError: the layout does not divide the model; the hint says which sizes do.
        MappingError: the checkpoint is no whole decoder.
    """

    def __init__(
        self,
        source: CheckpointSource,
        *,
        parallel: ParallelConfig | None = None,
        seat: RankCoordinates | None = None,
        vocab_multiple: int = 1,
        threads: int | None = None,
        memory_bytes: int = BUFFER_BYTES,
        keeps_mtp: bool = False,
        progress: Progress = silent,
    ) -> None:
        self.parallel, seat = parallel or ParallelConfig(), seat or RankCoordinates()
        self.catalogue = source.catalogue
        self.config, self._side = decoder_of(source, keeps_mtp=keeps_mtp)
        self._target = self._written(vocab_multiple)
        ranks = rank_parameters(self._target.tensors, self.config, self.parallel)
        self.tensors: Mapping[str, LocalTensor] = local_tensors(
            ranks, seat, num_chunks=self.parallel.vpp
        )
        self._kinds = {t.name: t.dtype for t in self._target.tensors}
        self._threads = threads
        self._memory_bytes, self._progress = memory_bytes, progress
        self._box_reader: BoxReader | None = None
        self._plans: dict[tuple[str, ...], PlannedReads] = {}

    def _written(self, vocab_multiple: int) -> TargetView:
        target = write_side(
            self._side,
            dialect="megatron",
            config=self.config,
            parallel=self.parallel,
            per_layer=True,
            options=DialectNaming(divisible_by=vocab_multiple),
        )
        others = [t.name for t in target.tensors if t.name.startswith("encoder.")]
        if others and not self.config.num_decoder_layers:
            raise _no_decoder(self.catalogue, others[0], "an encoder")
        return target

    @property
    def usual_dtype(self) -> DType:
        """The type of most stored weights; bfloat16 where it is none to compute in."""
        count: Counter[str] = Counter()
        for name, t in self._side.canonical.items():
            stored = self.catalogue[self._side.placements[name].stored]
            computes = t.dtype.is_float and t.dtype.itemsize > 1 and stored.packing is None
            count[t.dtype.name if computes else "bfloat16"] += t.numel
        return dtype(count.most_common(1)[0][0] if count else "bfloat16")

    def become(self, kinds: Mapping[str, DType]) -> None:
        """Load the tensors that `kinds` names as these types from now on (the others as stored)."""
        self._kinds = {**self._kinds, **kinds}
        self._plans.clear()

    def read_unshifted(self) -> None:
        """Load values as they are stored from now on: moments of weights that are stored shifted
        are not."""
        placements = {n: replace(p, shift=0.0) for n, p in self._target.placements.items()}
        self._target = replace(self._target, placements=placements)
        places = {n: replace(p, shift=0.0) for n, p in self._side.placements.items()}
        self._side = replace(self._side, placements=places)
        self._box_reader = None
        self._plans.clear()

    def kind(self, name: str) -> DType:
        """What type a tensor is loaded as."""
        return self._kinds.get(name) or self._kinds[self.tensors[name].key]

    def made_of(self, canonical: Collection[str]) -> set[str]:
        """The names of tensors that any of these canonical tensors is a part of."""
        keys = {p.stored for p in self._target.placements.values() if p.canonical in canonical}
        return {name for name, t in self.tensors.items() if t.key in keys}

    def num_bytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes that tensors (all, by default) take once loaded."""
        listed = self.tensors if names is None else names
        return sum(numel(self.tensors[n].shape) * self.kind(n).itemsize for n in listed)

    def load(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Tensors (all, by default) in memory of their own, on the CPU. For any thread.

        Raises:
            StorageError: a read failed, or there is no memory.
            SourceChangedError: a source file changed since it was opened.
        """
        selected = tuple(self.tensors if names is None else names)
        if not selected:
            return {}
        planned = self._plans.get(selected)
        if planned is None:
            reads = [BoxRead(tensor=self.tensors[n], dtype=self.kind(n)) for n in selected]
            planned = self._plans[selected] = self._reader().plan(reads)
        tensors = [
            GlobalTensor(name=n, shape=self.tensors[n].shape, dtype=self.kind(n)) for n in selected
        ]
        filled = memory.allocate(tensors)
        total = self.num_bytes()  # of all tensors, also where these are some

        def report(stage: str, num_bytes: int, total_bytes: int) -> None:
            self._progress(stage, num_bytes, total)

        planned.fill([filled[n] for n in selected], report)
        return {t.name: memory.as_torch(filled[t.name], t) for t in tensors}

    def _reader(self) -> BoxReader:
        """The reader of all tensors, made at first use."""
        if self._box_reader is None:
            self._box_reader = BoxReader(
                self.catalogue,
                self._side,
                self._target,
                threads=self._threads,
                memory_bytes=self._memory_bytes,
            )
        return self._box_reader


def group_of(name: str) -> str:
    """The layer a tensor belongs to (`decoder.layers.3`), else the first part of its name."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        return ".".join(parts[:3])
    return parts[0] if parts[0] != "decoder" else ".".join(parts[:2])


def decoder_of(
    source: CheckpointSource, *, keeps_mtp: bool = False
) -> tuple[ModelConfig, CanonicalView]:
    """The model of a checkpoint that is a whole decoder, and the side of its weights alone.

    Optimizer state is left out, and so are other parts than the text model and, unless the caller
    `keeps_mtp`, layers that predict further tokens (said once).

    Raises:
        MappingError: no configuration, no decoder, or some of its tensors are missing.
    """
    side, config, where = source.view, source.known_config, source.catalogue.root
    stored = [t.name for t in source.catalogue.tensors if not is_optimizer_state(t.name)]
    if is_encoder_decoder(stored) and (config is None or not config.num_decoder_layers):
        raise _no_decoder(
            source.catalogue, stored[0], "an encoder and a decoder that attends to it"
        )
    if config is None or side.dialect == "identity":
        raise MappingError(
            "the model of these tensors is unknown, so it cannot be run",
            file=where,
            tensor=stored[0] if stored else None,
            hint="--like HF_FOLDER gives a config.json; --family NAME says how to read it",
            error_id="no-model-config",
        )
    weights = {n: t for n, t in side.canonical.items() if ":" not in n}
    further = [n for n in weights if n.startswith("mtp.")]
    if further and not keeps_mtp:
        _LOG.info(
            "%d tensors of %d layers of multi-token prediction are skipped: "
            "a forward pass does not need them",
            len(further),
            config.mtp.num_mtp_layers,
        )
        weights = {n: t for n, t in weights.items() if not n.startswith("mtp.")}
    towers = frozenset(side.towers())
    weights = {n: t for n, t in weights.items() if n not in towers}
    if not (further and keeps_mtp):
        config = config.with_fields(num_mtp_layers=0)
    family = side.family
    known = {**VOCABULARY, **(family.vocabulary if family else {})}
    absent, flags = missing(weights, CanonicalModel(config, known))
    if absent:
        raise MappingError(
            f"{len(absent)} tensors of the model are not selected or missing: {summarize(absent)}",
            file=where,
            tensor=absent[0],
            hint="a model runs whole: select every layer, or make the ones wanted a model of "
            "their own (`megtool reshard --layers 0-3`)",
            error_id="missing-tensors",
        )
    config = config.with_fields(**flags)
    return config, replace(
        side,
        canonical=weights,
        placements={n: side.placements[n] for n in weights},
        config=config,
        states={},
    )


def _no_decoder(catalogue: Catalogue, name: str, what: str) -> MappingError:
    return MappingError(
        f"the checkpoint is {what}, and only models of one stack of `decoder.layers` are run, and "
        "T5",
        file=catalogue.root,
        tensor=name,
        hint="Megatron's BERT can be converted and inspected; RoBERTa, ModernBERT and decoders "
        "are run, and T5 with a config.json: --like HF_FOLDER",
        error_id="unsupported-model",
    )
