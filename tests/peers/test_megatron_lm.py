"""Megatron-LM's own `--load`, with megtool installed, takes any format and layout.

The training loop is that of a wheel of megatron-core 0.19.2, or of the checkout of Megatron-LM that
the environment variable MEGATRON_LM names (tried with core_v0.16.1).
"""

from __future__ import annotations

import json
import os
import shutil
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard
from tests.support.models.tiny_model import tiny_model
from tests.support.paths import PEERS
from tests.support.peers.release import install_release
from tests.support.peers.run_trained import read_with_torch
from tests.support.runs.exports import export_gguf
from tests.support.stores.s3_bucket import S3Bucket

pytestmark = [pytest.mark.peers, pytest.mark.slow]

FORMAT = ("--ckpt-format", "torch_dist")


@dataclass(frozen=True)
class Saved:
    """What Megatron-LM saved at TP2, what was in memory then, and where the loop's code is."""

    code: Path
    folder: Path
    found: dict[tuple[str, int], dict[str, Any]]


def run_loop(code: Path, runs: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """What each rank found, by run and rank."""
    done = subprocess.run(
        [
            sys.executable,
            str(PEERS / "megatron_lm_world.py"),
            json.dumps({"world": 2, "runs": runs}),
        ],
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [x.partition("found ")[2] for x in done.stdout.splitlines() if "found {" in x]
    found = [json.loads(x) for x in lines]
    return {(f.pop("run"), f.pop("rank")): f for f in found}


@pytest.fixture(scope="module", params=["0.19.2", "checkout"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    if request.param == "checkout":
        named = os.environ.get("MEGATRON_LM")
        if not named:
            pytest.skip("MEGATRON_LM names no checkout of Megatron-LM")
        code = Path(named)
    else:
        release = "megatron-core==0.19.2"
        code = install_release(release, tmp_path_factory.mktemp("core"), "--ignore-requires-python")
    run = {"do": "save", "layout": {"tp": 2}}
    runs = [
        {
            **run,
            "name": "dist",
            "words": ["--save", str(folder / "dist"), *FORMAT],
            "dump": str(folder / "truth"),
        },
        {
            **run,
            "name": "ranks",
            "words": ["--save", str(folder / "ranks"), "--ckpt-format", "torch"],
        },
    ]
    found = run_loop(code, runs)
    reshard(
        folder / "dist",
        folder / "hf",
        to="hf",
        optimizer_format="none",
        family="llama",
        fsync=False,
    )
    return Saved(code, folder, found)


def load(name: str, place: Path | str, *words: str, layout: Any, **more: Any) -> dict[str, Any]:
    """A run that loads a place, with megtool installed."""
    known = {"name": name, "do": "load", "install": True, "layout": layout}
    return {**known, "words": ["--load", str(place), *words], **more}


def assert_dumped(dump: Path, truth: Path, prefix: str = "") -> None:
    """The dumped tensors whose names begin so are the truth to the last bit."""
    found, want = read_with_torch(dump), read_with_torch(truth)
    assert found.keys() == want.keys()
    for name in (n for n in want if n.startswith(prefix)):
        assert torch.equal(found[name], want[name]), name


def test_load_goes_on_from_any_format_and_layout(saved: Saved, tmp_path: Path) -> None:
    """Iteration, samples, scheduler and random state are handed over; nothing is a fresh start."""
    folder = saved.folder
    places = {
        "own": (folder / "dist", {"tp": 2}),
        "ranks": (folder / "ranks", {"tp": 2}),
        "ranks at PP2": (folder / "ranks", {"pp": 2}),
        "torch_dist at PP2": (folder / "dist", {"pp": 2}),
    }
    runs = [
        load(name, place, *FORMAT, layout=layout, dump=str(tmp_path / name))
        for name, (place, layout) in places.items()
    ]
    found = run_loop(saved.code, runs)
    for name, (_, layout) in places.items():
        assert_dumped(tmp_path / name, folder / "truth")
        for rank in range(2):
            got, want = found[name, rank], saved.found["dist", rank]
            assert (got["iteration"], got["flops"]) == (7, 12345)
            assert [got[k] for k in ("samples", "scheduler", "rate")] == [
                want[k] for k in ("samples", "scheduler", "rate")
            ]
            assert (got["random"] == want["random"]) == ("tp" in layout)


def test_load_goes_on_from_zarr_and_a_store_into_virtual_stages(
    saved: Saved, s3_bucket: S3Bucket, tmp_path: Path
) -> None:
    """Two chunks of each of two stages read their own layers; a URL is found as a folder is."""
    folder = saved.folder
    reshard(folder / "dist", folder / "zarr", to="zarr", fsync=False)
    url = s3_bucket.url("ranks")
    reshard(folder / "ranks", url, to="megatron", pp=2, fsync=False)
    chunks = ("--num-layers-per-virtual-pipeline-stage", "1")
    places: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
        "zarr": (folder / "zarr", {"tp": 2}, ()),
        "store": (url, {"tp": 2}, ()),
        "virtual": (folder / "ranks", {"pp": 2, "vpp": 2}, chunks),
        "virtual from zarr": (folder / "zarr", {"pp": 2, "vpp": 2}, chunks),
    }
    runs = [
        load(name, place, *FORMAT, *words, layout=layout, dump=str(tmp_path / name))
        for name, (place, layout, words) in places.items()
    ]
    found = run_loop(saved.code, runs)
    for name in places:
        assert_dumped(tmp_path / name, folder / "truth")
        for rank in range(2):
            got, want = found[name, rank], saved.found["dist", rank]
            assert (got["iteration"], got["flops"]) == (7, 12345), name
            assert [got[k] for k in ("samples", "scheduler", "rate")] == [
                want[k] for k in ("samples", "scheduler", "rate")
            ], name


def test_load_starts_from_a_hugging_face_folder(saved: Saved, tmp_path: Path) -> None:
    """At iteration 0 with a fresh optimizer; a GGUF file likewise. Args come from where asked."""
    folder = saved.folder
    hf, tp = folder / "hf", {"tp": 2}
    runs = [
        load("weights", hf, *FORMAT, layout={"pp": 2}, dump=str(tmp_path / "weights")),
        load("gguf", make_gguf(hf), *FORMAT, layout=tp, dump=str(tmp_path / "gguf")),
        load("args", hf, *FORMAT, "--use-checkpoint-args", layout=tp),
        load("finetune", folder / "ranks", *FORMAT, "--finetune", layout=tp),
        load("nothing", tmp_path / "nothing", *FORMAT, layout=tp),
        load("format", hf, "--ckpt-format", "torch", layout=tp, fails=True),
        load("other", make_qwen(tmp_path / "qwen"), *FORMAT, layout=tp, fails=True),
    ]
    found = run_loop(saved.code, runs)
    assert_dumped(tmp_path / "weights", folder / "truth", "decoder.")
    assert_dumped(tmp_path / "gguf", folder / "truth", "decoder.")
    for name in ("weights", "gguf", "args", "finetune", "nothing"):
        for rank in range(2):
            got = found[name, rank]
            assert (got["iteration"], got["samples"], got["scheduler"]) == (0, 0, 0), name
    for rank in range(2):
        assert "--ckpt-format torch_dist" in found["format", rank]["text"]
        assert found["other", rank]["error"] == "MappingError"
        assert "qkv" in found["other", rank]["text"]


def make_gguf(folder: Path) -> Path:
    """The model of a Hugging Face folder as a GGUF file, with a tokenizer of its 64 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    copy = shutil.copytree(folder, folder.with_name("hf_tokenizer"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = [*string.ascii_lowercase, "Ġ"]
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<|eos|>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(["the model"], trainer)
    tokenizer.save(str(copy / "tokenizer.json"))
    export_gguf(copy, copy.with_name("model.gguf"), fsync=False)
    return copy.with_name("model.gguf")


def make_qwen(folder: Path) -> Path:
    """Another family, whose heads are of another size."""
    tiny_model("qwen3", folder, num_hidden_layers=4, vocab_size=64, tie_word_embeddings=False)
    return folder
