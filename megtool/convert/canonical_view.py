"""Both sides of a conversion: the stored tensors and where each canonical tensor is in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megtool.convert.families.family import Family
from megtool.convert.language.binding import MatchedTensors
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalView(MatchedTensors):
    """Stored tensors and the canonical tensors they hold.

    Optimizer state is called `<state>:<canonical name>`, and `states` says how the source spells
    each state. `config` has its flags set by what is there. `is_hybrid`: stored names are those of
    Megatron's HybridModel.
    """

    dialect: str
    tensors: tuple[GlobalTensor, ...]
    states: dict[str, str] = field(default_factory=dict)
    config: ModelConfig | None = None
    family: Family | None = None
    is_hybrid: bool = False

    def towers(self) -> list[str]:
        """The canonical tensors of the model's other parts than its text, without their state."""
        prefixes = tuple(t.name for t in self.family.towers) if self.family else ()
        return [n for n in self.canonical if n.startswith(prefixes)] if prefixes else []


@dataclass(frozen=True, slots=True)
class FalseCopy:
    """A stored tensor that is said to repeat another, and does not.

    With `flag` at `value` in the configuration it is a tensor of the model; "" where nothing makes
    it one.
    """

    name: str
    original: str
    difference: str
    flag: str = ""
    value: bool = False

    def __str__(self) -> str:
        return f"not a copy of {self.original}, though it should be: {self.difference}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Stored elements that belong to no canonical tensor, and their value."""

    placement: Placement
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetView:
    """The tensors to store, their canonical sources, and their shards.

    `placements` is keyed by canonical name and covers, with `fills`, every element of `tensors`
    once. `shards` is None where nothing says how to cut. `dropped` holds canonical tensors that
    the target has no place for, each with the reason. `config` counts layers as the names of
    `tensors` do.
    """

    tensors: list[GlobalTensor]
    placements: dict[str, Placement]
    shards: Shards | None
    fills: list[Padding]
    dropped: list[tuple[str, str]]
    config: ModelConfig | None = None


def layer_number(name: str) -> str:
    """The number of the layer a canonical name belongs to; empty outside of layers."""
    parts = name.split(".")
    return parts[1] if parts[0] == "layers" else ""


def canonical_side(config: ModelConfig, layers: Collection[str] | None = None) -> CanonicalView:
    """The canonical tensors of some layers (`""`: those outside of layers; None: all), each stored
    unchanged.
    """
    config = config.with_fields(num_mtp_layers=0)
    model = CanonicalModel(config, VOCABULARY)
    kind = dtype("float32")
    canonical = {
        name: GlobalTensor(name=name, shape=model.at(index).shape(pattern), dtype=kind)
        for pattern, entry in VOCABULARY.items()
        if entry.flag is None or model.value(entry.flag)
        for name, index in model.indexed_names(pattern)
        if layers is None or layer_number(name) in layers
    }
    return CanonicalView(
        dialect="hf",
        tensors=tuple(canonical.values()),
        placements={n: Placement.identity(n, t.shape) for n, t in canonical.items()},
        canonical=canonical,
        config=config,
    )


_OWN_MTP_END = re.compile(r"mtp\.\d+\.(?:embed|head)\.weight")


def refuse_own_mtp_ends(unplaced: Sequence[str], source: CanonicalView, dialect: str) -> None:
    """Refuse to leave out an embedding or a head of multi-token prediction's own.

    Raises:
        MappingError: one of the tensors without a place is such; the message names it.
    """
    own = [n for n in unplaced if _OWN_MTP_END.fullmatch(n)]
    if not own:
        return
    stored = [source.placements[n].stored for n in own]
    excluded = " ".join(f"--exclude '{name}'" for name in stored)
    what = "embedding" if own[0].endswith("embed.weight") else "output layer"
    raise MappingError(
        f"multi-token prediction has an {what} of its own; {dialect!r} has the model's",
        tensor=", ".join(stored),
        hint=f"--to hf keeps it; {excluded} leaves it out, which drafts other tokens",
        error_id="unsupported-model",
    )
