"""Cache rules: what is said of the KV cache, and the scales that it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megtool.lint import citations as at
from megtool.lint.config_rules import more, read_first
from megtool.lint.context import Subject
from megtool.lint.rules import Fault, Rule, View
from megtool.quant.recipes.formats import KV_BITS
from megtool.quant.verification.stored_folder import CACHE_SCALES
from megtool.tensors.box import numel

_CONFIG = "config.json"
_BIASES = ("k_bias", "v_bias")
_PLACES = (".k_proj", ".v_proj")
_ATTENTION = ".attn"
"""Where vLLM has them itself."""


def cache_algo(subject: Subject, view: View) -> str:
    """The KV cache that the engine reads out of the file it goes by.

    vLLM and TensorRT-LLM know `kv_cache_scheme` of eight-bit floats alone in config.json.
    """
    declared = read_first(subject, view)
    if declared is None:
        scheme = subject.said.get("kv_cache_scheme")
        eight = isinstance(scheme, dict) and scheme.get("num_bits") == 8
        return "FP8" if eight and isinstance(scheme, dict) else ""
    if declared is subject.beside or (view.engine == "sglang" and declared.kv_algo):
        return declared.kv_algo
    scheme = subject.said.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
        return "FP8"
    return ""


def _cache(subject: Subject, view: View) -> Iterator[Fault]:
    if subject.form != "modelopt":
        scheme = subject.said.get("kv_cache_scheme")
        if subject.form != "compressed-tensors" or scheme is None:
            return
        eight = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type"))
        if eight != (8, "float"):
            yield Fault(module=_CONFIG, text=f"kv_cache_scheme {scheme} is not of 8-bit floats")
        return
    said = {d.kv_algo for d in (subject.inline, subject.beside) if d is not None and d.kv_algo}
    known = sorted({a for s in view.target.lines("kv") for a in s.algos})
    for algo in sorted(said):
        if algo not in known:
            hint = "known: " + ", ".join(known)
            what = "not loaded" if algo in KV_BITS else "unknown"
            yield Fault(module=_CONFIG, text=f"a KV cache in {algo} is {what}", hint=hint)
        elif cache_algo(subject, view) != algo:
            yield Fault(
                module=_CONFIG,
                text=f"a KV cache in {algo} is said where it is not read",
                severity="warning",
                hint="kv_cache_scheme of config.json must say it; or choose the KV cache when "
                "the engine starts",
            )


def _cache_scales(subject: Subject, view: View) -> Iterator[Fault]:
    algo = cache_algo(subject, view)
    held = [n for n in subject.folder.tensors if n.rpartition(".")[2] in CACHE_SCALES]
    if algo and not held:
        yield Fault(
            module=_CONFIG, text=f"a KV cache in {algo}, and no k_scale or v_scale is there"
        )
    if held and not algo and (subject.form != "modelopt" or not _said_anywhere(subject)):
        text = f"{held[0]} is there, and no file says that the KV cache is quantized"
        yield Fault(module=_CONFIG, text=text + more(held))


def _halves(subject: Subject, view: View) -> Iterator[Fault]:
    """Both scales of an attention are there, or neither; and those of all layers are."""
    if not cache_algo(subject, view) and not _said_anywhere(subject):
        return  # that they are there at all is told
    held = _by_attention(subject)
    for attention, mine in held.items():
        if missing := [s for s in CACHE_SCALES if s not in mine]:
            text = f"has {', '.join(sorted(mine))}, and no {', '.join(missing)}"
            stops = view.engine == "vllm" and "k_scale" in missing
            yield Fault(module=attention, text=text, severity="error" if stops else None)
    every = {n.rpartition(".")[0] for n in _values_of(subject)}
    with_both = {a for a, mine in held.items() if len(mine) == len(CACHE_SCALES)}
    if with_both & every and (without := sorted(every - held.keys())):
        text = "has no k_scale and v_scale, and other layers have"
        yield Fault(module=without[0], text=text + more(without))


def _values_of(subject: Subject) -> Iterator[str]:
    """Projections to values, without those of layers that draft, whose caches are their own."""
    layers = subject.config.get("num_hidden_layers")
    for one in subject.linear:
        numbers = [int(p) for p in one.name.split(".") if p.isdecimal()]
        drafts = type(layers) is int and any(n >= layers for n in numbers[:1])
        if one.last == "v_proj" and not drafts and "mtp" not in one.name.split("."):
            yield one.name


def _by_attention(subject: Subject) -> dict[str, set[str]]:
    """The scales that there are, by the module of the attention."""
    held: dict[str, set[str]] = defaultdict(set)
    for name in subject.folder.tensors:
        module, _, last = name.rpartition(".")
        if last in CACHE_SCALES:
            for place in (*_PLACES, _ATTENTION):
                module = module.removesuffix(place)
            held[module].add(last)
    return held


def _single(subject: Subject, view: View) -> Iterator[Fault]:
    scheme = subject.said.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("strategy") == "attn_head":
        return  # compressed-tensors has one a head
    for module, tensors in subject.folder.modules.items():
        for last in CACHE_SCALES:
            t = tensors.get(last)
            if t is not None and numel(t.shape) != 1:
                yield Fault(module=module, text=f"{last} is {list(t.shape)}, not one number")


def _affine(subject: Subject, view: View) -> Iterator[Fault]:
    """ModelOpt's affine caches: `key = code * k_scale + k_bias`, of which loaders know no bias."""
    found = [
        f"{module}.{last}"
        for module, tensors in subject.folder.modules.items()
        for last in _BIASES
        if last in tensors and (module.endswith(_PLACES) or set(tensors) & set(CACHE_SCALES))
    ]
    if found:
        yield Fault(module=found[0], text="is that of an affine KV cache" + more(found))


def _said_anywhere(subject: Subject) -> bool:
    return any(d is not None and d.kv_algo for d in (subject.inline, subject.beside))


_LOADING = {"vllm": at.VLLM_LOADING, "sglang": at.SGLANG_LOADING, "trtllm": at.TRTLLM_LINEAR}

RULES = (
    Rule(
        id="kv-cache",
        forms=("modelopt", "compressed-tensors"),
        sources={
            "vllm": at.VLLM_MODELOPT,
            "sglang": at.SGLANG_MODELOPT,
            "trtllm": at.TRTLLM_COMPRESSED,
        },
        meaning="the loader stops, or keeps keys and values in another type",
        hint="choose another KV cache",
        check=_cache,
    ),
    Rule(
        id="kv-scales",
        severity="warning",
        forms=("modelopt", "compressed-tensors"),
        sources=_LOADING,
        meaning="engines take 1 where there is no scale, and leave scales out that are not said",
        hint="calibrate the KV cache, or leave it unquantized",
        check=_cache_scales,
    ),
    Rule(
        id="kv-scales-half",
        severity="warning",
        forms=("modelopt", "compressed-tensors"),
        sources=_LOADING,
        meaning="the engine stops, or takes 1, or the other's, where a scale is missing",
        hint="calibrate the KV cache of all layers, keys and values",
        check=_halves,
    ),
    Rule(
        id="kv-scale-shape",
        forms=("modelopt", "compressed-tensors"),
        sources=_LOADING,
        meaning="loaders stop at shapes that do not fit",
        hint="one scale for the keys of a layer, and one for its values",
        check=_single,
    ),
    Rule(
        id="kv-bias",
        forms=("modelopt", "compressed-tensors"),
        sources=_LOADING,
        meaning="loaders know no bias: keys and values come out shifted, or the loader stops",
        hint="calibrate the KV cache without a bias (FP8)",
        check=_affine,
    ),
)
