"""What runs on a GPU runs on an emulated one: placement, waiting, captures, layouts of operands.

`tests/support/emulated/device.py` says what the emulation is, and what it cannot show.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import verify
from megtool.train.run_log import read_log
from tests.support.emulated.device import build
from tests.support.models import tiny_text
from tests.support.peers.release import install_release
from tests.support.runs.finetune_runs import curve, save_lines

pytest.importorskip("transformers")

FEW = ("llama(yarn)", "gemma2(tie_word_embeddings=True,num", "gpt2", "deepseek_v3", "gpt_oss")
ON_GPU = (
    "tests/kernels",
    "tests/optim",
    "tests/inference/generation/test_generate.py",
    "tests/inference/test_load.py",
    "tests/quant/fake_quant",
)
BY_TE = (
    *(
        "tests/kernels/transformer_engine/test_weights.py",
        "tests/kernels/attention/test_transformer_engine.py",
    ),
    *("tests/optim/test_te_adam.py", "tests/commands/test_finetune_te.py"),
)
GRAPHED = ("tests/train/test_cuda_graph.py", "tests/commands/test_finetune_cuda_graph.py")
COMMANDS = (
    "tests/commands/test_finetune.py::test_the_same_command_goes_on_with_the_same_bits",
    "tests/commands/test_finetune_fp8.py",
    "tests/commands/test_evaluate.py",
    "tests/commands/test_generate.py",
)

REFUSED = """
import sys
from pathlib import Path
from tests.support.emulated.device import start
start(Path(sys.argv[1]))
import pytest
import torch

one, here = torch.ones(16, 16, device="cuda", requires_grad=True), torch.ones(16, 16)
(one @ one).sum().backward()
assert one.grad.is_cuda and one.grad.sum().item() == 2 * 16**3
x = one.detach()
assert (x + torch.tensor(1.0)).is_cuda and x[torch.arange(3)].is_cuda
assert (x.sum() > 0) and x[0].tolist() == [1.0] * 16

def scaled(a, b, columns=True):
    a, b = (t.to(torch.float8_e4m3fn) for t in (a, b))
    unit = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b.t() if columns else b, unit, unit)

for wrong, said in (
    (lambda: x + here, "devices|same device"),
    (lambda: x @ here, "same device"),
    (lambda: x.index_select(0, torch.arange(3)), "same device"),
    (lambda: x.numpy(), "can't convert cuda"),
    (lambda: torch.rand(3, device="cuda", generator=torch.Generator()), "generator"),
    (lambda: torch.empty(3, device="cuda", pin_memory=True), "pinned"),
    (lambda: scaled(x, x[:9]), "multiple of 16"),
    (lambda: scaled(x, x, columns=False), "rows times columns"),
):
    with pytest.raises((RuntimeError, TypeError), match=said):
        wrong()
graph, out = torch.cuda.CUDAGraph(), None
with torch.cuda.graph(graph):
    out = (x * 2).sum(0)
