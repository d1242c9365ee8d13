"""The `_amax` buffers of ModelOpt's quantizers in Megatron checkpoints, as FP8 scaling state.

A quantized module has `weight_quantizer._amax` and `input_quantizer._amax` next to its weight, and
attention `k_bmm_quantizer._amax` and `v_bmm_quantizer._amax`; in `torch_dist` layers and experts
may be stacked in them as they are in weights. They are small and read whole.
Source: modelopt 0.47, `torch/quantization/plugins/megatron.py` (`_process_quantizer_amax`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.fp8_state.checks import LOOSE, SLACK, StateFinding
from megtool.fp8_state.weight_amax import find_sites, index_box
from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.megatron_state.extra_states.names import Site, is_quantizer_buffer
from megtool.storage.files import Files, read_file
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement, narrow
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader

Array = NDArray[np.float32]

QUANTIZER = re.compile(r"\.((?:weight|input|output|[kqv]_bmm)_quantizer(?:\.\d+)?)\._amax$")
"""The suffix of such a tensor after its module's name; several quantizers are numbered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxBuffer:
    """One quantizer's amax, in the stored `tensor` at the leading indices `index`."""

    site: Site
    quantizer: str
    tensor: str
    index: tuple[int, ...]
    values: Array

    @property
    def amax(self) -> float:
        """The largest value; NaN if one is NaN."""
        return float(self.values.max()) if self.values.size else 0.0

    @property
    def is_per_tensor(self) -> bool:
        """Whether it is one number for the whole tensor."""
        return self.values.size == 1


def has_quantizers(catalogue: Catalogue) -> bool:
    """Whether a `torch_dist` checkpoint has the buffers of ModelOpt's quantizers, or says that it
    has quantizers without buffers (MX formats)."""
    if catalogue.format != "torch_dist":
        return False
    if any(is_quantizer_buffer(t.name) for t in catalogue.tensors):
        return True
    path = catalogue.auxiliary_files.get("modelopt_state/common.pt")
    return path is not None and b"quant_cfg" in read_file(path)


def list_amax_buffers(
    catalogue: Catalogue,
) -> Iterator[tuple[GlobalTensor, str, dict[Site, tuple[int, ...]]]]:
    """The amax tensors, the quantizer of each, and each module's indices in it."""
    for t in catalogue.tensors:
        match = QUANTIZER.search(t.name)
        if match is not None and t.dtype.is_float and (sites := find_sites(t, match[0])):
            yield t, match[1], sites


def read_amax_buffers(catalogue: Catalogue) -> list[AmaxBuffer]:
    """All amaxes of a checkpoint, as float32.

    Raises:
        StorageError: one cannot be read.
    """
    return list(_read(catalogue))


def _read(catalogue: Catalogue) -> Iterator[AmaxBuffer]:
    with CheckpointReader(catalogue, Files()) as reader:
        for tensor, quantizer, sites in list_amax_buffers(catalogue):
            placement = Placement.identity(tensor.name, tensor.shape)
            for site, index in sites.items():
                part = narrow(placement, *index_box(tensor, index)) if index else placement
                view = reader.open_canonical(part)
                values = numeric_values(view.read().reshape(-1), view.dtype).astype(np.float32)
                yield AmaxBuffer(
                    site=site, quantizer=quantizer, tensor=tensor.name, index=index, values=values
                )


def check_amax_buffer(buffer: AmaxBuffer, weights: Mapping[Site, float]) -> list[StateFinding]:
    """What is wrong with one amax; `weights` are the amaxes of weights by module."""
    values, name = buffer.values, buffer.quantizer
    bad = {
        "nan": ("NaN", np.isnan(values)),
        "inf": ("infinity", np.isinf(values)),
        "negative": ("negative numbers", values < 0),
    }
    out = [
        StateFinding(kind=kind, text=f"{word} in {name}") for kind, (word, mask) in bad.items()
        if mask.any()
    ]  # fmt: skip
    if out:
        return out
    if not values.any():
        return [StateFinding(kind="zeros", text=f"only zeros in {name}")]
    weight = weights.get(buffer.site)
    if not name.startswith("weight_quantizer") or not weight or not math.isfinite(weight):
        return out
    if weight > buffer.amax * (1 + SLACK):
        text = f"the weight reaches {weight:.4g}, and {name} {buffer.amax:.4g}"
        out.append(StateFinding(kind="uncovered", text=text))
    elif buffer.amax > LOOSE * weight:
        text = f"the weight reaches {weight:.4g}, and {name} is made for {buffer.amax:.4g}"
        out.append(StateFinding(kind="stale", text=text))
    return out


def is_rebuildable(buffer: AmaxBuffer, weights: Mapping[Site, float]) -> bool:
    """Whether its weight determines its value."""
    weight = weights.get(buffer.site, 0.0)
    of_weight = buffer.quantizer.startswith("weight_quantizer") and buffer.is_per_tensor
    return of_weight and math.isfinite(weight) and weight > 0


def rebuild_buffers(
    catalogue: Catalogue, buffers: Iterable[AmaxBuffer], weights: Mapping[Site, float]
) -> tuple[dict[str, Array], list[AmaxFinding]]:
    """New values of tensors with a weight amax that is not the weight's, and the findings.

    Amaxes by channel or block are reported and not changed: one maximum does not determine them.
    """
    out: dict[str, Array] = {}
    findings: list[AmaxFinding] = []
    for b in buffers:
        problems, weight = check_amax_buffer(b, weights), weights.get(b.site, 0.0)
        is_fixable = is_rebuildable(b, weights)
        site = b.site
        module = site.module if site.expert is None else f"{site.module} of expert {site.expert}"
        for f in problems:
            text = f"{f.text}: {b.amax:.6g} -> {weight:.6g}" if is_fixable else f"{f.text}: kept"
            findings.append(AmaxFinding(module=module, kind=f.kind, text=text))
        if is_fixable and problems:
            if b.tensor not in out:
                with CheckpointReader(catalogue, Files()) as reader:
                    view = reader.open_stored(b.tensor)
                    out[b.tensor] = numeric_values(view.read(), view.dtype).astype(np.float32)
            out[b.tensor][b.index] = weight
    return out, findings
