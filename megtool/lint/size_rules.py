"""Rules about sizes: what must be divisible, per rank if tensor parallelism splits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megtool.lint.context import Check, LinearModule, LintContext, parts_of
from megtool.lint.engines import EngineTarget, SizeLimit, load_engines
from megtool.lint.folder_view import CONFIG_FILE
from megtool.lint.module_rules import excluded_units
from megtool.report.finding import Finding

_SCALE_TILE = (128, 4)
"""Rows, and scales of NVFP4, in one tile of the order in which kernels read scales."""


def _check_divides(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    excluded = excluded_units(context, engine)
    limits = [
        limit
        for limit in load_engines().size_limits
        if (limit.engine, limit.form) == (engine.engine, context.form)
    ]
    for module in context.quantized():
        if module.unit in excluded:
            continue
        for limit in limits:
            if module.algo in limit.algos and (text := _why_not(module, limit, engine.tp)):
                yield Finding(
                    module=module.name, message=text, hint=limit.hint, source=limit.source
                )


def _why_not(module: LinearModule, limit: SizeLimit, tp: int) -> str:
    """Why a module breaks a limit; empty if it does not."""
    size = module.shape[0 if limit.dim == "rows" else 1]
    is_split = tp > 1 and load_engines().modules.split_dim(module.last) == limit.dim
    is_fused = bool(parts_of(module.unit)) or module.expert is not None
    if limit.when == "split" and not is_split:
        return ""
    if limit.when == "joined" and not (is_split or (is_fused and limit.dim == "rows")):
        return ""
    divisor = limit.multiple_of or module.group_size
    if not divisor or (is_split and size % tp):
        return ""  # `tensor-parallel` reports what cannot be split at all
    part = size // tp if is_split else size
    if part % divisor == 0:
        return ""
    ranks = f" ({size} over {tp} ranks)" if is_split else ""
    return f"{part} {limit.dim}{ranks} are no multiple of {divisor}, as {module.algo} needs"


def _check_padding(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Releases that reorder scales without the padding that their tiles need."""
    if engine.target.has("main"):
        return
    excluded = excluded_units(context, engine)
    for unit, modules in context.units().items():
        is_nvfp4 = all(m.algo == "NVFP4" for m in modules)
        if not is_nvfp4 or modules[0].expert is not None or unit in excluded:
            continue
        dim = load_engines().modules.split_dim(modules[0].last)
        rows = sum(m.shape[0] for m in modules) // (engine.tp if dim == "rows" else 1)
        scales = modules[0].shape[1] // (engine.tp if dim == "columns" else 1) // 16
        if rows % _SCALE_TILE[0] or scales % _SCALE_TILE[1]:
            text = f"has {rows} rows and {scales} scales per row: no multiples of 128 and of 4"
            yield Finding(module=unit, message=text)


def _check_tensor_parallel(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    tp = engine.tp
    if tp == 1:
        return
    config = context.model_config
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and heads % tp:
        yield Finding(module=CONFIG_FILE, message=f"{heads} heads over {tp} ranks")
    elif isinstance(kv_heads, int) and kv_heads > 0 and kv_heads % tp and tp % kv_heads:
        yield Finding(module=CONFIG_FILE, message=f"{kv_heads} KV heads over {tp} ranks")
    reported = set()
    for module in context.linears:
        dim = load_engines().modules.split_dim(module.last)
        if dim is None or module.last in ("lm_head", "k_proj", "v_proj"):
            continue  # vocabularies are padded, and KV heads are replicated
        size = module.shape[0 if dim == "rows" else 1]
        if size % tp and (module.last, size) not in reported:
            reported.add((module.last, size))
            yield Finding(module=module.name, message=f"{size} {dim} over {tp} ranks")


CHECKS: Mapping[str, Check] = {
    "divides": _check_divides,
    "padding": _check_padding,
    "tensor-parallel": _check_tensor_parallel,
}
