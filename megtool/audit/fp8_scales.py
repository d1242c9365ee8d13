"""FP8 scales of a save that saturate or hold no number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megtool.fp8_state.collect import collect_fp8_state
from megtool.megatron_state.extra_states.names import is_empty_value, is_extra_state
from megtool.megatron_state.saved_objects import read_object
from megtool.options.groups import SourceOptions
from megtool.source.open import open_source
from megtool.tensors.catalogue import Catalogue

_LARGEST = {"fwd": 448.0, "bwd": 57344.0}
"""The largest number of E4M3, and of E5M2, which gradients have (or E4M3, which is smaller)."""

_SATURATED = 2.0
"""A scale saturates if every amax of its history exceeds the format that many times."""


def find_scale_faults(catalogue: Catalogue, path: Path) -> Iterator[tuple[str, str]]:
    """Modules with delayed scaling whose scales are wrong, and what is wrong with them.

    Raises:
        MegtoolError: a state is damaged or hostile.
    """
    states = [stored for name, stored in catalogue.objects.items() if is_extra_state(name)]
    if all(is_empty_value(read_object(catalogue, stored)) for stored in states):
        return  # not trained in FP8: the model need not be opened
    source = open_source(path, SourceOptions(), lenient=True, compare_copies=False, optimizer=False)
    for module in collect_fp8_state(source).states:
        if not module.state.is_delayed:
            continue
        name = module.site.module if module.site else module.name
        if module.site is not None and module.site.expert is not None:
            name += f" of expert {module.site.expert}"
        for direction, largest in _LARGEST.items():
            scale = module.state.tensors.get(f"scale_{direction}")
            history = module.state.tensors.get(f"amax_history_{direction}")
            if scale is None or history is None or not scale.size or not history.size:
                continue
            if bad := int((~np.isfinite(scale) | (scale <= 0)).sum()):
                yield name, f"{bad} of {scale.size} scales ({direction}) are zero or no numbers"
            flat = history.reshape(-1, history.shape[-1]).astype(np.float64)
            if not np.isfinite(flat).all():
                yield name, f"the amax history ({direction}) holds NaN or Inf"
                continue
            least = np.where(flat > 0, flat, np.inf).min(0)
            with np.errstate(all="ignore"):
                over = least * scale.reshape(-1) / largest
            over = np.where(np.isfinite(over), over, 0.0)
            if int((over > _SATURATED).sum()):
                text = f"values exceed the largest FP8 number {float(over.max()):.1f} times"
                yield name, f"{text} in every step of the history ({direction})"
