"""Verifying real checkpoints: equal ones across formats, and every way to differ."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from megtool import reshard, verify
from megtool.cli.app import main
from megtool.digests.crc32c import SIDECAR, encode_sidecar, read_sidecar
from megtool.errors import CheckpointError, MappingError
from megtool.formats import open_checkpoint
from tests.support.errors import raises
from tests.support.models import tiny_llama
from tests.support.stored_bits import flip

SHAPES = tiny_llama.shapes(tiny_llama.config())
Q = "layers.1.attn.q.weight"
HF_Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model as `hf`, as `megatron` with all digests, and `back` again."""
    root = tmp_path_factory.mktemp("verify")
    tiny_llama.save(root / "hf")
    reshard(root / "hf", root / "megatron", to="torch_dist", tp=2, pp=2, digest="all")
    reshard(root / "megatron", root / "back", to="hf", max_shard_size="40KB")
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of them, to be damaged."""

    def make(name: str) -> Path:
        shutil.copytree(made / name, tmp_path / name)
        return tmp_path / name

    return make


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Edit the tensors of a Hugging Face folder of one file."""
    held = load_file(folder / "model.safetensors")
    edit(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- equal ones


@pytest.mark.parametrize(("a", "b"), [("hf", "megatron"), ("megatron", "back"), ("hf", "back")])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_model_in_other_formats_and_layouts(
    made: Path, a: str, b: str, threads: int
) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(
        made / a,
        made / b,
        threads=threads,
        progress=lambda stage, n, total: seen.append((n, total)) if stage == "verify" else None,
    )
    assert (report.verdict, report.exit_status, report.differences) == ("equal", 0, ())
    assert (report.matched_by, report.family, report.num_tensors) == (
        "canonical",
        "llama",
        len(SHAPES),
    )
    assert report.num_bytes == sum(2 * torch.Size(s).numel() for s in SHAPES.values())
    assert sum(n for n, _ in seen) == seen[0][1] == report.num_bytes
    held = {d.path: d.matching for d in report.digests}
    assert held[str(made / b)] == len(SHAPES)


def test_one_whose_digests_all_hold_is_ok(made: Path) -> None:
    report = verify(made / "megatron")
    assert (report.verdict, report.exit_status) == ("ok", 0)
    assert report.digests[0].matching == len(SHAPES)
    assert report.digests[0].unverified == ()


def test_one_without_digests_is_unverified_and_never_ok(made: Path) -> None:
    report = verify(made / "hf")
    assert (report.verdict, report.exit_status) == ("unverified", 0)
    assert len(report.digests[0].unverified) == len(SHAPES)
    assert "ok" not in next(iter(report.lines()))


def test_a_model_known_to_one_side_alone_is_used_for_both(copy: Callable[[str], Path]) -> None:
    hf, megatron = copy("hf"), copy("megatron")
    (hf / "config.json").unlink()
    for pair in ((hf, megatron), (megatron, hf)):
        report = verify(*pair)
        assert (report.verdict, report.matched_by) == ("equal", "canonical")


@pytest.mark.parametrize("swapped", [False, True])
def test_an_iteration_is_asked_of_the_save_folder_alone(
    made: Path, tmp_path: Path, swapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "megatron" / "release", tmp_path / "save" / "iter_0000005")
    shutil.copytree(made / "megatron" / "release", tmp_path / "save" / "iter_0000009")
    flip(tmp_path / "save" / "iter_0000009", "embedding.word_embeddings.weight")
    pair = [str(made / "hf"), str(tmp_path / "save")][:: -1 if swapped else 1]
    assert main(["verify", *pair, "--iteration", "5", "--threads", "1", "-q"]) == 0
    assert main(["verify", *pair, "--iteration", "9", "-q"]) == 7
    assert main(["verify", *pair, "--iteration", "6", "-q"]) == 3
    assert "there are: 5, 9" in capsys.readouterr().err
    assert main(["verify", str(made / "hf"), "--iteration", "5"]) == 2
    assert "hint: leave out --iteration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 3}, "is l=3, but num_layers is 3"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3, which does not divide num_heads 4"),
        ({"architectures": ["Parrot"], "model_type": "parrot"}, "unknown model family 'Parrot'"),
    ],
    ids=str,
)
def test_why_a_checkpoint_does_not_fit_its_model_is_noted(
    copy: Callable[[str], Path], changes: dict[str, Any], says: str
) -> None:
    folder = copy("hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    report = verify(folder)
    assert (report.verdict, report.matched_by) == ("unverified", "stored")
    (note,) = report.notes
    assert says in note
    assert "; hint: " in note
    assert f"  {'note':<12}{note}" in list(report.lines())


def test_two_unknown_models_meet_under_stored_names(tmp_path: Path) -> None:
    held = {"x": torch.arange(12.0).reshape(3, 4), "empty": torch.empty(0, 3)}
    save_file(held, tmp_path / "a.safetensors")
    reshard(tmp_path / "a.safetensors", tmp_path / "b", to="dcp", dp=2, digest="all")
    report = verify(tmp_path / "a.safetensors", tmp_path / "b")
    assert (report.verdict, report.matched_by, report.num_tensors) == ("equal", "stored", 2)
    assert verify(tmp_path / "b").verdict == "ok"
    save_file({"y": held["x"]}, tmp_path / "c.safetensors")
    with pytest.raises(MappingError, match="no tensor name"):
        verify(tmp_path / "a.safetensors", tmp_path / "c.safetensors")


def test_optimizer_state_is_noted_where_the_other_format_has_no_place_for_it(
    made: Path, tmp_path: Path
) -> None:
    catalogue = open_checkpoint(made / "megatron")
    held = {t.name: torch.empty(t.shape, dtype=torch.bfloat16) for t in catalogue.tensors}
    dcp.load(held, checkpoint_id=catalogue.root)
    name = "decoder.final_layernorm.weight"
    with_state = held | {f"optimizer.state.exp_avg.{name}": held[name].float()}
    dcp.save(held, checkpoint_id=tmp_path / "without")
    dcp.save(with_state, checkpoint_id=tmp_path / "with")
    like = made / "hf"
    report = verify(tmp_path / "with", made / "hf", like=like)
    assert (report.verdict, report.matched_by) == ("equal", "canonical")
    assert "exp_avg of 1 tensors" in report.notes[0]
    report = verify(tmp_path / "without", tmp_path / "with", like=like)
    assert [(d.tensor, d.kind) for d in report.differences] == [("exp_avg:norm.weight", "missing")]


# ---- damage to one


@pytest.mark.parametrize(
    ("stored", "hit"),
    [
        ("embedding.word_embeddings.weight", "embed.weight"),
        ("decoder.layers.mlp.linear_fc2.weight", "layers."),
    ],
)
def test_a_flipped_bit_is_found_by_the_digest(
    copy: Callable[[str], Path], stored: str, hit: str
) -> None:
    folder = copy("megatron")
    flip(folder, stored)
    report = verify(folder)
    assert (report.verdict, report.exit_status) == ("different", 7)
    damaged, found = report.differences
    assert (damaged.kind, Path(damaged.stored).suffix) == ("file", ".distcp")
    assert (found.kind, found.stored) == ("digest", stored)
    assert found.tensor.startswith(hit)
    assert report.digests[0].differing_files == 1
    assert report.digests[0].matching == len(SHAPES) - 1
    assert any(found.tensor in line for line in report.lines())


def test_a_flipped_bit_without_a_digest_is_unverified(copy: Callable[[str], Path]) -> None:
    folder = copy("megatron")
    flip(folder, "embedding.word_embeddings.weight")
    for sidecar in folder.rglob(SIDECAR):
        sidecar.unlink()
    report = verify(folder)
    assert (report.verdict, report.exit_status) == ("unverified", 0)


def test_swapped_files_of_equal_size_are_found(copy: Callable[[str], Path]) -> None:
    folder = copy("megatron")
    one, other = (next(folder.rglob(f"__{r}_0.distcp")) for r in (2, 3))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second.ljust(len(first), b"\0")[: len(first)])
    other.write_bytes(first.ljust(len(second), b"\0")[: len(second)])
    try:
        report = verify(folder)
    except CheckpointError as e:
        assert "__" in str(e.file)
    else:
        assert report.exit_status == 7
        assert {d.kind for d in report.differences} == {"digest", "file"}


