"""Names of a state dict with more, or less, in front than those that a family's table has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megtool.convert.language.binding import Binding
from megtool.convert.language.mapping import first_gap
from megtool.tensors.sharded import GlobalTensor

_MAX_PARTS = 4
HEADLESS = (
    "the model has no head, as transformers' AutoModel saves it: `megtool reshard --select '*'` "
    "writes what is there; where it should have one, the checkpoint is incomplete"
)


def without_wrappers(
    tensors: Mapping[str, GlobalTensor], binding: Binding
) -> Mapping[str, GlobalTensor]:
    """Return the tensors without the names of wrappers, or of parts of a state dict.

    The shortest is taken off behind which the table knows a name: `model.`, `app.model.`,
    `actor.module.`. Names that do not begin with it stay, so that the weights of a second model
    are unknown, and not taken for those of the first. Where there is none, names get what those of
    the table begin with: transformers' models without a head (`AutoModel`) save without `model.`.
    """
    for num_parts in range(_MAX_PARTS + 1):
        wrappers = {".".join(n.split(".")[:num_parts]) for n in tensors if n.count(".") > num_parts}
        for wrapper in sorted(f"{w}." if w else "" for w in wrappers):
            if any(binding.knows(n[len(wrapper) :]) for n in tensors if n.startswith(wrapper)):
                return {n.removeprefix(wrapper): t for n, t in tensors.items()}
    for base in _base_prefixes(binding):
        if any(binding.knows(base + n) for n in tensors):
            return {base + n if binding.knows(base + n) else n: t for n, t in tensors.items()}
    return tensors


def _base_prefixes(binding: Binding) -> list[str]:
    """Return the beginnings of the names of a table's rows, the shortest first."""
    out: dict[str, None] = {}
    for row in binding.rows:
        head, layer, _ = row.stored.partition(".layers.{l}.")
        parts = head.split(".") if layer else row.stored.split(".")[:1]
        if "{" not in "".join(parts):
            out |= dict.fromkeys(".".join(parts[: k + 1]) + "." for k in range(len(parts)))
    return sorted(out, key=lambda prefix: (prefix.count("."), prefix))


def are_of_head(absent: Sequence[str], binding: Binding, present: Collection[str]) -> bool:
    """Return whether the absent tensors all lie outside the body of transformers' class."""
    stored = [first_gap(binding.rows, binding.model, name, present) for name in absent[:32]]
    bodies = tuple(
        {row.stored.partition(".")[0] + "." for row in binding.rows if "{l}" in row.stored}
    )
    return all(gap is not None and not gap[0].startswith(bodies) for gap in stored)
