"""Kernels of other packages in Triton's interpreter: what it lacks for them.

It takes megtool's kernels as they are. Those of flash-linear-attention, mamba-ssm and Liger want an
autotuner without a device (the first configuration is as right as any), functions of libdevice,
numbers with methods, and a CUDA device to be current. Nothing of the packages is changed. `start`
comes before they are imported. bfloat16 products are wrong there: numpy multiplies their bits.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LIBDEVICE = ("rsqrt", "exp", "exp2", "log", "log2")


def start() -> None:
    """Prepare Triton's interpreter in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    for name in LIBDEVICE:
        setattr(libdevice, name, lambda x, name=name: getattr(tl.math, name)(x))
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1  # type: ignore[attr-defined]
    Autotuner.run = _run_first  # type: ignore[method-assign]
    convert = interpreter._implicit_cvt

    def convert_numbers(value: Any) -> Any:
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    class Index(int):
        """A number of a loop, which a kernel may convert."""

        def to(self, dtype: Any) -> Any:
            """A tensor of one number."""
            return convert(int(self)).to(dtype)

    def count(*limits: Any) -> Iterator[Index]:
        numbers = [int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in limits]
        return map(Index, builtins.range(*numbers))

    interpreter._implicit_cvt = convert_numbers
    execute = interpreter.GridExecutor.__call__

    def with_numbers(executor: Any, *args: Any, **meta: Any) -> Any:
        names = executor.fn.__globals__
        names["range"] = count
        try:
            return execute(executor, *args, **meta)
        finally:
            names.pop("range", None)

    interpreter.GridExecutor.__call__ = with_numbers
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    facts = SimpleNamespace(multi_processor_count=2)
    torch.cuda.get_device_properties = lambda device=None: facts  # type: ignore[assignment]


def _run_first(tuner: Any, *args: Any, **meta: Any) -> Any:
    """Run an autotuned kernel with its first configuration."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    tuner.best_config = config = tuner.configs[0]
    if config.pre_hook is not None:  # sums that begin at zero
        config.pre_hook({**tuner.nargs, **meta, **config.all_kwargs()})
    return tuner.fn.run(*args, **{**meta, **config.all_kwargs()})


def mount_mamba(folder: Path) -> None:
    """Let `mamba_ssm`'s Triton kernels be imported from a source tree, without its extensions.

    Its package imports compiled extensions, and this module of it none. The metadata of an
    installed package is made of the tree's own version.
    """
    version = re.search(r'__version__ = "(.+)"', (folder / "mamba_ssm/__init__.py").read_text())
    assert version is not None
    site = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, site)
    facts = site / f"mamba_ssm-{version[1]}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: mamba-ssm\nVersion: {version[1]}\n"
    )
    sys.path.append(str(site))
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        module = ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    conv = ModuleType("causal_conv1d")
    conv.causal_conv1d_fn = None  # type: ignore[attr-defined]
    functions = ModuleType("causal_conv1d.cpp_functions")
    for name in ("fwd", "bwd", "update"):
        setattr(functions, f"causal_conv1d_{name}_function", None)
    sys.modules |= {"causal_conv1d": conv, "causal_conv1d.cpp_functions": functions}
    importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