def test_damage_of_one_is_no_hint_on_the_other(copy: Callable[[str], Path]) -> None:
    folder = copy("megatron")
    flip(folder, "embedding.word_embeddings.weight")
    with raises(CheckpointError, hint=True) as caught:
        verify(folder.parent / "absent", folder)
    assert "is not as it was written" not in str(caught.value.hint)


def test_the_tracker_names_the_last_iteration(copy: Callable[[str], Path]) -> None:
    folder = copy("megatron")
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    (found,) = verify(folder).differences
    assert (found.kind, found.stored) == ("file", tracker.name)
    shutil.copytree(folder / "release", folder / "iter_0000004")
    shutil.copytree(folder / "release", folder / "iter_0000006")
    tracker.write_text("4")
    assert "there is iteration 6" in verify(folder).differences[0].text
    assert verify(folder, iteration="4").verdict == "ok"
    tracker.write_text("6")
    assert verify(folder).verdict == "ok"


def test_a_tensor_that_is_gone(copy: Callable[[str], Path]) -> None:
    folder = change(copy("hf"), lambda held: held.pop(HF_Q))
    report = verify(folder)
    assert [(d.tensor, d.kind) for d in report.differences] == [(Q, "missing")]
    report = verify(copy("megatron"), folder)
    assert [(d.tensor, d.kind) for d in report.differences] == [(Q, "missing")]
    assert report.num_tensors == len(SHAPES) - 1
    assert report.exit_status == 7


