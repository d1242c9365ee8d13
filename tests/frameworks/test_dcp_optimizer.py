"""Optimizer state through `megtool.dcp`: torch's AdamW under FSDP2 goes on from any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import megtool
from megtool.errors import UsageError
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints import zero_folders
from tests.support.checkpoints.old_formats import as_fragments
from tests.support.checkpoints.trained import config, write
from tests.support.folders import torch_tensors
from tests.support.worlds.gloo_world import run_world

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 48}
BETAS = (0.8, 0.9)


def decoder(seed: int, size: int, **more: Any) -> Any:
    """A Llama of transformers under FSDP2, and on four ranks under tensor parallelism too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = LlamaForCausalLM(LlamaConfig(**SIZES | heads | {"tie_word_embeddings": False} | more))
    if size == 1:
        return model
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        if size > 2:
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def adamw(model: nn.Module, lr: float = 1e-2, betas: tuple[float, float] = BETAS) -> Any:
    """Two groups: norms are not decayed."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    """Losses of some steps on the same batch, which all ranks have."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value: Any) -> Any:
    """Nested values with their DTensors gathered."""
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    gather = getattr(value, "full_tensor", None)
    if gather is not None:
        return gather()
    return value.clone() if isinstance(value, torch.Tensor) else value


def run_and_save(rank: int, size: int, out: Path) -> tuple[dict[str, Any], list[float]]:
    """State after two steps, saved as DCP and by megtool's writer; losses of the next three."""
    dist.init_process_group("gloo")
    model = decoder(0, size)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    weights, states = get_state_dict(model, optimizer)
    if rank == 0:
        model.config.save_pretrained(out / "like")
    dist.barrier()
    dcp.save({"model": weights, "optim": states}, checkpoint_id=out / "dcp")
    writer = megtool.dcp.Writer(out / "torch_dist", to="torch_dist", like=out / "like", tp=2, pp=2)
    dcp.save({"model": weights, "optim": states}, storage_writer=writer)
    kept = {"model": whole(weights), "state": whole(states["state"])}
    return kept, train(model, optimizer, 3)


def load_and_go_on(
    rank: int, size: int, out: Path, kept: dict[str, Any], flat: bool
) -> dict[str, list[float]]:
    """The losses of three steps from each source, into a fresh model of other values."""
    dist.init_process_group("gloo")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    losses = {}
    for name in ("dcp", "torch_dist"):
        model = decoder(1, size)
        optimizer = adamw(model, 5.0, (0.5, 0.5))
        weights, states = get_state_dict(model, optimizer, options=options)
        state = {"model": weights, "optim": states}
        megtool.dcp.load(state, out / name, like=out / "like")
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options
        )
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
        assert all(g["lr"] == 1e-2 and g["betas"] == BETAS for g in optimizer.param_groups)
        weights, states = get_state_dict(model, optimizer)
        for key, tensor in whole(weights).items():
            assert tensor.equal(kept["model"][key]), (name, key)
        for key, of_parameter in whole(states["state"]).items():
            for state_name, tensor in of_parameter.items():
                assert tensor.equal(kept["state"][key][state_name]), (name, key, state_name)
        losses[name] = train(model, optimizer, 3)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("flat", [False, True])
def test_training_goes_on(size: int, flat: bool, tmp_path: Path) -> None:
    """Saved by two ranks and loaded by two or four, with all bits of the state and equal losses."""
    (kept, expected), *_ = run_world(run_and_save, 2, tmp_path, timeout_s=500)
    for losses in run_world(load_and_go_on, size, tmp_path, kept, flat, timeout_s=500):
        for name, of_source in losses.items():
            if size == 2:
                assert of_source == expected, name
            assert of_source == pytest.approx(expected, rel=1e-6), name


SMALL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_heads": 4}
HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 37,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of the model that `trained` holds."""
    folder = tmp_path_factory.mktemp("like")
    (folder / "config.json").write_text(json.dumps(HF))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, like: Path, materialize: Any) -> Path:
    """Bfloat16 weights with master weights and moments, as Megatron saves them."""
    root = tmp_path_factory.mktemp("trained")
    write(root, config(num_layers=2), ParallelConfig(), materialize)
    return root


def state_of(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any]]:
    """A model of transformers, its AdamW, and the state dict of both."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    optimizer = adamw(model)
    weights, states = get_state_dict(model, optimizer)
    return model, optimizer, {"model": weights, "optim": states}


