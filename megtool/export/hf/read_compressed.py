"""Read the quantized modules of compressed-tensors folders, with their input quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.errors import FormatError
from megtool.export.hf.infer_format import (
    DECODE_HINT,
    QuantizedWeight,
    infer_group_size,
    infer_packing,
    is_zero,
)
from megtool.export.quantized_module import QuantizedModule
from megtool.quant.recipes.compressed_arguments import EXPRESSION, means
from megtool.tensors.catalogue import Catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class InputQuantization:
    """What is said of inputs: `numbers` such as `float8` ("" where they are as they are), `scaling`
    is `static`, `dynamic` or `none`, `group_size` the columns under one scale of a group.
    `is_symmetric` is false where they have a zero point."""

    numbers: str = ""
    scaling: str = "none"
    strategy: str = ""
    group_size: int = 0
    is_symmetric: bool = True

    @property
    def label(self) -> str:
        """Numbers and how they are scaled."""
        return f"{self.numbers} {self.scaling}" if self.numbers else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedGroup:
    """One of `config_groups`: whose it is, what of a weight has a scale (`strategy`, "" where it is
    not said), and how inputs are quantized."""

    name: str
    targets: tuple[str, ...]
    strategy: str
    inputs: InputQuantization
    has_outputs: bool

    def rank(self, module: str) -> int:
        """How exactly it means a module: 0 by name, 1 by an expression, 2 by class, 3 not."""
        if module in self.targets:
            return 0
        if any(means(t, module) for t in self.targets):
            return 1
        return 2 if any(not t.startswith(EXPRESSION) and "." not in t for t in self.targets) else 3


def read_groups(config: Mapping[str, Any], catalogue: Catalogue) -> tuple[CompressedGroup, ...]:
    """The groups of a `quantization_config`.

    Raises:
        FormatError: it has none.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise FormatError(
            "its quantization_config has no config_groups",
            file=catalogue.root / "config.json",
            hint=DECODE_HINT,
        )
    out = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise FormatError(
                f"{name!r} of config_groups is no object", file=catalogue.root / "config.json"
            )
        targets, weights = group.get("targets"), group.get("weights")
        strategy = weights.get("strategy") if isinstance(weights, dict) else None
        out.append(
            CompressedGroup(
                name=str(name),
                targets=tuple(str(t) for t in targets) if isinstance(targets, list) else (),
                strategy=str(strategy or ""),
                inputs=_inputs(group.get("input_activations")),
                has_outputs=isinstance(group.get("output_activations"), dict),
            )
        )
    return tuple(out)


_BLOCK = 128  # what blocks of inputs have where no size is said


def _inputs(args: Any) -> InputQuantization:
    if not isinstance(args, dict):
        return InputQuantization()
    bits = args.get("num_bits", 8)
    return InputQuantization(
        numbers=f"{args.get('type', 'int')}{bits if type(bits) is int else 8}",
        # "local": groups are scaled as they come, under one calibrated scale
        scaling="dynamic" if args.get("dynamic") is True else "static",
        strategy=str(args.get("strategy") or ""),
        group_size=size if type(size := args.get("group_size")) is int else _BLOCK,
        is_symmetric=args.get("symmetric") is not False,
    )


def find_group_of(
    weight: QuantizedWeight, groups: Sequence[CompressedGroup], ignored: Sequence[str]
) -> CompressedGroup:
    """The group of a module.

    Raises:
        FormatError: it has none, or is ignored, and yet quantized.
    """
    best = min(groups, key=lambda s: s.rank(weight.module))
    listed = any(means(i, weight.module) for i in ignored)
    if listed or best.rank(weight.module) == 3:
        reason = "ignores it" if listed else "has no group for it"
        raise weight.error(
            f"is stored quantized, and the quantization_config {reason}: engines would load it as "
            "it is",
            hint="mend config.json, or take the folder it was made from",
        )
    return best


def read_module(
    weight: QuantizedWeight, config_group: CompressedGroup
) -> tuple[QuantizedModule, str]:
    """One module, and what of it becomes otherwise in a format of ours ("": nothing).

    Raises:
        FormatError: no format of ours has such weights with such inputs, inputs have a zero point,
            or a scale of inputs is missing.
    """
    if config_group.has_outputs:
        raise weight.error(
            "its outputs are quantized, as no format of engines has them", hint=KEEP_HINT
        )
    algo, note = _algo(weight, config_group)
    group = infer_group_size(weight, algo)
    second = weight.numbers == "nvfp4"
    last = "input_global_scale" if second and algo == "NVFP4" else "input_scale"
    inputs = weight.find_single(last, "input_global_scale", "input_scale")
    check_zero_point(weight, config_group.inputs)
    if config_group.inputs.scaling == "static" and algo in _STATIC and not inputs:
        raise weight.error(
            f"its {last} {weight.module + '.' + last!r} is missing, and {algo} needs it",
            hint=f"is the download complete? If it never had one, {DECODE_HINT}",
        )
    suits = weight.fits(algo, group)
    packing = infer_packing(weight, algo, group) if suits else weight.packed.packing
    module = QuantizedModule(
        name=weight.module,
        shape=weight.shape,
        algo=algo,
        group_size=group,
        packing=packing,
        parts=weight.packed.parts,
        input_scale=inputs,
        input_divides=inputs.endswith("input_global_scale"),
    )
    return module, note


