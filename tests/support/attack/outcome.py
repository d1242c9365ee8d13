"""What an attack found: how many attempts were met as they should be, and which were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """The attempts of one family; `faults` say how each attempt that was not met can be repeated.

    An attempt is seen if the damage is reported, or if the run ends as documented.
    """

    family: str
    seen: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """The number of attempts."""
        return self.seen + len(self.faults)

    def note(self, attempt: str, fault: str | None) -> None:
        """Count one attempt."""
        if fault is None:
            self.seen += 1
        else:
            self.faults.append(f"{attempt}: {fault}")


def format_table(outcomes: Sequence[Outcome]) -> str:
    """The counts of all families."""
    rows = [("family", "tried", "seen", "unseen")]
    rows += [(o.family, str(o.tried), str(o.seen), str(len(o.faults))) for o in outcomes]
    total = sum(o.tried for o in outcomes), sum(o.seen for o in outcomes)
    rows.append(("all", str(total[0]), str(total[1]), str(total[0] - total[1])))
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    lines = []
    for number, row in enumerate(rows):
        numbers = " | ".join(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        lines.append(f"| {row[0]:<{widths[0]}} | {numbers} |")
        if number == 0:
            lines.append(
                "| "
                + " | ".join(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])])
                + " |"
            )
    return "\n".join(lines)
