"""Buffers: the `_amax` that ModelOpt's quantizers keep in Megatron's checkpoints, read as FP8's.

A quantized module has `weight_quantizer._amax` and `input_quantizer._amax` beside its weight, and
attention `k_bmm_quantizer._amax` and `v_bmm_quantizer._amax`; in `torch_dist` layers and experts
may lie behind one another in them as they do in weights. They are small and read whole.
Source: modelopt 0.47, `torch/quantization/plugins/megatron.py` (`_process_quantizer_amax`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.numeric_values import numbers
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.reshard.fp8_state.checks import LOOSE, SLACK, Found
from megtool.reshard.fp8_state.weight_amax import box_at, sites_of
from megtool.reshard.megatron.amax_report import AmaxFinding
from megtool.reshard.megatron.extra_state_names import Site
from megtool.tensors.placement import Placement, narrow
from megtool.tensors.sharded import GlobalTensor

Array = NDArray[np.float32]

QUANTIZER = re.compile(r"\.((?:weight|input|output|[kqv]_bmm)_quantizer(?:\.\d+)?)\._amax$")
"""What a tensor of this kind is called behind its module's name; several formats are numbered."""

_ORDINARY = re.compile(r"_quantizer(\.\d+)?\.(_amax|_global_amax)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One quantizer's amax: `tensor` holds it at the leading indices `at`."""

    site: Site
    quantizer: str
    tensor: str
    at: tuple[int, ...]
    values: Array

    @property
    def top(self) -> float:
        """The largest of them; NaN where one is."""
        return float(self.values.max()) if self.values.size else 0.0

    @property
    def of_tensor(self) -> bool:
        """It is one number, for the whole tensor."""
        return self.values.size == 1


def is_buffer(name: str) -> bool:
    """A stored tensor is an amax of a quantizer of ModelOpt's, and no part of the model."""
    return _ORDINARY.search(name) is not None


def list_buffers(
    catalogue: Catalogue,
) -> Iterator[tuple[GlobalTensor, str, dict[Site, tuple[int, ...]]]]:
    """The tensors that hold amaxes, the quantizer of each, and where each module's lies."""
    for t in catalogue.tensors:
        match = QUANTIZER.search(t.name)
        if match is not None and t.dtype.is_float and (sites := sites_of(t, match[0])):
            yield t, match[1], sites


def read_buffers(catalogue: Catalogue) -> list[Buffer]:
    """All amaxes of a checkpoint, as float32.

    Raises:
        StorageError: one cannot be read.
    """
    return list(_read(catalogue))


def _read(catalogue: Catalogue) -> Iterator[Buffer]:
    with Reader(catalogue, Files()) as reader:
        for tensor, quantizer, sites in list_buffers(catalogue):
            whole = Placement.identity(tensor.name, tensor.shape)
            for site, at in sites.items():
                place = narrow(whole, *box_at(tensor, at)) if at else whole
                view = reader.canonical(place)
                values = numbers(view.read().reshape(-1), view.dtype).astype(np.float32)
                yield Buffer(
                    site=site, quantizer=quantizer, tensor=tensor.name, at=at, values=values
                )


def check_buffer(buffer: Buffer, weights: Mapping[Site, float]) -> list[Found]:
    """What is wrong with one amax; `weights` are the amaxes of weights, by module."""
    values, name = buffer.values, buffer.quantizer
    bad = {
        "nan": ("NaN", np.isnan(values)),
        "inf": ("infinity", np.isinf(values)),
        "negative": ("negative numbers", values < 0),
    }
    out = [
        Found(kind=kind, text=f"{word} in {name}") for kind, (word, where) in bad.items()
        if where.any()
    ]  # fmt: skip
    if out:
        return out
    if not values.any():
        return [Found(kind="zeros", text=f"nothing but zeros in {name}")]
    weight = weights.get(buffer.site)
    if not name.startswith("weight_quantizer") or not weight or not math.isfinite(weight):
        return out
    if weight > buffer.top * (1 + SLACK):
        text = f"the weight reaches {weight:.4g}, and {name} {buffer.top:.4g}"
        out.append(Found(kind="uncovered", text=text))
    elif buffer.top > LOOSE * weight:
        text = f"the weight reaches {weight:.4g}, and {name} is made for {buffer.top:.4g}"
        out.append(Found(kind="stale", text=text))
    return out


def is_mendable(buffer: Buffer, weights: Mapping[Site, float]) -> bool:
    """Its weight says what it has to be."""
    weight = weights.get(buffer.site, 0.0)
    of_weight = buffer.quantizer.startswith("weight_quantizer") and buffer.of_tensor
    return of_weight and math.isfinite(weight) and weight > 0


def rebuilt_buffers(
    catalogue: Catalogue, buffers: Iterable[Buffer], weights: Mapping[Site, float]
) -> tuple[dict[str, Array], list[AmaxFinding]]:
    """New values of the tensors in which a weight's amax is not the weight's, and what was wrong.

    Those by channel or block are found and stay: their weights tell them apart, not their maximum.
    """
    out: dict[str, Array] = {}
    findings: list[AmaxFinding] = []
    for b in buffers:
        found, weight = check_buffer(b, weights), weights.get(b.site, 0.0)
        known = is_mendable(b, weights)
        site = b.site
        where = site.module if site.expert is None else f"{site.module} of expert {site.expert}"
        for f in found:
            text = f"{f.text}: {b.top:.6g} -> {weight:.6g}" if known else f"{f.text}: it stays"
            findings.append(AmaxFinding(module=where, kind=f.kind, text=text))
        if known and found:
            if b.tensor not in out:
                with Reader(catalogue, Files()) as reader:
                    view = reader.stored(b.tensor)
                    out[b.tensor] = numbers(view.read(), view.dtype).astype(np.float32)
            out[b.tensor][b.at] = weight
    return out, findings
