"""Read compressed-tensors: quantized modules, with what their group says of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.errors import FormatError
from megtool.export.folders.infer_format import DECODE, Found, group_for, is_zero, packing_for
from megtool.export.quantized_module import Coded
from megtool.quant.recipes.compressed_targets import EXPRESSION, means


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is said of inputs: `numbers` such as `float8` ("" where they are as they are), `how` is
    `static`, `dynamic` or `none`. `is_even` is false where they have a zero point."""

    numbers: str = ""
    how: str = "none"
    strategy: str = ""
    is_even: bool = True

    @property
    def words(self) -> str:
        """Numbers and how they are scaled."""
        return f"{self.numbers} {self.how}" if self.numbers else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One of `config_groups`: whose it is, what of a weight has a scale (`strategy`, "" where it is
    not said), and how inputs are quantized."""

    name: str
    targets: tuple[str, ...]
    strategy: str
    inputs: Inputs
    has_outputs: bool

    def rank(self, module: str) -> int:
        """How exactly it means a module: 0 by name, 1 by an expression, 2 by class, 3 not."""
        if module in self.targets:
            return 0
        if any(means(t, module) for t in self.targets):
            return 1
        return 2 if any(not t.startswith(EXPRESSION) and "." not in t for t in self.targets) else 3


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
        targets, weights = one.get("targets"), one.get("weights")
        strategy = weights.get("strategy") if isinstance(weights, dict) else None
        out.append(
            Scheme(
                name=str(name),
                targets=tuple(str(t) for t in targets) if isinstance(targets, list) else (),
                strategy=str(strategy or ""),
                inputs=_inputs(one.get("input_activations")),
                has_outputs=isinstance(one.get("output_activations"), dict),
            )
        )
    return tuple(out)


def _inputs(args: Any) -> Inputs:
    if not isinstance(args, dict):
        return Inputs()
    bits = args.get("num_bits", 8)
    return Inputs(
        numbers=f"{args.get('type', 'int')}{bits if type(bits) is int else 8}",
        # "local": groups are scaled as they come, under one calibrated scale
        how="dynamic" if args.get("dynamic") is True else "static",
        strategy=str(args.get("strategy") or ""),
        is_even=args.get("symmetric") is not False,
    )


def scheme_of(found: Found, schemes: Sequence[Scheme], ignored: Sequence[str]) -> Scheme:
    """The group of a module.

    Raises:
        FormatError: it has none, or is ignored, and yet quantized.
    """
    best = min(schemes, key=lambda s: s.rank(found.module))
    listed = any(means(i, found.module) for i in ignored)
    if listed or best.rank(found.module) == 3:
        why = "ignores it" if listed else "has no group for it"
        raise found.fault(
            f"is stored quantized, and the quantization_config {why}: engines would load it as "
            "it is",
            hint="mend config.json, or take the folder it was made from",
        )
    return best


def read_module(found: Found, scheme: Scheme) -> tuple[Coded, str]:
    """One module, and what of it becomes otherwise in a format of ours ("": nothing).

    Raises:
        FormatError: no format of ours has such weights with such inputs, inputs have a zero point,
            or a scale of inputs is missing.
    """
    if scheme.has_outputs:
        raise found.fault("its outputs are quantized, as no format of engines has them", hint=KEEP)
    algo, note = _algo(found, scheme)
    group = group_for(found, algo)
    second = found.numbers == "nvfp4"
    last = "input_global_scale" if second and algo == "NVFP4" else "input_scale"
    inputs = found.single(last, "input_global_scale", "input_scale")
    _check_zero_point(found, scheme.inputs)
    if scheme.inputs.how == "static" and algo in _STATIC and not inputs:
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

KEEP = "export it with --to compressed-tensors, which keeps it as it is, or --to hf, which decodes"
"""The ways out where other forms cannot say what compressed-tensors can."""


def _check_zero_point(found: Found, inputs: Inputs) -> None:
    """Inputs are scaled about zero, as all formats of ours have them.

    Raises:
        FormatError: they are not, or what they are scaled about is missing.
    """
    zero = found.beside("input_zero_point")
    if zero is None and not inputs.is_even and inputs.how == "static":
        raise found.fault(
            "its inputs are said to have a zero point, and there is no input_zero_point", hint=KEEP
        )
    if zero is not None and not is_zero(found.stored.catalogue, zero):
        raise found.fault(
            f"its inputs are scaled about a zero point ({zero.name!r}), and other forms than "
            "compressed-tensors scale them about zero",
            hint=KEEP,
        )


def _algo(found: Found, scheme: Scheme) -> tuple[str, str]:
    """The format of a module by its weights and what is said of its inputs, and a note."""
    able, inputs = _formats(found, scheme.strategy), scheme.inputs
    if not able:
        rows, columns = found.reach
        raise found.fault(
            f"{found.numbers} with a scale for {rows} x {columns} elements is no format of engines "
            "other than those of compressed-tensors",
            hint=KEEP,
        )
    algo = able.get(inputs.words)
    if algo is None:
        have = "inputs as they are" if inputs.words == "none" else f"{inputs.words} inputs"
        known = [
            f"{a} (inputs as they are)" if w == "none" else f"{a} ({w} inputs)"
            for w, a in able.items()
        ]
        raise found.fault(
            f"{found.numbers} weights, {have}: no format but of compressed-tensors; there is "
            f"{' and '.join(known)}",
            hint=KEEP,
        )
    if algo == "FP8_PB_WO" and not inputs.numbers:
        return algo, "inputs as they are; engines that load FP8_PB_WO round them to FP8"
    if algo == "FP8_PER_CHANNEL_PER_TOKEN" and inputs.strategy not in ("", "token"):
        return algo, f"inputs scaled a {inputs.strategy} as they come; {algo} scales every token"
    return algo, ""


def _formats(found: Found, strategy: str) -> dict[str, str]:
    """The formats that such weights may be of, by the words for what their inputs are then."""
    rows, columns = found.reach
    whole = found.reach == found.shape
    row = rows == 1 and columns == found.shape[1]
    match found.numbers:
        case "fp8" if strategy == "block" or not (whole or row):
            if found.suits("FP8_PB_WO", 128):
                return {"none": "FP8_PB_WO", "float8 dynamic": "FP8_PB_WO"}
        case "fp8":
            one = {"float8 static": "FP8"} if whole else {}
            return one | {"float8 dynamic": "FP8_PER_CHANNEL_PER_TOKEN"}
        case "mxfp8" if found.suits("MXFP8", 32):
            return {"float8 dynamic": "MXFP8"}
        case "mxfp4" if found.suits("MXFP4", 32):
            return {"float4 dynamic": "MXFP4", "float8 dynamic": "W4A8_MXFP4_FP8"}
        case "nvfp4" if columns == 16 or columns == found.shape[1]:
            return {"none": "W4A16_NVFP4", "float4 static": "NVFP4"}
        case "nvfp4" if columns == 32:
            return {"none": "W4A16_NVFP4", "float8 static": "W4A8_NVFP4_FP8"}
        case "int8" | "int8words" if whole or row:
            return {"none": "W8A16", "int8 static": "W8A8_SQ_PER_CHANNEL"}
        case "int4" if rows == 1:
            return {"none": "W4A16_AWQ"}
    return {}


def cache_algo(config: Mapping[str, Any], catalogue: Catalogue) -> str | None:
    """What keys and values are kept in, by `kv_cache_scheme`; None where it says nothing.

    Raises:
        FormatError: no KV cache of ours is like it.
    """
    said = config.get("kv_cache_scheme")
    if said is None:
        return None
    args = said if isinstance(said, dict) else {}
    bits, kind = args.get("num_bits"), args.get("type", "int")
    algo = {8: "FP8", 4: "NVFP4"}.get(bits if type(bits) is int else 0)
    plain = args.get("symmetric") is not False and not args.get("dynamic")
    one = args.get("strategy") in (None, "tensor", "tensor_group", "group")
    if algo is None or kind != "float" or not plain or not one:
        words = {k: v for k, v in args.items() if v not in (None, False)} or said
        raise FormatError(
            f"its KV cache {words} is that of compressed-tensors alone: others have floats, with a "
            "stored scale a tensor",
            file=catalogue.root / "config.json",
            hint=KEEP,
        )
    return algo
