"""A world of gloo processes in which a megatron-core of any version saves optimizer state on a CPU.

    PYTHONPATH=CORE python old_core_world.py FOLDER [options as JSON]

With `"load": true` it loads instead, and compares everything it loaded; with `"t5": true` the model
is a T5 (`t5_world`), not a GPT.

Weights are filled from key-seeded global tensors (`megatron_world.expected`), master weights and
moments from what `state_of` makes of them, so every layout and every way to store the state has a
known content.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.overrides import TorchFunctionMode

WORLD = runpy.run_path(str(Path(__file__).with_name("megatron_world.py")), run_name="world")
LAYERS, HIDDEN, HEADS, GROUPS = (WORLD[k] for k in ("LAYERS", "HIDDEN", "HEADS", "GROUPS"))
FFN, VOCAB, ITERATION = (WORLD[k] for k in ("FFN", "VOCAB", "ITERATION"))
STATES = ("param", "exp_avg", "exp_avg_sq")


def state_of(state: str, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The global tensor of a state; master weights round to the bfloat16 weights."""
    weight = WORLD["expected"](key, shape, torch.bfloat16).float()
    if state == "param":
        return weight * (1 + 2.0**-12)
    moment = WORLD["expected"](f"{state}.{key}", shape, torch.bfloat16).float()
    return moment if state == "exp_avg" else moment.abs()


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def pretend_cuda() -> None:
    """What the distributed optimizer needs of a GPU."""
    cpu, of_type = torch.device("cpu"), torch.Tensor.type

    class Stream:
        def wait_stream(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = of_type(self, *args, **kwargs)
        return found if args or kwargs else "torch.cuda." + found.rsplit(".", 1)[1]

    np.product = np.prod  # removed in numpy 2
    filesystem._write_item.__defaults__ = (filesystem.SerializationFormat.TORCH_SAVE,)  # torch 2.7
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream, torch.cuda.stream = Stream, lambda *_: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Stream()
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.type = type_of
    _CudaToCpu().__enter__()


def main() -> None:
    folder = sys.argv[1]
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    from gloo_ranks import run_ranks  # beside this script

    run_ranks(work, options.get("world", 2), folder, options)


def work(rank: int, folder: str, options: dict[str, Any]) -> None:
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "0"
    pretend_cuda()
    from megatron.core import parallel_state

    tp, pp, ep = options.get("tp", 1), options.get("pp", 1), options.get("ep", 1)
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    build = t5_world()["build"] if options.get("t5") else WORLD["build"]
    chunk = build({"tp": tp, "pp": pp, "ep": ep}, {**options, "dtype": "bfloat16"})[0]
    kind = options["sharding"]
    metadata = {
        "distrib_optim_sharding_type": kind,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": options.get("avoid_prefix", True),
    }
    where = str(Path(folder) / f"iter_{ITERATION:07d}")
    optimizer = optimizer_of(chunk, options)
    fill_states(chunk, optimizer)
    if options.get("load"):
        count = load(where, chunk, optimizer, metadata)
        print(f"rank {rank} loaded {count} states")
    else:
        save(rank, where, chunk, optimizer, metadata, options)
    dist.barrier()
    dist.destroy_process_group()


def t5_world() -> dict[str, Any]:
    """What the world of T5s has; it imports the other one by its name."""
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    return runpy.run_path(str(here / "t5_world.py"), run_name="t5_world")


def save(
    rank: int,
    where: str,
    chunk: Any,
    optimizer: Any,
    metadata: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Save as an iteration of a save folder."""
    from megatron.core import dist_checkpointing

    tp, pp, ep = options.get("tp", 1), options.get("pp", 1), options.get("ep", 1)
    kind = metadata["distrib_optim_sharding_type"]
    if rank == 0:
        into = Path(where)
        into.mkdir(parents=True)
        (into.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    with contextlib.suppress(TypeError):
        state = {"model": chunk.sharded_state_dict(metadata=metadata)}
    try:
        held = optimizer.sharded_state_dict(state, metadata=metadata)
        more = {"content_metadata": metadata}
    except TypeError:
        held, more = optimizer.sharded_state_dict(state, sharding_type=kind), {}
    args = argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        swiglu=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        make_vocab_size_divisible_by=VOCAB // 2,
        num_experts=options.get("experts"),
        moe_ffn_hidden_size=24 if options.get("experts") else None,
        moe_router_topk=2,
        position_embedding_type="rope",
        transformer_impl="local",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        data_parallel_size=options.get("world", 2) // (tp * pp),
        ddp_bucket_size=options.get("bucket_size"),
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    if options.get("t5"):
        vars(args).update({**t5_world()["ARGS"], "swiglu": False})
        vars(args).update(num_query_groups=HEADS, untie_embeddings_and_output_weights=False)
        vars(args).update(vocab_size=128, padded_vocab_size=128, group_query_attention=False)
    common = {"iteration": ITERATION, "args": args, "checkpoint_version": 3.0}
    whole = {**state, "optimizer": held, **common}
    try:
        dist_checkpointing.save(whole, where, **more)
    except TypeError:
        dist_checkpointing.save(whole, where)


def load(where: str, chunk: Any, optimizer: Any, metadata: dict[str, Any]) -> int:
    """Load over zeros and compare: the number of states."""
    from megatron.core import dist_checkpointing

    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    keep_step(type(inner[0]))
    found = [
        (p, one._get_main_param_and_optimizer_states(p))
        for one in inner
        for p in one.model_param_gbuf_map
    ]
    wanted = [{s: held[s].clone() for s in STATES} for _, held in found]
    weights = {n: p.detach().clone() for n, p in chunk.named_parameters()}
    with torch.no_grad():
        for p in chunk.parameters():
            p.zero_()
        for _, held in found:
            for state in STATES:
                held[state].zero_()
    state = {"model": chunk.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    out = dist_checkpointing.load(state, where)
    chunk.load_state_dict(out["model"])
    optimizer.load_state_dict(out["optimizer"])
    for name, p in chunk.named_parameters():
        if not torch.equal(p, weights[name]):
            raise AssertionError(f"{name} differs")
    after = [
        (p, one._get_main_param_and_optimizer_states(p))
        for one in inner
        for p in one.model_param_gbuf_map
    ]
    for (_, held), want in zip(after, wanted, strict=True):
        for name in STATES:
            if not torch.equal(held[name], want[name]):
                raise AssertionError(f"{name} differs")
    return len(after) * len(STATES)


def keep_step(optimizer: Any) -> None:
    """Loading sets every state torch's AdamW has, and `step` is in param groups: keep it."""
    given = optimizer._set_main_param_and_optimizer_states

    def kept(self: Any, p: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[p]
        own = self.optimizer.param_groups[group]["params"][order]
        step = {k: v for k, v in self.optimizer.state[own].items() if k == "step"}
        return given(self, p, {**step, **tensors})

    optimizer._set_main_param_and_optimizer_states = kept


def optimizer_of(chunk: Any, options: dict[str, Any]) -> Any:
    """The distributed optimizer of a chunk, its states initialized."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    WORLD["fill"]({"model": chunk.sharded_state_dict()})
    data_parallel = DistributedDataParallel(
        chunk.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=options.get("bucket_size") is not None,
            bucket_size=options.get("bucket_size"),
        ),
        chunk,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [data_parallel])
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        begin(one.optimizer)
    return optimizer


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's optimizer make its states."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def fill_states(chunk: Any, optimizer: Any) -> None:
    """Give every state of every parameter its content, through the weights' own sharding."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    kept = {n: p.detach().clone() for n, p in chunk.named_parameters()}
    local: dict[str, dict[Any, torch.Tensor]] = {}
    for state in STATES:
        for value in list(nested_values(chunk.sharded_state_dict())):
            if isinstance(value, ShardedTensorFactory):
                parts = list(nested_values(value.build()))
            else:
                parts = [value] if isinstance(value, ShardedTensor) else []
            for t in parts:
                first = t.global_offset[: t.prepend_axis_num]
                own = zip(t.global_offset[t.prepend_axis_num :], t.local_shape, strict=True)
                box = [*(slice(o, o + 1) for o in first), *(slice(o, o + n) for o, n in own)]
                whole = state_of("exp_avg" if state == "param" else state, t.key, t.global_shape)
                if state == "param":
                    whole = state_of("param", t.key, t.global_shape)
                with torch.no_grad():
                    t.data.copy_(whole[tuple(box)].reshape(t.local_shape))
        local[state] = {p: p.detach().float().reshape(-1) for p in chunk.parameters()}
        if state == "param":
            local[state] = {p: v * (1 + 2.0**-12) for p, v in local[state].items()}
    with torch.no_grad():
        for name, p in chunk.named_parameters():
            p.copy_(kept[name])
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for p in one.model_param_gbuf_map:
            found = one._get_main_param_and_optimizer_states(p)
            own = one._get_model_param_range_map(p)["param"]
            for state in STATES:
                found[state].copy_(local[state][p][own.start : own.end])


if __name__ == "__main__":
    main()
