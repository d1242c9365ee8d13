"""Read the quantized modules of a folder as they are stored, without decoding them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megtool.convert.families.nested import TEXT_CONFIG, TIED, tied_head
from megtool.errors import FormatError
from megtool.export.hf import read_compressed, read_fp8_blocks, read_modelopt
from megtool.export.hf.infer_format import QuantizedWeight, is_zero
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.formats.safetensors.quantization_config import quantization_config
from megtool.formats.safetensors.quantized import DECODED_METHODS, find_packed_weights
from megtool.formats.safetensors.reader import open_as_stored
from megtool.tensors.catalogue import Catalogue

_CACHE = re.compile(r"(.+?)(?:\.[kv]_proj)?\.([kv])_scale")
_CACHE_BIAS = re.compile(r".+\.[kv]_proj\.[kv]_bias|.+\.[kv]_bias")
_CACHE_ZERO = re.compile(r".+\.[kv]_zero_point")
_EMBEDDING = re.compile(
    r"(?![._]?embed_out\b)(?:(?:^|[._])(?:embed|wte|wpe|emb|embd|embeddings?|tok)(?=[._]|$)|embed_)"
)


def read_quantized_modules(path: Path) -> QuantizedModules:
    """The quantized modules of a Hugging Face folder; headers, and a few bytes of shapes, alone.

    Raises:
        FormatError: the folder is not quantized, or by a method that is not known; a scale is
            missing, or does not belong to its weight; what the config says is not what is stored;
            a weight is stacked with others.
    """
    catalogue = open_as_stored(path)
    config = quantization_config(catalogue.metadata)
    if config is None:
        raise FormatError(
            "it is not quantized: its config names no quantization_config",
            file=catalogue.root,
            hint="quantize it first (megtool quantize), or export it with --to hf",
        )
    method = str(config.get("quant_method", "")).lower()
    if method in ("quark", *DECODED_METHODS):
        raise FormatError(
            f"a folder of {method} keeps its codes in no other form yet",
            file=catalogue.root,
            hint="--to hf decodes it, and megtool quantize encodes it for another engine",
            error_id="unsupported-quantization",
        )
    folded, stored = find_packed_weights(catalogue, config)
    weights = [QuantizedWeight.of(f, stored) for f in folded]
    notes: list[str] = []
    if is_modelopt(config):
        form, (modules, kv_algo) = "modelopt", _read_modelopt(weights, catalogue, notes)
    elif is_compressed(config):
        form, modules = "compressed-tensors", _read_compressed(weights, config, notes)
        kv_algo = read_compressed.read_kv_cache_algo(config, catalogue)
        _check_zero_points(catalogue)
    else:
        form, modules, kv_algo = "fp8", [read_fp8_blocks.read_module(f) for f in weights], None
    caches = find_kv_cache_scales(catalogue)
    if caches and kv_algo is None:
        kv_algo = "FP8"
        notes.append("scales of a KV cache are there, and nothing says of what: taken for FP8's")
    return QuantizedModules(
        catalogue=catalogue,
        form=form,
        modules=tuple(modules),
        kv_cache_scales=caches,
        kv_algo=kv_algo,
        unquantized=_find_unquantized(catalogue, {m.name for m in modules}),
        notes=(*notes, *_note_missing_scales(kv_algo, caches)),
        kv_cache_biases=tuple(t.name for t in catalogue.tensors if _CACHE_BIAS.fullmatch(t.name)),
    )


def is_modelopt(config: Mapping[str, Any]) -> bool:
    """What `quantization` found is ModelOpt's."""
    return str(config.get("quant_method", "")).lower().startswith("modelopt")


def is_compressed(config: Mapping[str, Any]) -> bool:
    """What `quantization` found is of compressed-tensors."""
    return str(config.get("quant_method", "")).lower().startswith("compressed")


def read_passthrough(path: Path) -> QuantizedModules:
    """A folder of compressed-tensors that is to stay one: `carried` are its quantized modules, with
    whatever it says of them, and its tensors are what they are.

    Raises:
        FormatError: scales or codes are missing, or the config leaves a quantized module out.
    """
    catalogue = open_as_stored(path)
    config = quantization_config(catalogue.metadata) or {}
    folded, stored = find_packed_weights(catalogue, config)
    weights = [QuantizedWeight(packed=f, finder=stored) for f in folded]
    if weights:
        schemes = read_compressed.read_groups(config, catalogue)
        for f in weights:
            read_compressed.find_group_of(f, schemes, listed_ignored(config))
    caches = find_kv_cache_scales(catalogue)
    scheme = config.get("kv_cache_scheme")
    kv_algo = None
    if isinstance(scheme, dict):
        kind = "FP" if scheme.get("type") == "float" else "INT"
        kv_algo = f"{kind}{scheme.get('num_bits', 8)}"
    carried = tuple(f.module for f in weights)
    return QuantizedModules(
        catalogue=catalogue,
        form="compressed-tensors",
        modules=(),
        passed_through=carried,
        kv_cache_scales=caches,
        kv_algo=kv_algo,
        unquantized=_find_unquantized(catalogue, set(carried)),
        notes=_note_missing_scales(kv_algo, caches if isinstance(scheme, dict) else {}),
    )


