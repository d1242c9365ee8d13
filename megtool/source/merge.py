"""Low-rank updates (adapters) that are merged into a model's weights while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megtool.console import several
from megtool.convert.dialects import is_optimizer_state
from megtool.errors import MappingError, UsageError, listed
from megtool.formats.safetensors.quantization_config import without_quantization
from megtool.megatron_state.extra_states.amax_report import AmaxTarget
from megtool.source.checkpoint import CheckpointSource, require_model
from megtool.source.computed.updated import with_updates
from megtool.transport.weight_update import WeightUpdate

EMBEDDING, HEAD = "embed.weight", "head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMerge:
    """What is added to canonical weights of a source, by their names.

    `path` is the adapter that it was read from, None if it was made in memory.
    """

    updates: Mapping[str, WeightUpdate]
    path: Path | None = None

    def describe(self) -> str:
        """The number of weights, the adapter, and the ranks and scales of its updates."""
        words = []
        for noun, values in (("rank", self._ranks()), ("scale", self._scales())):
            some = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
            words.append(f"{noun} {some}")
        origin = f" with {self.path}" if self.path else ""
        return f"{several(len(self.updates), 'weight')}{origin}: {', '.join(words)}"

    def to_json(self) -> dict[str, Any]:
        """The adapter and the weights as plain data."""
        return {
            "adapter": str(self.path) if self.path else None,
            "weights": sorted(self.updates),
            "ranks": self._ranks(),
            "scales": self._scales(),
        }

    def _ranks(self) -> list[int]:
        return sorted({u.rank for u in self.updates.values()})

    def _scales(self) -> list[float]:
        return sorted({float(u.scale) for u in self.updates.values()})


def open_merge(path: Path, source: CheckpointSource) -> AdapterMerge:
    """Open an adapter whose updates are those of an open checkpoint's weights.

    Raises:
        FormatError: there is no adapter, or a damaged one.
        MappingError: the model is not known, or the adapter is of another one, or is more than
            low-rank updates.
    """
    from megtool.adapters.read import read_adapter

    model, _ = require_model(source, "merging an adapter")
    adapter = read_adapter(path)
    updates = adapter.updates(source.config, model.family)
    return AdapterMerge(path=adapter.path, updates=updates)


def collect_updates(merges: Sequence[AdapterMerge]) -> dict[str, tuple[WeightUpdate, ...]]:
    """The updates of each weight by all adapters."""
    out: dict[str, tuple[WeightUpdate, ...]] = {}
    for merge in merges:
        for name, update in merge.updates.items():
            out[name] = (*out.get(name, ()), update)
    return out


def open_merges(paths: Sequence[Path], source: CheckpointSource) -> list[AdapterMerge]:
    """The updates of several adapters, each given once; raises what `open_merge` does.

    Raises:
        UsageError: an adapter is given twice, and would be added twice.
    """
    if repeated := [path for path in paths if list(paths).count(path) > 1]:
        raise UsageError(
            f"the adapter {repeated[0]} is given twice, and would be added twice",
            hint="give it once",
        )
    return [open_merge(path, source) for path in paths]


def add_adapters(source: CheckpointSource, paths: Sequence[Path]) -> CheckpointSource:
    """The checkpoint as if adapters were merged into it: what is not quantized.

    Its weights are computed when they are read, with the bits that `reshard --adapter` writes.

    Raises:
        FormatError: there is no adapter, or a damaged one.
        MappingError: an adapter does not fit the model, or weights cannot take its updates.
        UsageError: an adapter is given twice.
    """
    merges = open_merges(paths, source)
    for merge in merges:
        check_merge(source, merge)
    view = source.view
    catalogue = with_updates(source.catalogue, view.placements, collect_updates(merges))
    catalogue.metadata = without_quantization(catalogue.metadata)
    return replace(
        source,
        catalogue=catalogue,
        view=replace(view, tensors=tuple(catalogue.tensors)),
        sidecar=None,
        pruning=None,
        adapters=tuple(paths),
    )


def check_merge(
    source: CheckpointSource, merge: AdapterMerge, amax: AmaxTarget | None = None
) -> None:
    """Refuse updates that the checkpoint's weights cannot take exactly.

    Raises:
        MappingError: the model is not known or has no such weights, or ties one of them to another
            that the update is not for.
        UsageError: optimizer state, or FP8 state of the weights as they were, would be written.
    """
    require_model(source, "merging an adapter")
    weights, updates, file = source.view.canonical, merge.updates, merge.path
    if source.view.states or any(is_optimizer_state(name) for name in weights):
        raise UsageError(
            "the optimizer state of the source belongs to its weights without the adapter",
            hint="leave --optimizer-format out, and only the model is written",
        )
    if amax is not None and amax.mode == "rebuild":
        raise UsageError(
            "--amax rebuild computes FP8 scaling state from weights without the adapter",
            hint="merge first, then rebuild the state with `reshard DST OTHER --amax rebuild`",
        )
    if not updates:
        raise MappingError("the adapter updates no weight", file=file, error_id="foreign-adapter")
    if source.config.embedding.tied_embeddings and (tied := {EMBEDDING, HEAD} & updates.keys()):
        raise MappingError(
            "the adapter updates the embedding or the output layer, and the model has one weight "
            "for both",
            file=file,
            tensor=min(tied),
            hint="merged, the update would change both: serve the adapter beside the model",
            error_id="unsupported-adapter",
        )
    if unknown := [name for name in updates if name not in weights]:
        raise MappingError(
            f"the model has no weights of these names: {listed(unknown)}",
            file=file,
            tensor=unknown[0],
            hint="the adapter is of another model",
            error_id="foreign-adapter",
        )
    for name, update in updates.items():
        update.check_shape(name, weights[name].shape)
