"""SVDQuant: what four bits round worst of a weight goes into two thin matrices of 16 bits.

Muyang Li and others, "SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion
Models" (2025): outliers of inputs are moved into the weight by smoothing scales, and the largest
singular values of the smoothed weight into a branch `up @ down`. Only the residual is rounded.
Outputs are `round(x) @ round(residual).T + (x @ down.T) @ up.T` of smoothed inputs x.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from megtool.number_formats.decode_torch import low_rank_product
from megtool.quant.fake_quant.fake_quantize import check_finite
from megtool.quant.qparams import LowRankBranch


def split_low_rank(
    weights_OI: Mapping[str, Tensor], rank: int
) -> tuple[dict[str, LowRankBranch], dict[str, Tensor]]:
    """Split smoothed weights that share an input into branches and residuals, by module.

    The weights are decomposed as one matrix, so their branches have one `down`, as in ModelOpt 0.47
    (`export/quant_utils.py` _update_svdquant). Matrices are rounded to bfloat16, and residuals are
    what these leave. A rank above the smaller dimension is filled with zeros.

    Raises:
        FormatError: a weight has NaN or Inf.
    """
    for name, weight_OI in weights_OI.items():
        check_finite(weight_OI, name)
    up_OR, down_RI = _factorize(torch.cat(list(weights_OI.values())).double(), rank)
    missing = rank - len(down_RI)
    up_OR, down_RI = pad(up_OR, (0, missing)), pad(down_RI, (0, 0, 0, missing))
    ups = torch.split(up_OR, [len(w) for w in weights_OI.values()])
    branches: dict[str, LowRankBranch] = {}
    residuals: dict[str, Tensor] = {}
    for (name, weight_OI), up in zip(weights_OI.items(), ups, strict=True):
        branches[name], residuals[name] = subtract_branch(weight_OI, up, down_RI)
    return branches, residuals


def _factorize(weight_OI: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest singular values of a matrix times their left vectors, and the right vectors; from
    the eigenvectors of the smaller Gram matrix, which is much faster than all singular values."""
    rows, columns = weight_OI.shape
    if rows >= columns:
        down_RI = torch.linalg.eigh(weight_OI.T @ weight_OI)[1][:, -rank:].T
        return weight_OI @ down_RI.T, down_RI
    left_OR = torch.linalg.eigh(weight_OI @ weight_OI.T)[1][:, -rank:]
    scaled_RI = left_OR.T @ weight_OI
    values_R = scaled_RI.norm(dim=1)
    return left_OR * values_R, scaled_RI / torch.where(values_R > 0, values_R, 1)[:, None]


def subtract_branch(
    weight_OI: Tensor, up_OR: Tensor, down_RI: Tensor
) -> tuple[LowRankBranch, Tensor]:
    """A branch of matrices rounded to bfloat16, and what it leaves of a weight."""
    up_OR, down_RI = (m.bfloat16().float() for m in (up_OR, down_RI))
    branch = LowRankBranch(up=up_OR.numpy(), down=down_RI.numpy())
    return branch, weight_OI.float() - low_rank_product(up_OR, down_RI)