_STATIC = ("FP8", "W8A8_SQ_PER_CHANNEL", "NVFP4", "W4A8_NVFP4_FP8")

KEEP_HINT = (
    "export it with --to compressed-tensors, which keeps it as it is, or --to hf, which decodes"
)
"""The ways out where other forms cannot say what compressed-tensors can."""


def check_zero_point(weight: QuantizedWeight, inputs: InputQuantization) -> None:
    """Inputs are scaled about zero, as all formats of ours have them.

    Raises:
        FormatError: they are not, or what they are scaled about is missing.
    """
    zero = weight.find_tensor("input_zero_point")
    if zero is None and not inputs.is_symmetric and inputs.scaling == "static":
        raise weight.error(
            "its inputs are said to have a zero point, and there is no input_zero_point",
            hint=KEEP_HINT,
        )
    if zero is not None and not is_zero(weight.finder.catalogue, zero):
        raise weight.error(
            f"its inputs are scaled about a zero point ({zero.name!r}), and other forms than "
            "compressed-tensors scale them about zero",
            hint=KEEP_HINT,
        )


def _algo(weight: QuantizedWeight, group: CompressedGroup) -> tuple[str, str]:
    """The format of a module by its weights and what is said of its inputs, and a note."""
    candidates, inputs = _formats(weight, group.strategy), group.inputs
    if not candidates:
        rows, columns = weight.scale_block
        raise weight.error(
            f"{weight.numbers} with a scale for {rows} x {columns} elements is no format of "
            "engines other than those of compressed-tensors",
            hint=KEEP_HINT,
        )
    algo = candidates.get(inputs.label)
    if algo is None:
        have = "inputs as they are" if inputs.label == "none" else f"{inputs.label} inputs"
        alternatives = [
            f"{a} (inputs as they are)" if w == "none" else f"{a} ({w} inputs)"
            for w, a in candidates.items()
        ]
        raise weight.error(
            f"{weight.numbers} weights, {have}: no format but of compressed-tensors; there is "
            f"{' and '.join(alternatives)}",
            hint=KEEP_HINT,
        )
    if algo == "FP8_PB_WO" and not inputs.numbers:
        return algo, "inputs as they are; engines that load FP8_PB_WO round them to FP8"
    if algo == "FP8_PER_CHANNEL_PER_TOKEN" and inputs.strategy not in ("", "token"):
        return algo, f"inputs scaled a {inputs.strategy} as they come; {algo} scales every token"
    return algo, ""


def _formats(weight: QuantizedWeight, strategy: str) -> dict[str, str]:
    """The formats that such weights may be of, by the words for what their inputs are then."""
    rows, columns = weight.scale_block
    is_per_tensor = weight.scale_block == weight.shape
    is_per_row = rows == 1 and columns == weight.shape[1]
    match weight.numbers:
        case "fp8" if strategy == "block" or not (is_per_tensor or is_per_row):
            if weight.fits("FP8_PB_WO", 128):
                return {"none": "FP8_PB_WO", "float8 dynamic": "FP8_PB_WO"}
        case "fp8":
            static = {"float8 static": "FP8"} if is_per_tensor else {}
            return static | {"float8 dynamic": "FP8_PER_CHANNEL_PER_TOKEN"}
        case "mxfp8" if weight.fits("MXFP8", 32):
            return {"float8 dynamic": "MXFP8"}
        case "mxfp4" if weight.fits("MXFP4", 32):
            return {"float4 dynamic": "MXFP4", "float8 dynamic": "W4A8_MXFP4_FP8"}
        case "nvfp4" if columns == 16 or columns == weight.shape[1]:
            return {"none": "W4A16_NVFP4", "float4 static": "NVFP4"}
        case "nvfp4" if columns == 32:
            return {"none": "W4A16_NVFP4", "float8 static": "W4A8_NVFP4_FP8"}
        case "int8" | "int8words" if is_per_tensor or is_per_row:
            return {"none": "W8A16", "int8 static": "W8A8_SQ_PER_CHANNEL"}
        case "int4" if rows == 1:
            return {"none": "W4A16_AWQ"}
    return {}


def read_kv_cache_algo(config: Mapping[str, Any], catalogue: Catalogue) -> str | None:
    """What keys and values are kept in, by `kv_cache_scheme`; None where it says nothing.

    Raises:
        FormatError: no KV cache of ours is like it.
    """
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return None
    args = scheme if isinstance(scheme, dict) else {}
    bits, kind = args.get("num_bits"), args.get("type", "int")
    algo = {8: "FP8", 4: "NVFP4"}.get(bits if type(bits) is int else 0)
    is_static = args.get("symmetric") is not False and not args.get("dynamic")
    is_per_tensor = args.get("strategy") in (None, "tensor", "tensor_group", "group")
    if algo is None or kind != "float" or not is_static or not is_per_tensor:
        words = {k: v for k, v in args.items() if v not in (None, False)} or scheme
        raise FormatError(
            f"its KV cache {words} is that of compressed-tensors alone: others have floats, with a "
            "stored scale a tensor",
            file=catalogue.root / "config.json",
            hint=KEEP_HINT,
        )
    return algo
