"""Metadata checks: what config files say of a quantized model, held against its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from megtool.quant.packed_tensors.transposed import TURNED
from megtool.quant.recipes.formats import FORMATS
from megtool.quant.recipes.match import Decision
from megtool.quant.verification.findings import Finding, error, warning
from megtool.quant.verification.quant_config_files import Declared, in_config, in_quant_file
from megtool.quant.verification.said_checks import check_said
from megtool.quant.verification.stored_folder import CACHE_SCALES, COMPANIONS, Folder, StoredTensor

_ALL = "no engine loads it"
_ROUTES = "engines that follow the file take these bytes for something else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How engines expect a format: `codes` the type of `weight`, of which a byte holds `columns`
    columns or `rows` rows, `scale` the type of `weight_scale`; whether there is a second scale, and
    one of inputs. Shapes of scales are by `NumberFormat.scaling`."""

    codes: str
    scale: str
    columns: int = 1
    rows: int = 1
    second: bool = False
    inputs: bool = False


_E4M3 = "float8_e4m3fn"

STORED: Mapping[str, Stored] = {
    "FP8": Stored(codes=_E4M3, scale="float32", inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Stored(codes=_E4M3, scale="float32"),
    "FP8_PB_WO": Stored(codes=_E4M3, scale="float32"),
    "W8A8_SQ_PER_CHANNEL": Stored(codes="int8", scale="float32", inputs=True),
    "W8A16": Stored(codes="int8", scale="float32"),
    "W4A16_AWQ": Stored(codes="uint8", scale="float32", rows=2),
    "W4A8_AWQ": Stored(codes="uint8", scale="float32", rows=2, second=True, inputs=True),
    "MXFP8": Stored(codes=_E4M3, scale="uint8"),
    "MXFP4": Stored(codes="uint8", scale="uint8", columns=2),
    "W4A8_MXFP4_FP8": Stored(codes="uint8", scale="uint8", columns=2),
    "NVFP4": Stored(codes="uint8", scale=_E4M3, columns=2, second=True, inputs=True),
    "W4A16_NVFP4": Stored(codes="uint8", scale=_E4M3, columns=2, second=True),
    "W4A8_NVFP4_FP8": Stored(codes="uint8", scale=_E4M3, columns=2, second=True, inputs=True),
}
"""By `quant_algo`, as ModelOpt's unified export has them and engines read them."""


def check_metadata(
    folder: Folder,
    decisions: Sequence[Decision],
    names: Mapping[str, str],
    *,
    tokenizer: bool = True,
) -> Iterator[Finding]:
    """All contradictions among config.json, hf_quant_config.json, the tensors and the decisions.

    `names` are the stored names of modules by their canonical ones; `tokenizer` says that the
    source has one.
    """
    for name, what in folder.faults:
        yield error("config", name, what, _ALL)
    yield from check_tokenizer(folder, is_due=tokenizer)
    beside, inline = in_quant_file(folder), in_config(folder)
    if beside is not None and inline is not None:
        yield from check_agreement(beside, inline)
    said = [d for d in (beside, inline) if d is not None]
    linear = [d for d in decisions if d.module.kind in ("linear", "embedding")]
    quantized = any(d.format is not None for d in linear)
    if inline is None and quantized:
        yield error(
            "config",
            "config.json",
            "has no quantization_config of ModelOpt's",
            "vLLM and SGLang take codes for weights",
        )
    for declared in said:
        yield from _layers(folder, declared)
    rows: Counter[str] = Counter()  # of stored modules, in which several may lie
    for d in linear:
        rows[names.get(d.module.name, d.module.name)] += d.module.shape[0]
    for d in linear:
        stored = names.get(d.module.name, d.module.name)
        yield from _module(folder, said, d, stored, rows[stored])
    yield from check_said(folder, said, linear, names)
    yield from _smoothing(folder, said)
    yield from _caches(folder, said, decisions, names)
    yield from _strangers(folder, linear, names)


def check_tokenizer(folder: Folder, *, is_due: bool) -> Iterator[Finding]:
    """A folder without a tokenizer; an error where one `is_due`."""
    if not folder.has_tokenizer:
        make = error if is_due else warning
        yield make("tokenizer", folder.path.name, "no tokenizer is there", "engines cannot start")


def check_agreement(beside: Declared, inline: Declared) -> Iterator[Finding]:
    """Where the two config files say different things."""
    for what, one, other in (
        ("quant_algo", beside.algo, inline.algo),
        ("kv_cache_quant_algo", beside.kv_algo, inline.kv_algo),
        ("excluded modules", sorted(beside.exclude), sorted(inline.exclude)),
        ("quantized_layers", dict(beside.layers), dict(inline.layers)),
        ("group_size", beside.group_size, inline.group_size),
        ("pre_quant_scale", beside.pre_quant_scale, inline.pre_quant_scale),
    ):
        if one == other or (what in _MAY_BE_UNSAID and None in (one, other)):
            continue
        if isinstance(one, list) and isinstance(other, list):
            told = ", ".join(sorted(set(one) ^ set(other))[:3]) + " in one alone"
        elif isinstance(one, dict) and isinstance(other, dict):
            keys = {k for k in one.keys() | other.keys() if one.get(k) != other.get(k)}
            told = f"{len(keys)} differ, such as {min(keys)}"
        else:
            told = f"{one or 'nothing'} in {beside.where}, {other or 'nothing'} in {inline.where}"
        yield error(
            "config-differ",
            beside.where,
            f"{what}: {told}",
            "TensorRT-LLM follows hf_quant_config.json, vLLM and SGLang either",
        )


_MAY_BE_UNSAID = ("group_size", "pre_quant_scale")


def _layers(folder: Folder, declared: Declared) -> Iterator[Finding]:
    """`quantized_layers` lists what is quantized, and nothing else."""
    if declared.algo == "MIXED_PRECISION" and not declared.layers:
        yield error(
            "layers",
            declared.where,
            "MIXED_PRECISION without quantized_layers",
            "engines leave every module as it is and take codes for weights",
        )
    for name in declared.layers:
        inside = any(m == name or m.startswith(name + ".") for m in folder.modules)
        if not inside:
            yield error(
                "layers",
                name,
                f"is in quantized_layers of {declared.where}, and in no file",
                "vLLM waits for scales that never come",
            )


def _module(
    folder: Folder, said: Sequence[Declared], d: Decision, stored: str, rows: int
) -> Iterator[Finding]:
    """One module: declared as decided, and stored as declared, in a tensor of so many rows."""
    name = d.module.name
    tensors = folder.modules.get(stored)
    if tensors is None or "weight" not in tensors:
        return  # what is missing is told where tensors are held against the source
    wanted = d.format.algo if d.format is not None else ""
    scales = [s for s in COMPANIONS if s in tensors]
    embedding = d.module.kind == "embedding"  # engines know them not to be quantized
    for declared in said:
        algo = declared.algo_of(stored)
        if algo == wanted or (not wanted and embedding):
            continue
        if wanted and not algo:
            yield error(
                "excluded" if declared.algo != "MIXED_PRECISION" else "layers",
                name,
                f"is quantized to {wanted}, and {declared.where} "
                + (
                    "does not list it"
                    if declared.algo == "MIXED_PRECISION"
                    else "says that it is not quantized"
                ),
                "engines take its codes for weights, or refuse its scales",
            )
        elif algo and not wanted:
            yield error(
                "not-excluded",
                name,
                f"is kept, and {declared.where} says that it is {algo}",
                "engines look for scales that are not there",
            )
        else:
            yield error("algo", name, f"is {wanted}, and {declared.where} says {algo}", _ROUTES)
    if not wanted:
        if scales:
            yield error(
                "scale-extra",
                name,
                f"is kept, and has {', '.join(scales)}",
                "vLLM refuses names it does not know",
            )
        return
    yield from _tensors(d, tensors, wanted, rows)
    yield from _group_size(d, said, stored)


def _tensors(
    d: Decision, tensors: Mapping[str, StoredTensor], algo: str, rows: int
) -> Iterator[Finding]:
    """Types and shapes of a quantized module's tensors, and which of them there are."""
    name, form = d.module.name, STORED[algo]
    columns = d.module.shape[1]
    held = (rows // form.rows, ceil(columns / form.columns))
    weight = tensors["weight"]
    if weight.dtype != form.codes:
        yield error("dtype", name, f"weight is {weight.dtype}, {algo} has {form.codes}", _ALL)
    elif weight.shape != held and (algo not in TURNED or weight.shape != held[::-1]):
        yield error("shape", name, f"weight is {list(weight.shape)}, {algo} has {list(held)}", _ALL)
    needed = {"weight_scale": True, "weight_scale_2": form.second, "input_scale": form.inputs}
    for last, needs in needed.items():
        if needs and last not in tensors:
            yield error(
                "scale-missing",
                name,
                f"{last} is missing, which {algo} needs",
                "engines stop, or go on with an uninitialized scale",
            )
        elif not needs and last in tensors:
            yield error(
                "scale-extra",
                name,
                f"has {last}, which {algo} has not",
                "vLLM refuses names it does not know",
            )
    if (scale := tensors.get("weight_scale")) is not None:
        want = scale_shape(algo, (rows, columns), d.format.group_size if d.format else 0)
        if scale.dtype != form.scale:
            text = f"weight_scale is {scale.dtype}, {algo} has {form.scale}"
            yield error("dtype", name, text, _ALL)
        if scale.shape != want:
            text = f"weight_scale is {list(scale.shape)}, {algo} has {list(want)}"
            yield error("shape", name, text, _ALL)
    for last in ("weight_scale_2", "input_scale"):
        if (one := tensors.get(last)) is not None and (one.shape, one.dtype) != ((), "float32"):
            text = f"{last} is {one.dtype} {list(one.shape)}, not one float32"
            yield error("shape", name, text, "engines expect a scalar")
    smooth = tensors.get("pre_quant_scale")
    if smooth is not None and smooth.shape != (columns,):
        text = f"pre_quant_scale is {list(smooth.shape)}, not one for each of {columns} columns"
        yield error("shape", name, text, _ALL)


def scale_shape(algo: str, shape: tuple[int, int], group: int = 0) -> tuple[int, ...]:
    """The shape of `weight_scale` for a weight `[out, in]`; `group` 0 stands for the format's own
    size."""
    rows, columns = shape
    group = group or next(iter(FORMATS[algo].groups), 1)
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (),
        "channel": (rows,),
        "group": (rows, ceil(columns / group)),
        "block": (ceil(rows / group), 1, ceil(columns / group), 1),
    }
    return shapes[FORMATS[algo].scaling]


def _group_size(d: Decision, said: Sequence[Declared], stored: str) -> Iterator[Finding]:
    """Each file that gives a group size gives the right one."""
    if d.format is None or FORMATS[d.format.algo].scaling != "group":
        return
    size = d.format.group_size or FORMATS[d.format.algo].groups[0]
    told = {one.where: one.group_of(stored) for one in said}
    for where, group in told.items():
        if group is not None and group != size:
            yield error(
                "group-size",
                d.module.name,
                f"has groups of {size}, and {where} says {group}",
                "engines scale the wrong columns, or refuse the shapes",
            )


def _smoothing(folder: Folder, said: Sequence[Declared]) -> Iterator[Finding]:
    """`pre_quant_scale` is said only if one is there."""
    held = [m for m, tensors in folder.modules.items() if "pre_quant_scale" in tensors]
    for declared in said:
        if declared.pre_quant_scale and not held:
            yield error(
                "pre-quant-scale",
                declared.where,
                "says that there are pre_quant_scales, and there are none",
                "TensorRT-LLM waits for them, or multiplies by what it finds in memory",
            )


def _caches(
    folder: Folder,
    said: Sequence[Declared],
    decisions: Sequence[Decision],
    names: Mapping[str, str],
) -> Iterator[Finding]:
    """Scales of the KV cache are there if and only if they are said and decided."""
    for d in decisions:
        if d.module.kind != "kv_cache" or "mtp" in d.module.roles:
            continue
        wanted = d.format.kv_algo if d.format is not None else ""
        parent = d.module.name.rpartition(".")[0]
        attention = names.get(f"{parent}.v", names.get(f"{parent}.kv_down", parent))
        attention = attention.rpartition(".")[0]
        found = {last for last in CACHE_SCALES if _cache_scale(folder, attention, last)}
        for declared in said:
            if declared.kv_algo != wanted:
                yield error(
                    "kv",
                    d.module.name,
                    f"is {wanted or 'kept'}, and {declared.where} says "
                    f"{declared.kv_algo or 'nothing'}",
                    "engines keep keys and values in another type than was calibrated",
                )
        constant = d.format is not None and d.format.constant
        latent = f"{parent}.v" not in names
        if wanted and not constant and not latent and len(found) < len(CACHE_SCALES):
            lacks = ", ".join(s for s in CACHE_SCALES if s not in found)
            yield error(
                "kv-scale",
                d.module.name,
                f"{lacks} is missing",
                "vLLM, TensorRT-LLM and SGLang take 1 instead: large values are cut off",
            )
        if found and not wanted:
            yield error(
                "kv-scale",
                d.module.name,
                f"{', '.join(sorted(found))} is there, and the cache is not quantized",
                "vLLM refuses names it does not know, others leave them out",
            )


def _cache_scale(folder: Folder, attention: str, last: str) -> bool:
    """The scale lies with its projection, or with the attention that holds it."""
    places = (f"{attention}.{last[0]}_proj", attention, f"{attention}.attn")
    return any(last in folder.modules.get(p, {}) for p in places)


def _strangers(
    folder: Folder, linear: Sequence[Decision], names: Mapping[str, str]
) -> Iterator[Finding]:
    """Scales of modules that nothing was decided about."""
    known = {names.get(d.module.name, d.module.name) for d in linear}
    for module, tensors in folder.modules.items():
        held = [s for s in ("weight_scale", "weight_scale_2", "input_scale") if s in tensors]
        if held and module not in known:
            yield error(
                "scale-extra",
                module,
                f"has {', '.join(held)}, and is no module of this model that can be quantized",
                "vLLM refuses names it does not know",
            )
