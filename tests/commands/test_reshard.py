"""Checkpoints through formats and layouts and back: the same bytes, and real readers agree."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import reshard
from megtool.errors import (
    CoverageError,
    DestinationError,
    FormatError,
    MappingError,
    UsageError,
)
from megtool.formats import open_checkpoint
from megtool.options.sizes import parse_size
from tests.support.errors import raises
from tests.support.folders import contents, file_states, staging_folders, stored_tensors
from tests.support.models import tiny_llama

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "parts": 3},
    "biased": {"attention_bias": True, "mlp_bias": True, "dtype": "float32"},
    "every head its own": {"num_key_value_heads": 4, "vocab_size": 256, "dtype": "float16"},
}
ROUTES: dict[str, list[dict[str, int]]] = {
    "tensor": [{"tp": 2}, {"tp": 4}, {"tp": 1}],
    "pipeline": [{"pp": 4}, {"pp": 2, "vpp": 2}, {"pp": 1}],
    "both": [{"tp": 4, "pp": 2}, {"tp": 2, "pp": 4}],
    "data": [{"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 1}],
    "all": [{"tp": 2, "pp": 2, "vpp": 2, "dp": 2}, {"tp": 1, "pp": 2, "vpp": 1, "dp": 1}],
}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("model", MODELS)
def test_every_route_comes_back_to_the_same_bytes(tmp_path: Path, model: str, route: str) -> None:
    original = tiny_llama.save(tmp_path / "hf", **MODELS[model])
    before, at, options = file_states(original), original, {"to": "torch_dist"}
    for number, layout in enumerate(ROUTES[route]):
        report = reshard(at, tmp_path / str(number), **options, **layout)
        assert report.dropped == ()
        assert report.layout | layout == report.layout
        at, options = tmp_path / str(number), {}
    reshard(at, tmp_path / "dcp", to="dcp")
    reshard(tmp_path / "dcp", tmp_path / "one.safetensors", to="safetensors")
    reshard(tmp_path / "one.safetensors", tmp_path / "again", to="hf", like=original)
    reshard(at, tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "again") == stored_tensors(original)
    assert stored_tensors(tmp_path / "back") == stored_tensors(original)
    for folder in ("again", "back"):
        for name in ("config.json", "tokenizer.json"):
            assert (tmp_path / folder / name).read_bytes() == (original / name).read_bytes()
    assert file_states(original) == before
    assert staging_folders(tmp_path) == []


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, hf: Path) -> None:
    runs = [("a", 1, "1MiB"), ("b", 2, "128MiB"), ("c", 5, "1920KiB")]
    for name, threads, memory in runs:
        options = {"threads": threads, "memory": memory, "digest": "all"}
        reshard(hf, tmp_path / name, to="torch_dist", tp=2, pp=2, **options)
        reshard(tmp_path / name, tmp_path / f"{name}-hf", to="hf", **options)
    for name, _, _ in runs[1:]:
        assert contents(tmp_path / name) == contents(tmp_path / "a")
        assert contents(tmp_path / f"{name}-hf") == contents(tmp_path / "a-hf")


def test_a_layout_reached_by_any_way_holds_the_same_files(tmp_path: Path, hf: Path) -> None:
    options = {"tp": 2, "pp": 2, "digest": "all"}
    reshard(hf, tmp_path / "straight", to="torch_dist", **options)
    reshard(hf, tmp_path / "first", to="torch_dist", tp=4, digest="all")
    reshard(tmp_path / "first", tmp_path / "round", **options)
    assert contents(tmp_path / "round") == contents(tmp_path / "straight")


# ---- real readers


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    original = tiny_llama.save(tmp_path / "hf", dtype="float32", attention_bias=True)
    reshard(original, tmp_path / "m", to="torch_dist", tp=2, pp=2)
    reshard(tmp_path / "m", tmp_path / "back", to="hf", max_shard_size="30KB")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    logits = []
    for folder in (original, tmp_path / "back"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits.append(model(torch.arange(20)[None]).logits)
    assert logits[0].isfinite().all()
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@pytest.mark.parametrize("to", ["torch_dist", "dcp"])
def test_torch_loads_what_is_written(tmp_path: Path, to: str) -> None:
    import torch
    from torch.distributed import checkpoint

    original = tiny_llama.save(tmp_path / "hf", dtype="float32")
    reshard(original, tmp_path / "m", to="torch_dist", tp=2, pp=2)
    folder = tmp_path / "m" / "release"
    if to == "dcp":
        reshard(tmp_path / "m", tmp_path / "plain", to="dcp")
        folder = tmp_path / "plain"
    held = {
        n: np.frombuffer(d, np.float32).reshape(s)
        for n, (_, s, d) in stored_tensors(original).items()
    }
    qkv = []
    for layer in range(4):
        q, k, v = (held[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
        groups = zip(np.split(q, 2), np.split(k, 2), np.split(v, 2), strict=True)
        qkv.append(np.concatenate([x for group in groups for x in group]))
    embedding = np.zeros((256, 32), np.float32)  # 128 x tp
    embedding[:101] = held["model.embed_tokens.weight"]
    expected = {
        "decoder.layers.self_attention.linear_qkv.weight": np.stack(qkv),
        "embedding.word_embeddings.weight": embedding,
        "decoder.layers.mlp.linear_fc1.weight": np.stack(
            [
                np.concatenate(
                    [held[f"model.layers.{n}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
                )
                for n in range(4)
            ]
        ),
    }
    found = {name: torch.full(a.shape, torch.nan) for name, a in expected.items()}
    checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)


def test_what_torch_saved_is_cut_anew_without_a_family(tmp_path: Path) -> None:
    import torch
    from torch.distributed import checkpoint

    saved = {
        "net.0.weight": torch.randn(10, 7),
        "net.0.bias": torch.randn(10, dtype=torch.float64),
        "scale": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "steps": torch.arange(9).reshape(3, 3).T,
    }
    checkpoint.save(saved | {"epoch": 3}, checkpoint_id=tmp_path / "saved", no_dist=True)
    report = reshard(tmp_path / "saved", tmp_path / "cut", dp=3)
    assert (report.family, report.target_format) == (None, "dcp")
    assert len(list((tmp_path / "cut").glob("*.distcp"))) == 3
    reshard(tmp_path / "cut", tmp_path / "again", dp=1)
    for folder in ("cut", "again"):
        found = {n: torch.full_like(t, 99) for n, t in saved.items()} | {"epoch": 0}
        checkpoint.load(found, checkpoint_id=tmp_path / folder, no_dist=True)
        assert found["epoch"] == 3
        for name, t in saved.items():
            torch.testing.assert_close(found[name], t, rtol=0, atol=0)


def save_with_moments(folder: Path, original: Path) -> Path:
    """A plain torch checkpoint of Megatron's names: weights, main weights and two moments."""
    import torch
    from torch.distributed import checkpoint

    bare = folder.with_name("bare")
    reshard(original, bare, to="torch_dist")
    weights = open_checkpoint(bare).tensors
    state: dict[str, Any] = {t.name: torch.zeros(t.shape, dtype=torch.bfloat16) for t in weights}
    checkpoint.load(state, checkpoint_id=bare / "release", no_dist=True)
    for kind in ("fp32_param", "exp_avg", "exp_avg_sq"):
        for t in weights:
            moment = torch.randn(t.shape)
            if "word_embeddings" in t.name or "output_layer" in t.name:
                moment[101:] = 0
            state[f"optimizer.state.{kind}.{t.name}"] = moment
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("known", [True, False], ids=["known model", "unknown model"])
def test_moments_come_back_to_the_same_bytes(tmp_path: Path, hf: Path, known: bool) -> None:
    saved = save_with_moments(tmp_path / "saved", hf)
    more = {"family": "llama", "like": hf} if known else {}
    steps: list[dict[str, Any]] = [{"to": "torch_dist", "tp": 2, "pp": 2, **more}] if known else []
    steps += [{"to": "dcp", "tp": 4, "pp": 2, "dp": 2}, {"to": "dcp", "tp": 1, "pp": 1, "dp": 1}]
    at = saved
    for number, step in enumerate(steps):
        report = reshard(at, tmp_path / str(number), **step)
        assert report.dropped == ()
        at = tmp_path / str(number)
    reshard(saved, tmp_path / "a.safetensors", to="safetensors", **more)
    reshard(at, tmp_path / "b.safetensors", to="safetensors")
    assert stored_tensors(tmp_path / "a.safetensors") == stored_tensors(tmp_path / "b.safetensors")
    assert len(stored_tensors(tmp_path / "a.safetensors")) == 4 * len(
        open_checkpoint(tmp_path / "bare").tensors
    )


