"""All rules, in the order in which a person would look for them."""

from __future__ import annotations

from megtool.lint import (
    cache_rules,
    compressed_layout,
    compressed_schemes,
    config_rules,
    model_family_rules,
    model_rules,
    module_rules,
    scale_rules,
    size_rules,
    value_rules,
)
from megtool.lint.rules import Rule

RULES: tuple[Rule, ...] = (
    *config_rules.RULES,
    *cache_rules.RULES,
    *compressed_schemes.RULES,
    *compressed_layout.RULES,
    *model_rules.RULES,
    *module_rules.RULES,
    *model_family_rules.RULES,
    *scale_rules.RULES,
    *value_rules.RULES,
    *size_rules.RULES,
)
