"""Parts of mixers, which `torch_dist` stores one by one, as the tensors that they make."""

from __future__ import annotations

from megtool.convert.megatron.sections import joined, part_names, split_part
from megtool.megatron_state.optimizer.box_runs import BoxRunCollector
from megtool.tensors.catalogue import Catalogue
from megtool.transport.rechunk import rechunk


def join_parts(catalogue: Catalogue) -> Catalogue:
    """The catalogue with whole tensors instead of their parts, over the same bytes.

    Buckets hold parameters, and a parameter is whole. Parts of which some are missing stay.
    """
    groups: dict[str, list[str]] = {}
    for t in catalogue.tensors:
        if split := split_part(t.name):
            groups.setdefault(split[0], []).append(t.name)
    complete = {
        whole: names for whole, stored in groups.items() if (names := part_names(whole, stored))
    }
    if not complete:
        return catalogue
    parts = {name for names in complete.values() for name in names}
    wholes = {t.name: t for t in joined(catalogue[n] for n in parts)}
    collected = BoxRunCollector()
    for whole, names in complete.items():
        first = 0
        for name in names:
            tensor = catalogue[name]
            rows = catalogue.shards.of(catalogue.index[name])
            for row in range(rows.start, rows.stop):
                lo = catalogue.shards.boxes.lo[row, : len(tensor.shape)].tolist()
                hi = catalogue.shards.boxes.hi[row, : len(tensor.shape)].tolist()
                box = [lo[0] + first, *lo[1:]], [hi[0] + first, *hi[1:]]
                collected.add(wholes[whole], box, row, 0)
            first += tensor.shape[0]
    return rechunk(catalogue, lambda name: name not in parts, collected.regrouping())
