"""Rank file: one rank's data file of a save, laid out once and filled every time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from megtool.checkpoint.catalogue import Destination
from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.formats.torch_dist_layout import CONFIG_FILE, lay_out
from megtool.train.checkpointing.host_snapshot import LiveRows
from megtool.train.checkpointing.save_layout import Layout
from megtool.train.checkpointing.staged_iteration import Elements, IterationFolder

_FOLDER = folder_name(None) + "/"


class RankFile:
    """The file of `rank` among those of `size` ranks, for saves that all have one layout.

    Objects lie at the beginning of the first rank's file; of the others' nothing depends on them.
    """

    def __init__(self, layout: Layout, *, rank: int, size: int) -> None:
        self._layout, self._rank, self._size = layout, rank, size
        self._laid: Destination | None = None
        self._known: list[tuple[str, int]] = []

    def lay_out(self, objects: Mapping[str, bytes]) -> Destination:
        """All files; laid out anew only if objects changed in name or size, as they rarely do."""
        known = [(name, len(item)) for name, item in objects.items()]
        laid = self._laid
        if laid is None or known != self._known:
            self._known = known
            self._laid = lay_out(
                self._layout.tensors,
                self._layout.shards,
                num_files=self._size,
                objects=objects or {"nothing/shard_0_1": b""},
                common={},
                iteration=None,
                megatron=True,
            )
            return self._laid
        fragments = list(laid.fragments)
        first = next((i for i, (k, at, _) in enumerate(fragments) if (k, at) == (0, 0)), None)
        if first is not None and objects:
            rest = fragments[first][2][sum(length for _, length in known) :]
            fragments[first] = 0, 0, b"".join(objects.values()) + rest
        return Destination(
            catalogue=laid.catalogue, fragments=fragments, small=laid.small, last=laid.last
        )

    def write(
        self, place: IterationFolder, laid: Destination, rows: Mapping[int, Tensor] | LiveRows
    ) -> None:
        """Write this rank's file, if it has one; `rows` are the elements of its shards."""
        held = laid.catalogue
        name = f"__{self._rank}_0.distcp"
        number = next((i for i, f in enumerate(held.files) if f.path == _FOLDER + name), None)
        if number is None:
            return
        fragments = [(at, data) for file, at, data in laid.fragments if file == number]
        place.write(name, held.files[number].size, fragments, self._elements(laid, rows))

    def _elements(
        self, laid: Destination, rows: Mapping[int, Tensor] | LiveRows
    ) -> Iterator[Elements]:
        offsets = laid.catalogue.extents.offset
        for row in self._layout.parts:
            kind = self._layout.tensors[int(self._layout.shards.tensor[row])].dtype
            yield int(offsets[row]), kind, partial(rows.__getitem__, row)


def marks_of(laid: Destination) -> tuple[bytes, bytes]:
    """The `.metadata` of all files, and the file that marks a folder as complete."""
    return laid.small[f"{_FOLDER}.metadata"], laid.last[f"{_FOLDER}{CONFIG_FILE}"]
