"""Rules about the config files: what they say of the model and of its quantization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.convert.families.draft_heads import find_draft_head
from megtool.formats.safetensors.quantization_config import QUANT_FILE
from megtool.lint.context import Check, LintContext
from megtool.lint.engines import EngineTarget, is_unknown_form, load_engines, rows_for
from megtool.lint.folder_view import CONFIG_FILE
from megtool.lint.quant_config import (
    MIXED,
    QuantConfig,
    check_agreement,
    find_missing_layers,
    iterate_layers,
)
from megtool.quant.recipes.engine_models import (
    UNLISTED,
    UNLISTED_HINT,
    is_unlisted,
    kv_cache_only_hint,
)
from megtool.quant.recipes.formats import ALGO_SPELLING, FORMATS
from megtool.report.finding import Finding, Severity

_IN_COMPRESSED: Mapping[str, tuple[str, int, str, str]] = {
    "FP8_PER_CHANNEL_PER_TOKEN": ("float", 8, "channel", "token"),
    "FP8_PB_WO": ("float", 8, "block", "group"),
    "W8A16": ("int", 8, "channel", "none"),
    "W4A16_AWQ": ("int", 4, "group", "none"),
}
"""Type, bits, scales and inputs of formats in compressed-tensors."""


def effective_config(context: LintContext, engine: EngineTarget) -> QuantConfig | None:
    """The file that the engine follows: vLLM and SGLang read config.json if it declares anything,
    TensorRT-LLM reads hf_quant_config.json if there is one."""
    if engine.engine == "trtllm":
        return context.hf_quant_config or context.config_json
    return context.config_json or context.hf_quant_config


def _section(context: LintContext, file: str) -> Mapping[str, Any]:
    """The quantization section of one of the files, as it stands there."""
    if file == CONFIG_FILE:
        return context.declared
    section = (context.folder.hf_quant_config or {}).get("quantization")
    return section if isinstance(section, dict) else {}


def more(names: Sequence[str]) -> str:
    """How many more there are than the first, in brackets."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_files(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for name, text in context.folder.problems:
        if (name, text) != (QUANT_FILE, "is missing"):  # a folder need not have it
            yield Finding(module=name, message=text)


