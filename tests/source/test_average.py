"""`--average`: the mean of several checkpoints of any format, and what keeps it from being one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool import quantize, reshard, verify
from megtool.cli.app import main
from megtool.errors import CoverageError, DestinationError, MappingError, UsageError
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from tests.support import folders
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises
from tests.support.models import tiny_llama

SHARES = (0.5, 0.3, 0.2)


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Folders of one model's weights at three seeds, the last in float32."""
    kinds = ("bfloat16", "float16", "float32")
    return [
        tiny_llama.save(tmp_path / f"hf{i}", seed=i, dtype=kind) for i, kind in enumerate(kinds)
    ]


def mean(folders: list[Path], shares: tuple[float, ...], dtype: str) -> dict[str, bytes]:
    """The bytes of the weighted means, as torch computes them in float32."""
    import torch
    from safetensors.torch import load_file

    held = [load_file(f / "model.safetensors") for f in folders]
    out = {}
    for name in held[0]:
        total = held[0][name].float() * torch.tensor(shares[0])
        for one, share in zip(held[1:], shares[1:], strict=True):
            total = total + one[name].float() * torch.tensor(share)
        out[name] = total.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    return out


def weights(folder: Path) -> dict[str, bytes]:
    return {n: data for n, (_, _, data) in folders.stored_tensors(folder).items()}


@pytest.mark.parametrize("averages", [True, False])
def test_decoding_takes_no_more_memory_than_is_said(averages: bool, tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    tiny_llama.save(tmp_path / "hf", **wide)
    quantize(tmp_path / "hf", tmp_path / "fp8", recipe="fp8_per_channel", fsync=False)
    report = reshard(
        tmp_path / "fp8",
        tmp_path / "out",
        dtype="bfloat16",
        average=[tmp_path / "fp8"] if averages else (),
        threads=1,
    )
    assert report.plan.peak_buffer_bytes < 64 << 20
    assert 0 < report.peak_buffer_bytes <= report.plan.peak_buffer_bytes


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("to", ["hf", "torch_dist", "megatron"])
def test_the_mean_of_any_formats(
    to: str, dtype: str | None, tmp_path: Path, three: list[Path]
) -> None:
    reshard(three[1], tmp_path / "b", to="torch_dist", tp=2, pp=2)
    reshard(three[2], tmp_path / "c", to="megatron", tp=4)
    report = reshard(
        three[0],
        tmp_path / "mean",
        to=to,
        dtype=dtype,
        average=[tmp_path / "b", tmp_path / "c"],
        average_weights="5,3,2",
        tp=2 if to != "hf" else None,
        strict=True,
    )
    assert report.shares == tuple(
        zip(map(str, (three[0], tmp_path / "b", tmp_path / "c")), SHARES, strict=True)
    )
    assert report.plan.num_bytes.reduce == report.plan.num_bytes.total - report.plan.num_bytes.fill
    assert report.unverified == 0
    assert verify(tmp_path / "mean").exit_status == 0
    reshard(tmp_path / "mean", tmp_path / "back", to="hf")
    assert weights(tmp_path / "back") == mean(three, SHARES, dtype or "bfloat16")


def test_shares_are_equal_unless_given(tmp_path: Path, three: list[Path]) -> None:
    reshard(three[0], tmp_path / "mean", average=three[1:])
    assert weights(tmp_path / "mean") == mean(three, (1 / 3,) * 3, "bfloat16")


def test_the_mean_of_one_model_and_itself(tmp_path: Path, three: list[Path]) -> None:
    reshard(three[0], tmp_path / "mean", average=[three[0], three[0]])
    assert weights(tmp_path / "mean") == weights(three[0])


def test_layers_and_tensors_are_chosen_in_all(tmp_path: Path, three: list[Path]) -> None:
    reshard(three[0], tmp_path / "a", average=three[1:], layers="3,1,3")
    found, wanted = weights(tmp_path / "a"), mean(three, (1 / 3,) * 3, "bfloat16")
    for new, old in enumerate((3, 1, 3)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert found[name.format(new)] == wanted[name.format(old)]
    reshard(three[0], tmp_path / "b", average=three[1:], select=["*mlp*"])
    some = weights(tmp_path / "b")
    assert len(some) == 12
    assert some == {n: data for n, data in wanted.items() if "mlp" in n}


def test_nobody_has_trained_the_mean(tmp_path: Path, materialize: Any) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        write(folder, config(), ParallelConfig(), materialize, seed=seed)
    report = reshard(folders[0], tmp_path / "mean", average=folders[1:])
    lost = [d for d in report.dropped if d.is_lost]
    assert [d.name for d in lost] == [f"optimizer state of {f}" for f in folders]
    assert all(d.num_bytes == 6 * report.num_bytes for d in lost)
    found = open_checkpoint(tmp_path / "mean")
    assert not any(t.name.startswith("optimizer") for t in found.tensors)
    assert "optimizer" not in found.metadata["common"]
    with pytest.raises(CoverageError, match="has no optimizer state"):
        reshard(folders[0], tmp_path / "c", average=folders[1:], strict=True)
    reshard(folders[0], tmp_path / "c", average=folders[1:], strict=True, optimizer_format="none")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"vocab_size": 90}, r"shape \[90, 32\], and \[101, 32\]"),
        ({"num_hidden_layers": 5}, r"it has 'layers\.4\.attn_norm"),
        ({"num_hidden_layers": 3}, r"it lacks 'layers\.3\.attn_norm"),
        ({"attention_bias": True}, "it has 'layers.0.attn.k.bias'"),
    ],
)
def test_another_model_is_refused(
    more: dict[str, Any], what: str, tmp_path: Path, three: list[Path]
) -> None:
    other = tiny_llama.save(tmp_path / "other", **more)
    with raises(MappingError, match=what, file=other):
        reshard(three[0], tmp_path / "out", average=[other])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["1,2,3", "1", "1,-1", "0,1", "nan,1", "inf,1", "a,b", ""])
