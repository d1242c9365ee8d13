"""A quantized folder compared with itself: config files against tensors, for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megtool.lint.compressed_rules import find_group, ignored_modules
from megtool.lint.context import LinearModule, LintContext, read_context
from megtool.lint.engines import EngineTarget
from megtool.lint.folder_view import CONFIG_FILE, FolderView
from megtool.lint.rules import apply_rules, load_rules
from megtool.quant.recipes.compressed_arguments import means
from megtool.quant.recipes.engine_support import EngineVersion
from megtool.report.finding import Finding, error

_ALWAYS_ERRORS = frozenset(("kv-scales-half",))
"""Rules that engines differ about, and that find a contradiction all the same."""

_SOUND_IN_COMPRESSED = frozenset(("siblings", "w1-w3"))
"""Findings that compressed-tensors itself causes: it gives every module a global scale of its own,
which is sound, though engines that fuse modules keep one of them."""

_READERS = (
    EngineTarget(target=EngineVersion(engine="vllm")),
    EngineTarget(target=EngineVersion(engine="trtllm")),
)
"""One engine that follows config.json, and one that follows hf_quant_config.json."""


def check_consistency(folder: FolderView, *, reads_all_scales: bool = False) -> Iterator[Finding]:
    """What contradicts itself in a folder (errors), and what is odd (warnings)."""
    context = read_context(folder)
    context.reads_all_scales = reads_all_scales
    context.has_engine_limits = False
    rules = [rule for rule in load_rules() if rule.text.engine_independent]
    heads = _linear_heads(context)
    for engine in _READERS:
        for finding in apply_rules(rules, context, engine):
            if finding.id == "format" and finding.module in heads:
                continue
            severity = finding.severity
            if finding.id in _SOUND_IN_COMPRESSED and context.form == "compressed-tensors":
                severity = "warning"
            if finding.id in _ALWAYS_ERRORS:
                severity = "error"
            yield replace(finding, severity=severity)
    effect = "engines read codes as weights, or look for scales that do not exist"
    for module in context.linears:
        for file, algo in _declarations(context, module):
            if module.algo and not algo:
                text = f"holds codes, and {file} excludes it from quantization"
                yield error("format", module.name, text, effect)
            elif algo and not module.algo:
                text = f"holds no codes, and {file} declares {algo}"
                yield error("format", module.name, text, effect)


def _linear_heads(context: LintContext) -> set[str]:
    """Output layers that compressed-tensors' targets name by their class, though engines do not."""
    return {
        module.name
        for module in context.quantized()
        if module.last == "lm_head"
        and context.form == "compressed-tensors"
        and find_group(context.declared, module.name) is not None
    }


def _declarations(context: LintContext, module: LinearModule) -> Iterator[tuple[str, str]]:
    """The format that each file declares for a module; empty for none."""
    for config in (context.config_json, context.hf_quant_config):
        if config is not None:
            yield config.file, config.algo_of(module.name)
    ignored = ignored_modules(context.declared)
    if context.form == "compressed-tensors":
        group = None
        if not any(means(p, module.name) for p in ignored):
            classes = bool(module.algo) or module.last != "lm_head"
            group = find_group(context.declared, module.name, classes=classes)
        yield CONFIG_FILE, "quantized" if group is not None else ""
    elif context.form == "fp8" and module.algo:  # what has no codes need not be listed
        yield CONFIG_FILE, "" if module.name in ignored else "quantized"