def test_casts_touch_weights_alone(tmp_path: Path, hf: Path) -> None:
    saved = save_with_moments(tmp_path / "saved", hf)
    reshard(saved, tmp_path / "cast", dtype="float16")
    for t in open_checkpoint(tmp_path / "cast").tensors:
        assert t.dtype.name == ("float32" if t.name.startswith("optimizer.") else "float16"), t.name


def test_optimizer_state_that_a_format_cannot_hold_is_listed(tmp_path: Path, hf: Path) -> None:
    saved = save_with_moments(tmp_path / "saved", hf)
    options: dict[str, Any] = {"to": "hf", "like": hf, "family": "llama"}
    report = reshard(saved, tmp_path / "back", **options)
    assert stored_tensors(tmp_path / "back") == stored_tensors(hf)
    names = {t.name for t in open_checkpoint(saved).tensors if t.name.startswith("optimizer.")}
    assert {d.name for d in report.dropped} == names
    assert all(d.num_bytes and "optimizer state" in d.reason for d in report.dropped)
    with pytest.raises(CoverageError) as e:
        reshard(saved, tmp_path / "strict", **options, strict=True)
    assert e.value.tensor in names
    assert "--optimizer-format none" in (e.value.hint or "")
    assert not (tmp_path / "strict").exists()
    reshard(saved, tmp_path / "weights", **options, strict=True, optimizer_format="none")
    assert stored_tensors(tmp_path / "weights") == stored_tensors(hf)
    assert staging_folders(tmp_path) == []


