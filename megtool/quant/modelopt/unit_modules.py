"""The modules that ModelOpt calibrates for us: matrices and KV caches by their names.

ModelOpt knows them by its registry of quantized modules, as it knows those of Megatron-Core
(`modelopt.torch.quantization.plugins.megatron`). A matrix is whole, on one rank, and is given the
rows of all ranks, so its parameters do not depend on the layout; ModelOpt's own math does: it
averages AWQ's scales over tensor-parallel ranks that have normalized their parts alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megtool.errors import CalibrationError
from megtool.quant.algorithms.weight_grid import Grid
from megtool.quant.fake_quant.rounding_torch import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    block_scale,
    round_e2m1_,
)

ROUNDING = "megtool_nvfp4"
"""The name of `round_nvfp4` in ModelOpt's registry of backends."""


class WholeLinear(nn.Linear):
    """A matrix `[out, in]` without a bias. Its product is computed only if `multiplies`: an
    algorithm that measures inputs alone does not look at it."""

    def __init__(self, weight_OI: Tensor, *, multiplies: bool) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight_OI.shape
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        self.register_parameter("bias", None)
        self.multiplies = multiplies

    def forward(self, input: Tensor) -> Tensor:
        """`[T, out]`; without `multiplies` no rows."""
        if not self.multiplies:
            return input.new_empty(0, self.out_features)
        return F.linear(input, self.weight)


class KVCacheInputs(nn.Module):
    """Keys after RoPE and values of one layer, `[T, heads * head size]` each."""

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Both unchanged."""
        return keys, values


class UnitModules(nn.Module):
    """Modules of a unit by their dotted names, for ModelOpt's patterns."""

    def put(self, name: str, module: nn.Module) -> None:
        """Add a module; those between are made."""
        parent: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, module)


def round_nvfp4(x: Tensor, quantizer: Any) -> Tensor:
    """Fake-quantize to NVFP4 with dynamic block scales, on any device, as ModelOpt does on a GPU.

    Raises:
        CalibrationError: blocks do not divide the columns.
    """
    per = quantizer.block_sizes[-1]
    if x.shape[-1] % per:
        raise CalibrationError(f"blocks of {per} do not divide {x.shape[-1]} columns")
    grid = Grid(algo="NVFP4", kind="nvfp4", rows=1, columns=per, has_global_scale=True)
    amax = x.abs().amax() if quantizer.amax is None else quantizer.amax
    rows = x.reshape(-1, x.shape[-1]).float()
    if not len(rows):
        return x
    return grid.fake_quantize(rows, None, float(amax)).view(x.shape).to(x.dtype)


def round_blocks(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None,
    largest: float,
    dtype: torch.dtype | None,
) -> Tensor:
    """Fake-quantize to NVFP4 with the scales of given amaxes of blocks, as ModelOpt does on a GPU.

    `largest` is what the scale of a block with the amax `global_amax` becomes (448, or 256).
    """
    amax = amax.float().flatten()
    top = amax.max() if global_amax is None else global_amax.float()
    second = top / (E2M1_LARGEST * largest)
    scale = (block_scale(amax, second) * second).unsqueeze(1)
    blocks = x.float().reshape(len(amax), -1)
    return round_e2m1_(blocks / scale).mul_(scale).view(x.shape).to(dtype or x.dtype)


def _round_static(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantizes_scales: bool = True,
    largest: float = E4M3_LARGEST,
    dtype: torch.dtype | None = None,
    *rest: Any,
) -> Tensor:
    """ModelOpt's function of this signature, whose kernel needs a GPU: elsewhere `round_blocks`."""
    if x.device.type == "cpu" and quantizes_scales:
        return round_blocks(x, amax, global_amax, largest, dtype)
    from modelopt.torch.quantization.tensor_quant import static_blockwise_fp4_fake_quant

    out: Tensor = static_blockwise_fp4_fake_quant(
        x, amax, global_amax, quantizes_scales, largest, dtype, *rest
    )
    return out


def register() -> None:
    """Register the modules and the rounding with ModelOpt, once."""
    from modelopt.torch.quantization import model_calib
    from modelopt.torch.quantization.nn import (
        QuantModule,
        QuantModuleRegistry,
        TensorQuantizer,
        register_quant_backend,
    )
    from modelopt.torch.quantization.nn.modules import tensor_quantizer
    from modelopt.torch.quantization.nn.modules.quant_linear import _QuantLinear
    from modelopt.torch.utils.distributed import ParallelState

    if WholeLinear in QuantModuleRegistry:
        return

    def alone() -> Any:
        """No group: the rank that has the module has all rows and columns."""
        return ParallelState(data_parallel_group=-1)

    class QuantWholeLinear(_QuantLinear):  # type: ignore[misc]
        """Quantizers of the inputs and of the weight."""

        def _setup(self) -> None:
            super()._setup()
            self.parallel_state = alone()

    class QuantKVCacheInputs(QuantModule):  # type: ignore[misc]
        """Quantizers of keys and values."""

        def _setup(self) -> None:
            self.parallel_state = alone()
            self._register_temp_attribute("k_bmm_quantizer", TensorQuantizer())
            self._register_temp_attribute("v_bmm_quantizer", TensorQuantizer())

        def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return self.k_bmm_quantizer(keys), self.v_bmm_quantizer(values)

    QuantModuleRegistry.register({WholeLinear: "megtool.WholeLinear"})(QuantWholeLinear)
    QuantModuleRegistry.register({KVCacheInputs: "megtool.KVCacheInputs"})(QuantKVCacheInputs)
    register_quant_backend(ROUNDING, round_nvfp4)
    tensor_quantizer.static_blockwise_fp4_fake_quant = _round_static
    model_calib.tqdm = partial(model_calib.tqdm, disable=True)
