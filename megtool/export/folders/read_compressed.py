"""Read compressed-tensors: quantised modules, with what their group says of inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.errors import FormatError
from megtool.export.coded import Coded
from megtool.export.folders.structure import DECODE, Found, group_for, packing_for

Inputs = tuple[str, int, str]
"""Kind, bits and how: `static`, `dynamic`, or `none`."""

_NONE: Inputs = ("", 0, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One of `config_groups`: whose it is, and how inputs are quantised."""

    name: str
    targets: tuple[str, ...]
    inputs: Inputs

    def rank(self, module: str) -> int:
        """How exactly it means a module: 0 by name, 1 by an expression, 2 by class, 3 not."""
        if module in self.targets:
            return 0
        if any(_matches(t, module) for t in self.targets):
            return 1
        return 2 if any(not t.startswith("re:") and "." not in t for t in self.targets) else 3


def read_schemes(config: Mapping[str, Any], catalogue: Catalogue) -> tuple[Scheme, ...]:
    """The groups of a `quantization_config`.

    Raises:
        FormatError: it has none.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise FormatError(
            "its quantization_config has no config_groups",
            file=catalogue.root / "config.json",
            hint=DECODE,
        )
    out = []
    for name, one in groups.items():
        if not isinstance(one, dict):
            raise FormatError(
                f"{name!r} of config_groups is no object", file=catalogue.root / "config.json"
            )
        targets = one.get("targets")
        out.append(
            Scheme(
                name=str(name),
                targets=tuple(str(t) for t in targets) if isinstance(targets, list) else (),
                inputs=_inputs(one.get("input_activations")),
            )
        )
    return tuple(out)


def _inputs(args: Any) -> Inputs:
    if not isinstance(args, dict):
        return _NONE
    dynamic = args.get("dynamic")
    # "local": groups are scaled as they come, under one calibrated scale
    how = "dynamic" if dynamic is True else "static"
    kind, bits = str(args.get("type", "int")), args.get("num_bits", 8)
    return kind, bits if type(bits) is int else 8, how


def scheme_of(found: Found, schemes: Sequence[Scheme], ignored: Sequence[str]) -> Scheme:
    """The group of a module.

    Raises:
        FormatError: it has none, or is ignored, and yet quantised.
    """
    best = min(schemes, key=lambda s: s.rank(found.module))
    listed = any(i == found.module or _matches(i, found.module) for i in ignored)
    if listed or best.rank(found.module) == 3:
        why = "ignores it" if listed else "has no group for it"
        raise found.fault(
            f"is stored quantised, and the quantization_config {why}: engines would load it as "
            "it is",
            hint="mend config.json, or take the folder it was made from",
        )
    return best


def _matches(pattern: str, module: str) -> bool:
    try:
        return pattern.startswith("re:") and bool(re.match(pattern[3:], module))
    except re.error:
        return False


def read_module(found: Found, scheme: Scheme) -> tuple[Coded, str]:
    """One module, and what of it no format of ours says ("" if all is said).

    Raises:
        FormatError: no format of ours has such weights, or a scale of inputs is missing.
    """
    algo, note = _algo(found, scheme.inputs)
    group = group_for(found, algo)
    second = found.numbers == "nvfp4"
    last = "input_global_scale" if second and algo == "NVFP4" else "input_scale"
    inputs = found.single(last, "input_global_scale", "input_scale")
    if zeros := found.beside("input_zero_point"):
        note = note or f"zero points of inputs ({zeros.name.rpartition('.')[2]}) are left out"
    if scheme.inputs[2] == "static" and algo in _STATIC and not inputs:
        raise found.fault(
            f"its {last} {found.module + '.' + last!r} is missing, and {algo} needs it",
            hint=f"is the download complete? If it never had one, {DECODE}",
        )
    suits = found.suits(algo, group)
    packing = packing_for(found, algo, group) if suits else found.folded.packing
    coded = Coded(
        name=found.module,
        shape=found.shape,
        algo=algo,
        group_size=group,
        packing=packing,
        parts=found.folded.parts,
        input_scale=inputs,
        input_divides=inputs.endswith("input_global_scale"),
    )
    return coded, note


_STATIC = ("FP8", "W8A8_SQ_PER_CHANNEL", "NVFP4", "W4A8_NVFP4_FP8")


def _algo(found: Found, inputs: Inputs) -> tuple[str, str]:
    """The format of a module by its weights and what is said of its inputs, and a note."""
    kind, bits, how = inputs
    rows, columns = found.reach
    whole = found.reach == found.shape
    row = rows == 1 and columns == found.shape[1]
    said = f"inputs {how} {kind}{bits}" if how != "none" else "inputs as they are"
    match found.numbers:
        case "fp8" if whole and how == "static":
            return "FP8", ""
        case "fp8" if whole or row:
            plain = (kind, bits, how) == ("float", 8, "dynamic")
            return "FP8_PER_CHANNEL_PER_TOKEN", "" if plain else f"{said}, taken as FP8 by token"
        case "fp8" if found.suits("FP8_PB_WO", 128):
            return "FP8_PB_WO", ""
        case "mxfp8" if found.suits("MXFP8", 32):
            return "MXFP8", ""
        case "mxfp4" if found.suits("MXFP4", 32):
            return ("W4A8_MXFP4_FP8" if bits == 8 else "MXFP4"), ""
        case "nvfp4" if columns == 16 or columns == found.shape[1]:
            if (kind, bits) == ("float", 8):
                return "W4A16_NVFP4", f"{said}, taken as they are"
            return ("W4A16_NVFP4" if how == "none" else "NVFP4"), ""
        case "nvfp4" if columns == 32:
            fp8 = (kind, bits, how) == ("float", 8, "static")
            return ("W4A8_NVFP4_FP8" if fp8 else "W4A16_NVFP4"), ""
        case "int8" | "int8words" if whole or row:
            if (kind, bits, how) == ("int", 8, "static"):
                return "W8A8_SQ_PER_CHANNEL", ""
            return "W8A16", "" if how == "none" else f"{said}, taken as they are"
        case "int4" if rows == 1:
            return "W4A16_AWQ", "" if how == "none" else f"{said}, taken as they are"
    raise found.fault(
        f"{found.numbers} with a scale for {rows} x {columns} elements is no format of engines "
        "other than those of compressed-tensors",
        hint=DECODE,
    )
