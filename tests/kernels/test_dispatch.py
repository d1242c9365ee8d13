"""Every name of an implementation is honoured or refused; nothing optional is imported early."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import megtool.kernels
from megtool.errors import MissingPackageError, UsageError
from megtool.inference.runtime import on_ranks
from megtool.kernels import launch
from megtool.kernels.dispatch import IMPLEMENTATIONS, Kernel, chosen, use
from megtool.kernels.elementwise.activation import KINDS, gated
from megtool.kernels.elementwise.norm import rms_norm
from megtool.kernels.experts.grouped_gemm import permute, unpermute
from megtool.kernels.transformer_engine import library as transformer_engine
from megtool.kernels.transformer_engine.library import SCOPE
from megtool.kernels.vocabulary.cross_entropy import cross_entropy, linear_cross_entropy
from megtool.options.groups import RuntimeOptions
from tests.support.errors import raises


def kernel() -> Kernel[[torch.Tensor], str]:
    return Kernel("test", lambda x: "reference", triton=lambda x: "triton", te=lambda x: "te")


def test_auto_is_torch_on_a_cpu_and_triton_on_cuda() -> None:
    for name in ("cpu", "meta", "mps"):
        assert chosen(name) == "torch"
    assert chosen("cuda:1") == ("triton" if launch.is_installed() else "torch")
    assert kernel().on(torch.device("cpu"))(torch.ones(1)) == "reference"


def test_a_name_holds_inside_its_block_and_its_thread() -> None:
    seen = []
    with use("torch"):
        with use("compile"):
            assert chosen("cpu") == "compile"
            thread = threading.Thread(target=lambda: seen.append(chosen("cpu")))
            thread.start()
            thread.join()
        assert chosen("cuda") == "torch"
    assert seen == ["torch"]
    with pytest.raises(KeyError), use("compile"):
        raise KeyError
    assert chosen("cpu") == "torch"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="'cuda'") as caught, use("cuda"):  # type: ignore[arg-type]
        pass
    assert all(name in str(caught.value) for name in IMPLEMENTATIONS)


without_te = pytest.mark.skipif(
    transformer_engine.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted on a GPU")
def test_triton_is_honoured_where_it_is_interpreted() -> None:
    with use("triton"):
        assert chosen("cpu") == "triton"
        assert kernel().on(torch.device("cpu"))(torch.ones(1)) == "triton"


@without_te
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_missing_transformer_engine_is_an_error_and_no_fallback(device: str) -> None:
    with use("te"):
        with pytest.raises(MissingPackageError, match="not installed") as caught:
            chosen(device)
        assert "pip install" in str(caught.value)
        assert "'megtool[te]'" in str(caught.value)
        # Not even where it has no such kernel.
        with pytest.raises(MissingPackageError):
            rms_norm(torch.ones(2, 4), None, 1e-5)
        with pytest.raises(MissingPackageError):
            gated(torch.ones(2, 4), "gelu")


def test_what_transformer_engine_runs_is_said() -> None:
    """The sentence that is shown where it is asked for names all that it runs, and only that."""
    kernels = [
        found
        for module in pkgutil.walk_packages(megtool.kernels.__path__, "megtool.kernels.")
        for found in vars(importlib.import_module(module.name)).values()
        if isinstance(found, Kernel)
    ]
    by_te = {k.name for k in kernels if k._ways["te"] is not None}
    norms = {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"}
    assert by_te == norms | {"activation", "gated activation"}
    said = {"gelu_pytorch_tanh": "gelu by tanh", "gelu": "not exact gelu"}
    for kind in KINDS:
        assert (kind in transformer_engine.KINDS) == (kind != "gelu")
        assert said.get(kind, kind) in SCOPE


@without_te
def test_a_command_asks_for_transformer_engine_before_it_starts() -> None:
    with (
        pytest.raises(MissingPackageError, match="not installed"),
        on_ranks(RuntimeOptions(device="cpu", kernels="te")),
    ):
        pytest.fail("it started")


def test_a_transformer_engine_that_cannot_be_loaded_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a torch without CUDA its import raises RuntimeError, not ImportError."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text('raise RuntimeError("cudnn shared object not found.")')
    facts = tmp_path / "transformer_engine-2.20.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    transformer_engine.load.cache_clear()
    with use("te"):
        with pytest.raises(MissingPackageError, match="cudnn shared object not found"):
            chosen("cuda")
        with raises(MissingPackageError, id="missing-device"):
            chosen("cpu")
    transformer_engine.load.cache_clear()


WITHOUT = """
import importlib, pkgutil, sys
import torch
before = set(sys.modules)
import megtool.kernels
for module in pkgutil.walk_packages(megtool.kernels.__path__, "megtool.kernels."):
    importlib.import_module(module.name)
from megtool.kernels import launch
from megtool.kernels.dispatch import chosen, use
from megtool.errors import MissingPackageError
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "transformer_engine", "liger_kernel"}))
def refused(device):
    launch.is_installed.cache_clear()
    launch.require.cache_clear()
    try:
        with use("triton"):
            chosen(device)
    except MissingPackageError as error:
        print(str(error).replace(chr(10), " "))
refused("cpu")
for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None
refused("cuda")
"""


def test_nothing_imports_triton_before_it_is_asked_for_nor_fails_without(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    early, on_cpu, missing = done.stdout.splitlines()
    assert early == "[]"
    assert "'cpu', where Triton does not run" in on_cpu
    assert "not installed" in missing
    assert "pip install 'triton" in missing


@pytest.mark.slow
def test_compile_is_the_reference_compiled() -> None:
    x = torch.randn(5, 64, requires_grad=True)
    results = []
    for name in ("torch", "compile"):
        with use(name):
            out = gated(x, "silu", limit=1.0, offset=1.0)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        results.append((out, grad))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_a_backward_pass_has_the_kernels_of_its_forward_pass() -> None:
    """Autograd runs it later, on a GPU in a thread of its own; `te`, asked anew, would fail."""
    x = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(16, 8, requires_grad=True)
    probs = torch.rand(6, 2, requires_grad=True)
    labels, chosen_TK = torch.arange(6), torch.arange(12).view(6, 2) % 4

    def through_experts() -> torch.Tensor:
        rows, row_ids, _ = permute(x, chosen_TK, 4)
        return unpermute(rows, row_ids, probs)

    for run in (
        through_experts,
        lambda: cross_entropy(x @ weight.t(), labels),
        lambda: linear_cross_entropy(x, weight, labels, vocab_size=15),
    ):
        with use("torch"):
            out = run().sum()
        with use("te"):
            out.backward()
        assert x.grad is not None
        found, x.grad = x.grad, None
        with use("torch"):
            (expected,) = torch.autograd.grad(run().sum(), x)
        assert torch.equal(found, expected)
