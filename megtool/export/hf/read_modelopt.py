"""Read the quantized modules of ModelOpt's unified folders, and compare them with their config."""

from __future__ import annotations

from collections.abc import Iterable

from megtool.errors import FormatError
from megtool.export.hf.infer_format import (
    DECODE_HINT,
    QuantizedWeight,
    infer_group_size,
    infer_packing,
)
from megtool.export.quantized_module import QuantizedModule
from megtool.lint.folder_view import FolderView
from megtool.lint.quant_config import (
    QuantConfig,
    check_agreement,
    parse_hf_quant_config,
    parse_quantization_config,
)
from megtool.number_formats.decode import LOW_RANK_UP, SCALE_2
from megtool.number_formats.packed_parts import WHOLE, PackedPart, PartSpan
from megtool.quant.packed_tensors.modelopt_tensors import GLOBAL_SCALE_DIVISORS, INPUT_SCALE, NAMES
from megtool.quant.recipes.formats import FORMATS
from megtool.tensors.catalogue import Catalogue

_ALIASES = {"FP8_BLOCK_SCALES": "FP8_PB_WO", "W4A8_NVFP4": "W4A8_NVFP4_FP8"}


def read_quant_config(catalogue: Catalogue) -> QuantConfig:
    """What the folder says: hf_quant_config.json, or config.json where that is not there.

    Raises:
        FormatError: neither says it in ModelOpt's form.
    """
    file, inline = _read_quant_configs(catalogue)
    config = file or inline
    if config is None:
        raise FormatError("its config says nothing of its quantization", file=catalogue.root)
    return config


def _read_quant_configs(catalogue: Catalogue) -> tuple[QuantConfig | None, QuantConfig | None]:
    metadata = catalogue.metadata
    folder = FolderView(path=catalogue.root, config=metadata.get("config"))
    return (
        parse_hf_quant_config(metadata.get("hf_quant_config")),
        parse_quantization_config(folder.quantization),
    )


def compare_quant_configs(catalogue: Catalogue) -> list[str]:
    """Where the two files do not say the same, and hf_quant_config.json is followed.

    Raises:
        FormatError: they call the codes different things.
    """
    file, inline = _read_quant_configs(catalogue)
    if file is None or inline is None:
        return []
    for key, first, second in (
        ("quant_algo", file.algo, inline.algo),
        ("quantized_layers", file.layers, inline.layers),
        ("group_size", file.group_size, inline.group_size),
    ):
        if first and second and first != second:
            words = f" is {first} and {second}" if isinstance(first, (str, int)) else " differ"
            raise FormatError(
                f"{key} of {file.file} is not that of {inline.file}{words}",
                file=catalogue.root / file.file,
                hint="make both say what the tensors are: engines go by the one or the other",
            )
    messages = [f.message for f in check_agreement(file, inline)]
    reported = ("kv_cache_quant_algo", "excluded modules")
    return [f"{t}; {file.file} is followed" for t in messages if t.startswith(reported)]


def read_module(weight: QuantizedWeight, config: QuantConfig) -> QuantizedModule:
    """One module, of the format that is said of it.

    A format's second scale that is none of decoded values (W4A8_AWQ's) is among its parts.

    Raises:
        FormatError: what is said is not what is stored, or a scale is missing.
    """
    algo, group = _format(weight, config)
    number = FORMATS[algo]
    parts = list(weight.packed.parts)
    if algo in GLOBAL_SCALE_DIVISORS and not weight.has_second:
        second = weight.find_single(NAMES[SCALE_2])
        if not second:
            raise _missing(weight, NAMES[SCALE_2], algo)
        t = weight.finder.catalogue[second]
        spans = tuple(PartSpan(WHOLE) for _ in t.shape)
        part = PackedPart(role=SCALE_2, dtype=t.dtype.name, shape=t.shape, spans=spans)
        parts.append((part, second))
    has_branch = any(p.role == LOW_RANK_UP for p, _ in parts)
    if has_branch != number.has_branch:
        raise weight.error(
            f"{config.file} says it is {algo}, and it has {'' if has_branch else 'no '}"
            "svdquant_lora_a and svdquant_lora_b",
            hint="do the files belong together?",
        )
    inputs = weight.find_single(INPUT_SCALE)
    if number.calibrates and not inputs:
        raise _missing(weight, INPUT_SCALE, algo)
    return QuantizedModule(
        name=weight.module,
        shape=weight.shape,
        algo=algo,
        group_size=group,
        packing=infer_packing(weight, algo, group),
        parts=tuple(parts),
        input_scale=inputs,
    )


