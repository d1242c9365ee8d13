"""Read: a quantised folder as stored, and what its tensors are; nothing is decoded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.formats.quantised import packed_weights, quantisation
from megtool.checkpoint.formats.safetensors import open_as_stored
from megtool.errors import FormatError
from megtool.export.coded import Coded, CodedFolder
from megtool.export.folders import read_compressed, read_fine_grained, read_modelopt
from megtool.export.folders.structure import Found

_CACHE = re.compile(r"(.+?)(?:\.[kv]_proj)?\.([kv])_scale")
_EMBEDDING = re.compile(r"(?:^|[._])(?:embed|wte|wpe|emb|embd|embeddings?|tok)(?=[._]|$)|embed_")


def read_coded(path: Path) -> CodedFolder:
    """The quantised modules of a Hugging Face folder; headers, and a few bytes of shapes, alone.

    Raises:
        FormatError: the folder is not quantised, or by a method that is not known; a scale is
            missing, or does not belong to its weight; what the config says is not what is stored;
            a weight is stacked with others.
    """
    catalogue = open_as_stored(path)
    config = quantisation(catalogue.metadata)
    if config is None:
        raise FormatError(
            "it is not quantised: its config names no quantization_config",
            file=catalogue.root,
            hint="quantise it first (megtool quantize), or export it with --to hf",
        )
    folded, stored = packed_weights(catalogue, config)
    found = [Found.of(f, stored) for f in folded]
    method = str(config.get("quant_method", "")).lower()
    notes: Sequence[str] = ()
    if method.startswith("modelopt"):
        form, (modules, kv_algo) = "modelopt", _of_modelopt(found, catalogue)
    elif method.startswith("compressed"):
        form, (modules, kv_algo, notes) = "compressed-tensors", _of_compressed(found, config)
    else:
        form, modules, kv_algo = "fp8", [read_fine_grained.read_module(f) for f in found], None
    caches = _caches(catalogue)
    if caches and kv_algo is None:
        kv_algo = "FP8"
    return CodedFolder(
        catalogue=catalogue,
        form=form,
        modules=tuple(modules),
        caches=caches,
        kv_algo=kv_algo,
        kept=_kept(catalogue, {m.name for m in modules}),
        notes=tuple(notes),
    )


def _of_modelopt(found: Sequence[Found], catalogue: Catalogue) -> tuple[list[Coded], str | None]:
    said = read_modelopt.declared(catalogue)
    modules = [read_modelopt.read_module(f, said) for f in found]
    read_modelopt.check_listed(said, modules, catalogue)
    return modules, said.kv_algo or None


def _of_compressed(
    found: Sequence[Found], config: Mapping[str, Any]
) -> tuple[list[Coded], str | None, list[str]]:
    modules: list[Coded] = []
    left: Counter[str] = Counter()
    if found:
        schemes = read_compressed.read_schemes(config, found[0].stored.catalogue)
        ignored = config.get("ignore")
        ignored = [str(i) for i in ignored] if isinstance(ignored, list) else []
        for f in found:
            scheme = read_compressed.scheme_of(f, schemes, ignored)
            coded, note = read_compressed.read_module(f, scheme)
            modules.append(coded)
            left[note] += bool(note)
    cache = config.get("kv_cache_scheme")
    kv_algo = None
    if isinstance(cache, dict):
        kv_algo = {8: "FP8", 4: "NVFP4"}.get(cache.get("num_bits", 0))
    return modules, kv_algo, [f"{n} modules: {note}" for note, n in left.items() if n]


def _caches(catalogue: Catalogue) -> dict[str, tuple[str, str]]:
    """Scales of keys and values by the name of their attention."""
    found: dict[str, dict[str, str]] = {}
    for t in catalogue.tensors:
        if m := _CACHE.fullmatch(t.name):
            found.setdefault(m[1], {})[m[2]] = t.name
    for held in found.values():
        if len(held) == 1:
            (kind, name), *_ = held.items()
            other = "v" if kind == "k" else "k"
            row = catalogue.index[name]
            raise FormatError(
                f"the cache has a scale of {kind} and none of {other}",
                file=catalogue.path(int(catalogue.extents.file[row])),
                tensor=name,
                hint="is the download complete?",
            )
    return {name: (held["k"], held["v"]) for name, held in found.items()}


def _kept(catalogue: Catalogue, quantised: set[str]) -> tuple[str, ...]:
    """Matrices that are weights of modules, neither quantised nor tables of embeddings; a head that
    is tied counts as one, as engines have a module for it."""
    out = [
        t.name.removesuffix(".weight")
        for t in catalogue.tensors
        if t.name.endswith(".weight")
        and len(t.shape) == 2
        and t.name.removesuffix(".weight") not in quantised
        and not _EMBEDDING.search(t.name.removesuffix(".weight"))
    ]
    config = catalogue.metadata.get("config")
    tied = isinstance(config, dict) and config.get("tie_word_embeddings")
    if tied and not {"lm_head", *out} & (quantised | set(out)):
        out.append("lm_head")
    return tuple(out)
