"""Kernels of other packages: found, refused by version and arguments, and chosen in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megtool.errors import MissingPackageError
from megtool.kernels import launch, peers
from megtool.kernels.choices import automatic_choices, find_peers
from megtool.kernels.dispatch import IMPLEMENTATIONS, Kernel, chosen, use
from megtool.kernels.elementwise.activation import gated
from megtool.kernels.recurrence import packages
from megtool.machine.abilities import find_abilities
from megtool.machine.hardware import find_hardware
from tests.support.errors import raises

CUDA = torch.device("cuda")
FLA = """
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None,
                           output_final_state=False, use_qk_l2norm_in_kernel=False,
                           cu_seqlens=None): ...
chunk_kda = chunk_gated_delta_rule
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages can be put into, where none of them is installed elsewhere."""
    for name in peers.NAMES:
        if peers.is_installed(name):
            pytest.skip(f"{name} is installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    peers.load.cache_clear()
    peers.is_usable.cache_clear()
    import sys

    for module in [m for m in sys.modules if m.partition(".")[0] in ("fla", "liger_kernel")]:
        del sys.modules[module]


def install(site: Path, distribution: str, version: str, modules: dict[str, str]) -> None:
    """Write a package that has these modules."""
    facts = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    for name, text in modules.items():
        path = site.joinpath(*name.split("."))
        path.mkdir(parents=True)
        (path / "__init__.py").write_text(text)
    peers.load.cache_clear()
    peers.is_usable.cache_clear()


def fla(site: Path, version: str = "0.6.0", text: str = FLA) -> None:
    install(
        site,
        "fla-core",
        version,
        {"fla": "", "fla.ops": "", "fla.ops.gated_delta_rule": text, "fla.ops.kda": text},
    )


def rule(text: str = "delta") -> Kernel[[], str]:
    return Kernel(
        text,
        lambda: "torch",
        triton=lambda: "triton",
        packages={"fla": lambda: "fla", "liger": lambda: "liger"},
        preferred=("fla",),
    )


def test_every_package_is_a_name_of_kernels() -> None:
    assert tuple(peers.PACKAGES) == peers.NAMES
    assert set(peers.NAMES) < set(IMPLEMENTATIONS)
    assert peers.as_peer("triton") is None
    for name, package in peers.PACKAGES.items():
        assert package.install.startswith("pip install ")
        assert package.distribution in package.install
        assert peers.as_peer(name) == name


def test_auto_takes_an_installed_package_before_triton(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = "triton" if launch.is_installed() else "torch"
    assert rule().automatic(CUDA) == usual
    fla(site)
    with caplog.at_level(logging.INFO, logger="megtool.kernels.dispatch"):
        kernel = rule()
        assert [kernel.on(CUDA)() for _ in range(2)] == ["fla", "fla"]
    assert [r.getMessage() for r in caplog.records] == ["fla 0.6.0 runs delta"]
    assert kernel.automatic(CUDA, without=("fla",)) == usual
    assert kernel.automatic(torch.device("cpu")) == "torch"
    taken = {c.operation: c.implementation for c in automatic_choices(CUDA)}
    assert taken["gated_delta_rule"] == taken["kimi_delta_rule"] == "fla"
    assert taken["ssd_scan"] == taken["gated activation"] == usual
    found = {f.name: f for f in find_peers(CUDA)}
    assert found["fla"].operations == ("gated_delta_rule", "kimi_delta_rule")
    assert not found["fla"].problem
    assert "pip install" in found["liger"].problem


def test_what_is_not_preferred_runs_by_name_alone(site: Path) -> None:
    function = """
import torch
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, R=None, W=None, B=None, eps=0, offset=0, casting_mode="", in_place=True):
        return "liger"
