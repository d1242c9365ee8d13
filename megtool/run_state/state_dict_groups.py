"""The settings of an optimizer's parameters in a state dict of PyTorch, whichever way it is nested.

`get_optimizer_state_dict` of torch 2.13 makes `param_groups.N.lr` with the names of the parameters
in `param_groups.N.params`, or, flattened, `param_groups.NAME.lr`; DeepSpeed has a list of groups.
Megatron's groups, which name no parameters, become such entries without `params`, and come back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron.names import split_optimizer
from megtool.formats import STATE_DICT_FORMATS
from megtool.megatron_state.param_groups import OptimizerGroups, OptimizerState, read_groups
from megtool.megatron_state.saved_objects import read_object
from megtool.pickles.reader import dict_items
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.reading.reader import CheckpointReader

if TYPE_CHECKING:
    from megtool.formats.torch_checkpointing.metadata import NestedPath

_SETTING = re.compile(r"(?:.*\.)?optim(?:izer)?\.param_groups\.(.+)\.([^.]+)")
_LIST = "optimizer.param_groups"
_SCALER = "optimizer.grad_scaler"
_EXPERT = "is_expert_parallel"
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


def read_any_groups(catalogue: Catalogue) -> OptimizerGroups | None:
    """The optimizer's small state of any format, as Megatron has it; None if there is none.

    Raises:
        FormatError: an object or a step is damaged.
    """
    return read_groups(catalogue) or _make_group_state(catalogue)


def make_group_entries(
    catalogue: Catalogue, tensors: Iterable[GlobalTensor]
) -> dict[str, tuple[NestedPath, Any]]:
    """Megatron's groups as entries of a state dict with `tensors`: places and values, by name.

    Those of the experts' optimizer follow the dense one's. The loss scale is one entry. There are
    none without optimizer state, or if the checkpoint has such entries already.

    Raises:
        FormatError: an object is damaged.
    """
    out: dict[str, tuple[NestedPath, Any]] = {}
    has_state = any(is_optimizer_state(t.name) for t in tensors)
    is_other = catalogue.format not in STATE_DICT_FORMATS
    groups = read_groups(catalogue) if has_state and is_other else None
    number = 0
    for state in groups.chain if groups else ():
        inner = state.get("optimizer")
        for group in inner.get("param_groups", ()) if isinstance(inner, Mapping) else ():
            for key, value in group.items():
                out[f"{_LIST}.{number}.{key}"] = (*_LIST.split("."), number, str(key)), value
            number += 1
        if (scaler := state.get("grad_scaler")) is not None:
            out.setdefault(_SCALER, (tuple(_SCALER.split(".")), scaler))
    return out


def _make_group_state(catalogue: Catalogue) -> OptimizerGroups | None:
    """The groups as Megatron has them, with the step that all parameters share; None if none.

    Megatron tells groups apart by `wd_mult`, which is 0 for parameters without weight decay.
    Those of experts that are spread over ranks are another optimizer's.

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
        settings.setdefault("lr_mult", 1.0)
        settings.setdefault(_EXPERT, False)
    more: OptimizerState = {}
    if (scaler := catalogue.objects.get(_SCALER)) is not None:
        more["grad_scaler"] = read_object(catalogue, scaler)
    parts = [[g for g in groups if bool(g[_EXPERT]) == is_expert] for is_expert in (False, True)]
    return OptimizerGroups(
        chain=tuple({"optimizer": {"param_groups": part}} | more for part in parts if part)
    )


def is_group_entry(name: str) -> bool:
    """Whether an object is a setting of a state dict's param groups, all of them, or its scale."""
    return name in (_LIST, _SCALER) or _SETTING.fullmatch(name) is not None


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
