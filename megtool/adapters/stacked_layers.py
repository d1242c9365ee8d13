"""Matrices that Megatron stacks over layers, as those of single layers."""

from __future__ import annotations

import re
from dataclasses import replace

from megtool.adapters.stored_adapter import AdaptedWeight, LazyMatrix

_STACK = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")


def is_stacked(name: str) -> bool:
    """Whether a name is that of a weight of all layers."""
    return _STACK.search(name) is not None


def unstack(weight: AdaptedWeight) -> list[AdaptedWeight]:
    """A weight of stacked layers as one of each; a single one is returned alone."""
    stack = _STACK.search(weight.name)
    if stack is None:
        return [weight]
    begin, end = weight.name[: stack.end()], weight.name[stack.end() :]

    def of(matrix: LazyMatrix, number: int) -> LazyMatrix:
        return matrix.derive(lambda tensor: tensor[number], matrix.shape[1:])

    return [
        replace(
            weight,
            name=f"{begin}{number}.{end}",
            down=of(weight.down, number),
            up=of(weight.up, number),
        )
        for number in range(weight.down.shape[0])
    ]
