"""Check that the parts of a model beside its text are whole.

Their tensors are carried without a table of names. What must be there is known of three things: a
part of which the family says that it is required, the tensors that it names outside of layers, and
a stack of layers, which have the same tensors in each, as many of them as the part's settings
count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megtool.convert.families.family import Family
from megtool.convert.language.mapping import Tower
from megtool.errors import MappingError

_LAYER = re.compile(r"(.*?\.|)(\d+)\.(.+\.)(weight|bias|qweight|weight_packed)")
_AS_WEIGHT = re.compile(r"\.(?:qweight|weight_packed)$")
_STACKS = ("layers.", "layer.", "blocks.")
_COUNTS = ("num_hidden_layers", "num_layers", "depth")
_LEAST_SIBLINGS = 3
"""So many equal layers say what another has, if no settings do."""


def check_towers(family: Family, canonical: Collection[str], settings: Mapping[str, Any]) -> None:
    """Check that every part of a larger model is there, with what projects its outputs.

    `settings` are the keys of config.json beside the text model's.

    Raises:
        MappingError: a part has no tensor, or lacks one that it has in every model, or a layer
            lacks one that the others have.
    """
    for tower in family.towers:
        own = [n.removeprefix(tower.name) for n in canonical if n.startswith(tower.name)]
        if not own and tower.is_required:
            raise _no_part(family, tower, tower.name)
        if own and tower.projector and not any(n.startswith(tower.projector) for n in canonical):
            raise _no_part(family, tower, tower.projector)
        stored = {f".{_AS_WEIGHT.sub('.weight', n)}" for n in own}
        for end in _ends(tower, settings) if own else ():
            if not any(n.endswith(f".{end}") for n in stored):
                raise _no_tensor(tower.prefixes[0] + end, "every such part of a model has")
        if (lacks := find_gap(own, count_layers(tower.name, settings))) is not None:
            raise _no_tensor(tower.prefixes[0] + lacks, "the other layers of its stack have")


def count_layers(tower: str, settings: Mapping[str, Any]) -> frozenset[int]:
    """The numbers of layers that a part's settings in config.json state; empty if they do not."""
    keys = _settings_of(tower, settings).items()
    counts = (v for k, v in keys if isinstance(k, str) and k.endswith(_COUNTS))
    return frozenset(n for n in counts if isinstance(n, int) and n > 1)


def _settings_of(tower: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    part = settings.get("audio_config" if "audio" in tower else "vision_config")
    return part if isinstance(part, Mapping) else {}


def _ends(tower: Tower, settings: Mapping[str, Any]) -> Iterator[str]:
    """What the names of a part's tensors outside of layers end with."""
    listed = _settings_of(tower.name, settings).get(tower.entries)
    number = len(listed) if isinstance(listed, list | tuple) else 0
    for end in tower.ends:
        copies = range(number) if "{n}" in end else (0,)
        yield from (end.replace("{n}", str(n)) for n in copies)


def find_gap(names: Iterable[str], counts: frozenset[int]) -> str | None:
    """The first tensor that a layer of a stack lacks; None if every stack is whole.

    A stack of a length in `counts` is one of equal layers, and so is the longest of those that are
    shorter, with layers missing at its end. Any other stack is one if its layers are equal but for
    a single one: a sequence of different modules has numbers too. A packed weight counts as one.
    """
    stacks: dict[str, dict[int, set[str]]] = {}
    for name in names:
        if (match := _LAYER.fullmatch(name)) is not None:
            own = stacks.setdefault(match[1], {}).setdefault(int(match[2]), set())
            own.add(match[3] + ("bias" if match[4] == "bias" else "weight"))
    lengths = {begin: max(layers) + 1 for begin, layers in stacks.items()}
    named = [begin for begin in stacks if begin.endswith(_STACKS)]
    if named and counts.isdisjoint(lengths.values()):
        longest = max(named, key=lengths.__getitem__)
        more = [n for n in counts if n > lengths[longest]]
        lengths[longest] = min(more, default=lengths[longest])
    for begin, layers in stacks.items():
        length = lengths[begin]
        whole = _of_most(layers) if length in counts else _of_all_but_one(layers)
        for number in range(length):
            if lacking := sorted(whole - layers.get(number, set())):
                return f"{begin}{number}.{lacking[0]}"
    return None


def _of_most(layers: Mapping[int, set[str]]) -> set[str]:
    """The names that at least half of the layers have."""
    every = set[str]().union(*layers.values())
    return {n for n in every if 2 * sum(n in own for own in layers.values()) >= len(layers)}


def _of_all_but_one(layers: Mapping[int, set[str]]) -> set[str]:
    """The names that all layers have, but for one that has fewer; none if they differ otherwise."""
    every = set[str]().union(*layers.values())
    num_whole = sum(own == every for own in layers.values())
    is_stack = num_whole >= max(_LEAST_SIBLINGS, len(layers) - 1)
    return every if is_stack and any("." in n.rpartition(".")[0] for n in every) else set()


def _no_tensor(name: str, owner: str) -> MappingError:
    return MappingError(
        f"there is no tensor {name!r}, which {owner}",
        tensor=name,
        hint="the checkpoint is incomplete: copy it again, or add the missing file",
        error_id="missing-tensors",
    )


def _no_part(family: Family, tower: Tower, part: str) -> MappingError:
    stored = {t.name: t.prefixes[0] for t in family.towers}
    begin = next(s + part.removeprefix(n) for n, s in stored.items() if part.startswith(n))
    neighbour = f" beside {tower.prefixes[0] + '*'!r}" if part != tower.name else ""
    return MappingError(
        f"there is no tensor {begin + '*'!r}, which every model of family {family.name!r} has"
        + neighbour,
        tensor=begin + "*",
        hint="the checkpoint is incomplete; a text model alone has the class of a text "
        "model in `architectures` of its config.json",
        error_id="missing-tensors",
    )
