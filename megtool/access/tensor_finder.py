"""The tensors of a checkpoint by the names and optimizer states that a state dict asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megtool.access.naming import NamedTensors, fitting_namings
from megtool.access.read_boxes import BoxReader
from megtool.access.wrapped_names import unwrapped_names
from megtool.convert.language.mapping import Row
from megtool.convert.megatron.names import split_optimizer
from megtool.convert.rank_tensors import LocalTensor
from megtool.dtypes import DType
from megtool.source.checkpoint import CheckpointSource

_HEAD = "lm_head.weight"
_MODEL_PARTS = ("model.", "app.model.")
"""What a state dict of several parts puts before the names of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMatch:
    """A tensor under one of the namings, which also says how it is read."""

    naming: NamingIndex
    name: str

    @property
    def tensor(self) -> LocalTensor:
        """Its shape and boxes."""
        return self.naming.named.tensors[self.name]

    @property
    def dtype(self) -> DType:
        """Its type in the checkpoint."""
        return self.naming.named.dtypes[self.name]


class NamingIndex:
    """One naming, with its tensors by optimizer state (`""`: weights) and name."""

    def __init__(self, source: CheckpointSource, named: NamedTensors, threads: int | None) -> None:
        self.named = named
        self._source, self._threads = source, threads
        self._reader: BoxReader | None = None
        self.index: dict[tuple[str, str], str] = {("", name): name for name in named.tensors}
        for name in named.tensors:
            state, _, key = split_optimizer(name)
            if state:
                self.index.setdefault((state, key), name)

    @property
    def reader(self) -> BoxReader:
        """What reads boxes of the tensors."""
        if self._reader is None:
            named = self.named
            self._reader = BoxReader(
                self._source.catalogue, named.source, named.target, threads=self._threads
            )
        return self._reader


class TensorFinder:
    """Finds tensors under all names that they have, or under those of one naming.

    A naming is planned when a name is asked for that those before it do not have.

    Raises:
        MappingError: `naming` needs a model that is not known.
    """

    def __init__(
        self, source: CheckpointSource, naming: str | None = None, *, threads: int | None = None
    ) -> None:
        self._source, self._threads = source, threads
        self._indices: list[NamingIndex] = []
        self._more = fitting_namings(source, naming)
        if naming is not None:
            next(self._namings())

    def find(self, name: str, state: str = "", prefix: str = "") -> TensorMatch | None:
        """A tensor by its name behind `prefix`, or a state of the weight of that name.

        What PyTorch's wrappers put into the name is left out if no tensor is called so; without
        `prefix`, what a state dict of several parts puts before it, too.
        """
        if prefix:
            names = [*unwrapped_names(name.removeprefix(prefix))] if name.startswith(prefix) else []
        else:
            unwrapped = [*unwrapped_names(name)]
            parts = [(n, p) for n in unwrapped for p in ("", *_MODEL_PARTS) if n.startswith(p)]
            names = [n.removeprefix(p) for n, p in parts]
        for each in dict.fromkeys(names):
            for naming in self._namings():
                if (tensor := naming.index.get((state, each))) is not None:
                    return TensorMatch(naming=naming, name=tensor)
        return None

    def names(self) -> Iterator[str]:
        """The names of all tensors under the naming, or the stored ones."""
        first = next(self._namings(), None)
        yield from first.named.tensors if first is not None else ()

    def _namings(self) -> Iterator[NamingIndex]:
        yield from self._indices
        for named in self._more:
            if named.naming == "hf":
                named = _with_tied_head(self._source, named)
            naming = NamingIndex(self._source, named, self._threads)
            self._indices.append(naming)
            yield naming


def _with_tied_head(source: CheckpointSource, named: NamedTensors) -> NamedTensors:
    """The tensors, and the output matrix of a tied model, which files lack and state dicts have."""
    tensors, dtypes = dict(named.tensors), dict(named.dtypes)
    for canonical, embedding in named.target.placements.items():
        if canonical.rpartition(":")[2] != "embed.weight" or not embedding.is_identity:
            continue
        for head in _head_names(source):
            name = embedding.stored.replace(_bare(embedding.stored), head)
            if name not in tensors:
                tensors[name] = replace(tensors[embedding.stored], name=name)
                dtypes[name] = dtypes[embedding.stored]
    return replace(named, tensors=tensors, dtypes=dtypes)


def _bare(name: str) -> str:
    return split_optimizer(name)[2]


def _head_names(source: CheckpointSource) -> set[str]:
    """What the output matrix is called in state dicts of the family's model."""
    family = source.model.family if source.model else None
    rows = [r for r in family.hf if isinstance(r, Row)] if family else []
    return {r.stored for r in rows if r.word == "head.weight"} or {_HEAD}
