"""Read ModelOpt: quantized modules of its unified folders, checked by what their config says."""

from __future__ import annotations

from collections.abc import Iterable

from megtool.checkpoint.catalogue import Catalogue
from megtool.errors import FormatError
from megtool.export.folders.infer_format import DECODE, Found, group_for, packing_for
from megtool.export.quantized_module import Coded
from megtool.number_formats.decode import SCALE_2
from megtool.number_formats.packed_parts import WHOLE, PackedPart, PartSpan
from megtool.quant.packed_tensors.modelopt_tensors import INPUT_SCALE, NAMES, SECONDS
from megtool.quant.recipes.formats import FORMATS
from megtool.quant.verification.metadata_checks import check_agreement
from megtool.quant.verification.quant_config_files import Declared, in_config, in_quant_file
from megtool.quant.verification.stored_folder import Folder

_ALIASES = {"FP8_BLOCK_SCALES": "FP8_PB_WO", "W4A8_NVFP4": "W4A8_NVFP4_FP8"}


def declared(catalogue: Catalogue) -> Declared:
    """What the folder says: hf_quant_config.json, or config.json where that is not there.

    Raises:
        FormatError: neither says it in ModelOpt's form.
    """
    beside, inline = _both(catalogue)
    found = beside or inline
    if found is None:
        raise FormatError("its config says nothing of its quantization", file=catalogue.root)
    return found


def _both(catalogue: Catalogue) -> tuple[Declared | None, Declared | None]:
    meta = catalogue.metadata
    folder = Folder(
        path=catalogue.root, config=meta.get("config"), quant=meta.get("hf_quant_config")
    )
    return in_quant_file(folder), in_config(folder)


def differences(catalogue: Catalogue) -> list[str]:
    """Where the two files do not say the same, and hf_quant_config.json is followed.

    Raises:
        FormatError: they call the codes different things.
    """
    beside, inline = _both(catalogue)
    if beside is None or inline is None:
        return []
    for what, one, other in (
        ("quant_algo", beside.algo, inline.algo),
        ("quantized_layers", beside.layers, inline.layers),
        ("group_size", beside.group_size, inline.group_size),
    ):
        if one and other and one != other:
            words = f" is {one} and {other}" if isinstance(one, (str, int)) else " differ"
            raise FormatError(
                f"{what} of {beside.where} and of {inline.where}{words}",
                file=catalogue.root / beside.where,
                hint="make both say what the tensors are: engines go by the one or the other",
            )
    found = [f.text for f in check_agreement(beside, inline)]
    told = ("kv_cache_quant_algo", "excluded modules")
    return [f"{t}; {beside.where} is followed" for t in found if t.startswith(told)]


def read_module(found: Found, said: Declared) -> Coded:
    """One module, of the format that is said of it.

    A format's second scale that is none of decoded values (W4A8_AWQ's) is among its parts.

    Raises:
        FormatError: what is said is not what is stored, or a scale is missing.
    """
    algo, group = _format(found, said)
    number = FORMATS[algo]
    parts = list(found.folded.parts)
    if algo in SECONDS and not found.has_second:
        second = found.single(NAMES[SCALE_2])
        if not second:
            raise _missing(found, NAMES[SCALE_2], algo)
        t = found.stored.catalogue[second]
        spans = tuple(PartSpan(WHOLE) for _ in t.shape)
        part = PackedPart(role=SCALE_2, dtype=t.dtype.name, shape=t.shape, spans=spans)
        parts.append((part, second))
    inputs = found.single(INPUT_SCALE)
    if number.calibrates and not inputs:
        raise _missing(found, INPUT_SCALE, algo)
    return Coded(
        name=found.module,
        shape=found.shape,
        algo=algo,
        group_size=group,
        packing=packing_for(found, algo, group),
        parts=tuple(parts),
        input_scale=inputs,
    )


def _missing(found: Found, last: str, algo: str) -> FormatError:
    return found.fault(
        f"its {last} {found.module + '.' + last!r} is missing, and {algo} needs it",
        hint=f"is the download complete? If it never had one, {DECODE}",
    )


def _format(found: Found, said: Declared) -> tuple[str, int]:
    """The format of a module and its group size."""
    algo = said.algo_of(found.module)
    algo = _ALIASES.get(algo, algo)
    if not algo and (said.algo or said.layers or said.excludes(found.module)):
        raise found.fault(
            f"is stored quantized, and by {said.where} it is not: engines would load it as it is",
            hint=f"mend {said.where}, or take the folder it was made from",
        )
    algo = algo or _by_structure(found)
    if algo not in FORMATS:
        raise found.fault(
            f"{said.where} says it is {algo}, which is not known",
            hint=f"known: {', '.join(FORMATS)}",
        )
    group = group_for(found, algo)
    stated = said.group_of(found.module)
    if FORMATS[algo].groups and algo != "FP8_PB_WO" and stated is not None:
        if min(stated, found.shape[1]) != found.reach[1]:
            raise found.fault(
                f"its scales are for {found.reach[1]} columns each, and {said.where} says {stated}",
                hint="do the files belong together?",
            )
        group = stated
    if not found.suits(algo, group):
        rows, columns = found.reach
        raise found.fault(
            f"{said.where} says it is {algo}, and it is stored as {found.numbers} with a scale for "
            f"{rows} x {columns} of {' x '.join(map(str, found.shape))} elements",
            hint="do the files belong together?",
        )
    return algo, group


def _by_structure(found: Found) -> str:
    """The format of a module that nothing is said of."""
    inputs = f"{found.module}.{INPUT_SCALE}" in found.stored.catalogue
    second = f"{found.module}.{NAMES[SCALE_2]}" in found.stored.catalogue
    candidates = {
        "fp8": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
        "int8": ("W8A8_SQ_PER_CHANNEL",) if inputs else ("W8A16",),
        "int4rows": ("W4A8_AWQ",) if second else ("W4A16_AWQ",),
        "mxfp8": ("MXFP8",),
        "mxfp4": ("MXFP4",),
        "nvfp4": ("NVFP4", "W4A8_NVFP4_FP8") if inputs else ("W4A16_NVFP4",),
    }[found.numbers]
    for algo in candidates:
        group = group_for(found, algo)
        if found.suits(algo, group) and (algo != "NVFP4" or group == 16):
            return algo
    raise found.fault(f"its scales are for {found.reach} elements, a format that is not known")


def check_listed(said: Declared, modules: Iterable[Coded], catalogue: Catalogue) -> None:
    """Modules that are listed with a format are quantized.

    Raises:
        FormatError: one is not.
    """
    held = {m.name for m in modules}
    for name, (algo, _) in said.layers.items():
        if algo and name not in held and f"{name}.weight" in catalogue:
            row = catalogue.index[f"{name}.weight"]
            raise FormatError(
                f"{said.where} says it is {algo}, and it is stored as "
                f"{catalogue.tensors[row].dtype.name} without scales",
                file=catalogue.path(int(catalogue.extents.file[row])),
                tensor=f"{name}.weight",
                hint="is the download complete?",
            )
