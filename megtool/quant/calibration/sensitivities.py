"""Sensitivities: what rounding each unit alone costs, kept so that another budget needs no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megtool.errors import FormatError

SensitivityMethod = Literal["kl_div", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """Losses by unit and by format (`units.key_of`), in nats a token over `num_tokens` tokens.

    `kl_div` is the divergence of the model's answers from those of the model as it was; `gradient`
    estimates the same from one backward pass, to within a factor that is alike for all.
    """

    method: SensitivityMethod
    num_tokens: int
    losses: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        """As plain data; numbers come back exactly."""
        return {
            "method": self.method,
            "num_tokens": self.num_tokens,
            "losses": {unit: dict(some) for unit, some in self.losses.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Sensitivities:
        """From what `to_json` gave.

        Raises:
            FormatError: it is something else.
        """
        try:
            method, tokens, losses = value["method"], value["num_tokens"], value["losses"]
            parsed = {
                str(unit): {str(key): float(loss) for key, loss in some.items()}
                for unit, some in losses.items()
            }
            count = int(tokens)
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as e:
            raise FormatError(f"no sensitivities: {e}") from e
        if method not in ("kl_div", "gradient") or count < 1:
            raise FormatError(f"sensitivities by {method!r} over {tokens!r} tokens")
        if any(not 0 <= x < math.inf for some in parsed.values() for x in some.values()):
            raise FormatError("sensitivities hold what is no loss")
        return cls(method=method, num_tokens=count, losses=parsed)


def merge_sensitivities(parts: Sequence[Sensitivities]) -> Sensitivities | None:
    """Of several machines' sensitivities the mean over all of their tokens, of what every one knows
    about; None where they were measured in different ways, or there are none."""
    methods = {part.method for part in parts}
    if len(methods) != 1:
        return None
    tokens = sum(part.num_tokens for part in parts)
    losses = {
        unit: {
            key: math.fsum(p.losses[unit][key] * p.num_tokens for p in parts) / tokens
            for key in some
            if all(key in p.losses.get(unit, {}) for p in parts)
        }
        for unit, some in parts[0].losses.items()
    }
    return Sensitivities(
        method=methods.pop(),
        num_tokens=tokens,
        losses={unit: some for unit, some in losses.items() if some},
    )