def stored_states(folder: Path, like: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The states of each weight under Hugging Face's names, as lazy views read them."""
    view = megtool.open(folder, family="llama", like=like, framework="torch").as_("hf")
    out: dict[str, dict[str, torch.Tensor]] = {}
    for name in view:
        if name.startswith("optimizer.state."):
            state, _, key = name.removeprefix("optimizer.state.").partition(".")
            out.setdefault(key, {})[state] = view[name][...]
    return out


FORMS = {
    "fully_reshardable": {"to": "torch_dist", "tp": 2},
    "dp_reshardable": {"to": "torch_dist", "optimizer_format": "dp_reshardable", "dp": 2},
    "rank files": {"to": "megatron", "tp": 2, "pp": 2},
    "dcp": {"to": "dcp", "dp": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_optimizer_state_is_loaded(
    form: str, trained: Path, like: Path, tmp_path: Path
) -> None:
    """Moments, steps and groups; float32 parameters are the master weights."""
    expected = stored_states(trained, like)
    megtool.reshard(trained, tmp_path / "out", like=like, family="llama", **FORMS[form])
    _, _, state = state_of(like, torch.float32)
    reader = megtool.dcp.Reader(tmp_path / "out", family="llama", like=like)
    dcp.load(state, storage_reader=reader, planner=megtool.dcp.Planner(), no_dist=True)
    for name, tensor in state["model"].items():
        assert tensor.equal(expected[name]["param"]), name
        of_weight = state["optim"]["state"][name]
        assert all(of_weight[s].equal(expected[name][s]) for s in ("exp_avg", "exp_avg_sq")), name
        assert of_weight["step"].item() == 7
    assert {g["lr"] for g in state["optim"]["param_groups"]} == {1e-3}


def test_master_weights_are_for_float32_parameters(trained: Path, like: Path) -> None:
    """Bfloat16 parameters are the weights; without an optimizer to load, float32 ones are, too."""
    name = "lm_head.weight"
    opened = megtool.open(trained, family="llama", like=like, framework="torch")
    weight = opened.as_("hf")[name][...]
    main = opened.as_("hf")[f"optimizer.state.param.{name}"][...]
    _, _, state = state_of(like, torch.bfloat16)
    megtool.dcp.load(state, trained, family="llama", like=like)
    assert state["model"][name].equal(weight)
    assert state["optim"]["state"][name]["exp_avg"].dtype == torch.bfloat16
    for masters, expected in ((None, weight.float()), (True, main)):
        alone = {"model": {name: torch.zeros(37, 16)}}
        megtool.dcp.load(alone, trained, family="llama", like=like, masters=masters)
        assert alone["model"][name].equal(expected)
    assert not main.equal(weight.float())


def test_one_error_names_weights_and_states(trained: Path, like: Path, tmp_path: Path) -> None:
    _, _, state = state_of(like, torch.float32)
    state["model"]["a.weight"] = torch.zeros(2)
    state["optim"]["state"]["b.weight"] = {"exp_avg": torch.zeros(2), "step": torch.tensor(1.0)}
    with pytest.raises(dcp.CheckpointException) as caught:
        megtool.dcp.load(state, trained, family="llama", like=like)
    (error,) = {str(e) for e, _ in caught.value.failures.values()}
    lacks = ("model.a.weight", "optim.state.b.weight.exp_avg", "optim.state.b.weight.step")
    assert "lacks 3 of them" in error
    assert all(name in error for name in lacks)
    megtool.reshard(trained, tmp_path / "hf", to="hf", like=like, family="llama")
    with pytest.raises(dcp.CheckpointException, match="exp_avg_sq"):
        megtool.dcp.load(state_of(like, torch.float32)[2], tmp_path / "hf")


def test_a_folder_of_hugging_face_holds_no_optimizer(like: Path, tmp_path: Path) -> None:
    _, _, state = state_of(like, torch.float32)
    writer = megtool.dcp.Writer(tmp_path / "out", to="hf", like=like)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, no_dist=True)
    (error,) = [e for e, _ in caught.value.failures.values()]
    assert isinstance(error, UsageError)
    assert not (tmp_path / "out").exists()
    writer = megtool.dcp.Writer(tmp_path / "out", to="hf", like=like, optimizer_format="none")
    dcp.save(state, storage_writer=writer, no_dist=True)
    folder = megtool.open(tmp_path / "out", framework="torch").as_("hf")
    assert folder["lm_head.weight"][...].equal(state["model"]["lm_head.weight"])


@pytest.mark.parametrize("stage", [2, 3, "universal"])
def test_state_of_deepspeed_is_loaded(stage: int | str, llama: Path, tmp_path: Path) -> None:
    """Its step is the iteration of the run, and float32 weights are the master weights."""
    weights = torch_tensors(llama)
    states = zero_folders.trained(weights)
    if isinstance(stage, int):
        zero_folders.save_zero(tmp_path, weights, states, stage=stage, ranks=2)
    else:
        zero_folders.save_universal(tmp_path, weights, states)
    moments = ("exp_avg", "exp_avg_sq")
    empty = {
        name: {s: torch.zeros(w.shape) for s in moments} | {"step": torch.tensor(0.0)}
        for name, w in weights.items()
    }
    model = {name: torch.zeros(w.shape) for name, w in weights.items()}
    groups = [{"lr": 1.0, "params": [*weights]}]
    state = {"model": model, "optimizer": {"state": empty, "param_groups": groups}}
    megtool.dcp.load(state, tmp_path, like=llama)
    for name in weights:
        assert model[name].equal(states["param"][name]), name
        assert empty[name]["step"].item() == 7
        assert all(empty[name][s].equal(states[s][name]) for s in moments), name
    lr = 1.0 if stage == "universal" else 0.01  # which has no settings of groups
    assert state["optimizer"]["param_groups"] == [{"lr": lr, "params": [*weights]}]


def test_flattened_state_of_old_cores_is_loaded(
    trained: Path, like: Path, materialize: Any, tmp_path: Path
) -> None:
    """`fully_sharded_model_space`: cells of parameters, cut anywhere."""
    as_fragments(trained, tmp_path / "old", materialize)
    expected = stored_states(trained, like)
    _, _, state = state_of(like, torch.float32)
    megtool.dcp.load(state, tmp_path / "old", family="llama", like=like)
    for name, tensor in state["model"].items():
        assert tensor.equal(expected[name]["param"]), name
        of_weight = state["optim"]["state"][name]
        assert all(of_weight[s].equal(expected[name][s]) for s in ("exp_avg", "exp_avg_sq")), name
        assert of_weight["step"].item() == 7


def sgd_state(seed: int, size: int, steps: int) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its SGD with momentum after some steps, and the state dict of both."""
    model = decoder(seed, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if steps else 5.0, momentum=0.9)
    train(model, optimizer, steps)
    weights, states = get_state_dict(model, optimizer)
    return model, optimizer, {"model": weights, "optim": states}


def save_sgd(rank: int, size: int, out: Path) -> tuple[Any, list[float]]:
    dist.init_process_group("gloo")
    model, optimizer, state = sgd_state(0, size, 2)
    if rank == 0:
        model.config.save_pretrained(out / "like")
    dcp.save(state, checkpoint_id=out / "dcp")
    return whole(state["optim"]["state"]), train(model, optimizer, 3)


def load_sgd(rank: int, size: int, out: Path, kept: Any) -> list[float]:
    """The losses of three more steps, by the momentum of another run."""
    dist.init_process_group("gloo")
    model, optimizer, state = sgd_state(1, size, 0)
    megtool.dcp.load(state, out / "dcp", like=out / "like")
    weights, states = state["model"], state["optim"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert optimizer.param_groups[0]["lr"] == 0.1
    found = whole(get_state_dict(model, optimizer)[1]["state"])
    assert found.keys() == kept.keys()
    for name, of_parameter in kept.items():
        assert found[name]["momentum_buffer"].equal(of_parameter["momentum_buffer"]), name
    return train(model, optimizer, 3)


@pytest.mark.slow
def test_momentum_of_sgd_goes_on(tmp_path: Path) -> None:
    (kept, expected), *_ = run_world(save_sgd, 2, tmp_path, timeout_s=500)
    for losses in run_world(load_sgd, 2, tmp_path, kept, timeout_s=500):
        assert losses == expected


def test_values_of_a_state_dict_come_back(like: Path, tmp_path: Path) -> None:
    """A scheduler, and a list of one number; groups that the checkpoint has not keep their own."""
    _, optimizer, state = state_of(like, torch.float32)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    state |= {"scheduler": {**scheduler.state_dict(), "one": [3]}, "words": "text"}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    again = {"scheduler": dict.fromkeys(state["scheduler"], 0), "words": ""}
    megtool.dcp.load(again, tmp_path / "saved", like=like)
    assert again == {"scheduler": state["scheduler"], "words": "text"}
