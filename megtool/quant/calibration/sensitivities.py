"""Sensitivities: the loss from quantizing one decision group, stored for later budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megtool.errors import FormatError

SensitivityMethod = Literal["kl_div", "gradient", "modelopt_kl_div", "modelopt_gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """Losses by decision group and format, in nats per token over `num_tokens` tokens.

    `kl_div` is the KL divergence from the unquantized model's output; `gradient` estimates the same
    from one backward pass, up to a common factor. With `modelopt_` they are the scores of
    ModelOpt's `auto_quantize`.
    """

    method: SensitivityMethod
    num_tokens: int
    losses: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        """As JSON data; numbers round-trip exactly."""
        return {
            "method": self.method,
            "num_tokens": self.num_tokens,
            "losses": {unit: dict(by_format) for unit, by_format in self.losses.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Sensitivities:
        """Parse the output of `to_json`.

        Raises:
            FormatError: it is invalid.
        """
        try:
            method, tokens, losses = value["method"], value["num_tokens"], value["losses"]
            parsed = {
                str(unit): {str(key): float(loss) for key, loss in by_format.items()}
                for unit, by_format in losses.items()
            }
            count = int(tokens)
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as e:
            raise FormatError(f"the sensitivities are invalid: {e}") from e
        if method not in get_args(SensitivityMethod) or count < 1:
            raise FormatError(f"the sensitivities are by {method!r} over {tokens!r} tokens")
        if any(not 0 <= x < math.inf for by_format in parsed.values() for x in by_format.values()):
            raise FormatError("sensitivities contain negative or non-finite losses")
        return cls(method=method, num_tokens=count, losses=parsed)


def merge_sensitivities(parts: Sequence[Sensitivities]) -> Sensitivities | None:
    """Average the sensitivities of several machines over all tokens, for the groups and formats
    that all of them have; None for different methods or an empty list."""
    methods = {part.method for part in parts}
    if len(methods) != 1:
        return None
    tokens = sum(part.num_tokens for part in parts)
    losses = {
        unit: {
            key: math.fsum(p.losses[unit][key] * p.num_tokens for p in parts) / tokens
            for key in by_format
            if all(key in p.losses.get(unit, {}) for p in parts)
        }
        for unit, by_format in parts[0].losses.items()
    }
    return Sensitivities(
        method=methods.pop(),
        num_tokens=tokens,
        losses={unit: by_format for unit, by_format in losses.items() if by_format},
    )
