"""Rules about gpt-oss's form: all experts of a layer in one tensor of MXFP4 blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from megtool.formats.safetensors.quantization_config import QUANT_FILE
from megtool.lint.context import Check, LintContext
from megtool.lint.engines import EngineTarget
from megtool.lint.expected import ExpectedModel
from megtool.lint.folder_view import CONFIG_FILE, FolderView, StoredTensor
from megtool.lint.scale_sanity import SCALE_NAMES, check_values
from megtool.number_formats.layout import MX_BLOCK
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import BLOCKS, is_in_expert_blocks
from megtool.report.finding import Finding, error

_SCALES = "_scales"
_BLOCK_BYTES = MX_BLOCK // 2
_NOT_LOADED = "no engine loads it"


def _check_blocks(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Codes and scales of experts come in pairs, and no expert has another form."""
    tensors = context.folder.tensors
    blocks = {n.removesuffix(BLOCKS): t for n, t in tensors.items() if n.endswith(BLOCKS)}
    if not blocks:
        text = "declares mxfp4, and no tensor is called ..._blocks"
        yield Finding(module=CONFIG_FILE, message=text)
    for name, codes in blocks.items():
        scales = tensors.get(name + _SCALES)
        if scales is None:
            yield Finding(module=name, message=f"has no {_SCALES[1:]}")
        elif (codes.dtype, scales.dtype) != ("uint8", "uint8"):
            text = f"is {codes.dtype} with scales of {scales.dtype}"
            yield Finding(module=name, message=text)
        elif codes.shape != (*scales.shape, _BLOCK_BYTES):
            text = f"has blocks {list(codes.shape)} and scales {list(scales.shape)}"
            yield Finding(module=name, message=text)
    for t in context.stacked:
        if not t.name.endswith((BLOCKS, _SCALES)):
            yield Finding(module=t.name, message="holds experts, and not in blocks")
    for module in context.quantized():
        text = f"holds codes ({module.algo}), and is no expert in blocks"
        yield Finding(module=module.name, message=text)


CHECKS: Mapping[str, Check] = {"blocks": _check_blocks}


def has_blocks(decisions: Sequence[Decision]) -> bool:
    """Whether experts are to be stored in blocks, so that the folder has this form."""
    return any(d.format is not None and is_in_expert_blocks(d.module) for d in decisions)


def check_expected_blocks(folder: FolderView, expected: ExpectedModel) -> Iterator[Finding]:
    """All contradictions among config.json, the tensors and the decisions of a recipe."""
    for name, text in folder.problems:
        if name != QUANT_FILE:
            yield error("config", name, text, _NOT_LOADED)
    if folder.hf_quant_config is not None:
        text = "does not belong to a folder of MXFP4 blocks"
        yield error("config", QUANT_FILE, text, "TensorRT-LLM and SGLang follow it")
    columns: dict[str, int] = {}
    rows: Counter[str] = Counter()
    for d in expected.decisions:
        if d.format is not None and d.module.name in expected.stored_names:
            stored = expected.stored_name(d)
            columns[stored] = d.module.shape[1]
            rows[stored] += d.module.shape[0]
    yield from _check_config(folder, expected, set(columns))
    for stored, width in columns.items():
        yield from _check_tensors(folder, stored, rows[stored], width)
    for module, tensors in folder.modules.items():
        for last in tensors:
            name = f"{module}.{last}".removesuffix(BLOCKS).removesuffix(_SCALES)
            is_extra = last.endswith((BLOCKS, _SCALES)) and name not in columns
            if is_extra or last in SCALE_NAMES:
                text = f"has {last}, which no decision of the recipe explains"
                effect = "engines refuse names that they do not know"
                yield error("scale-extra", module, text, effect)


def _check_config(
    folder: FolderView, expected: ExpectedModel, quantized: set[str]
) -> Iterator[Finding]:
    """config.json declares the form, and all modules that are not quantized."""
    declared = folder.quantization
    if declared is None or declared.get("quant_method") != "mxfp4":
        value = "no quantization_config"
        if declared is not None:
            value = f"quant_method {declared.get('quant_method')!r}"
        text = f"has {value}, and experts in blocks need quant_method 'mxfp4'"
        yield error("config", CONFIG_FILE, text, "engines read codes as weights")
        return
    listed = declared.get("modules_to_not_convert")
    patterns = [str(p) for p in listed] if isinstance(listed, list) else []
    for d in expected.decisions:
        stored = expected.stored_names.get(d.module.name)
        if stored is None or d.module.kind not in ("linear", "embedding"):
            continue
        is_excluded = any(fnmatchcase(stored, glob) for p in patterns for glob in (p, f"{p}.*"))
        if stored in quantized and is_excluded:
            text = "is quantized, and modules_to_not_convert excludes it"
            yield error("excluded", d.module.name, text, "engines read its codes as weights")
        elif stored not in quantized and not is_excluded:
            text = "is not quantized, and modules_to_not_convert does not list it"
            yield error("not-excluded", d.module.name, text, "engines look for its blocks")


def _check_tensors(folder: FolderView, stored: str, rows: int, width: int) -> Iterator[Finding]:
    """Types and shapes of codes and scales, for `rows` of all experts, and the scales' values."""
    for last, block in ((BLOCKS, (_BLOCK_BYTES,)), (_SCALES, ())):
        tensor = folder.tensors.get(stored + last)
        if tensor is None:
            yield error("scale-missing", stored, f"{stored + last} is in no file", _NOT_LOADED)
        elif tensor.dtype != "uint8":
            text = f"{last[1:]} are {tensor.dtype}, not bytes"
            yield error("dtype", stored, text, _NOT_LOADED)
        elif not _has_shape(tensor, (rows, width // MX_BLOCK), block):
            text = f"{last[1:]} are {list(tensor.shape)} for {rows:,} rows of {width:,}"
            effect = "engines stop, or read the codes of other experts"
            yield error("shape", stored, text, effect)
        elif last == _SCALES:
            statistics = folder.read_statistics(tensor)
            yield from check_values(stored, "scales", tensor, statistics)


def _has_shape(tensor: StoredTensor, matrix: tuple[int, int], block: tuple[int, ...]) -> bool:
    shape = tensor.shape
    if len(shape) != 3 + len(block):
        return False
    return (shape[0] * shape[1], shape[2], shape[3:]) == (*matrix, block)
