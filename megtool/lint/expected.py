"""The model that a folder was meant to hold: the decisions of a recipe about its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megtool.quant.recipes.match import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModel:
    """What a quantized folder should hold, as the recipe decided.

    `stored_names` are the names of modules in the files by their canonical ones, those of experts
    in blocks without the suffix. `needs_tokenizer` says that the source has one. `auxiliary_files`
    are the other files of the unquantized model.
    """

    decisions: Sequence[Decision]
    stored_names: Mapping[str, str]
    needs_tokenizer: bool = True
    auxiliary_files: Mapping[str, bytes] = field(default_factory=dict)

    def stored_name(self, decision: Decision) -> str:
        """The name of a module in the files."""
        return self.stored_names.get(decision.module.name, decision.module.name)
