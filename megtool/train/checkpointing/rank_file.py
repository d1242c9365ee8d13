"""The data file of a rank in a save: planned once, and filled in each save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from megtool.digests.crc32c import StoredDigest
from megtool.formats.save_folder import folder_name
from megtool.formats.torch_dist.layout import CONFIG_FILE, MegatronSave, plan_torch_dist_layout
from megtool.tensors.catalogue import Destination
from megtool.train.checkpointing.host_snapshot import LiveShards
from megtool.train.checkpointing.save_layout import SaveLayout
from megtool.train.checkpointing.staged_iteration import Elements, StagedIteration

_FOLDER = folder_name(None) + "/"


class RankDataFile:
    """The file of `rank` of `size` ranks, for saves with the same layout.

    Objects are at the beginning of the first rank's file; the other files do not depend on them.
    """

    def __init__(self, layout: SaveLayout, *, rank: int, size: int) -> None:
        self._layout, self._rank, self._size = layout, rank, size
        self._planned: Destination | None = None
        self._sizes: list[tuple[str, int]] = []

    def plan(self, objects: Mapping[str, bytes]) -> Destination:
        """Plan all files; again only if names or sizes of objects have changed, which is rare."""
        sizes = [(name, len(item)) for name, item in objects.items()]
        planned = self._planned
        if planned is None or sizes != self._sizes:
            self._sizes = sizes
            self._planned = plan_torch_dist_layout(
                self._layout.tensors,
                self._layout.shards,
                num_files=self._size,
                objects=objects or {"nothing/shard_0_1": b""},
                megatron=MegatronSave(common={}),
            )
            return self._planned
        fragments = list(planned.fragments)
        first = next(
            (i for i, (k, offset, _) in enumerate(fragments) if (k, offset) == (0, 0)), None
        )
        if first is not None and objects:
            remainder = fragments[first][2][sum(length for _, length in sizes) :]
            fragments[first] = 0, 0, b"".join(objects.values()) + remainder
        return Destination(
            catalogue=planned.catalogue,
            fragments=fragments,
            small_files=planned.small_files,
            final_files=planned.final_files,
        )

    def write(
        self, place: StagedIteration, planned: Destination, rows: Mapping[int, Tensor] | LiveShards
    ) -> None:
        """Write this rank's file, if it has one; `rows` has the elements of its shards."""
        catalogue = planned.catalogue
        name = f"__{self._rank}_0.distcp"
        number = next((i for i, f in enumerate(catalogue.files) if f.path == _FOLDER + name), None)
        if number is None:
            return
        fragments = [(offset, data) for file, offset, data in planned.fragments if file == number]
        elements = self._elements(planned, rows)
        shards = self._shards(planned, name)
        place.write(name, catalogue.files[number].size, fragments, elements, shards)

    def _shards(self, planned: Destination, file: str) -> dict[str, StoredDigest]:
        """This rank's shards, by tensor and box; their digests are not known yet."""
        layout, extents, out = self._layout, planned.catalogue.extents, {}
        for row in layout.parts:
            tensor = layout.tensors[int(layout.shards.tensor[row])]
            ndim = len(tensor.shape)
            lo = layout.shards.boxes.lo[row, :ndim].tolist()
            hi = layout.shards.boxes.hi[row, :ndim].tolist()
            is_whole = tuple(hi) == tensor.shape and not any(lo)
            box = ", ".join(f"{a}:{b}" for a, b in zip(lo, hi, strict=True))
            out[tensor.name if is_whole else f"{tensor.name}[{box}]"] = StoredDigest(
                crc32c=0,
                dtype=tensor.dtype,
                shape=tuple(b - a for a, b in zip(lo, hi, strict=True)),
                file=file,
                begin=int(extents.offset[row]),
                size=int(extents.length[row]),
            )
        return out

    def _elements(
        self, planned: Destination, rows: Mapping[int, Tensor] | LiveShards
    ) -> Iterator[Elements]:
        offsets = planned.catalogue.extents.offset
        for row in self._layout.parts:
            kind = self._layout.tensors[int(self._layout.shards.tensor[row])].dtype
            yield int(offsets[row]), kind, partial(rows.__getitem__, row)


def metadata_files(planned: Destination) -> tuple[bytes, bytes]:
    """The `.metadata` of all files, and the file that marks a folder as complete."""
    return planned.small_files[f"{_FOLDER}.metadata"], planned.final_files[
        f"{_FOLDER}{CONFIG_FILE}"
    ]
