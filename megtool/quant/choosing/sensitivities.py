"""Sensitivities: what rounding each unit alone costs, kept so that another budget needs no data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megtool.errors import FormatError

How = Literal["kl_div", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """Losses by unit and by format (`units.key_of`), in nats a token over `num_tokens` tokens.

    `kl_div` is the divergence of the model's answers from those of the model as it was; `gradient`
    estimates the same from one backward pass, to within a factor that is alike for all.
    """

    method: How
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
            found = {
                str(unit): {str(key): float(loss) for key, loss in some.items()}
                for unit, some in losses.items()
            }
            count = int(tokens)
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as e:
            raise FormatError(f"no sensitivities: {e}") from e
        if method not in ("kl_div", "gradient") or count < 1:
            raise FormatError(f"sensitivities by {method!r} over {tokens!r} tokens")
        if any(not math.isfinite(x) for some in found.values() for x in some.values()):
            raise FormatError("sensitivities hold a NaN or an infinity")
        return cls(method=method, num_tokens=count, losses=found)
