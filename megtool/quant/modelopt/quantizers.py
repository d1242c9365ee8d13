"""The settings of ModelOpt's quantizers of a module, and the format that they are.

A quantized module of a Megatron checkpoint has an `_extra_state`: a tensor of bytes, which
`torch.load` reads as a dict; its `modelopt_quantizer_state` has the settings of each quantizer. The
buffers of quantizers (`_amax`, `_pre_quant_scale`) are tensors of the checkpoint.
Source: modelopt 0.47, torch/quantization/plugins/megatron.py (`quant_module_get_extra_state`) and
nn/modules/tensor_quantizer.py (`get_modelopt_state`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from megtool.errors import FormatError
from megtool.megatron_state.extra_states.te_state import raw_bytes
from megtool.quant.recipes.formats import FORMATS, INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.quant.recipes.modelopt_quantizers import ALGOS
from megtool.quant.recipes.modelopt_settings import classify_quantizer

STATES = "modelopt_quantizer_state"
FACTS = "megtool"
"""Where an extra state has what no quantizer says: ModelOpt ignores it."""
ROUND_TWICE, FIXED = "round_twice", "fixed"
"""Facts: weights are rounded to their dtype before FP8; amaxes are not those of the weights, which
were trained with them."""

WEIGHT, INPUT, OUTPUT = "weight_quantizer", "input_quantizer", "output_quantizer"
AMAX, GLOBAL_AMAX, PRE_QUANT_SCALE = "_amax", "_global_amax", "_pre_quant_scale"

_DEFAULTS: Mapping[str, Any] = {
    "_num_bits": 8,
    "_axis": None,
    "_block_sizes": None,
    "_dynamic": False,
    "_unsigned": False,
    "_narrow_range": False,
    "_learn_amax": False,
    "_fake_quant": True,
    "_if_quant": True,
    "_if_calib": False,
    "_pass_through_bwd": True,
    "_enable_pre_quant_scale": True,
    "_use_constant_amax": False,
}
_FP8: Mapping[str, Any] = {"_num_bits": (4, 3)}
_FLOAT32 = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """A quantizer of a module: its settings by ModelOpt's attributes, and the shapes and dtypes of
    its buffers. `enabled` is whether it rounds."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    enabled: bool = True

    def state(self) -> dict[str, Any]:
        """What `TensorQuantizer.get_modelopt_state` returns."""
        shapes = {
            name: {"shape": torch.Size(shape), "dtype": dtype}
            for name, (shape, dtype) in self.buffers.items()
        }
        return {
            **_DEFAULTS,
            **self.settings,
            "_disabled": not self.enabled,
            "_pytorch_state_metadata": {"params": {}, "buffers": shapes},
        }

    def config(self) -> dict[str, Any]:
        """The settings as a `quant_cfg` entry has them."""
        axis, blocks = self.settings.get("_axis"), self.settings.get("_block_sizes")
        if blocks or isinstance(axis, tuple):  # ModelOpt sets the axis from the blocks
            axis = None
        if self.settings.get("_dynamic"):
            blocks = {-1: None}
        return {
            "num_bits": self.settings.get("_num_bits", 8),
            "axis": axis,
            "block_sizes": dict(blocks) if blocks else None,
            "type": "dynamic" if self.settings.get("_dynamic") else "static",
        }


def list_weight_quantizers(
    form: RecipeFormat, shape: tuple[int, ...], *, is_static: bool = False, by_row: bool = False
) -> list[Quantizer]:
    """The quantizers of a weight: two for codes that are converted to FP8.

    `shape` is that of its amaxes, `()` for one. `is_static`: NVFP4's block amaxes are stored, and
    not those of the weight. `by_row`: FP8 has an amax a row.
    """
    packing = packing_of(form)
    buffers = {AMAX: (shape, _FLOAT32)}
    if packing.startswith("mx"):
        buffers = {}
    if packing.startswith("nvfp4") and is_static:
        settings = _settings(packing) | {
            "_block_sizes": {-1: form.group_size, "type": "static", "scale_bits": (4, 3)},
            "_axis": (0,),
            "_is_static_block_scale_quantizer": True,
            "_is_nvfp4_static_quantizer": True,
        }
        buffers[GLOBAL_AMAX] = ((), _FLOAT32)
        return [Quantizer(name=WEIGHT, settings=settings, buffers=buffers)]
    settings = _settings(packing) | ({"_axis": 0} if by_row else {})
    if form.algo != "W4A8_AWQ":
        return [Quantizer(name=WEIGHT, settings=settings, buffers=buffers)]
    return [
        Quantizer(name=f"{WEIGHT}.0", settings=settings, buffers=buffers),
        Quantizer(name=f"{WEIGHT}.1", settings=_FP8, buffers={AMAX: ((), _FLOAT32)}),
    ]


