"""Size rules: what must divide, alone and cut over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.lint import citations as at
from megtool.lint.context import Linear, Subject, shards_of
from megtool.lint.module_rules import left_alone
from megtool.lint.rules import Fault, Rule, View
from megtool.lint.tables import COLUMNS, LIMITS, ROWS, SPLIT, Limit


def _divides(subject: Subject, view: View) -> Iterator[Fault]:
    skipped = left_alone(subject, view)
    lines = [x for x in LIMITS if x.engine == view.engine and x.form == subject.form]
    for one in subject.coded():
        if one.unit in skipped:
            continue
        for line in lines:
            if one.algo in line.algos and (told := _beyond(one, line, view.tp)):
                yield Fault(module=one.name, text=told, source=line.source)


def _beyond(one: Linear, line: Limit, tp: int) -> str:
    """Why a module breaks a limit; empty where it does not."""
    size = one.shape[0] if line.dimension == ROWS else one.shape[1]
    cut = tp > 1 and SPLIT.get(one.last) == line.dimension
    joined = bool(shards_of(one.unit)) or one.expert is not None
    if line.when == "cut" and not cut:
        return ""
    if line.when == "joined" and not (cut or (joined and line.dimension == ROWS)):
        return ""
    of = line.of or one.group
    if not of or (cut and size % tp):
        return ""  # that it cannot be cut at all is told as such
    part = size // tp if cut else size
    if part % of == 0:
        return ""
    whole = f" ({size} over {tp} ranks)" if cut else ""
    return f"{part} {line.dimension}{whole} are no multiple of {of}, as {one.algo} needs"


_TILE = (128, 4)
"""Rows and scales of NVFP4 in a tile of the kernels' own order of scales."""


def _unpadded(subject: Subject, view: View) -> Iterator[Fault]:
    """Releases that reorder scales without the padding that their tiles need."""
    if view.target.has("main"):
        return
    skipped = left_alone(subject, view)
    for unit, modules in subject.units().items():
        fp4 = [m for m in modules if m.algo == "NVFP4"]
        if len(fp4) < len(modules) or modules[0].expert is not None or unit in skipped:
            continue
        cut = view.tp if (side := SPLIT.get(modules[0].last)) is not None else 1
        rows = sum(m.shape[0] for m in modules) // (cut if side == ROWS else 1)
        scales = modules[0].shape[1] // (cut if side == COLUMNS else 1) // 16
        if rows % _TILE[0] or scales % _TILE[1]:
            text = f"has {rows} rows and {scales} scales a row: no multiples of 128 and of 4"
            yield Fault(module=unit, text=text)


def _ranks(subject: Subject, view: View) -> Iterator[Fault]:
    if view.tp == 1:
        return
    config = subject.config
    heads, kv = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and heads % view.tp:
        yield Fault(module="config.json", text=f"{heads} heads over {view.tp} ranks")
    elif isinstance(kv, int) and kv > 0 and kv % view.tp and view.tp % kv:
        yield Fault(module="config.json", text=f"{kv} KV heads over {view.tp} ranks")
    seen = set()
    for one in subject.linear:
        side = SPLIT.get(one.last)
        if side is None or one.last in ("lm_head", "k_proj", "v_proj"):
            continue  # vocabularies are padded, and KV heads are held several times
        size = one.shape[0] if side == ROWS else one.shape[1]
        if size % view.tp and (one.last, size) not in seen:
            seen.add((one.last, size))
            yield Fault(module=one.name, text=f"{size} {side} over {view.tp} ranks")


RULES = (
    Rule(
        id="divides",
        forms=("modelopt", "compressed-tensors", "fp8"),
        sources={
            "vllm": at.VLLM_MODELOPT,
            "sglang": at.SGLANG_MODELOPT,
            "trtllm": at.TRTLLM_LINEAR,
        },
        meaning="the loader stops, or a block would lie on two ranks",
        hint="fewer ranks, smaller groups, or leave the module unquantized",
        check=_divides,
    ),
    Rule(
        id="padding",
        severity="warning",
        forms=("modelopt",),
        sources={"sglang": at.SGLANG_MODELOPT_2025},
        meaning="releases of 2025 stop as they put the scales into their kernels' order; later "
        "sources pad them",
        hint="take a newer release, or leave the module unquantized",
        check=_unpadded,
    ),
    Rule(
        id="tensor-parallel",
        sources={
            "vllm": at.VLLM_LINEAR,
            "sglang": at.SGLANG_LINEAR,
            "trtllm": at.TRTLLM_LINEAR,
        },
        meaning="the engine does not start",
        hint="choose a number of ranks that divides them",
        check=_ranks,
    ),
)
