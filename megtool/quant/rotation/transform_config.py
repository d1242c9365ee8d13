"""The description of offline rotations that compressed-tensors and llm-compressor write.

Source: compressed-tensors 0.20, `transform/transform_scheme.py` and `transform_args.py`;
llm-compressor `modifiers/transform/spinquant/base.py`. Only keys that all versions know are
written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megtool.convert.dialects import write_side
from megtool.errors import MappingError
from megtool.quant.recipes.rotation import HADAMARD, RANDOM, RANDOM_HADAMARD, RotationMatrices
from megtool.quant.rotation.orthogonal import OrthogonalMatrix
from megtool.source.checkpoint import CheckpointSource

_ROLES: Mapping[str, re.Pattern[str]] = {
    "writes": re.compile(r"embed|layers\.\d+\.(?:attn\.o|mlp\..*down|mlp\.down)"),
    "reads": re.compile(
        r"head|layers\.\d+\.(?:attn\.(?:q|k|v|gate|q_down|kv_down)|mlp\.(?:.+\.)?(?:gate|up|router))"
    ),
    "values": re.compile(r"layers\.\d+\.attn\.v"),
    "outputs": re.compile(r"layers\.\d+\.attn\.o"),
}


def describe_transforms(
    source: CheckpointSource,
    settings: RotationMatrices,
    matrices: Mapping[str, OrthogonalMatrix],
) -> dict[str, Any]:
    """The `transform_config` of a rotated checkpoint: one group for each rotation."""
    names = _stored_modules(source)
    groups: dict[str, Any] = {}
    if "R1" in matrices:
        block = settings.block_size
        groups["R1"] = _scheme(
            settings.r1, matrices["R1"], block, names, before="writes", after="reads"
        )
    if "R2" in matrices:
        size = matrices["R2"].size
        groups["R2"] = _scheme(
            settings.r2, matrices["R2"], size, names, before="values", after="outputs"
        )
    return {"config_groups": groups}


def _scheme(
    kind: str,
    matrix: OrthogonalMatrix,
    block: int,
    names: Mapping[str, str],
    *,
    before: str,
    after: str,
) -> dict[str, Any]:
    """One rotation: what it is multiplied into, and what its inverse is."""
    if kind == HADAMARD and not matrix.is_sylvester:
        kind = RANDOM_HADAMARD  # the library's `hadamard` has powers of two alone
    if kind not in (HADAMARD, RANDOM_HADAMARD):
        kind = RANDOM
    return {
        "type": kind,
        "apply": [
            {"targets": _targets(names, before), "location": "weight_output"},
            {"targets": _targets(names, after), "location": "weight_input", "inverse": True},
        ],
        **({"head_dim": block} if block else {}),
    }


def _targets(names: Mapping[str, str], role: str) -> list[str]:
    """Patterns for the stored modules of a role, by the last parts of their names."""
    pattern = _ROLES[role]
    last_parts = dict.fromkeys(names[n].rpartition(".")[2] for n in names if pattern.fullmatch(n))
    return [f"re:.*{re.escape(last)}$" for last in last_parts]


def _stored_modules(source: CheckpointSource) -> dict[str, str]:
    """Hugging Face names of modules by canonical ones; canonical ones if the family has none."""
    side = source.view
    weights = [n for n in side.canonical if n.endswith(".weight")]
    try:
        family = side.family.for_codes if side.family is not None else None
        target = write_side(side, dialect="hf", family=family, per_layer=True)
    except MappingError:
        return {n: n for n in _modules(weights)}
    placements = target.placements
    return {
        n.removesuffix(".weight"): placements[n].stored.removesuffix(".weight")
        for n in weights
        if n in placements
    }


def _modules(weights: Iterable[str]) -> list[str]:
    return [n.removesuffix(".weight") for n in weights]
