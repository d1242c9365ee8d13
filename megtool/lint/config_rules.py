"""Config rules: files, and what they say of the model and of its quantization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.checkpoint.formats.quantized import QUANT_FILE
from megtool.lint import citations as at
from megtool.lint.context import Subject, faults_of
from megtool.lint.rules import Fault, Rule, View, lines_for
from megtool.lint.tables import KEYS, METHODS, MODELOPT_METHODS
from megtool.quant.recipes.engine_models import (
    UNLISTED,
    UNLISTED_HINT,
    cache_alone_hint,
    is_unlisted,
)
from megtool.quant.recipes.formats import FORMATS, SPELLED
from megtool.quant.verification.metadata_checks import check_agreement
from megtool.quant.verification.quant_config_files import Declared

_CONFIG = "config.json"
"""What TensorRT-LLM compares byte by byte where others have capitals."""


def _raw(subject: Subject, where: str) -> Mapping[str, Any]:
    """What one of the files says, as it stands there."""
    if where == "inline":
        return subject.said
    said = (subject.folder.quant or {}).get("quantization")
    return said if isinstance(said, dict) else {}


def read_first(subject: Subject, view: View) -> Declared | None:
    """What the engine goes by: vLLM and SGLang config.json where it says anything, TensorRT-LLM
    hf_quant_config.json where it is there."""
    if view.engine == "trtllm":
        return subject.beside or subject.inline
    return subject.inline or subject.beside


def _files(subject: Subject, view: View) -> Iterator[Fault]:
    for name, what in faults_of(subject.folder):
        yield Fault(module=name, text=what)


def _architectures(subject: Subject, view: View) -> Iterator[Fault]:
    said = (subject.folder.config or {}).get("architectures")
    if not isinstance(said, list) or not said:
        yield Fault(module=_CONFIG, text=f"architectures is {said!r}")
        return
    if is_unlisted(view.engine, list(map(str, said))):
        yield Fault(
            module=_CONFIG,
            text=f"{said[0]} {UNLISTED}",
            severity="warning",
            hint=UNLISTED_HINT,
        )


def _tokenizer(subject: Subject, view: View) -> Iterator[Fault]:
    if not subject.folder.has_tokenizer:
        yield Fault(module=subject.folder.path.name, text="no file of a tokenizer is there")


def _method(subject: Subject, view: View) -> Iterator[Fault]:
    if not subject.form:
        coded = [one.name for one in subject.coded()]
        if coded:
            text = f"says nothing of quantization, and {coded[0]} holds codes"
            yield Fault(module=_CONFIG, text=text + more(coded))
        return
    lines = [m for m in METHODS if m.engine == view.engine and m.form == subject.form]
    spelled = str(subject.said.get("quant_method", "")).lower()
    if lines and view.engine not in MODELOPT_METHODS.get(spelled, (view.engine,)):
        yield Fault(
            module=_CONFIG,
            text=f"quant_method {spelled!r} is none of this engine's",
            severity="warning",
            hint="write modelopt, which all engines know",
        )
    if not lines:
        known = sorted({m.form for m in METHODS if m.engine == view.engine})
        text = f"quant_method {subject.said.get('quant_method')!r} is not loaded"
        yield Fault(module=_CONFIG, text=text, hint="known: " + ", ".join(known))
    elif not lines_for(view, lines):
        yield Fault(
            module=_CONFIG,
            text=f"{view.target.name} is not known to load {subject.form}",
            hint=f"{lines[0].since} is the first version known to"
            + ("" if subject.form == "mxfp4" else "; or export it as modelopt"),
            source=lines[0].source,
        )


def _agreement(subject: Subject, view: View) -> Iterator[Fault]:
    if subject.beside is not None and subject.form not in ("", "modelopt"):
        text = f"is there, and config.json says that the folder is {subject.form}"
        softly = view.engine != "trtllm"
        yield Fault(module=QUANT_FILE, text=text, severity="warning" if softly else None)
        return
    if subject.beside is None or subject.inline is None:
        return
    for found in check_agreement(subject.beside, subject.inline):
        yield Fault(module=found.module, text=found.text)


def _which_file(subject: Subject, view: View) -> Iterator[Fault]:
    if subject.beside is None and not view.target.has("main"):
        yield Fault(module=QUANT_FILE, text="is not there")


def _keys(subject: Subject, view: View) -> Iterator[Fault]:
    for line in KEYS:
        said = _raw(subject, line.where)
        declared = subject.inline if line.where == "inline" else subject.beside
        if line.engine != view.engine or declared is None:
            continue
        if line.algos and declared.algo not in line.algos:
            continue
        read = declared is read_first(subject, view)
        for key in line.keys:
            if key == "group_size" and line.where == "inline" and declared.group_size:
                continue  # said in config_groups
            there = key in said and (said[key] is not None or key == "kv_cache_quant_algo")
            if there and (not line.filled or said[key]):
                continue
            what = "is empty" if there else "is not said"
            softly = not read or (there and key == "exclude_modules")
            hint = "releases that read this file first stop at it" if softly else ""
            if key == "quant_algo" and declared.kv_algo and not declared.layers and not softly:
                hint = cache_alone_hint(view.engine)
            yield Fault(
                module=declared.where,
                text=f"{key} {what}",
                severity="warning" if softly else None,
                hint=hint,
                source=line.source,
            )


def _algo(subject: Subject, view: View) -> Iterator[Fault]:
    declared = read_first(subject, view)
    if declared is None:
        return
    said = {declared.algo} if declared.algo != "MIXED_PRECISION" else set()
    said |= {algo for algo, _ in declared.layers.values()}
    lines = view.target.lines("linear")
    for algo in sorted(a for a in said if a):
        able = [s for s in lines if algo in s.algos]
        if not able:
            known = sorted({a for s in lines for a in s.algos})
            what = f"{algo} is not loaded" if algo in FORMATS else f"{algo} is unknown"
            yield Fault(module=declared.where, text=what, hint="known: " + ", ".join(known))
        elif all(s.dense for s in able):
            experts = [x for x in subject.coded() if x.expert is not None]
            mine = [x.name for x in experts if declared.algo_of(x.name) == algo]
            if mine:
                text = f"{algo} is loaded for dense modules alone, and is that of {mine[0]}"
                yield Fault(module=declared.where, text=text + more(mine))


def _spelling(subject: Subject, view: View) -> Iterator[Fault]:
    """Algorithms as they are spelled in the file an engine reads."""
    declared = read_first(subject, view)
    if declared is None:
        return
    said = _raw(subject, "inline" if declared is subject.inline else "file")
    entries = [said.get("quant_algo")]
    listed = said.get("quantized_layers")
    if isinstance(listed, dict):
        entries += [e.get("quant_algo") for e in listed.values() if isinstance(e, dict)]
    for algo in dict.fromkeys(e for e in entries if isinstance(e, str)):
        if (spelled := SPELLED.get(algo.upper())) is not None:
            right = spelled if view.engine == "trtllm" else algo
        else:
            right = algo.upper()
        if algo != right:
            yield Fault(module=declared.where, text=f"{algo!r} must be {right!r}")


def _mixed(subject: Subject, view: View) -> Iterator[Fault]:
    declared = read_first(subject, view)
    if declared is None or declared.algo != "MIXED_PRECISION":
        return
    if not declared.layers:
        yield Fault(module=declared.where, text="MIXED_PRECISION without quantized_layers")
        return
    mixes = {a for s in view.target.lines("mixed") for a in s.algos}
    used = sorted({algo for algo, _ in declared.layers.values()})
    odd = [a for a in used if a not in mixes]
    if odd:
        known = f"it mixes {', '.join(sorted(mixes))}" if mixes else "it mixes no formats"
        yield Fault(module=declared.where, text=f"{', '.join(odd)} in a mixed model", hint=known)


def _listed(subject: Subject, view: View) -> Iterator[Fault]:
    declared = read_first(subject, view)
    names = subject.folder.modules
    lost = [
        n
        for n in (declared.layers if declared is not None else ())
        if n not in names and not any(m.startswith(n + ".") for m in names)
    ]
    if declared is not None and lost:
        text = f"{lost[0]} is in quantized_layers, and in no file"
        yield Fault(module=declared.where, text=text + more(lost))


def more(names: Sequence[str]) -> str:
    """How many more there are than the first, in brackets."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