def _missing(weight: QuantizedWeight, last: str, algo: str) -> FormatError:
    return weight.error(
        f"its {last} {weight.module + '.' + last!r} is missing, and {algo} needs it",
        hint=f"is the download complete? If it never had one, {DECODE_HINT}",
    )


def _format(weight: QuantizedWeight, config: QuantConfig) -> tuple[str, int]:
    """The format of a module and its group size."""
    algo = config.algo_of(weight.module)
    algo = _ALIASES.get(algo, algo)
    if not algo and (config.algo or config.layers or config.excludes(weight.module)):
        raise weight.error(
            f"is stored quantized, and by {config.file} it is not: engines would load it as it is",
            hint=f"mend {config.file}, or take the folder it was made from",
        )
    algo = algo or _infer_algo(weight)
    if algo not in FORMATS:
        raise weight.error(
            f"{config.file} says it is {algo}, which is not known",
            hint=f"known: {', '.join(FORMATS)}",
        )
    group = infer_group_size(weight, algo)
    stated = config.group_size_of(weight.module)
    if FORMATS[algo].groups and algo != "FP8_PB_WO" and stated is not None:
        if min(stated, weight.shape[1]) != weight.scale_block[1]:
            raise weight.error(
                f"its scales are for {weight.scale_block[1]} columns each, and {config.file} "
                f"declares {stated}",
                hint="do the files belong together?",
            )
        group = stated
    if not weight.fits(algo, group):
        rows, columns = weight.scale_block
        raise weight.error(
            f"{config.file} says it is {algo}, and it is stored as {weight.numbers} with one scale "
            f"for {rows} x {columns} of {' x '.join(map(str, weight.shape))} elements",
            hint="do the files belong together?",
        )
    return algo, group


def _infer_algo(weight: QuantizedWeight) -> str:
    """The format of a module that nothing is said of."""
    inputs = f"{weight.module}.{INPUT_SCALE}" in weight.finder.catalogue
    second = f"{weight.module}.{NAMES[SCALE_2]}" in weight.finder.catalogue
    has_branch = any(p.role == LOW_RANK_UP for p, _ in weight.packed.parts)
    candidates = {
        "fp8": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
        "int8": ("W8A8_SQ_PER_CHANNEL",) if inputs else ("W8A16",),
        "int4rows": ("W4A8_AWQ",) if second else ("W4A16_AWQ",),
        "mxfp8": ("MXFP8",),
        "mxfp4": ("MXFP4",),
        "svd": ("NVFP4_SVD",),
        "nvfp4": ("NVFP4", "W4A8_NVFP4_FP8") if inputs else ("W4A16_NVFP4",),
    }["svd" if has_branch else weight.numbers]
    for algo in candidates:
        group = infer_group_size(weight, algo)
        if weight.fits(algo, group) and (algo != "NVFP4" or group == 16):
            return algo
    raise weight.error(
        f"its scales are for {weight.scale_block} elements, a format that is not known"
    )


def check_listed(
    config: QuantConfig, modules: Iterable[QuantizedModule], catalogue: Catalogue
) -> None:
    """Modules that are listed with a format are quantized.

    Raises:
        FormatError: one is not.
    """
    quantized = {m.name for m in modules}
    for name, (algo, _) in config.layers.items():
        if algo and name not in quantized and f"{name}.weight" in catalogue:
            row = catalogue.index[f"{name}.weight"]
            raise FormatError(
                f"{config.file} says it is {algo}, and it is stored as "
                f"{catalogue.tensors[row].dtype.name} without scales",
                file=catalogue.path(int(catalogue.extents.file[row])),
                tensor=f"{name}.weight",
                hint="is the download complete?",
            )
