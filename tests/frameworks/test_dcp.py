"""`megtool.dcp`: torch's own `dcp.load` and `dcp.save` over any checkpoint, in real worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import megtool
from megtool.access.state_dict import TensorRequest, fill_tensors
from megtool.errors import DestinationError, MappingError, UsageError
from tests.support.checkpoints.layouts import LAYOUTS
from tests.support.counted_reads import CountedReads
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import tiny_llama
from tests.support.worlds.gloo_world import run_world

Q = "model.layers.1.self_attn.q_proj.weight"


class Scale(nn.Module):
    """A norm, as far as its name goes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


def model_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Modules with the names and shapes of tensors, without memory."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last, _ = name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        is_matrix = tensor.ndim == 2
        leaf = nn.Linear(*reversed(tensor.shape), bias=False) if is_matrix else Scale(len(tensor))
        parent.add_module(last, leaf)
    return root.to(torch.bfloat16)


def sharded_model(tensors: dict[str, torch.Tensor], size: int) -> nn.Module:
    """Llama's modules under FSDP2, on four ranks under tensor parallelism too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    with torch.device("meta"):
        model = model_of(tensors)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.get_submodule("model.layers").children():
        if size > 2:
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    return model


def load_everywhere(rank: int, size: int, llama: Path, sources: list[Path]) -> list[float]:
    """What each load read, over what the rank needs; every tensor is compared."""
    dist.init_process_group("gloo")
    whole = torch_tensors(llama)
    shares = []
    for source in sources:
        for through_dcp in (False, True):
            model = sharded_model(whole, size)
            opened = megtool.open(source, like=llama, optimizer=False)
            reader = megtool.dcp.Reader(opened)
            assert Q in reader.read_metadata().state_dict_metadata
            with CountedReads() as files:
                if through_dcp:
                    dcp.load(model.state_dict(), storage_reader=reader)
                else:
                    megtool.load_state_dict(model, opened)
            state: dict[str, Any] = model.state_dict()
            needed = sum(t.to_local().numel() * 2 for t in state.values())
            shares.append(files.num_bytes / needed)
            for name, tensor in state.items():
                assert tensor.full_tensor().equal(whole[name]), (source, name)
    return shares


def test_sharded_models_are_filled(llama: Path, anywhere: dict[str, Path]) -> None:
    sources = [llama, anywhere["torch_dist"]]
    for shares in run_world(load_everywhere, 2, llama, sources):
        assert max(shares) <= 1.05


@pytest.mark.slow
def test_four_ranks_are_filled_from_every_format(tmp_path: Path) -> None:
    """Columns of a rank are 1 KiB here: shorter runs would be read with the gaps between them."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16}
    sizes |= {"head_dim": 64, "num_hidden_layers": 2}
    large = tiny_llama.save(tmp_path / "hf", **sizes)
    sources = [large]
    for name, options in LAYOUTS.items():
        megtool.reshard(large, tmp_path / name, **options)
        sources.append(tmp_path / name)
    for shares in run_world(load_everywhere, 4, large, sources):
        assert max(shares) <= 1.05


def test_a_model_finds_its_own_names(anywhere: dict[str, Path], llama: Path) -> None:
    """Names of Hugging Face, of Megatron and the stored ones, in one state dict."""
    stored = "decoder.layers.self_attention.linear_qkv.weight"
    state = {
        Q: torch.empty(32, 32),
        "decoder.layers.3.mlp.linear_fc2.weight": torch.empty(32, 48),
        stored: torch.empty(4, 64, 32),
    }
    megtool.dcp.load(state, anywhere["torch_dist"])
    opened = megtool.open(llama, framework="torch")
    assert state[Q].equal(opened.as_("hf", dtype="float32")[Q][...])
    qkv = opened.as_("megatron", dtype="float32")
    for layer in range(4):
        name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
        assert state[stored][layer].equal(qkv[name][...])
    prefixed = {"model": {Q: torch.empty(32, 32)}}
    dcp.load(prefixed, storage_reader=megtool.dcp.Reader(llama, prefix="model."))
    assert prefixed["model"][Q].equal(state[Q])
    only = megtool.dcp.Reader(anywhere["torch_dist"], naming="stored")
    assert Q not in only.read_metadata().state_dict_metadata


def test_a_tied_model_has_its_output_matrix_too(tmp_path: Path) -> None:
    tied = tiny_llama.save(tmp_path / "hf", tie_word_embeddings=True)
    state = {n: torch.zeros(101, 32) for n in ("lm_head.weight", "model.embed_tokens.weight")}
    dcp.load(state, storage_reader=megtool.dcp.Reader(tied))
    assert state["lm_head.weight"].any()
    assert state["lm_head.weight"].equal(state["model.embed_tokens.weight"])