_ALL_LOADING = {"vllm": at.VLLM_LOADING, "sglang": at.SGLANG_LOADING, "trtllm": at.TRTLLM_CONFIG}
_ALL_MODELOPT = {
    "vllm": at.VLLM_MODELOPT,
    "sglang": at.SGLANG_MODELOPT,
    "trtllm": at.TRTLLM_MODELOPT,
}

RULES = (
    Rule(
        id="files",
        sources=_ALL_LOADING,
        meaning="loaders stop, or leave tensors out",
        hint="export the folder again",
        check=_files,
    ),
    Rule(
        id="architectures",
        sources={
            "vllm": at.VLLM_MODELS,
            "sglang": at.SGLANG_MODELS,
            "trtllm": at.TRTLLM_MODELS,
        },
        meaning="engines choose their model by it",
        hint="put the class of the model into architectures",
        check=_architectures,
    ),
    Rule(
        id="tokenizer",
        severity="warning",
        sources=_ALL_LOADING,
        meaning="engines take text only where they are given a tokenizer besides",
        hint="copy the tokenizer's files into the folder",
        check=_tokenizer,
    ),
    Rule(
        id="method",
        sources={
            "vllm": at.VLLM_LOADING,
            "sglang": at.SGLANG_LOADING,
            "trtllm": at.TRTLLM_CONFIG,
        },
        meaning="the engine stops, or takes codes for weights",
        hint="quantization_config of config.json must say what the codes are",
        check=_method,
    ),
    Rule(
        id="config-agree",
        sources={
            "vllm": at.VLLM_FILES,
            "sglang": at.SGLANG_LOADING,
            "trtllm": at.TRTLLM_MODELOPT,
        },
        meaning="TensorRT-LLM follows hf_quant_config.json, vLLM and SGLang config.json",
        hint="make both files say the same",
        check=_agreement,
    ),
    Rule(
        id="quant-file",
        forms=("modelopt",),
        sources={"trtllm": at.TRTLLM_CONFIG_1},
        meaning="releases up to 1.x know ModelOpt's folders by this file alone",
        hint="write hf_quant_config.json beside config.json",
        check=_which_file,
    ),
    Rule(
        id="keys",
        forms=("modelopt",),
        sources=_ALL_MODELOPT,
        meaning="the loader stops",
        hint="write the key",
        check=_keys,
    ),
    Rule(
        id="algorithm",
        forms=("modelopt",),
        sources={**_ALL_MODELOPT, "trtllm": at.TRTLLM_ALGOS},
        meaning="the loader stops, or takes the scales for others",
        hint="quantize to a format of the engine",
        check=_algo,
    ),
    Rule(
        id="spelling",
        forms=("modelopt",),
        sources={"sglang": at.SGLANG_MODELOPT, "trtllm": at.TRTLLM_MODELOPT},
        meaning="the loader compares the words byte by byte, and stops",
        hint="spell the algorithm as the engine does",
        check=_spelling,
    ),
    Rule(
        id="mixed",
        forms=("modelopt",),
        sources={**_ALL_MODELOPT, "trtllm": at.TRTLLM_CONFIG},
        meaning="the loader stops, or leaves modules unquantized that hold codes",
        hint="choose formats that the engine mixes",
        check=_mixed,
    ),
    Rule(
        id="mixed-names",
        forms=("modelopt",),
        sources={**_ALL_MODELOPT, "trtllm": at.TRTLLM_CONFIG},
        meaning="the engine waits for scales that never come, or looks the layer up in vain",
        hint="list what is quantized, and nothing else",
        check=_listed,
    ),
)
