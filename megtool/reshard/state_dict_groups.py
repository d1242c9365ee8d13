"""The settings of an optimizer's parameters in a state dict of PyTorch, whichever way it is nested.

`get_optimizer_state_dict` of torch 2.13 makes `param_groups.N.lr` with the names of the parameters
in `param_groups.N.params`, or, flattened, `param_groups.NAME.lr`; DeepSpeed has a list of groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.containers.pickle_reader import dict_items
from megtool.checkpoint.formats import STATE_DICT_FORMATS
from megtool.checkpoint.megatron_metadata import read_object
from megtool.checkpoint.param_groups import OptimizerGroups
from megtool.checkpoint.read import CheckpointReader
from megtool.checkpoint.storage.files import Files
from megtool.convert.megatron import split_optimizer

_SETTING = re.compile(r"(?:.*\.)?optim(?:izer)?\.param_groups\.(.+)\.([^.]+)")
_LIST = "optimizer.param_groups"
PARAMS, STEP = "params", "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictGroup:
    """The settings that parameters share; `params` is None where their names are not known."""

    params: tuple[str, ...] | None
    settings: Mapping[str, Any]


def read_state_dict_groups(catalogue: Catalogue) -> list[StateDictGroup]:
    """Read the groups from a checkpoint's objects; none if it has none.

    Raises:
        FormatError: an object is damaged, or names what no checkpoint needs.
    """
    listed = catalogue.objects.get(_LIST)
    if listed is not None:
        return list(_from_list(read_object(catalogue, listed)))
    if catalogue.format not in STATE_DICT_FORMATS:
        return []
    by_key: dict[str, dict[str, Any]] = {}
    for name, stored in catalogue.objects.items():
        if match := _SETTING.fullmatch(name):
            by_key.setdefault(match[1], {})[match[2]] = read_object(catalogue, stored)
    return list(_joined(by_key))


def make_group_state(catalogue: Catalogue) -> OptimizerGroups | None:
    """The groups as Megatron has them, with the step that all parameters share; None if none.

    Megatron tells groups apart by `wd_mult`, which is 0 for parameters without weight decay.

    Raises:
        FormatError: an object or a step is damaged.
    """
    groups = [dict(g.settings) for g in read_state_dict_groups(catalogue)]
    if not groups:
        return None
    steps = set(read_steps(catalogue).values())
    for settings in groups:
        if len(steps) == 1:
            settings.setdefault(STEP, int(*steps))
        settings.setdefault("wd_mult", 0.0 if settings.get("weight_decay") == 0 else 1.0)
        settings |= {"lr_mult": 1.0, "is_expert_parallel": False}
    return OptimizerGroups(chain=({"optimizer": {"param_groups": groups}},))


def is_group_entry(name: str) -> bool:
    """Whether an object is a setting of a state dict's param groups, or a list of groups."""
    return name == _LIST or _SETTING.fullmatch(name) is not None


def read_steps(catalogue: Catalogue) -> dict[str, float]:
    """Read how many steps each parameter was trained, from state dicts that have it per parameter.

    Raises:
        FormatError: a step is damaged.
    """
    out = {}
    with CheckpointReader(catalogue, Files()) as reader:
        for tensor in catalogue.tensors:
            state, _, name = split_optimizer(tensor.name)
            if state == STEP and tensor.numel == 1 and tensor.dtype.name == "float32":
                out[name] = float(reader.open_stored(tensor.name).read().reshape(-1)[0])
    return out


def _from_list(groups: Any) -> Iterator[StateDictGroup]:
    for group in groups if isinstance(groups, list) else ():
        settings = dict(dict_items(group) or ())
        yield StateDictGroup(params=None, settings=_without_params(settings))


def _joined(by_key: Mapping[str, dict[str, Any]]) -> Iterator[StateDictGroup]:
    """Groups; parameters with equal settings of their own become one."""
    single: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for key, settings in by_key.items():
        if key.isdigit():
            names = settings.get(PARAMS)
            names = [names] if isinstance(names, str) else names  # read_object unwraps one
            is_named = isinstance(names, list) and all(isinstance(n, str) for n in names)
            yield StateDictGroup(
                params=tuple(names) if is_named and names else None,
                settings=_without_params(settings),
            )
        else:
            single.setdefault(repr(sorted(settings.items())), ([], settings))[0].append(key)
    for names, settings in single.values():
        yield StateDictGroup(params=tuple(names), settings=_without_params(settings))


def _without_params(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {str(k): v for k, v in settings.items() if k != PARAMS}