def test_weights_are_one_positive_number_each(
    given: str, tmp_path: Path, three: list[Path]
) -> None:
    with pytest.raises(UsageError, match="weight"):
        reshard(three[0], tmp_path / "out", average=three[1:2], average_weights=given)


def test_options_that_make_no_sense(tmp_path: Path, three: list[Path]) -> None:
    for options in ({"weights": "1,2"}, {"average": three[1:], "optimizer_only": True}):
        with pytest.raises(UsageError):
            reshard(three[0], tmp_path / "out", **options)  # type: ignore[arg-type]
    with pytest.raises(DestinationError):
        reshard(three[0], three[1] / "out", average=three[1:])


def test_an_interrupted_mean_is_resumed_by_the_same_means_alone(
    tmp_path: Path, three: list[Path]
) -> None:
    calls: list[int] = []

    def stop(what: str, done: int, total: int) -> None:
        calls.append(done)
        if sum(calls) > 0:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    options: dict[str, Any] = {"average": three[1:], "to": "torch_dist", "pp": 4, "threads": 1}
    with pytest.raises(KeyboardInterrupt):
        reshard(three[0], out, progress=stop, **options)
    assert not out.exists()
    reshard(three[0], out, **options)
    reshard(out, tmp_path / "back", to="hf")
    assert weights(tmp_path / "back") == mean(three, (1 / 3,) * 3, "bfloat16")
    plans = [
        reshard(three[0], tmp_path / "x", dry_run=True, average_weights=w, **options).plan
        for w in ("1,1,1", "1,1,2", "1,1,1")
    ]
    assert plans[0].fingerprint == plans[2].fingerprint != plans[1].fingerprint


def test_the_command_line(
    tmp_path: Path, three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    others = ["--average", str(three[1]), "--average", str(three[2])]
    call = [
        "reshard",
        str(three[0]),
        str(tmp_path / "mean"),
        *others,
        "--average-weights",
        "2,1,1",
        "-q",
    ]
    assert main([*call, "--layers", "0,2", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"average     0.25 of {three[2]}" in text
    assert "averaged" in text
    assert not (tmp_path / "mean").exists()
    assert main(call) == 0
    assert weights(tmp_path / "mean") == mean(three, (0.5, 0.25, 0.25), "bfloat16")
    assert main([*call[:-2], "1,2", "--overwrite"]) == 2