def test_a_tied_output_matrix_has_the_name_of_its_family(tmp_path: Path) -> None:
    """GPT-NeoX calls it `embed_out`; stored, as Megatron stores it, it has neither name."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 101}
    settings = GPTNeoXConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    tied = tmp_path / "hf"
    GPTNeoXForCausalLM(settings).save_pretrained(tied)
    megtool.reshard(tied, tmp_path / "out", to="torch_dist", tp=2)
    for source in (tied, tmp_path / "out"):
        names = ("embed_out.weight", "gpt_neox.embed_in.weight")
        state = {"model": {n: torch.zeros(101, 32) for n in names}}
        megtool.dcp.load(state, source)
        first, second = state["model"].values()
        assert first.any()
        assert first.equal(second)


def test_two_parts_of_one_tensor_are_read(llama: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A plan may have several items of one name."""
    view = megtool.open(llama).as_("hf")
    halves = [torch.zeros(5, 32), torch.zeros(3, 32)]
    requests = [
        TensorRequest(name=Q, shape=(32, 32), lo=(2, 0), hi=(7, 32), local=halves[0]),
        TensorRequest(name=Q, shape=(32, 32), lo=(20, 0), hi=(23, 32), local=halves[1]),
    ]
    fill_tensors(view.reader, view.named.tensors, requests)
    assert halves[0].equal(tensors[Q][2:7].float())
    assert halves[1].equal(tensors[Q][20:23].float())


def test_one_error_names_all_faults(llama: Path) -> None:
    state = {Q: torch.zeros(32, 31), "a.weight": torch.zeros(2), "b.weight": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException) as caught:
        megtool.dcp.load(state, llama)
    (error,) = {str(e) for e, _ in caught.value.failures.values()}
    assert all(text in error for text in ("a.weight", "b.weight", Q, "[32, 31]", "[32, 32]"))
    assert not state[Q].any()


def test_what_is_no_tensor_is_named(llama: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="a number"):
        megtool.dcp.load({Q: torch.zeros(32, 32), "a number": 3}, llama)


def check_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    assert megtool.verify(folder).exit_status == 0
    values = megtool.open(folder, framework="torch").as_("hf").read()
    assert values.keys() == tensors.keys()
    assert all(t.equal(tensors[n]) for n, t in values.items())


def test_what_is_saved_becomes_a_folder_with_digests(
    llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    writer = megtool.dcp.Writer(tmp_path / "out", to="hf", like=llama)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    check_folder(tmp_path / "out", tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def save_sharded(rank: int, size: int, llama: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    model = sharded_model(torch_tensors(llama), size)
    megtool.load_state_dict(model, llama)
    state = model.state_dict()
    dcp.save(state, storage_writer=megtool.dcp.Writer(out / "hf", to="hf", like=llama))
    dist.barrier()
    writer = megtool.dcp.Writer(out / "torch_dist", to="torch_dist", like=llama, tp=2)
    dcp.save(state, storage_writer=writer)


@pytest.mark.slow
def test_a_sharded_model_becomes_a_folder_with_digests(
    llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_world(save_sharded, 2, llama, tmp_path)
    for name in ("hf", "torch_dist"):
        check_folder(tmp_path / name, tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "torch_dist"]


def test_a_writer_refuses_before_anything_is_written(
    llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A format and an option that do not exist, and a destination that does."""
    with raises(UsageError, "zz", hint="torch_dist"):
        megtool.dcp.Writer(tmp_path / "out", to="zz")
    with raises(UsageError, "tpp", hint=True):
        megtool.dcp.Writer(tmp_path / "out", tpp=2)
    (tmp_path / "out").mkdir()
    writer = megtool.dcp.Writer(tmp_path / "out", like=llama)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    (error,) = [e for e, _ in caught.value.failures.values()]
    assert isinstance(error, DestinationError)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_conversion_that_fails_says_where_the_tensors_are(llama: Path, tmp_path: Path) -> None:
    writer = megtool.dcp.Writer(tmp_path / "out", like=llama)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({Q: torch.zeros(32, 32)}, storage_writer=writer, no_dist=True)
    (error,) = [e for e, _ in caught.value.failures.values()]
    assert isinstance(error, MappingError)
    assert str(tmp_path / ".out.dcp") in (error.hint or "")
    assert not (tmp_path / "out").exists()
    assert Q in megtool.open(tmp_path / ".out.dcp").tensors


def test_a_destination_in_a_store_needs_a_folder() -> None:
    with raises(UsageError, hint="staging"):
        megtool.dcp.Writer("s3://bucket/out")


def test_a_reader_of_nothing_is_refused(tmp_path: Path) -> None:
    with raises(MappingError, hint="--family"):
        path = tmp_path / "model.safetensors"
        torch.save({}, tmp_path / "x")
        from safetensors.torch import save_file

        save_file({"w": torch.zeros(2)}, path)
        megtool.dcp.Reader(path, naming="megatron").read_metadata()
