"""Learned scales (LSQ): the amaxes of a weight's blocks that training changes.

A weight is rounded to `round(w / s_pre) * s_post`, where a scale is that of an amax: the codes are
those under the pre scale, and the post scale is stored with them. Sources: Esser et al., 2020
(arXiv 1902.08153), and modelopt 0.47, torch/quantization/config.py (`LSQConfig`), whose options
both dialects have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.quant.recipes.formats import RecipeFormat, packing_of
from megtool.quant.recipes.rules import RecipeProblems

METHOD = "lsq"
SIDES = ("pre", "post")
DEFAULT_SCALES = "mse"
"""The algorithm that chooses the first scales, if a recipe names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedScales:
    """Which amaxes are trained (`learns_pre`, `learns_post`), whether both are one (`is_tied`), and
    whether the pre scale is rounded to E4M3 as the post scale is (`rounds_pre`)."""

    learns_pre: bool = False
    learns_post: bool = True
    is_tied: bool = False
    rounds_pre: bool = True

    @classmethod
    def of(cls, algorithm: Mapping[str, Any]) -> LearnedScales | None:
        """Those of a recipe's algorithm; None for another algorithm."""
        if algorithm.get("method") != METHOD:
            return None
        sides = list_sides(algorithm.get("learnable_amax", ["post"]))
        return cls(
            learns_pre="pre" in sides,
            learns_post="post" in sides,
            is_tied=bool(algorithm.get("tied_amax", False)),
            rounds_pre=bool(algorithm.get("quantize_pre_scale", True)),
        )


def list_sides(value: Any) -> list[Any]:
    """`learnable_amax` as a list: ModelOpt takes a name, too."""
    return [value] if isinstance(value, str) else list(value or ())


def check_tied(algorithm: Mapping[str, Any], line: int, problems: RecipeProblems) -> None:
    """Add it to the problems if pre and post are one, and one of them alone is trained."""
    sides = set(list_sides(algorithm.get("learnable_amax", ["post"])))
    if algorithm.get("tied_amax") and sides not in (set(), set(SIDES)):
        problems.add(
            line,
            "tied_amax true, and one of pre and post alone is learnable",
            "learnable_amax: [pre, post], or tied_amax: false",
        )


def first_scales(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The algorithm that chooses the scales that training begins with, with its options."""
    chosen = algorithm.get("scale_algorithm") or DEFAULT_SCALES
    return {"method": chosen} if isinstance(chosen, str) else dict(chosen)


def has_learnable_scales(format: RecipeFormat) -> bool:
    """Whether scales of a weight are of blocks, and stored: NVFP4's static ones, or INT4's."""
    packing = packing_of(format)
    if packing.startswith("nvfp4"):
        return bool(format.block_scales)
    return packing.startswith("int4rows") and format.algo != "W4A8_AWQ"
