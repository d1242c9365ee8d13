"""All rules, in the order in which a person would look for them."""

from __future__ import annotations

from megtool.export.lint import config_rules, module_rules, scale_rules, schemes, size_rules
from megtool.export.lint.rules import Rule

RULES: tuple[Rule, ...] = (
    *config_rules.RULES,
    *schemes.RULES,
    *module_rules.RULES,
    *scale_rules.RULES,
    *size_rules.RULES,
)
