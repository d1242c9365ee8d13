"""Real megatron-core trains for two steps on a CPU, saves its optimizer in every way, and loads.

    python trained_world.py ACTION OPTIONS-AS-JSON

`train` saves one training state in several formats; `load` loads one of them under a layout and
saves what it got as `fully_reshardable`, to be compared with what was trained. With a `pattern` the
model is a HybridModel (of megatron-core 0.19, on PYTHONPATH), otherwise a GPTModel.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import hybrid_world
import megatron_world
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from megatron_world import (
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    ITERATION,
    LAYERS,
    VOCAB,
    build,
    fill,
    sharded,
)
from torch.overrides import TorchFunctionMode

MODES: list[Any] = []


class OnCpu(TorchFunctionMode):
    """Whatever is asked for on a CUDA device comes on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class Stream:
    """A stream that does not wait."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def pretend_cuda() -> None:
    """What megatron-core's optimizer asks of CUDA, without it."""
    cpu = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = Stream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Stream()
    torch.Tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(self, *args, **kwargs)
        return "torch.cuda." + kind(self).rsplit(".", 1)[1]

    torch.Tensor.type = type_
    MODES.append(OnCpu())
    MODES[-1].__enter__()


def main() -> None:
    action, options = sys.argv[1], json.loads(sys.argv[2])
    run_ranks(work, options.get("world", 2), action, options)


def work(rank: int, action: str, options: dict[str, Any]) -> None:
    """One process: one layout, one optimizer, one action."""
    pretend_cuda()
    if "pattern" in options:
        hybrid_world.stub_kernels()
    from megatron.core import parallel_state

    layout = options["layout"]
    parallel_state.initialize_model_parallel(
        layout.get("tp", 1),
        layout.get("pp", 1),
        layout.get("vpp"),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp"),
    )
    if "pattern" in options:
        chunks = [hybrid_world.build(hybrid_options(options))]
    else:
        chunks = build(layout, {**options, "dtype": "bfloat16"})
    wrapped, optimizer = with_optimizer(chunks, options)
    ACTIONS[action](rank, chunks, wrapped, optimizer, options)
    dist.barrier()
    dist.destroy_process_group()


def hybrid_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a HybridModel with an optimizer."""
    layout = {"tp": 1, "pp": 1, "ep": 1, **options["layout"]}
    dp = options.get("world", 2) // (layout["tp"] * layout["pp"])
    return {**options, **layout, "dp": dp, "dtype": "bfloat16"}


def with_optimizer(chunks: list[Any], options: dict[str, Any]) -> tuple[list[Any], Any]:
    """Chunks wrapped for data parallelism, and an Adam over them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    is_distributed = options.get("distributed", True)
    keep_step(DistributedOptimizer)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=is_distributed,
        overlap_grad_reduce=options.get("overlap", False),
        bucket_size=options.get("bucket_size"),
        pad_buckets_for_high_nccl_busbw=options.get("busbw", False),
        grad_reduce_in_fp32=options.get("grads_in_fp32", False),
    )
    wrapped = [
        DistributedDataParallel(c.config, config, c, disable_bucketing=number > 0)
        for number, c in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=is_distributed,
            clip_grad=1.0,
        ),
        wrapped,
    )
    return wrapped, optimizer


def keep_step(kind: Any) -> None:
    """torch's own Adam keeps a step per parameter, which megatron-core forgets to load."""
    if hasattr(kind, "keeps_step"):
        return
    original = kind._set_main_param_and_optimizer_states

    def keeping(self: Any, param: Any, tensors: Any) -> Any:
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"].clone()} if "step" in state else {}
        return original(self, param, {**step, **tensors})

    kind._set_main_param_and_optimizer_states = keeping
    kind.keeps_step = True


def step(wrapped: list[Any], optimizer: Any, times: int = 2) -> None:
    """Steps with gradients that depend on the parameter's name alone."""
    for number in range(times):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
            for name, p in chunk.module.named_parameters():
                seed = hashlib.md5(f"{name}{number}".encode(), usedforsecurity=False).hexdigest()
                generator = torch.Generator().manual_seed(int(seed[:12], 16))
                p.main_grad.copy_(torch.randn(p.shape, generator=generator))
            chunk.finish_grad_sync()
        if not optimizer.step()[0]:
            raise AssertionError("the optimizer did not step")


def arguments(options: dict[str, Any]) -> argparse.Namespace:
    """Args as Megatron's training loop saves them."""
    if "pattern" in options:
        return hybrid_world.arguments(hybrid_options(options))
    layout, experts = options["layout"], options.get("experts")
    tp, pp, ep = layout.get("tp", 1), layout.get("pp", 1), layout.get("ep", 1)
    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        kv_channels=HIDDEN // HEADS,
        padded_vocab_size=VOCAB,
        vocab_size=VOCAB,
        make_vocab_size_divisible_by=8,
        max_position_embeddings=16,
        position_embedding_type="rope",
        swiglu=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=not options.get("tied", False),
        num_experts=experts,
        moe_ffn_hidden_size=24 if experts else None,
        moe_router_topk=2,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=layout.get("vpp"),
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=layout.get("etp") or tp,
        data_parallel_size=options.get("world", 2) // (tp * pp),
        world_size=options.get("world", 2),
        use_distributed_optimizer=options.get("distributed", True),
        overlap_grad_reduce=options.get("overlap", False),
        ddp_bucket_size=options.get("bucket_size"),
        ddp_pad_buckets_for_high_nccl_busbw=options.get("busbw", False),
        accumulate_allreduce_grads_in_fp32=options.get("grads_in_fp32", False),
    )