def test_digests_of_a_tensor_that_is_gone_or_another(tmp_path: Path) -> None:
    held = {n: torch.arange(6.0) for n in ("a", "b", "c", "d")}
    (tmp_path / "from").mkdir()
    save_file(held, tmp_path / "from" / "model.safetensors")
    reshard(tmp_path / "from", tmp_path / "to", digest="all")
    path = tmp_path / "to" / SIDECAR
    sidecar = read_sidecar(path)
    assert sidecar is not None
    tensors = dict(sidecar.tensors)
    tensors["e"] = tensors["a"]
    tensors["b"] = replace(tensors["b"], shape=(2, 3))
    tensors["c"] = replace(tensors["c"], shape=(4,))
    del tensors["d"]
    path.write_bytes(encode_sidecar(replace(sidecar, tensors=tensors, files={})))
    report = verify(tmp_path / "to")
    assert [(d.tensor, d.kind) for d in report.differences] == [
        ("b", "digest"),
        ("e", "missing"),
        ("c", "digest"),
    ]
    check = report.digests[0]
    assert (check.matching, check.differing, check.unverified) == (1, 2, ("d",))


@pytest.mark.parametrize("differs", [False, True])
def test_replicas_are_compared(tmp_path: Path, differs: bool) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    dcp.save({"x": x}, checkpoint_id=tmp_path)
    torch.save(x + differs, tmp_path / "again.distcp")
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    index = MetadataIndex("y", torch.Size([0, 0]), 0)
    metadata.storage_data[index] = _StorageInfo(
        relative_path="again.distcp",
        offset=0,
        length=(tmp_path / "again.distcp").stat().st_size,
    )
    data = pickle.dumps(metadata, protocol=4).replace(b"\x8c\x01y", b"\x8c\x01x")
    (tmp_path / ".metadata").write_bytes(data)
    report = verify(tmp_path)
    assert report.num_replicas == 1
    assert [(d.kind, d.num_differing) for d in report.differences] == (
        [("replica", 12)] if differs else []
    )
    assert f"{1 - differs} equal, {int(differs)} differ" in "\n".join(report.lines())


# ---- two that differ


def test_values_that_differ_are_counted_and_placed(made: Path, copy: Callable[[str], Path]) -> None:
    def edit(held: dict[str, torch.Tensor]) -> None:
        held[HF_Q][3, 5] += 2.0
        held[HF_Q][3, 6] += 1.0
        held["model.norm.weight"][7] = float("nan")

    folder = change(copy("hf"), edit)
    report = verify(folder, made / "megatron")
    before, after = (
        load_file(made / "hf" / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    apart = (after[HF_Q].double() - before[HF_Q].double()).abs()
    found = {d.tensor: d for d in report.differences}
    assert set(found) == {Q, "norm.weight"}
    q = found[Q]
    assert (q.num_differing, q.num_elements, q.largest_abs_at) == (2, 1024, (3, 5))
    assert q.largest_abs == apart[3, 5].item()
    relative = apart / before[HF_Q].double().abs()
    assert q.largest_rel == relative.max().item()
    assert q.largest_rel_at == tuple(divmod(int(relative.argmax()), 32))
    assert "1 of them NaN on one side alone" in found["norm.weight"].text
    assert report.exit_status == 7


def test_nan_with_the_same_bits_is_equal_and_zeros_of_two_signs_are_not(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), 0.0, 1.0, float("inf")])
    save_file({"x": values}, tmp_path / "a.safetensors")
    save_file({"x": values.clone()}, tmp_path / "b.safetensors")
    assert verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors").verdict == "equal"
    values[1] = -0.0
    save_file({"x": values}, tmp_path / "b.safetensors")
    report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [d.num_differing for d in report.differences] == [1]
    assert "bits alone" in report.differences[0].text
    report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=1e-9)
    assert report.verdict == "equal"


