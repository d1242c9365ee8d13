"""Rules of engines' loaders, and what they find in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megtool.lint import (
    compressed_rules,
    config_rules,
    kv_cache_rules,
    model_rules,
    module_rules,
    mxfp4_rules,
    scale_rules,
    size_rules,
)
from megtool.lint.context import Check, LintContext
from megtool.lint.engines import EngineTarget, RuleText, is_unknown_form, load_engines
from megtool.report.finding import Finding

METHOD_RULE = "method"

CHECKS: Mapping[str, Check] = {
    **config_rules.CHECKS,
    **kv_cache_rules.CHECKS,
    **compressed_rules.CHECKS,
    **model_rules.CHECKS,
    **module_rules.CHECKS,
    **mxfp4_rules.CHECKS,
    **scale_rules.CHECKS,
    **size_rules.CHECKS,
}
"""The function of each rule; its texts are in `engines.yaml`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule:
    """One thing that loaders demand: a check, and what `engines.yaml` says of it."""

    id: str
    text: RuleText
    check: Check = field(repr=False)

    def applies(self, context: LintContext, engine: EngineTarget) -> bool:
        """Whether the rule is about this folder and engine."""
        forms = self.text.forms
        if is_unknown_form(context.form) and self.id != METHOD_RULE:
            return False  # what its tensors should be is not known either
        return engine.engine in self.text.sources and (not forms or context.form in forms)


@lru_cache(maxsize=1)
def load_rules() -> tuple[LintRule, ...]:
    """All rules, in the order in which a user would look for them."""
    texts = load_engines().rules
    return tuple(LintRule(id=id, text=text, check=CHECKS[id]) for id, text in texts.items())


def apply_rules(
    rules: Iterable[LintRule], context: LintContext, engine: EngineTarget
) -> Iterator[Finding]:
    """All that the rules find in a folder for one engine."""
    for rule in rules:
        if not rule.applies(context, engine):
            continue
        for finding in rule.check(context, engine):
            yield replace(
                finding,
                id=rule.id,
                severity=finding.severity or rule.text.severity,
                target=engine.target.name,
                effect=finding.effect or rule.text.effect,
                hint=finding.hint or rule.text.hint,
                source=finding.source or rule.text.sources[engine.engine],
            )