def train(
    rank: int, chunks: list[Any], wrapped: list[Any], optimizer: Any, options: dict[str, Any]
) -> None:
    """Train, and save the state in every format that `saves` lists as `[kind, folder]`."""
    fill(sharded(chunks))
    optimizer.reload_model_params()
    step(wrapped, optimizer)
    for kind, folder in options["saves"]:
        save(rank, chunks, optimizer, kind, Path(folder), options)


def load(
    rank: int, chunks: list[Any], wrapped: list[Any], optimizer: Any, options: dict[str, Any]
) -> None:
    """Load `folder`, of format `kind`, and save what is in memory then as `dump`."""
    kind, folder = options["kind"], Path(options["folder"]) / f"iter_{ITERATION:07d}"
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    if options.get("distributed", True):
        for one in optimizers:
            one._init_optimizer_states_with_dummy_values()
    if options.get("via"):
        load_by_megtool(chunks, optimizer, folder, options)
    elif kind == "legacy":
        load_ranks(chunks, optimizer, folder)
    else:
        from megatron.core import dist_checkpointing

        metadata = dist_checkpointing.load_content_metadata(str(folder))
        state = sharded(chunks)
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=True, metadata=dict(metadata)
        )
        out = dist_checkpointing.load(state, str(folder))
        for name, c in zip(names(chunks), chunks, strict=True):
            c.load_state_dict(out[name])
        optimizer.load_state_dict(out["optimizer"])
    kind = options.get("dump_kind", "fully_reshardable")
    save(rank, chunks, optimizer, kind, Path(options["dump"]), options)
    if rank == 0:
        groups = optimizers[0].optimizer.param_groups
        print("loaded", [g.get("step") for g in groups], [g["lr"] for g in groups])


def load_by_megtool(
    chunks: list[Any], optimizer: Any, folder: Path, options: dict[str, Any]
) -> None:
    """Load whatever `folder` is: by `megtool.megatron.load`, its strategy, or once installed."""
    from megatron.core import dist_checkpointing

    import megtool

    via = options["via"]
    installed = megtool.megatron.install() if via == "install" else None
    if via == "strategy":
        metadata = dict(dist_checkpointing.load_content_metadata(str(folder)))
    elif via == "install":
        metadata = dict(dist_checkpointing.load_content_metadata(str(folder)) or {})
    else:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            **options.get("metadata", {}),
        }
    state = {
        n: c.sharded_state_dict(metadata=metadata)
        for n, c in zip(names(chunks), chunks, strict=True)
    }
    if options.get("optimizer", True):
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=True, metadata=dict(metadata)
        )
    if via == "load":
        out = megtool.megatron.load(state, folder)
    elif via == "install":
        out = dist_checkpointing.load(state, str(folder))
        installed.undo()
    else:
        strategy = megtool.megatron.LoadStrategy()
        out = dist_checkpointing.load(state, str(folder), sharded_strategy=strategy)
    for name, c in zip(names(chunks), chunks, strict=True):
        c.load_state_dict(out[name])
    if options.get("optimizer", True):
        optimizer.load_state_dict(out["optimizer"])
        assert out["iteration"] == ITERATION


def names(chunks: list[Any]) -> list[str]:
    """What a checkpoint calls each chunk."""
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def rank_folder(options: dict[str, Any]) -> str:
    """The folder of this rank in the legacy format."""
    from megatron.core import parallel_state as ps

    layout = options["layout"]
    out = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if layout.get("pp", 1) > 1:
        out += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if layout.get("ep", 1) > 1:
        out += f"_{ps.get_expert_model_parallel_rank():03d}"
    return out


def save(
    rank: int,
    chunks: list[Any],
    optimizer: Any,
    kind: str,
    folder: Path,
    options: dict[str, Any],
) -> None:
    """Save as an iteration of a save folder, in the way Megatron's training loop does."""
    from megatron.core import dist_checkpointing

    into = folder / f"iter_{ITERATION:07d}"
    if rank == 0:
        into.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    common = {"iteration": ITERATION, "args": arguments(options), "checkpoint_version": 3.0}
    if kind == "legacy":
        save_ranks(chunks, optimizer, into / rank_folder(options), common, options)
        dist.barrier()
        return
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": options.get("avoid_prefix", True),
    }
    if kind != "float16":
        metadata["distrib_optim_sharding_type"] = kind
    state = sharded(chunks)
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(metadata))
    dist_checkpointing.save({**state, **common}, str(into), content_metadata=metadata)


def save_ranks(
    chunks: list[Any],
    optimizer: Any,
    into: Path,
    common: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """One rank's legacy files."""
    from megatron.core import parallel_state as ps

    is_writer = ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0
    if is_writer:
        into.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if options.get("distributed", True):
        optimizer.save_parameter_state(str(into / "distrib_optim.pt"))
    if is_writer:
        models = {
            n: c.state_dict_for_save_checkpoint()
            for n, c in zip(names(chunks), chunks, strict=True)
        }
        state = {**models, **common, "optimizer": optimizer.state_dict()}
        torch.save(state, into / "model_optim_rng.pt")


def load_ranks(chunks: list[Any], optimizer: Any, folder: Path) -> None:
    """One rank's legacy files."""
    layout = json.loads(sys.argv[2])
    into = folder / rank_folder(layout)
    state = torch.load(into / "model_optim_rng.pt", weights_only=False)
    for name, c in zip(names(chunks), chunks, strict=True):
        c.load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.load_parameter_state(str(into / "distrib_optim.pt"))


ACTIONS = {"train": train, "load": load}


if __name__ == "__main__":
    megatron_world.ACTIONS.clear()
    main()
