"""Block checks: a folder whose experts are MXFP4 blocks, as gpt-oss has them, against itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from megtool.checkpoint.formats.quantized import QUANT_FILE
from megtool.number_formats.layout import MX_BLOCK
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import BLOCKS, in_blocks
from megtool.quant.verification.findings import Finding, error
from megtool.quant.verification.metadata_checks import check_tokenizer
from megtool.quant.verification.scale_checks import SCALE_NAMES, check_values
from megtool.quant.verification.stored_folder import Folder, StoredTensor

_SCALES = "_scales"
_ALL = "no engine loads it"
_SIZES = "engines stop, or read other experts' codes"


def has_blocks(decisions: Sequence[Decision]) -> bool:
    """Experts are to be stored in blocks, so that the folder has that form."""
    return any(d.format is not None and in_blocks(d.module) for d in decisions)


def check_blocks(
    folder: Folder,
    decisions: Sequence[Decision],
    names: Mapping[str, str],
    *,
    tokenizer: bool = True,
) -> Iterator[Finding]:
    """All contradictions among config.json, the tensors and the decisions.

    `names` are the stored names of modules by their canonical ones, those of experts without
    `BLOCKS`; `tokenizer` says that the source has one.
    """
    for name, what in folder.faults:
        if name != QUANT_FILE:
            yield error("config", name, what, _ALL)
    if folder.quant is not None:
        text = "stands beside blocks, and is of another form"
        yield error("config", QUANT_FILE, text, "TensorRT-LLM and SGLang follow it")
    yield from check_tokenizer(folder, is_due=tokenizer)
    columns: dict[str, int] = {}
    rows: Counter[str] = Counter()
    for d in decisions:
        if d.format is not None and d.module.name in names:
            stored = names[d.module.name]
            columns[stored] = d.module.shape[1]
            rows[stored] += d.module.shape[0]
    yield from _said(folder, decisions, names, set(columns))
    for stored, width in columns.items():
        yield from _tensors(folder, stored, rows[stored], width)
    for module, tensors in folder.modules.items():
        for last in tensors:
            base = f"{module}.{last}".removesuffix(BLOCKS).removesuffix(_SCALES)
            odd = last.endswith((BLOCKS, _SCALES)) and base not in columns
            if odd or last in SCALE_NAMES:
                text = f"has {last}, and nothing was decided that asks for it"
                yield error("scale-extra", module, text, "engines refuse names they do not know")


def _said(
    folder: Folder, decisions: Sequence[Decision], names: Mapping[str, str], quantized: set[str]
) -> Iterator[Finding]:
    """config.json names the form, and all that is kept."""
    said = folder.quantization
    if said is None or said.get("quant_method") != "mxfp4":
        found = "no quantization_config" if said is None else repr(said.get("quant_method"))
        text = f"has {found}, and experts are blocks, which is quant_method 'mxfp4'"
        yield error("config", "config.json", text, "engines take codes for weights")
        return
    listed = said.get("modules_to_not_convert")
    patterns = [str(p) for p in listed] if isinstance(listed, list) else []
    for d in decisions:
        stored = names.get(d.module.name)
        if stored is None or d.module.kind not in ("linear", "embedding"):
            continue
        left = any(_covers(p, stored) for p in patterns)
        if stored in quantized and left:
            text = "is quantized, and modules_to_not_convert says that it is not"
            yield error("excluded", d.module.name, text, "engines take its codes for weights")
        elif stored not in quantized and not left:
            text = "is kept, and modules_to_not_convert does not say so"
            yield error("not-excluded", d.module.name, text, "engines look for blocks of it")


def _covers(pattern: str, name: str) -> bool:
    """A module is named, or one around it; by a glob as well."""
    return any(fnmatchcase(name, p) for p in (pattern, f"{pattern}.*"))


def _tensors(folder: Folder, stored: str, rows: int, width: int) -> Iterator[Finding]:
    """Types and shapes of codes and scales, `rows` those of all experts, and the scales' values."""
    due = (rows, width // MX_BLOCK)
    for last, tail in ((BLOCKS, (MX_BLOCK // 2,)), (_SCALES, ())):
        tensor = folder.tensors.get(stored + last)
        if tensor is None:
            yield error("scale-missing", stored, f"{stored + last} is in no file", _ALL)
            continue
        if tensor.dtype != "uint8":
            text = f"{last[1:]} are {tensor.dtype}, not bytes"
            yield error("dtype", stored, text, _ALL)
        elif not _has(tensor, due, tail):
            text = f"{last[1:]} are {list(tensor.shape)} for {rows:,} rows of {width:,}"
            yield error("shape", stored, text, _SIZES)
        elif last == _SCALES:
            yield from check_values(stored, "scales", tensor, folder.numbers(tensor))


def _has(tensor: StoredTensor, due: tuple[int, int], tail: tuple[int, ...]) -> bool:
    shape = tensor.shape
    if len(shape) != 3 + len(tail):
        return False
    return (shape[0] * shape[1], shape[2], shape[3:]) == (*due, tail)