def _check_architectures(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    names = context.architectures
    if not names:
        value = (context.folder.config or {}).get("architectures")
        yield Finding(module=CONFIG_FILE, message=f"architectures is {value!r}")
    elif is_unlisted(engine.engine, names) and find_draft_head(context.model_config) is None:
        yield Finding(
            module=CONFIG_FILE,
            message=f"{names[0]} {UNLISTED}",
            severity="warning",
            hint=UNLISTED_HINT,
        )


def _check_tokenizer(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if not context.folder.has_tokenizer and find_draft_head(context.model_config) is None:
        yield Finding(module=context.folder.path.name, message="has no tokenizer file")


def _check_method(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if not context.form:
        quantized = [module.name for module in context.quantized()]
        if quantized:
            text = f"declares no quantization, and {quantized[0]} holds codes"
            yield Finding(module=CONFIG_FILE, message=text + more(quantized))
        return
    table = load_engines()
    methods = [m for m in table.quant_methods if m.engine == engine.engine]
    rows = [m for m in methods if m.form == context.form]
    spelling = str(context.declared.get("quant_method", "")).lower()
    if rows and engine.engine not in table.modelopt_spellings.get(spelling, (engine.engine,)):
        yield Finding(
            module=CONFIG_FILE,
            message=f"this engine does not know quant_method {spelling!r}",
            severity="warning",
            hint="write modelopt, which all engines know",
        )
    if is_unknown_form(context.form):
        yield Finding(
            module=CONFIG_FILE,
            message=f"quant_method {context.declared.get('quant_method')!r} is not known to "
            "megtool: nothing of it is checked",
            severity="warning",
            effect=f"{engine.engine} may load it or not",
            hint="load the folder in the engine",
        )
    elif not rows:
        supported = ", ".join(sorted({m.form for m in methods}))
        text = f"quant_method {context.declared.get('quant_method')!r} is not supported"
        yield Finding(module=CONFIG_FILE, message=text, hint=f"supported: {supported}")
    elif not rows_for(engine, rows):
        yield Finding(
            module=CONFIG_FILE,
            message=f"{engine.target.name} is not known to load {context.form}",
            hint=f"{rows[0].since} is the first version known to"
            + ("" if context.form == "mxfp4" else "; or export it as modelopt"),
            source=rows[0].source,
        )


def _check_agreement(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if context.hf_quant_config is not None and context.form not in ("", "modelopt"):
        text = f"is present, and config.json declares {context.form}"
        is_warning = engine.engine != "trtllm"
        severity: Severity | None = "warning" if is_warning else None
        yield Finding(module=QUANT_FILE, message=text, severity=severity)
    elif context.hf_quant_config is not None and context.config_json is not None:
        for difference in check_agreement(context.hf_quant_config, context.config_json):
            yield Finding(module=difference.module, message=difference.message)


def _check_quant_file(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if context.hf_quant_config is None and not engine.target.has("main"):
        yield Finding(module=QUANT_FILE, message="is missing")


def _check_keys(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for row in load_engines().required_keys:
        section = _section(context, row.file)
        config = context.config_json if row.file == CONFIG_FILE else context.hf_quant_config
        if row.engine != engine.engine or config is None:
            continue
        if row.algos and config.algo not in row.algos:
            continue
        is_followed = config is effective_config(context, engine)
        for key in row.keys:
            if key == "group_size" and row.file == CONFIG_FILE and config.group_size:
                continue  # config_groups give it
            present = key in section and (section[key] is not None or key == "kv_cache_quant_algo")
            if present and (not row.non_empty or section[key]):
                continue
            is_warning = not is_followed or (present and key == "exclude_modules")
            hint = "releases that read this file first stop at it" if is_warning else ""
            if key == "quant_algo" and config.kv_algo and not config.layers and not is_warning:
                hint = kv_cache_only_hint(engine.engine)
            yield Finding(
                module=config.file,
                message=f"{key} is {'empty' if present else 'missing'}",
                severity="warning" if is_warning else None,
                hint=hint,
                source=row.source,
            )


def _compressed_hint(engine: EngineTarget, algo: str) -> str:
    """Where the engine loads the format from a folder of compressed-tensors: that, as a hint."""
    if algo not in _IN_COMPRESSED:
        return ""
    type_, bits, strategy, inputs = _IN_COMPRESSED[algo]
    if not any(
        type_ == row.type
        and bits in row.bits
        and strategy in row.strategies
        and inputs in row.inputs
        for row in rows_for(engine, load_engines().compressed_schemes)
    ):
        return ""
    return f"; {engine.engine} loads {algo} from what megtool export --to compressed-tensors writes"


def _check_algorithm(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    config = effective_config(context, engine)
    if config is None:
        return
    algos = {config.algo} if config.algo != MIXED else set()
    algos |= {algo for algo, _ in config.layers.values()}
    supported = engine.target.supported("linear")
    for algo in sorted(a for a in algos if a):
        rows = [s for s in supported if algo in s.algos]
        if not rows:
            names = ", ".join(sorted({a for s in supported for a in s.algos}))
            text = f"{algo} is {'not supported' if algo in FORMATS else 'unknown'}"
            hint = f"supported: {names}{_compressed_hint(engine, algo)}"
            yield Finding(module=config.file, message=text, hint=hint)
        elif all(s.dense for s in rows):
            experts = [m.name for m in context.quantized() if m.expert is not None]
            experts = [name for name in experts if config.algo_of(name) == algo]
            if experts:
                text = f"{algo} is supported for dense modules alone, and {experts[0]} has it"
                yield Finding(module=config.file, message=text + more(experts))


def _check_spelling(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """TensorRT-LLM compares lower-case names byte by byte, and others capitals."""
    config = effective_config(context, engine)
    if config is None:
        return
    section = _section(context, config.file)
    values = [section.get("quant_algo")]
    values += [entry.get("quant_algo") for _, entry in iterate_layers(section)]
    for algo in dict.fromkeys(v for v in values if isinstance(v, str)):
        if (spelling := ALGO_SPELLING.get(algo.upper())) is not None:
            expected = spelling if engine.engine == "trtllm" else algo
        else:
            expected = algo.upper()
        if algo != expected:
            yield Finding(module=config.file, message=f"{algo!r} must be {expected!r}")


def _check_mixed(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    config = effective_config(context, engine)
    if config is None or config.algo != MIXED:
        return
    if not config.layers:
        yield Finding(module=config.file, message=f"{MIXED} without quantized_layers")
        return
    supported = {a for s in engine.target.supported("mixed") for a in s.algos}
    others = sorted({algo for algo, _ in config.layers.values()} - supported)
    if others:
        hint = f"it can mix {', '.join(sorted(supported))}" if supported else "it mixes no formats"
        yield Finding(
            module=config.file, message=f"{', '.join(others)} in a mixed model", hint=hint
        )


def _check_mixed_names(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    config = effective_config(context, engine)
    missing = find_missing_layers(config, context.folder) if config is not None else []
    if config is not None and missing:
        text = f"{missing[0]} is in quantized_layers, and in no file"
        yield Finding(module=config.file, message=text + more(missing))


CHECKS: Mapping[str, Check] = {
    "files": _check_files,
    "architectures": _check_architectures,
    "tokenizer": _check_tokenizer,
    "method": _check_method,
    "config-agree": _check_agreement,
    "quant-file": _check_quant_file,
    "keys": _check_keys,
    "algorithm": _check_algorithm,
    "spelling": _check_spelling,
    "mixed": _check_mixed,
    "mixed-names": _check_mixed_names,
}