# ---- options


@pytest.mark.parametrize("vocabulary", [1, 101, 127, 128, 129])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_vocabulary_is_padded_with_zeros(tmp_path: Path, vocabulary: int, tp: int) -> None:
    original = tiny_llama.save(tmp_path / "hf", vocab_size=vocabulary, num_hidden_layers=1)
    reshard(original, tmp_path / "m", to="torch_dist", tp=tp)
    reshard(tmp_path / "m", tmp_path / "m.safetensors", to="safetensors", select=["*word_emb*"])
    ((_, shape, data),) = stored_tensors(tmp_path / "m.safetensors").values()
    rows = -(-vocabulary // (128 * tp)) * 128 * tp
    assert open_checkpoint(tmp_path / "m")["embedding.word_embeddings.weight"].shape == (rows, 32)
    weight = stored_tensors(original)["model.embed_tokens.weight"][2]
    assert data[: len(weight)] == weight
    assert not any(data[len(weight) :])
    assert shape[0] >= vocabulary
    reshard(tmp_path / "m", tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "back") == stored_tensors(original)


@pytest.mark.parametrize(("kind", "code"), [("bf16", "BF16"), ("float16", "F16"), ("fp32", "F32")])
def test_dtype_casts_as_torch_does(tmp_path: Path, kind: str, code: str) -> None:
    import torch
    from safetensors.torch import load_file

    original = tiny_llama.save(tmp_path / "hf", dtype="float32")
    reshard(original, tmp_path / "cast", dtype=kind)
    wanted = {n: t for n, t in load_file(original / "model.safetensors").items()}
    found = load_file(tmp_path / "cast" / "model.safetensors")
    for name, t in wanted.items():
        assert torch.equal(found[name], t.to(found[name].dtype)), name
    assert {x for x, _, _ in stored_tensors(tmp_path / "cast").values()} == {code}
    config = json.loads((tmp_path / "cast" / "config.json").read_text())
    assert config["torch_dtype"] == str(found[name].dtype).removeprefix("torch.")


def test_selected_excluded_and_renamed(tmp_path: Path, hf: Path) -> None:
    before = stored_tensors(hf)
    reshard(hf, tmp_path / "a", select=["*.layers.1.*", "lm_head.*"], exclude=["*.mlp.*"])
    wanted = {
        n for n in before if (".layers.1." in n and ".mlp." not in n) or n == "lm_head.weight"
    }
    assert stored_tensors(tmp_path / "a") == {n: before[n] for n in wanted}
    one = tmp_path / "b.safetensors"
    reshard(
        hf / "model.safetensors",
        one,
        rename=["model.layers.*.mlp.*_proj.weight=blocks.*.ff.*", "lm_head.weight=head"],
    )
    found = stored_tensors(one)
    assert found["blocks.2.ff.gate"] == before["model.layers.2.mlp.gate_proj.weight"]
    assert found["head"] == before["lm_head.weight"]
    assert found["model.norm.weight"] == before["model.norm.weight"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"select": ["nothing*"]}, "no tensor is selected"),
        ({"exclude": ["*"]}, "no tensor is selected"),
        ({"rename": ["a"]}, "rename is 'a'"),
        ({"rename": ["nothing=b"]}, "matches no tensor"),
        ({"rename": ["lm_head.weight=a.*"]}, "rename is 'lm_head.weight=a.*'"),
        ({"rename": ["lm_head.weight=model.norm.weight"]}, "two tensors"),
        ({"iteration": "3"}, "no iterations"),
        ({"iteration": "third"}, "'third'"),
        ({"max_shard_size": "0"}, "'0'"),
        ({"memory": "much"}, "'much'"),
        ({"digest": "some"}, "'some'"),
        ({"dtype": "float9"}, "float9"),
        ({"to": "zip"}, "'zip'"),
        ({"to": "gguf"}, "'gguf'"),
        ({"tp": 2}, "--tp has no effect"),
        ({"threads": 0}, "threads"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, hf: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises((UsageError, FormatError)) as e:
        reshard(hf, tmp_path / "out", **options)
    assert says in str(e.value)
    assert e.value.exit_status == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_shards_are_no_larger_than_asked(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "out", max_shard_size="12 KiB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert len(files) > 4
    assert stored_tensors(tmp_path / "out") == stored_tensors(hf)
    for file in files:
        held = [len(data) for _, _, data in stored_tensors(file).values()]
        assert sum(held) <= 12 * 1024


def test_sizes_are_read_as_written() -> None:
    told = {"5GB": 5 * 10**9, "1.5 MiB": 3 << 19, "7": 7, "2k": 2000, "3kib": 3072, "1T": 10**12}
    assert {text: parse_size(text, "size") for text in told} == told


def test_a_megatron_checkpoint_born_elsewhere(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "m", to="torch_dist", tp=2)
    shutil.rmtree(tmp_path / "m" / "release" / "hf")
    reshard(tmp_path / "m", tmp_path / "tp1", tp=1)
    for source in ("m", "tp1"):
        with raises(MappingError, hint="--family"):
            reshard(tmp_path / source, tmp_path / "no", to="hf")
        reshard(tmp_path / source, tmp_path / f"{source}-like", to="hf", like=hf)
        for name in ("config.json", "tokenizer.json"):
            assert (tmp_path / f"{source}-like" / name).read_bytes() == (hf / name).read_bytes()
        assert stored_tensors(tmp_path / f"{source}-like") == stored_tensors(hf)
        # From args alone: the same tensors, a config of its own, no tokenizer.
        reshard(tmp_path / source, tmp_path / f"{source}-args", to="hf", family="llama")
        assert stored_tensors(tmp_path / f"{source}-args") == stored_tensors(hf)
    assert staging_folders(tmp_path) == []
    made = json.loads((tmp_path / "m-args" / "config.json").read_text())
    for key, value in tiny_llama.config().items():
        assert made.get(key, value) == value, key
    assert made["num_key_value_heads"] == 2


def test_dry_run_writes_nothing(tmp_path: Path, hf: Path) -> None:
    before = file_states(hf)
    report = reshard(hf, tmp_path / "out", to="torch_dist", tp=2, dry_run=True)
    assert report.dry_run
    assert report.plan.source_files == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    assert file_states(hf) == before
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(DestinationError):
        reshard(hf, tmp_path / "there", to="torch_dist", dry_run=True)


def test_an_existing_destination_is_replaced_only_when_asked(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "out", to="torch_dist", tp=2)
    old = contents(tmp_path / "out")
    with raises(DestinationError, hint="--overwrite"):
        reshard(hf, tmp_path / "out", to="torch_dist", tp=1)
    assert contents(tmp_path / "out") == old
    reshard(hf, tmp_path / "out", to="torch_dist", tp=1, overwrite=True)
    reshard(hf, tmp_path / "fresh", to="torch_dist", tp=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert staging_folders(tmp_path) == []


def test_a_link_to_the_destination_stays(tmp_path: Path, hf: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/real")
    reshard(hf, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert stored_tensors(tmp_path / "disk" / "real") == stored_tensors(hf)


def test_modes_follow_the_umask(tmp_path: Path, hf: Path) -> None:
    old = os.umask(0o027)
    try:
        reshard(hf, tmp_path / "out", to="torch_dist")
    finally:
        os.umask(old)
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_iterations_are_chosen_and_kept(tmp_path: Path) -> None:
    save = tmp_path / "save"
    originals = {}
    for number in (10, 20):
        originals[number] = tiny_llama.save(tmp_path / f"hf{number}", seed=number)
        reshard(originals[number], tmp_path / "one", to="torch_dist", tp=2)
        shutil.move(tmp_path / "one" / "release", save / f"iter_{number:07d}")
        shutil.rmtree(tmp_path / "one")
    (save / "latest_checkpointed_iteration.txt").write_text("20")
    for given, number in ((None, 20), ("latest", 20), ("10", 10), ("20", 20)):
        report = reshard(save, tmp_path / "back", to="hf", iteration=given, overwrite=True)
        assert stored_tensors(tmp_path / "back") == stored_tensors(originals[number])
        assert report.source_format == "torch_dist"
    reshard(save / "iter_0000010", tmp_path / "back", to="hf", overwrite=True)
    assert stored_tensors(tmp_path / "back") == stored_tensors(originals[10])
    with raises(FormatError, hint="10, 20"):
        reshard(save, tmp_path / "none", iteration="15")
    for inside in (save / "iter_0000030", save / "iter_0000010" / "new"):
        with pytest.raises(DestinationError):
            reshard(save, inside)


def test_a_release_stays_a_release(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "a", to="torch_dist", tp=2)
    reshard(tmp_path / "a", tmp_path / "b", tp=1)
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
        assert (folder / "release" / "metadata.json").exists()


def test_the_report(tmp_path: Path, hf: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = reshard(
        hf,
        tmp_path / "out",
        to="torch_dist",
        tp=2,
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    data = json.loads(json.dumps(report.to_json()))
    axes = {"pp": 1, "vpp": 1, "ep": 1, "etp": 2, "cp": 1, "dp": 1}
    assert data["layout"] == {"tp": 2, **axes}
    assert (data["family"], data["target_format"], data["dry_run"]) == (
        "llama",
        "torch_dist",
        False,
    )
    assert data["num_bytes"] == open_checkpoint(tmp_path / "out").num_bytes
    assert data["dropped"] == []
    assert data["digested"] + data["inherited"] + data["unverified"] == len(stored_tensors(hf))
    assert 0 <= data["kernel_bytes"] <= data["num_bytes"]
    assert sum(done for _, done, _ in told) == data["num_bytes"]
    assert {(what, total) for what, _, total in told} == {("reshard", data["num_bytes"])}
    text = "\n".join(report.lines())
    for part in (str(hf), "torch_dist", "llama", "tp=2 pp=1", "digests"):
        assert part in text


def test_a_checkpoint_is_named_by_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama.save(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    reshard("hf", "plain", to="dcp")
    assert open_checkpoint(Path("plain")).format == "dcp"