def input_quantizer(
    form: RecipeFormat | None, smoothed: tuple[int, torch.dtype] | None = None
) -> Quantizer:
    """The quantizer of a module's inputs; `smoothed` is the size and dtype of the smoothing scale
    that it multiplies them with."""
    packing = INPUT_PACKINGS.get(form.algo, "") if form is not None else ""
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if form is not None and form.number.calibrates:
        buffers[AMAX] = ((), _FLOAT32)
    if smoothed is not None:
        buffers[PRE_QUANT_SCALE] = ((smoothed[0],), smoothed[1])
    settings = _settings(packing) if packing else {}
    return Quantizer(name=INPUT, settings=settings, buffers=buffers, enabled=bool(packing))


def list_disabled_quantizers() -> list[Quantizer]:
    """The quantizers of a module that is not quantized."""
    return [Quantizer(name=n, enabled=False) for n in (INPUT, OUTPUT, WEIGHT)]


def list_cache_quantizers(form: RecipeFormat) -> list[Quantizer]:
    """The quantizers of attention: of keys and values, and a disabled one of queries."""
    settings: dict[str, Any] = dict(_FP8) if form.kv_algo == "FP8" else _settings("nvfp4:16")
    buffers = {} if form.constant else {AMAX: ((), _FLOAT32)}
    if form.constant:
        settings["_use_constant_amax"] = True
    keys_values = [
        Quantizer(name=f"{x}_bmm_quantizer", settings=settings, buffers=buffers) for x in "kv"
    ]
    return [Quantizer(name="q_bmm_quantizer", enabled=False), *keys_values]


def _settings(packing: str) -> dict[str, Any]:
    """The attributes of a quantizer for a packing such as `fp8:tensor` or `int4rows:128`."""
    name, _, granularity = packing.partition(":")
    bits: Any = {"int8": 8, "int4rows": 4, "mxfp4": (2, 1), "nvfp4": (2, 1)}.get(name, (4, 3))
    if name in ("nvfp4", "mxfp4", "mxfp8"):
        scale = (4, 3) if name == "nvfp4" else (8, 0)
        blocks = {-1: int(granularity), "type": "dynamic", "scale_bits": scale}
        return {"_num_bits": bits, "_block_sizes": blocks}
    if granularity == "token":
        return {"_num_bits": bits, "_dynamic": True, "_axis": (0, 1)}
    if granularity in ("tensor", "channel"):
        return {"_num_bits": bits, "_axis": 0 if granularity == "channel" else None}
    sizes = [int(n) for n in granularity.split("x")]
    if len(sizes) == 2:
        blocks = {-1: sizes[1], -2: sizes[0]}
        return {"_num_bits": bits, "_block_sizes": blocks, "_axis": (0, 2)}
    return {
        "_num_bits": bits,
        "_block_sizes": {-1: sizes[0], "type": "static"},
        "_axis": (0,),
        "_is_static_block_scale_quantizer": True,
    }


def encode_extra_state(
    quantizers: Iterable[Quantizer], facts: Mapping[str, Any] | None = None
) -> bytes:
    """The item of a module's extra state; `facts` are plain values that ModelOpt ignores."""
    state: dict[str, Any] = {
        STATES: {q.name: q.state() for q in quantizers},
        "modelopt_real_quantizer_state": None,
        "modelopt_q_tensor_state": None,
    }
    if facts:
        state[FACTS] = dict(facts)
    return _saved([torch.frombuffer(bytearray(_saved(state)), dtype=torch.uint8)])


def decode_extra_state(value: Any, *, file: Path, name: str) -> dict[str, Any] | None:
    """ModelOpt's dict in the inert tree of an extra state; None for those of other tools.

    Only tensors and plain values are unpickled.

    Raises:
        FormatError: it is damaged, or its weight is stored as codes (`mtq.compress`).
    """
    data = raw_bytes(value)
    if STATES.encode() not in data:
        return None
    try:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (RuntimeError, ValueError, EOFError, OSError, KeyError, TypeError, UnpicklingError) as e:
        raise FormatError(f"{name} cannot be read: {e}", file=file) from e
    states = state.get(STATES) if isinstance(state, dict) else None
    if not isinstance(states, dict) or not all(isinstance(s, dict) for s in states.values()):
        raise FormatError(f"{name} has no settings of quantizers", file=file)
    if state.get("modelopt_q_tensor_state"):
        raise FormatError(
            f"the weight of {name} is stored as codes (mtq.compress)",
            file=file,
            hint="save it before mtq.compress: fake-quantized weights are what is read",
            error_id="unsupported-quantization",
        )
    return dict(state)