def _note_missing_scales(kv_algo: str | None, caches: Mapping[str, Any]) -> tuple[str, ...]:
    if kv_algo is None or caches:
        return ()
    return (f"a KV cache in {kv_algo} is said, and no scale of it is stored: engines take 1",)


def _read_modelopt(
    weights: Sequence[QuantizedWeight], catalogue: Catalogue, notes: list[str]
) -> tuple[list[QuantizedModule], str | None]:
    config = read_modelopt.read_quant_config(catalogue)
    modules = [read_modelopt.read_module(f, config) for f in weights]
    read_modelopt.check_listed(config, modules, catalogue)
    notes += read_modelopt.compare_quant_configs(catalogue)
    return modules, config.kv_algo or None


def _read_compressed(
    weights: Sequence[QuantizedWeight], config: Mapping[str, Any], notes: list[str]
) -> list[QuantizedModule]:
    modules: list[QuantizedModule] = []
    counts: Counter[str] = Counter()
    if weights:
        schemes = read_compressed.read_groups(config, weights[0].finder.catalogue)
        for f in weights:
            scheme = read_compressed.find_group_of(f, schemes, listed_ignored(config))
            module, note = read_compressed.read_module(f, scheme)
            modules.append(module)
            counts[note] += bool(note)
    notes += [f"{n} modules: {note}" for note, n in counts.items() if n]
    return modules


def listed_ignored(config: Mapping[str, Any]) -> list[str]:
    """The modules that a `quantization_config` leaves out, by names and expressions."""
    ignored = config.get("ignore")
    return [str(i) for i in ignored] if isinstance(ignored, list) else []


def _check_zero_points(catalogue: Catalogue) -> None:
    """Keys and values are scaled about zero.

    Raises:
        FormatError: they are not.
    """
    for t in catalogue.tensors:
        if _CACHE_ZERO.fullmatch(t.name) and not is_zero(catalogue, t):
            row = catalogue.index[t.name]
            raise FormatError(
                "its KV cache is scaled about a zero point, and other forms than "
                "compressed-tensors scale theirs about zero",
                file=catalogue.path(int(catalogue.extents.file[row])),
                tensor=t.name,
                hint=read_compressed.KEEP_HINT,
            )


def find_kv_cache_scales(catalogue: Catalogue) -> dict[str, tuple[str, str]]:
    """Scales of keys and values by the name of their attention."""
    scales: dict[str, dict[str, str]] = {}
    for t in catalogue.tensors:
        if m := _CACHE.fullmatch(t.name):
            scales.setdefault(m[1], {})[m[2]] = t.name
    for names in scales.values():
        if len(names) == 1:
            (kind, name), *_ = names.items()
            missing = "v" if kind == "k" else "k"
            row = catalogue.index[name]
            raise FormatError(
                f"the cache has a scale of {kind} and none of {missing}",
                file=catalogue.path(int(catalogue.extents.file[row])),
                tensor=name,
                hint="is the download complete?",
            )
    return {name: (names["k"], names["v"]) for name, names in scales.items()}


def _find_unquantized(catalogue: Catalogue, quantized: set[str]) -> tuple[str, ...]:
    """Matrices that are weights of modules, neither quantized nor tables of embeddings; a head that
    is tied counts as one, as engines have a module for it."""
    out = [
        t.name.removesuffix(".weight")
        for t in catalogue.tensors
        if t.name.endswith(".weight")
        and len(t.shape) == 2
        and t.name.removesuffix(".weight") not in quantized
        and not _EMBEDDING.search(t.name.removesuffix(".weight"))
    ]
    config = catalogue.metadata.get("config")
    sections = (config, config.get(TEXT_CONFIG)) if isinstance(config, dict) else ()
    tied = next((s[TIED] for s in sections if isinstance(s, dict) and TIED in s), False)
    if tied and not any(n.rpartition(".")[2] == "lm_head" for n in (*quantized, *out)):
        out.append(tied_head(t.name for t in catalogue.tensors))
    return tuple(out)
