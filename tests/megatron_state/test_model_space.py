"""Megatron's model and optimizer as other trainers save them: Megatron-FSDP, Megatron-DeepSpeed."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megtool import reshard, verify
from megtool.formats.torch_dist import reader as torch_dist
from tests.support.checkpoints import zero_folders
from tests.support.models import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")
Tensors = dict[str, torch.Tensor]


def _load(folder: Path) -> Tensors:
    """Every tensor of a folder that torch.distributed.checkpoint reads."""
    c = torch_dist.open_checkpoint(folder)
    wanted = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype.name)) for t in c.tensors}
    dcp.load(wanted, checkpoint_id=c.root)
    return wanted


def _by_layer(tensors: Tensors) -> Tensors:
    out = {}
    for name, tensor in tensors.items():
        if ".layers." not in name:
            out[name] = tensor
            continue
        for layer, part in enumerate(tensor):
            out[name.replace(".layers.", f".layers.{layer}.")] = part.clone()
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, dict[str, Any]]:
    """A Hugging Face folder, its tensors by Megatron's names layer by layer, and the args."""
    root = tmp_path_factory.mktemp("source")
    folder = tiny_llama.save(root / "hf")
    reshard(folder, root / "megatron", to="torch_dist")
    c = torch_dist.open_checkpoint(root / "megatron")
    rows = tiny_llama.config()["vocab_size"]
    weights = _by_layer(_load(root / "megatron"))
    weights = {n: w[:rows].clone() if len(w) > rows else w for n, w in weights.items()}
    return folder, weights, dict(c.metadata["args"])


def _check(folder: Path, weights: Tensors, states: dict[str, Tensors]) -> None:
    """The folder holds these, but for the padding of the vocabulary."""
    found = _by_layer(_load(folder))
    expected = dict(weights)
    for state, tensors in states.items():
        expected |= {f"optimizer.state.{state}.{n}": t for n, t in tensors.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name][: len(tensor)], tensor), name


def _halves(name: str, tensor: torch.Tensor) -> Tensors:
    """What Megatron-FSDP makes of a tensor: gate and up rows apart."""
    if not name.endswith("mlp.linear_fc1.weight"):
        return {name: tensor}
    gate, up = tensor.chunk(2)
    return {f"{name}_w": gate.clone(), f"{name}_v": up.clone()}


def test_megatron_fsdp(source: tuple[Path, Tensors, dict[str, Any]], tmp_path: Path) -> None:
    folder, weights, args = source
    states = zero_folders.trained(weights)
    del states["param"]
    model = {f"module.{k}": v for n, w in weights.items() for k, v in _halves(n, w).items()}
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for state, tensors in states.items():
        for name, tensor in tensors.items():
            for k, v in _halves(name, tensor).items():
                optimizer.setdefault(f"module.module.module.{k}", {})[state] = v
    tree = {
        "model": model,
        "optimizer": {
            "state": optimizer,
            "param_to_group_meta": {n: {"lr": 0.1, "step": 5} for n in optimizer},
        },
        "args": Namespace(**args),
        "iteration": 5,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 40},
        "rng_state": {"(0, 0)": [{"random_rng_state": (3, (1, 2), None)}]},
    }
    dcp.save(tree, checkpoint_id=tmp_path / "in" / "iter_0000005")
    c = torch_dist.open_checkpoint(tmp_path / "in")
    assert (c.format, c.metadata["iteration"]) == ("dcp", 5)
    assert c.metadata["args"]["hidden_size"] == args["hidden_size"]
    assert verify(tmp_path / "in", folder, family="llama").verdict == "equal"
    report = reshard(tmp_path / "in", tmp_path / "out", to="torch_dist", tp=2, pp=2)
    _check(tmp_path / "out", weights, states)
    common = torch_dist.open_checkpoint(tmp_path / "out").metadata["common"]
    assert common["opt_param_scheduler"] == {"max_lr": 0.1, "num_steps": 40}
    assert common["iteration"] == 5
    assert {d.name.split(".")[0] for d in report.dropped} == {"optimizer", "rng_state"}
    again = reshard(tmp_path / "in", tmp_path / "again", to="dcp")  # all of it, by its own names
    assert not again.dropped
    assert {t.name for t in torch_dist.open_checkpoint(tmp_path / "again").tensors} == {
        t.name for t in c.tensors
    }


_CLASSIC = (
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "post_attention_layernorm."),
    (r"linear_qkv", "query_key_value"),
    (r"linear_proj", "dense"),
    (r"linear_fc1", "dense_h_to_4h"),
    (r"linear_fc2", "dense_4h_to_h"),
)


def _modules(name: str) -> str:
    """Megatron's name in a model of modules, before the core."""
    for new, old in _CLASSIC:
        name = re.sub(new, old, name)
    if name.startswith("decoder."):
        return "language_model.encoder." + name.removeprefix("decoder.")
    return "language_model." + name


def _pipeline(name: str) -> str:
    """Megatron's name in a pipeline whose first layer is number 2."""
    name = _modules(name).removeprefix("language_model.")
    if match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", name):
        return f"{int(match[1]) + 2}.{match[2]}"
    last = 2 + tiny_llama.config()["num_hidden_layers"]
    return {
        "embedding.word_embeddings.weight": "1.word_embeddings.weight",
        "encoder.final_layernorm.weight": f"{last}.weight",
        "output_layer.weight": f"{last + 1}.lm_head.weight",
    }[name]


@pytest.mark.parametrize("spell", [_modules, _pipeline])
@pytest.mark.parametrize("universal", [True, False])
def test_megatron_deepspeed(
    source: tuple[Path, Tensors, dict[str, Any]],
    tmp_path: Path,
    spell: Callable[[str], str],
    universal: bool,
) -> None:
    folder, weights, args = source
    states = zero_folders.trained(weights)
    their_args = {k: v for k, v in args.items() if "query_group" not in k}
    their_args |= {"num_key_value_heads": args["num_query_groups"], "normalization": "rmsnorm"}
    named = {spell(n): w for n, w in weights.items()}
    held = {s: {spell(n): t for n, t in tensors.items()} for s, tensors in states.items()}
    extra = {"args": Namespace(**their_args), "checkpoint_version": 3.0}
    if universal:
        step = zero_folders.save_universal(tmp_path / "in", named, held)
        tree = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)
        torch.save(tree | extra, step / "mp_rank_00_model_states.pt")
    else:
        zero_folders.save_zero(tmp_path / "in", named, held, stage=1, ranks=3, extra=extra)
    assert verify(tmp_path / "in", folder, family="llama").verdict == "equal"
    reshard(tmp_path / "in", tmp_path / "out", to="torch_dist", tp=2, pp=2)
    _check(tmp_path / "out", weights, states)
