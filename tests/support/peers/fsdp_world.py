"""Two ranks of PyTorch's FSDP2 on a CPU: train a tiny Llama, save it with DCP, and load it again.

`python fsdp_world.py save FOLDER TRUTH`, and `load` or `load-parts` with the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2
BETAS = (0.8, 0.9)


def tiny_model(seed: int) -> Any:
    """A random Llama whose sizes no two ranks share evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=20,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
        vocab_size=33,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _wrapped(seed: int) -> tuple[Any, Any, torch.optim.Optimizer]:
    model = tiny_model(seed)
    config = model.config
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return (
        model,
        config,
        torch.optim.AdamW(model.parameters(), lr=1e-2, betas=BETAS if seed == 0 else (0.9, 0.999)),
    )


def _step(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    ids = torch.randint(0, 33, (1, 8), generator=torch.Generator().manual_seed(rank))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _full(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every whole tensor of the run, by megtool's names."""
    options = StateDictOptions(full_state_dict=True)
    out = dict(get_model_state_dict(model, options=options))
    held = get_optimizer_state_dict(model, optimizer, options=options)
    for name, states in held["state"].items():
        out |= {f"{name}.{state}": value for state, value in states.items()}
    return {k: v.clone() for k, v in out.items()}


def _compare(whole: dict[str, torch.Tensor], truth: str, rank: int, but: str = "none") -> None:
    if rank:
        return
    expected = {k: v for k, v in torch.load(truth).items() if not k.endswith(but)}
    wrong = [k for k in expected if k not in whole or not torch.equal(expected[k], whole[k])]
    if wrong:
        raise SystemExit(f"differ: {wrong}")


def _run(rank: int, job: str, folder: str, truth: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{truth}.rendezvous", rank=rank, world_size=WORLD
    )
    try:
        model, config, optimizer = _wrapped(0 if job == "save" else 1)
        if job == "save":
            for _ in range(2):
                _step(model, optimizer, rank)
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
            whole = _full(model, optimizer)
            if rank == 0:
                torch.save(whole, truth)
                config.save_pretrained(Path(folder) / "hf")
            return
        _step(model, optimizer, rank)  # gives the optimizer its state
        weights, states = get_state_dict(model, optimizer)
        if job == "load-parts":
            # Without the names of a state dict of parts, and without step counts and groups.
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load({**weights, "optimizer": states}, checkpoint_id=folder, planner=planner)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            _compare(_full(model, optimizer), truth, rank, but=".step")
            return
        wanted = {"model": weights, "optimizer": states}
        dcp.load(wanted, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=wanted["model"],
            optim_state_dict=wanted["optimizer"],
        )
        _compare(_full(model, optimizer), truth, rank)
        if optimizer.param_groups[0]["betas"] != BETAS:
            raise SystemExit("the groups of the optimizer were not loaded")
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Run the job in a world of its own."""
    job, folder, truth = sys.argv[1:]
    Path(f"{truth}.rendezvous").unlink(missing_ok=True)
    mp.start_processes(_run, (job, folder, truth), nprocs=WORLD, start_method="spawn")


if __name__ == "__main__":
    main()
