"""The digests stored with a checkpoint, and the tensors that they are checked against."""

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


class DigestIndex:
    """The digests of one checkpoint.

    `compared` are those of tensors that are compared as they are; `stored_whole` those of whole
    stored tensors of which something else is compared, each with its placement. `differences` need
    no reading: a digest of a tensor that does not exist, or that has another dtype or shape.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.compared: dict[str, TensorDigest] = {}
        self.stored_whole: dict[str, TensorDigest] = {}
        self.placements: dict[str, Placement] = {}
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        if source.reason is not None:
            self.notes.append(_describe_mismatch(source, source.reason))
        sidecar = source.sidecar
        known: Mapping[str, TensorDigest] = sidecar.tensors if sidecar else {}
        by_stored = sidecar is not None and sidecar.names == "stored"
        if sidecar and not by_stored and not source.is_canonical:
            self.notes.append(
                f"the digests of {source.path} are not used: they have canonical names, and the "
                "model is not known (--family and --like say which it is)"
            )
            known = {}
        for name, digest in known.items():
            self._sort(name, digest, by_stored=by_stored)
        self.unverified = tuple(
            name
            for name, p in source.view.placements.items()
            if (p.stored if by_stored else name) not in known
        )

    def _sort(self, name: str, digest: TensorDigest, *, by_stored: bool) -> None:
        source, shape = self.source, digest.shape
        tensor = None if by_stored and source.is_canonical else source.view.canonical.get(name)
        stored_tensor = tensor
        if by_stored and name in source.catalogue:
            stored_tensor = source.catalogue[name]
        if stored_tensor is None:
            self.differences.append(
                Difference(
                    tensor=name,
                    stored=name,
                    kind="missing",
                    text="has a digest, but does not exist",
                )
            )
        elif tensor is not None and (shape, digest.dtype) == (tensor.shape, tensor.dtype):
            self.compared[name] = digest
        elif (
            by_stored
            and digest.dtype == stored_tensor.dtype
            and len(shape) == len(stored_tensor.shape)
            and shape[1:] == stored_tensor.shape[1:]
            and shape[:1] <= stored_tensor.shape[:1]
        ):
            self.stored_whole[name] = digest
            self.placements[name] = Placement.identity(name, shape)
        else:
            self._differ(
                name,
                f"it is {stored_tensor.dtype} {list(stored_tensor.shape)}, but its digest is of "
                f"{digest.dtype} {list(shape)}",
            )

    def compared_source(self, reader: CheckpointReader) -> ComparedSource:
        """This side of the comparison, with the digests of `compared` computed while reading."""
        return ComparedSource(reader=reader, sizes=_sizes(self.compared))

    def plan_stored_reads(
        self, reader: CheckpointReader
    ) -> tuple[list[TensorPair], ComparedSource]:
        """What is read for `stored_whole`."""
        pairs = [
            TensorPair(name=name, a=placement, b=None)
            for name, placement in self.placements.items()
        ]
        return pairs, ComparedSource(reader=reader, sizes=_sizes(self.stored_whole))

    def check_computed(self, computed_source: ComparedSource) -> None:
        """Compare the computed digests with the stored ones."""
        for name in computed_source.sizes:
            expected = self.compared[name] if name in self.compared else self.stored_whole[name]
            computed = computed_source.digests.get(name) if computed_source.digests else None
            if computed != expected.crc32c:
                self._differ(
                    name,
                    f"its bytes have the CRC-32C {computed or 0:08x}, but {SIDECAR} of "
                    f"{self.source.path} says {expected.crc32c:08x}",
                )

    def _differ(self, name: str, text: str) -> None:
        placement = self.source.view.placements.get(name)
        stored = name if placement is None or name in self.stored_whole else placement.stored
        self.differences.append(Difference(tensor=name, stored=stored, kind="digest", text=text))

    def summarize(self) -> DigestCheck:
        """Count the digests that match, those that differ, and tensors without one."""
        wrong = {d.tensor for d in self.differences if d.kind == "digest"}
        read = [*self.compared, *self.stored_whole]
        return DigestCheck(
            path=str(self.source.path),
            matching=sum(name not in wrong for name in read),
            differing=len(wrong),
            unverified=self.unverified,
        )

    def plan_reads(self) -> Iterator[TensorPair]:
        """What is read for `compared` if there is no second checkpoint."""
        for name in self.compared:
            yield TensorPair(name=name, a=self.source.view.placements[name], b=None)


def _describe_mismatch(source: CheckpointSource, reason: MappingError) -> str:
    """Why a checkpoint is not read as the model that it declares, and what to do about it."""
    consequence = (
        "the model of the other checkpoint is used"
        if source.is_canonical
        else "its tensors keep their stored names, and missing ones are not detected"
    )
    hint = f"; hint: {reason.hint}" if reason.hint else ""
    return f"{source.path}: {reason.message}; {consequence}{hint}"


def _sizes(digests: Mapping[str, TensorDigest]) -> dict[str, int]:
    return {name: numel(d.shape) * d.dtype.itemsize for name, d in digests.items()}
