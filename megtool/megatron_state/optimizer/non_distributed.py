"""Read the state of a non-distributed optimizer, which rank files number.

`Float16OptimizerWithFloat16Params` keeps one tensor per parameter and state, numbered through its
param groups; within a group, parameters follow as they are registered. Source: megatron-core
0.16.1, `optimizer/optimizer.py` and `optimizer/__init__.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.convert.megatron.rank_parameters import Parameter
from megtool.errors import FormatError
from megtool.megatron_state.optimizer.box_runs import BoxRunCollector, split_into_boxes
from megtool.megatron_state.optimizer.master_weight_check import find_mismatch
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.rechunk import rechunk

NUMBERED = re.compile(
    r"([^/]+)/model_optim_rng/optimizer/(?:optimizer/state/(\d+)/(\w+)"
    r"|fp32_from_fp16_params/(\d+)/(\d+))"
)
_HINT = "--optimizer-format none leaves the optimizer out"


def has_numbered_state(catalogue: Catalogue) -> bool:
    """Whether the rank files have state of a non-distributed optimizer."""
    return any(NUMBERED.fullmatch(t.name) for t in catalogue.tensors)


def read_numbered_state(
    catalogue: Catalogue,
    members: Mapping[str, Sequence[Parameter]],
    *,
    verify_master_weights: bool = False,
) -> Catalogue:
    """The catalogue with numbered state as `optimizer.state.STATE.KEY`, one tensor per layer.

    `catalogue` holds the weights in model space, `members` every rank folder's parameters as they
    are registered. `verify_master_weights` compares all master weights with the model's.

    Raises:
        FormatError: groups that do not fit the parameters, or master weights of another model.
    """
    collected = BoxRunCollector()
    index = catalogue.index
    for folder, parameters in members.items():
        for name, state, p in _list_numbered(catalogue, folder, parameters):
            if p.is_unused:
                continue
            stored = catalogue.tensors[index[name]]
            if stored.shape != p.local_shape:
                raise FormatError(
                    f"the state of a parameter {p.key!r} of {list(p.local_shape)} has shape "
                    f"{list(stored.shape)}",
                    file=catalogue.root / folder,
                    tensor=name,
                    hint=f"the optimizer belongs to another model; {_HINT}",
                )
            tensor = GlobalTensor(
                name=f"optimizer.state.{state}.{p.key}", shape=p.shape, dtype=stored.dtype
            )
            row = catalogue.shards.of(index[name]).start
            for box, position in split_into_boxes(p, 0, p.numel):
                collected.add(tensor, box, row, position)
    out = rechunk(catalogue, lambda n: NUMBERED.fullmatch(n) is None, collected.regrouping())
    mismatch = find_mismatch(out, catalogue, verify_master_weights=verify_master_weights)
    if mismatch is not None:
        raise mismatch.to_error(catalogue.root)
    return out


def _list_numbered(
    catalogue: Catalogue, folder: str, parameters: Sequence[Parameter]
) -> Iterator[tuple[str, str, Parameter]]:
    """Every stored state tensor of a rank, with its state and its parameter."""
    groups = _read_param_groups(catalogue, folder)
    parameters_of = _split_by_group(groups, parameters, catalogue, folder)
    of_number: dict[int, Parameter] = {}
    for group, group_parameters in zip(groups, parameters_of, strict=True):
        numbers = group["params"]
        of_number |= dict(zip(numbers, group_parameters, strict=True))
    prefix = f"{folder}/"
    for t in catalogue.tensors:
        match = NUMBERED.fullmatch(t.name) if t.name.startswith(prefix) else None
        if match is None:
            continue
        if match[2] is not None:
            number, state = int(match[2]), match[3]
            if state == "step":
                continue
            yield t.name, state, of_number[number]
        else:
            yield t.name, "param", parameters_of[int(match[4])][int(match[5])]


def _read_param_groups(catalogue: Catalogue, folder: str) -> list[dict[str, Any]]:
    tree = catalogue.metadata["rank_trees"].get(folder)
    optimizer = tree.get("optimizer") if isinstance(tree, dict) else None
    inner = optimizer.get("optimizer") if isinstance(optimizer, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise FormatError(
            "the optimizer's param groups are missing", file=catalogue.root / folder, hint=_HINT
        )
    return groups


def _split_by_group(
    groups: Sequence[Mapping[str, Any]],
    parameters: Sequence[Parameter],
    catalogue: Catalogue,
    folder: str,
) -> list[list[Parameter]]:
    """Each group's parameters: biases and 1-d parameters are in groups without weight decay."""
    if len(groups) == 1:
        parameters_of = [list(parameters)]
    else:
        decay_values = {bool(g.get("wd_mult", 1.0)) for g in groups}
        if len(groups) > 2 or len(decay_values) != 2:
            raise FormatError(
                f"{len(groups)} param groups that differ in more than weight decay",
                file=catalogue.root / folder,
                hint=_HINT,
            )
        parameters_of = [
            [p for p in parameters if _has_weight_decay(p) == bool(g.get("wd_mult", 1.0))]
            for g in groups
        ]
    for group, group_parameters in zip(groups, parameters_of, strict=True):
        if len(group["params"]) != len(group_parameters):
            raise FormatError(
                f"a param group of {len(group['params'])} parameters, where the model has "
                f"{len(group_parameters)}",
                file=catalogue.root / folder,
                hint=f"the optimizer belongs to another model; {_HINT}",
            )
    return parameters_of


def _has_weight_decay(p: Parameter) -> bool:
    return len(p.local_shape) > 1 and not p.key.endswith(".bias")