def find_format(states: Mapping[str, Mapping[str, Any]], module: str) -> RecipeFormat | None:
    """The format of a linear module by the states of its quantizers; None if it has none.

    Raises:
        FormatError: no engine has such a format.
    """
    weights = [n for n in sorted(states) if n == WEIGHT or n.startswith(f"{WEIGHT}.")]
    weights = [n for n in weights if "_num_bits" in states[n] and not states[n].get("_disabled")]
    inputs = states.get(INPUT, {})
    has_inputs = "_num_bits" in inputs and not inputs.get("_disabled")
    if not weights and not has_inputs:
        return None
    groups: list[int] = []
    kinds = [classify_quantizer(_config(states[n]), groups)[0] for n in weights]
    input_groups: list[int] = []
    kind = classify_quantizer(_config(inputs), input_groups)[0] if has_inputs else ""
    if kinds == ["fp8_channel"] and kind == "fp8":  # rows of several weights, each with its own
        kinds = ["fp8"]
    algo = ALGOS.get(("+".join(kinds), kind))
    size = groups[0] if groups else 0
    if algo is None or (has_inputs and not kind) or size not in (FORMATS[algo].groups or (0,)):
        described = [*(_config(states[n]) for n in weights), *([_config(inputs)] * has_inputs)]
        raise FormatError(
            f"no engine has a format of the quantizers of {module}: "
            + ", ".join(_described(d) for d in described),
            hint="formats are weights with inputs: "
            + ", ".join(f"{w} with {i or 'none'}" for w, i in ALGOS),
            error_id="unsupported-quantization",
        )
    return RecipeFormat(name=f"{algo} {size}".removesuffix(" 0"), algo=algo, group_size=size)


def find_cache_format(states: Mapping[str, Mapping[str, Any]], module: str) -> RecipeFormat | None:
    """The format of an attention's KV cache; None if it has none.

    Raises:
        FormatError: keys and values have different formats, or ones that no engine has.
    """
    found_states = [states.get(f"{x}_bmm_quantizer", {}) for x in "kv"]
    if all("_num_bits" not in s or s.get("_disabled") for s in found_states):
        return None
    kinds = [classify_quantizer(_config(s), [])[0] for s in found_states]
    algo = {"fp8": "FP8", "nvfp4": "NVFP4"}.get(kinds[0])
    if algo is None or kinds[0] != kinds[1] or any(s.get("_disabled") for s in found_states):
        raise FormatError(
            f"no engine has a format of the KV cache of {module}",
            hint="keys and values both in FP8, or both in NVFP4",
            error_id="unsupported-quantization",
        )
    constant = bool(found_states[0].get("_use_constant_amax"))
    return RecipeFormat(name=f"kv_{algo.lower()}", kv_algo=algo, constant=constant)


def _config(state: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a recipe of ModelOpt has them."""
    blocks = state.get("_block_sizes")
    if state.get("_dynamic") and not blocks:
        return {"num_bits": state.get("_num_bits"), "type": "dynamic", "block_sizes": {-1: None}}
    axis = None if blocks else state.get("_axis")
    return {"num_bits": state.get("_num_bits", 8), "axis": axis, "block_sizes": blocks}


def _described(config: Mapping[str, Any]) -> str:
    return " ".join(f"{k} {v}" for k, v in config.items() if v is not None)


def _make_mode(quantizers: Mapping[str, Sequence[Quantizer]]) -> dict[str, Any]:
    """The configuration of ModelOpt's mode `quantize`, for each quantized module by name.

    What all layers have alike is one entry, because the layers of a pipeline stage have other
    numbers; each module's extra state says what it has.
    """
    entries: list[dict[str, Any]] = [_entry("*", None, enable=False)]
    by_site: dict[str, list[tuple[str, Sequence[Quantizer]]]] = {}
    for module, owned in quantizers.items():
        site = ".".join("*" if p.isdecimal() else p for p in module.split("."))
        by_site.setdefault(site, []).append((module, owned))
    for site, members in by_site.items():
        first = [q.config() for q in members[0][1]]
        is_alike = all([q.config() for q in owned] == first for _, owned in members)
        for module, owned in members[:1] if is_alike else members:
            entries += _module_entries(f"*{site}" if is_alike else module, owned)
    config = {"quant_cfg": entries, "algorithm": "max", "effective_bits": None}
    return {"config": config, "metadata": {}}


def _module_entries(module: str, owned: Sequence[Quantizer]) -> list[dict[str, Any]]:
    weights = [q.config() for q in owned if q.name.startswith(WEIGHT) and q.enabled]
    out = []
    if weights:
        cfg = weights if len(weights) > 1 else weights[0]
        out.append(_entry(f"{module}.{WEIGHT}", cfg))
    others = [q for q in owned if not q.name.startswith(WEIGHT) and q.enabled]
    return out + [_entry(f"{module}.{q.name}", q.config()) for q in others]


def _entry(name: str, cfg: Any, *, enable: bool = True) -> dict[str, Any]:
    return {"quantizer_name": name, "parent_class": None, "cfg": cfg, "enable": enable}


VERSION = "0.47.0"
"""The release of ModelOpt whose form is written."""


def make_state_files(quantizers: Mapping[str, Sequence[Quantizer]]) -> dict[str, bytes]:
    """The folder `modelopt_state/` of an iteration with quantizers."""
    return make_mode_files("quantize", _make_mode(quantizers))


def make_mode_files(name: str, mode: Mapping[str, Any]) -> dict[str, bytes]:
    """The folder `modelopt_state/` of a model in one of ModelOpt's modes: a checkpoint that has a
    common state alone."""
    state = {"modelopt_state_dict": [(name, dict(mode))], "modelopt_version": VERSION}
    config = (
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
        b'"common_backend": "torch", "common_backend_version": 1}'
    )
    return {"modelopt_state/common.pt": _saved(state), "modelopt_state/metadata.json": config}


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