x.fill_(3)
assert out[0] == 32
graph.replay()
assert out[0] == 96
for waits in (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.cpu(), lambda: x.nonzero()):
    before = torch.cuda.current_stream()
    with torch.cuda.stream(before):
        with pytest.raises(RuntimeError, match="during capture"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                waits()
        assert torch.cuda.current_stream() is not before
    assert torch.cuda.current_stream() is before
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the emulated GPU with")
    if torch.version.cuda is not None:
        pytest.skip("a torch with CUDA cannot be given another device")
    return build(tmp_path_factory.mktemp("device"), compiler)


def run(checkout: Path, *arguments: str) -> str:
    """What a Python process says that starts with a GPU."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


def families(checkout: Path, library: Path, *arguments: str) -> list[dict[str, Any]]:
    told = run(checkout, "-m", "tests.support.emulated.families", str(library), *arguments)
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    wrong = [row for row in rows if row["error"]]
    assert not wrong, "\n".join(f"{row['name']} {row['dtype']}: {row['error']}" for row in wrong)
    return rows


def test_the_emulation_refuses_what_cuda_refuses(library: Path, checkout: Path) -> None:
    run(checkout, "-c", REFUSED, str(library))


def test_families_run_there(library: Path, checkout: Path) -> None:
    rows = families(checkout, library, "torch", *FEW)
    assert len(rows) >= 2 * len(FEW)
    for row in rows:  # experts in fp32 are looped over, on numbers that the host reads
        has_experts = row["name"].startswith(("deepseek", "gpt_oss"))
        assert row["graphed"] == (not has_experts or row["dtype"] == "torch.bfloat16"), row


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_all_families_run_there(kernels: str, library: Path, checkout: Path) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
    names = ("llama(yarn)", "gpt_oss-yarn") if kernels == "triton" else ()  # slow, interpreted
    rows = families(checkout, library, kernels, *names)
    assert len(rows) >= (2 * len(names) or 100)


def run_tests(checkout: Path, library: Path, kernels: str, marked: str, *names: str) -> str:
    """Run tests of this checkout in one process with a GPU."""
    return run(
        checkout,
        "-m",
        "tests.support.emulated.device",
        str(library),
        kernels,
        "-q",
        "-m",
        marked,
        *names,
    )


@pytest.mark.slow
def test_what_is_marked_gpu_passes_there(library: Path, checkout: Path) -> None:
    pytest.importorskip("triton")
    assert " passed" in run_tests(checkout, library, "auto", "gpu", *ON_GPU)


@pytest.mark.slow
@pytest.mark.peers
def test_transformer_engines_modules_run_there(
    library: Path, checkout: Path, tmp_path: Path
) -> None:
    """Its own Python part, with products of torch (`tests/support/emulated/te_extension.py`)."""
    release = install_release("transformer_engine==2.20.2", tmp_path / "te")
    assert " passed" in run_tests(checkout, library, str(release), "gpu", *BY_TE)


@pytest.mark.slow
@pytest.mark.peers
def test_transformer_engines_mxfp8_runs_on_a_later_one(
    library: Path, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_MAJOR", "10")
    release = install_release("transformer_engine==2.20.2", tmp_path / "te")
    told = run_tests(checkout, library, str(release), "gpu", *BY_TE, "-k", "mxfp8")
    assert " passed" in told
    assert "skipped" not in told


@pytest.mark.slow
def test_commands_take_it_and_give_the_same(library: Path, checkout: Path) -> None:
    assert " passed" in run_tests(checkout, library, "torch", "not slow and not peers", *COMMANDS)


@pytest.mark.slow
def test_training_as_graphs_gives_the_same_there(library: Path, checkout: Path) -> None:
    assert " passed" in run_tests(checkout, library, "torch", "gpu", *GRAPHED)


@pytest.mark.slow
def test_a_killed_run_of_graphs_goes_on_there(
    library: Path, checkout: Path, tmp_path: Path
) -> None:
    model = tiny_text.save(tmp_path / "model")
    told = f"finetune {model} DST --data {save_lines(tmp_path)} --seq-length 32 --train-iters 9"
    told += " --global-batch-size 4 --save-interval 2 --lr 1e-3 --kernels torch --threads 1 -q"
    program = (
        "import sys; from pathlib import Path; from tests.support.emulated.device import start; "
    )
    program += "start(Path(sys.argv.pop(1))); from megtool.cli.app import main; main(sys.argv[1:])"

    def command(folder: str, graphs: str) -> list[str]:
        words = [*told.split(), "--cuda-graph-impl", graphs]
        words = [str(tmp_path / folder) if word == "DST" else word for word in words]
        return ["-c", program, str(library), *words]

    run(checkout, *command("plain", "none"))
    log = tmp_path / "out/log.jsonl"
    with subprocess.Popen(
        [sys.executable, *command("out", "local")],
        cwd=checkout,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    ) as killed:
        while len(read_log(log)) < 5 and killed.poll() is None:
            time.sleep(0.01)
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    run(checkout, *command("out", "local"))
    assert curve(tmp_path / "out") == curve(tmp_path / "plain")
    assert verify(tmp_path / "out", tmp_path / "plain").exit_status == 0  # moments too


@pytest.mark.slow
@pytest.mark.peers
def test_megatron_core_learns_the_same_there(library: Path, checkout: Path) -> None:
    pytest.importorskip("megatron.core.models.gpt")
    told = run(checkout, "-m", "tests.support.emulated.rivals", str(library))
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert [row["dtype"] for row in rows] == ["torch.float32", "torch.bfloat16"]
    for row in rows:
        losses = row["losses"]
        assert losses["megtool"] == losses["megtool, graphed"]
        tolerance = 1e-5 if row["dtype"] == "torch.float32" else 1e-3
        assert losses["megatron-core"] == pytest.approx(losses["megtool"], rel=tolerance)
        assert losses["megtool"][-1] < losses["megtool"][0]


CALIBRATED = ("llama", "gemma3", "gemma4-small", "gpt_oss", "qwen3_moe", "glm4_moe", "mistral4")
CALIBRATED += ("deepseek_v3", "deepseek_v4", "qwen3_next", "kimi_linear", "nemotron_h")
CALIBRATED += ("granitemoehybrid-experts", "falcon_h1")
RECIPES = "fp8,nvfp4,int8_sq,int4_awq,int4_gptq"


def calibrate_there(
    checkout: Path, library: Path, folder: Path, recipes: str, *names: str, dtype: str = "bfloat16"
) -> list[dict[str, Any]]:
    """What calibrations of families did there, which gave the bits of those without graphs."""
    module = "tests.support.emulated.calibrations"
    told = run(checkout, "-m", module, str(library), "torch", dtype, str(folder), recipes, *names)
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    wrong = [row for row in rows if row["error"]]
    assert not wrong, "\n".join(f"{r['family']} {r['recipe']}: {r['error']}" for r in wrong)
    for row in rows:  # what the user reads is what the device has done
        first = f"CUDA graphs: {row['replays']} of {row['runs']} layer runs were replays"
        assert row["told"][0].startswith(first), row
    return rows


def test_layers_of_a_calibration_are_replays(library: Path, checkout: Path, tmp_path: Path) -> None:
    (row,) = calibrate_there(checkout, library, tmp_path, "int8_sq", "qwen3_moe")
    assert row["replays"] >= 0.85 * row["runs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", CALIBRATED)
def test_layers_of_all_calibrations_are_replays(
    family: str, library: Path, checkout: Path, tmp_path: Path
) -> None:
    rows = calibrate_there(checkout, library, tmp_path, RECIPES, family)
    assert len(rows) == len(RECIPES.split(","))
    for row in rows:
        assert row["replays"] >= 0.85 * row["runs"] > 0, row


@pytest.mark.slow
def test_a_calibration_says_why_layers_are_no_replays(
    library: Path, checkout: Path, tmp_path: Path
) -> None:
    """Experts in float32: a GPU has no grouped product of these."""
    rows = calibrate_there(checkout, library, tmp_path, "fp8", "qwen3_moe", dtype="float32")
    assert rows[0]["replays"] == 0
    assert any("--dtype bfloat16" in line for line in rows[0]["told"])