LigerRMSNormFunction = LigerLayerNormFunction = LigerFusedAddRMSNormFunction = F
LigerSiLUMulFunction = LigerGELUMulFunction = F
"""
    names = ("rms_norm", "layer_norm", "fused_add_rms_norm", "swiglu", "geglu")
    modules = {f"liger_kernel.ops.{name}": function for name in names}
    install(site, "liger-kernel", "0.8.5", {"liger_kernel": "", "liger_kernel.ops": "", **modules})
    taken = {c.operation: c.implementation for c in automatic_choices(CUDA)}
    assert taken["rms_norm"] == taken["layer_norm"] == taken["add_rms_norm"] == "liger"
    assert taken["gated activation"] != "liger"
    with use("liger"):
        assert chosen(CUDA) == "liger"
        assert rule().on(CUDA)() == "liger"
        assert rule().on(CUDA, without=("liger",))() == (
            "triton" if launch.is_installed() else "torch"
        )


@pytest.mark.parametrize(
    ("version", "text", "said"),
    [
        ("0.4.2", FLA, "0.4.2 is installed"),
        ("1.0", FLA, "1.0 is installed"),
        ("0.6.0", FLA.replace("cu_seqlens=None", "offsets=None"), "no argument cu_seqlens"),
        ("0.6.0", "raise RuntimeError('0 active drivers')", "0 active drivers"),
        ("0.6.0", "import libthat_is_not_there", "libthat_is_not_there"),
        ("0.6.0", "", "chunk_gated_delta_rule"),
    ],
)
def test_a_package_that_does_not_fit_is_refused_by_name_and_left_by_auto(
    site: Path, caplog: pytest.LogCaptureFixture, version: str, text: str, said: str
) -> None:
    fla(site, version, text)
    with use("fla"), pytest.raises(MissingPackageError, match=said) as caught:
        chosen(CUDA)
    assert "pip install 'fla-core>=0.5,<1'" in str(caught.value.hint)
    kernel = rule()
    for _ in range(2):
        assert kernel.on(CUDA)() == ("triton" if launch.is_installed() else "torch")
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert said in warnings[0].getMessage()
    assert said in next(f.problem for f in find_peers(CUDA) if f.name == "fla")


def test_a_missing_package_is_an_error_and_no_fallback(site: Path) -> None:
    for name in peers.NAMES:
        with use(name), pytest.raises(MissingPackageError, match="not installed") as caught:
            chosen(CUDA)
        assert caught.value.hint == peers.PACKAGES[name].install


def test_what_is_compiled_for_cuda_runs_on_no_cpu() -> None:
    with use("causal-conv1d"), raises(MissingPackageError, id="missing-device"):
        chosen("cpu")
    with use("causal-conv1d"), raises(MissingPackageError, id="missing-device"):
        gated(torch.ones(2, 4), "silu")


def test_calls_that_packages_cannot_do() -> None:
    key, runs = torch.zeros(1, 8, 2, 64), torch.zeros(1, 8, dtype=torch.int64)
    value = key.bfloat16()
    assert packages.fla_cannot(value, key, runs) == ()
    assert packages.fla_cannot(key, key, None) == ("fla",)  # its products are TF32
    with use("fla"):
        assert packages.fla_cannot(key, key, None) == ()
        assert packages.fla_cannot(key.double(), key, None) == ("fla",)
    assert packages.fla_cannot(value, torch.zeros(1, 8, 2, 512), None) == ("fla",)
    assert packages.mamba_cannot(key) == ("mamba-ssm",)
    x, weight, past = torch.zeros(1, 8, 64), torch.zeros(64, 4), torch.zeros(1, 3, 64)
    assert packages.conv_cannot(x, weight, past, None) == ()
    assert packages.conv_cannot(x, weight, None, runs) == ()
    assert packages.conv_cannot(x, weight, past, runs) == ("causal-conv1d",)
    assert packages.conv_cannot(x, torch.zeros(64, 5), None, None) == ("causal-conv1d",)
    assert packages.conv_cannot(x[..., :60], weight[:60], None, None) == ("causal-conv1d",)


def test_doctor_names_what_is_installed_and_why_it_does_not_run(site: Path) -> None:
    fla(site)
    found = {a.name: a for a in find_abilities(find_hardware(), ())}
    ability = found["--kernels fla"]
    assert ability.reason.startswith("0.6.0 runs the gated delta rule")
    assert ability.works == torch.cuda.is_available()
    assert ability.works or "no GPU" in ability.reason
    assert "pip install 'liger-kernel>=0.7,<1'" in found["--kernels liger"].reason
