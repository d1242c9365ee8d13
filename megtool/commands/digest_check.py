"""Kept: the digests beside a checkpoint, and which of its tensors they are held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megtool.checkpoint.compare import ComparedSource, TensorPair
from megtool.checkpoint.digest import SIDECAR, TensorDigest
from megtool.checkpoint.read import CheckpointReader
from megtool.commands.verify_report import Difference, DigestCheck
from megtool.errors import MappingError
from megtool.reshard.source import CheckpointSource
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement


class Kept:
    """The digests of one checkpoint.

    `here` are those of tensors as they are compared anyway; `apart` those of whole stored tensors
    where what is compared is something else, each with its placement. `differences` are what
    needs no reading: a digest of a tensor that is not there, or of another type or shape.
    """

    def __init__(self, opened: CheckpointSource) -> None:
        self.opened = opened
        self.here: dict[str, TensorDigest] = {}
        self.apart: dict[str, TensorDigest] = {}
        self.places: dict[str, Placement] = {}
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        if opened.reason is not None:
            self.notes.append(_unfitting(opened, opened.reason))
        sidecar = opened.sidecar
        known: Mapping[str, TensorDigest] = sidecar.tensors if sidecar else {}
        by_stored = sidecar is not None and sidecar.names == "stored"
        if sidecar and not by_stored and not opened.is_canonical:
            self.notes.append(
                f"the digests of {opened.path} are not used: they have canonical names, and the "
                "model is not known (--family and --like say which it is)"
            )
            known = {}
        for name, digest in known.items():
            self._sort(name, digest, by_stored=by_stored)
        self.unverified = tuple(
            name
            for name, p in opened.view.placements.items()
            if (p.stored if by_stored else name) not in known
        )

    def _sort(self, name: str, digest: TensorDigest, *, by_stored: bool) -> None:
        opened, shape = self.opened, digest.shape
        compared = None if by_stored and opened.is_canonical else opened.view.canonical.get(name)
        held = compared
        if by_stored and name in opened.catalogue:
            held = opened.catalogue[name]
        if held is None:
            self.differences.append(
                Difference(
                    tensor=name, stored=name, kind="missing", text="has a digest, but is not there"
                )
            )
        elif compared is not None and (shape, digest.dtype) == (compared.shape, compared.dtype):
            self.here[name] = digest
        elif (
            by_stored
            and digest.dtype == held.dtype
            and len(shape) == len(held.shape)
            and shape[1:] == held.shape[1:]
            and shape[:1] <= held.shape[:1]
        ):
            self.apart[name] = digest
            self.places[name] = Placement.identity(name, shape)
        else:
            self._differ(
                name,
                f"it is {held.dtype} {list(held.shape)}, but its digest is of {digest.dtype} "
                f"{list(shape)}",
            )

    def half(self, reader: CheckpointReader) -> ComparedSource:
        """This side of the comparison, with the digests of `here` computed on the way."""
        return ComparedSource(reader=reader, sizes=_sizes(self.here))

    def rest(self, reader: CheckpointReader) -> tuple[list[TensorPair], ComparedSource]:
        """What has to be read for `apart`."""
        pairs = [TensorPair(name=name, a=place, b=None) for name, place in self.places.items()]
        return pairs, ComparedSource(reader=reader, sizes=_sizes(self.apart))

    def hold(self, half: ComparedSource) -> None:
        """Hold the digests that were computed against those kept."""
        for name in half.sizes:
            kept = self.here[name] if name in self.here else self.apart[name]
            found = half.digests.get(name) if half.digests else None
            if found != kept.crc32c:
                self._differ(
                    name,
                    f"its bytes have the CRC-32C {found or 0:08x}, but {SIDECAR} of "
                    f"{self.opened.path} says {kept.crc32c:08x}",
                )

    def _differ(self, name: str, text: str) -> None:
        place = self.opened.view.placements.get(name)
        stored = name if place is None or name in self.apart else place.stored
        self.differences.append(Difference(tensor=name, stored=stored, kind="digest", text=text))

    def check(self) -> DigestCheck:
        """The counts."""
        wrong = {d.tensor for d in self.differences if d.kind == "digest"}
        read = [*self.here, *self.apart]
        return DigestCheck(
            path=str(self.opened.path),
            holding=sum(name not in wrong for name in read),
            differing=len(wrong),
            unverified=self.unverified,
        )

    def alone(self) -> Iterator[TensorPair]:
        """What has to be read for `here` where nothing is compared."""
        for name in self.here:
            yield TensorPair(name=name, a=self.opened.view.placements[name], b=None)


def _unfitting(opened: CheckpointSource, reason: MappingError) -> str:
    """Why a checkpoint is not read as the model it says it is, and what to do about it."""
    instead = (
        "the other's model is used"
        if opened.is_canonical
        else "its tensors keep stored names, and none of the model's is missed"
    )
    hint = f"; hint: {reason.hint}" if reason.hint else ""
    return f"{opened.path}: {reason.message}; {instead}{hint}"


def _sizes(digests: Mapping[str, TensorDigest]) -> dict[str, int]:
    return {name: numel(d.shape) * d.dtype.itemsize for name, d in digests.items()}