def test_another_dtype_differs_unless_a_tolerance_is_given(made: Path, tmp_path: Path) -> None:
    reshard(made / "hf", tmp_path / "wide", dtype="float32")
    report = verify(tmp_path / "wide", made / "megatron")
    assert {d.kind for d in report.differences} == {"dtype"}
    assert len(report.differences) == len(SHAPES)
    assert sum(c.matching for c in report.digests) == 2 * len(SHAPES)
    report = verify(tmp_path / "wide", made / "megatron", rtol=1e-9)
    assert (report.verdict, report.within) == ("equal", 0.0)


@pytest.mark.parametrize(
    ("tolerance", "differing"),
    [({"atol": 0.6}, 0), ({"atol": 0.4}, 2), ({"rtol": 0.11}, 1), ({"rtol": 0.02}, 2)],
)
def test_tolerances_mean_what_they_mean_to_torch(
    tmp_path: Path, tolerance: dict[str, float], differing: int
) -> None:
    b = torch.tensor([1.0, 10.0, float("inf"), float("nan"), 0.0])
    a = b + torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    save_file({"x": a}, tmp_path / "a.safetensors")
    save_file({"x": b.double()}, tmp_path / "b.safetensors")
    report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **tolerance)
    close = torch.isclose(a, b, **({"atol": 0.0, "rtol": 0.0} | tolerance), equal_nan=True)
    assert differing == int((~close).sum())
    assert sum(d.num_differing or 0 for d in report.differences) == differing
    assert report.within == (0.5 if close[:2].any() else 0.0)


def test_infinity_is_near_nothing_else(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([1.0, float("inf")])}, tmp_path / "a.safetensors")
    save_file({"x": torch.tensor([float("inf"), -float("inf")])}, tmp_path / "b.safetensors")
    report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=0.5)
    assert [d.num_differing for d in report.differences] == [2]
    assert report.differences[0].largest_abs == float("inf")


def test_large_integers_are_not_rounded(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([2**62, -(2**63)])}, tmp_path / "a.safetensors")
    save_file({"x": torch.tensor([2**62 + 1, 2**63 - 1])}, tmp_path / "b.safetensors")
    report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=1)
    assert report.within == 1.0
    assert [(d.num_differing, d.largest_abs) for d in report.differences] == [(1, 2.0**64)]


def test_another_shape(made: Path, copy: Callable[[str], Path]) -> None:
    def edit(held: dict[str, torch.Tensor]) -> None:
        held[HF_Q] = held[HF_Q][:16].clone()

    folder = change(copy("hf"), edit)
    report = verify(made / "hf", folder)
    assert [(d.tensor, d.kind) for d in report.differences] == [(HF_Q, "shape")]
    with raises(MappingError, tensor=HF_Q):
        verify(made / "megatron", folder)


def test_a_tied_copy_that_is_none_is_a_head(
    made: Path, copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy("hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert verify(folder).num_finite == len(SHAPES)
    assert "lm_head.weight is not a copy of model.embed_tokens.weight" in caplog.text
    assert verify(made / "megatron", folder).verdict == "equal"

    def tie(held: dict[str, torch.Tensor]) -> None:
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    assert verify(change(folder, tie)).notes == ()


def test_the_command_line(
    made: Path, copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(made / "hf"), str(made / "back"), "-q"]) == 0
    assert "equal" in capsys.readouterr().out
    folder = copy("megatron")
    flip(folder, "embedding.word_embeddings.weight")
    assert main(["verify", str(folder), "--json"]) == 7
    value = json.loads(capsys.readouterr().out)
    assert value["verdict"] == "different"
    assert [d["tensor"] for d in value["differences"] if d["kind"] == "digest"] == ["embed.weight"]
    assert main(["verify", str(made / "hf"), str(folder)]) == 7
    out = capsys.readouterr().out
    assert "embed.weight" in out
    assert "1 of 3,232 elements differ" in out
    assert main(["verify", str(made / "hf"), str(made / "nowhere")]) == 3
