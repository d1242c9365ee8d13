"""Read optimizer state of Megatron's default format, `dp_reshardable`: flat tensors per bucket."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megtool.convert.megatron.names import BUCKET, split_state
from megtool.convert.megatron.rank_parameters import (
    Parameter,
    RankPlace,
    each_once,
    in_buffer,
    of_tensor_rank,
    rank_parameters,
)
from megtool.errors import FormatError
from megtool.formats.torch_dist.gathered import COALESCED
from megtool.megatron_state.optimizer.bucket_decoding import Bucket, FlatBuffer, decode_buckets
from megtool.megatron_state.optimizer.joined_parts import join_parts
from megtool.megatron_state.optimizer.master_weight_check import check_copies
from megtool.megatron_state.param_groups import OPTIMIZER_OBJECT
from megtool.megatron_state.saved_objects import read_object, saved_args
from megtool.options.layout import ParallelConfig
from megtool.pickles.reader import is_global
from megtool.spec.model_config import ModelConfig
from megtool.tensors.buckets import default_bucket_size
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, order=True)
class FlatBufferKey:
    """One flat buffer: the optimizer of a chain, its data-parallel group, number and dtype."""

    chain: int
    group: int
    number: int
    dtype: str
    grad_dtype: str


def find_buffers(catalogue: Catalogue) -> dict[FlatBufferKey, list[Bucket]]:
    """The buffers of a checkpoint, each with its buckets in order.

    Raises:
        FormatError: a bucket is missing, or its states differ in size.
    """
    states_of_bucket: dict[FlatBufferKey, dict[int, dict[str, GlobalTensor]]] = {}
    for t in catalogue.tensors:
        if match := BUCKET.fullmatch(t.name):
            chain, group, number, dtype, grad, bucket, state = match.groups()
            buffer = FlatBufferKey(int(chain or 0), int(group), int(number), dtype, grad)
            states_of_bucket.setdefault(buffer, {}).setdefault(int(bucket), {})[state] = t
    out: dict[FlatBufferKey, list[Bucket]] = {}
    for buffer, numbered in sorted(states_of_bucket.items()):
        if sorted(numbered) != list(range(len(numbered))):
            missing = min(set(range(max(numbered) + 1)) - set(numbered))
            raise FormatError(
                f"bucket {missing} of buffer {buffer.number} ({buffer.dtype}) is missing",
                file=catalogue.root,
                tensor=re.sub(r"bucket_idx_\d+", f"bucket_idx_{missing}", _any_name(numbered)),
                hint="the optimizer state is incomplete; --optimizer-format none leaves it out",
            )
        out[buffer] = []
        for _, states in sorted(numbered.items()):
            sizes = {t.numel for t in states.values()}
            if len(sizes) != 1:
                counts = ", ".join(f"{s} {t.numel}" for s, t in sorted(states.items()))
                raise FormatError(
                    f"states of one bucket differ in size: {counts} elements",
                    file=catalogue.root,
                    tensor=min(states.values(), key=lambda t: t.numel).name,
                    hint=f"the optimizer state is damaged; {_LEAVE_OUT}",
                )
            out[buffer].append(Bucket(sizes.pop(), {s: t.name for s, t in states.items()}))
    return out


def _any_name(numbered: Mapping[int, Mapping[str, GlobalTensor]]) -> str:
    return next(t.name for states in numbered.values() for t in states.values())


def read_dp_reshardable(
    catalogue: Catalogue,
    config: ModelConfig,
    parallel: ParallelConfig,
    *,
    verify_master_weights: bool = False,
    require_equal_copies: bool = True,
) -> Catalogue:
    """The catalogue with its buckets' state as `optimizer.state.STATE.KEY`, one per layer.

    `parallel` is the layout the checkpoint was saved at. `require_equal_copies`
    refuses copies of several ranks that differ.

    Raises:
        FormatError: buckets are missing, or have another size than declared; see `decode_buckets`.
    """
    catalogue = join_parts(catalogue)
    weights = each_once([t for t in catalogue.tensors if _is_parameter(t)])
    buffers = find_buffers(catalogue)
    if not catalogue.metadata.get(COALESCED):
        check_sizes(catalogue, buffers)
    ranks = rank_parameters(weights, config, parallel)
    flat_buffers = list(_flat_buffers(buffers, ranks, parallel, catalogue))
    out = decode_buckets(
        catalogue,
        flat_buffers,
        lambda n: BUCKET.fullmatch(n) is not None,
        verify_master_weights=verify_master_weights,
    )
    out.metadata["bucket_dtypes"] = next((b.dtype, b.grad_dtype) for b in buffers)
    if require_equal_copies:
        check_copies(out, verify_master_weights=verify_master_weights)
    return out


def check_sizes(catalogue: Catalogue, buffers: Mapping[FlatBufferKey, Sequence[Bucket]]) -> None:
    """Compare the buckets with the sizes that every data-parallel group declares.

    Raises:
        FormatError: a bucket is missing, or has another size.
    """
    for name in catalogue.objects:
        match = OPTIMIZER_OBJECT.fullmatch(name)
        if match is None or match[3] != _SIZES:
            continue
        chain, group = int(match[1] or 0), int(match[2])
        value = read_object(catalogue, catalogue.objects[name])
        declared = {
            (number, dtypes[0].qualname, k): size
            for number, by_dtype in enumerate(value if isinstance(value, list) else ())
            for dtypes, sizes in (by_dtype.items() if isinstance(by_dtype, dict) else ())
            if isinstance(dtypes, tuple) and is_global(dtypes[0]) and isinstance(sizes, list)
            for k, size in enumerate(sizes)
        }
        stored = {
            (b.number, b.dtype, k): bucket.size
            for b, buckets in buffers.items()
            if (b.chain, b.group) == (chain, group)
            for k, bucket in enumerate(buckets)
        }
        for key in sorted(declared.keys() | stored.keys()):
            if declared.get(key) != stored.get(key):
                number, dtype, bucket = key
                raise FormatError(
                    f"bucket {bucket} of buffer {number} ({dtype}) has "
                    f"{_format_count(stored.get(key))}, "
                    f"and {_format_count(declared.get(key))} by this object",
                    file=catalogue.root,
                    tensor=name,
                    hint=f"the optimizer state is damaged or of two saves; {_LEAVE_OUT}",
                )


_SIZES = "per_bucket_numel_unpadded"


def _format_count(size: object) -> str:
    return "no tensor" if size is None else f"{size!r:.20} elements"


def _is_parameter(t: GlobalTensor) -> bool:
    name = t.name
    return not BUCKET.fullmatch(name) and split_state(name)[0] == "" and not is_module_buffer(name)


def is_module_buffer(name: str) -> bool:
    """Whether a name is that of a module's buffer, which has no optimizer state."""
    return name.endswith((".expert_bias", ".tid2eid", ".inv_freq", ".local_tokens_per_expert"))


def _flat_buffers(
    buffers: Mapping[FlatBufferKey, list[Bucket]],
    ranks: Mapping[RankPlace, list[Parameter]],
    parallel: ParallelConfig,
    catalogue: Catalogue,
) -> Iterator[FlatBuffer]:
    """Every buffer with the parameters in it."""
    chunks = parallel.vpp
    has_expert_chain = parallel.ep > 1 and any(p.is_expert for ps in ranks.values() for p in ps)
    per_group: dict[tuple[int, int], list[FlatBufferKey]] = {}
    for buffer in buffers:
        per_group.setdefault((buffer.chain, buffer.group), []).append(buffer)
    _check_groups(per_group, ranks, parallel, has_expert_chain, catalogue)
    is_coalesced = bool(catalogue.metadata.get(COALESCED))
    sizes = candidate_bucket_sizes(catalogue)
    for (chain, group), keys in sorted(per_group.items()):
        members = [
            _group_parameters(ranks, parallel, chain, group, k, has_expert_chain)
            for k in range(chunks)
        ]
        # Buffers are numbered over the chunks that have parameters of the group.
        filled = [buffers for buffers in members if buffers]
        dtypes = max(len(keys) // len(filled), 1)
        for buffer in keys:
            if buffer.number >= dtypes * len(filled):
                raise FormatError(
                    f"buffer {buffer.number} of {_group_name(chain, group)}, which by the args has "
                    f"{len(filled)} model chunks",
                    file=catalogue.root,
                    tensor=next(iter(buffers[buffer][0].states.values())),
                    hint=f"the args are of another layout; {_LEAVE_OUT}",
                )
            parameters = filled[buffer.number // dtypes]
            if dtypes > 1:
                parameters = [p for p in parameters if _has_buffer_dtype(p, buffer.dtype)]
            parameters = in_buffer(parameters, sum(b.size for b in buffers[buffer]))
            yield FlatBuffer(
                members=parameters,
                buckets=buffers[buffer],
                is_coalesced=is_coalesced and len(buffers[buffer]) == 1,
                bucket_sizes=sizes,
            )


def _check_groups(
    per_group: Mapping[tuple[int, int], Sequence[FlatBufferKey]],
    ranks: Mapping[RankPlace, list[Parameter]],
    parallel: ParallelConfig,
    has_expert_chain: bool,
    catalogue: Catalogue,
) -> None:
    """Check that every data-parallel group has a buffer for each chunk of its parameters.

    Raises:
        FormatError: groups or buffers are missing, or the layout does not have them.
    """
    p = parallel
    counts = [p.tp * p.pp, p.ep * p.etp * p.pp] if has_expert_chain else [p.tp * p.pp]
    layout = f"tp={p.tp} pp={p.pp}" + (f" ep={p.ep} etp={p.etp}" if has_expert_chain else "")
    expected: set[tuple[int, int]] = set()
    for chain, count in enumerate(counts):
        for group in range(count):
            chunks = [
                k
                for k in range(p.vpp)
                if _group_parameters(ranks, p, chain, group, k, has_expert_chain)
            ]
            numbers = {b.number for b in per_group.get((chain, group), ())}
            if chunks:
                expected.add((chain, group))
            if numbers and len(numbers) % p.vpp and len(numbers) < len(chunks):
                raise FormatError(
                    f"{len(numbers)} buffers of optimizer state for {len(chunks)} model chunks of "
                    f"{_group_name(chain, group)}, which vpp={p.vpp} in the args makes",
                    file=catalogue.root,
                    hint=f"state is missing, or the args are of another layout; {_LEAVE_OUT}",
                )
    if missing := sorted(expected - per_group.keys()):
        raise FormatError(
            f"optimizer state of {len(per_group)} data-parallel groups, but {layout} in the args "
            f"make {len(expected)}",
            file=catalogue.root,
            tensor=_group_name(*missing[0]),
            hint="ranks are missing: "
            + ", ".join(_group_name(*g) for g in missing[:8])
            + _ellipsis(missing),
        )
    if extra := sorted(per_group.keys() - expected):
        raise FormatError(
            f"optimizer state of {_group_name(*extra[0])}, but {layout} in the args have "
            f"{len(expected)} data-parallel groups",
            file=catalogue.root,
            tensor=next(iter(_group_name(*g) for g in extra)),
            hint=f"the args belong to another layout; {_LEAVE_OUT}",
        )


_LEAVE_OUT = "--optimizer-format none leaves the optimizer out"


def _group_name(chain: int, group: int) -> str:
    return f"chained_{chain}." * bool(chain) + f"optimizer.distributed.dp_group_idx_{group}"


def _ellipsis(items: Sequence[object]) -> str:
    return ", ..." if len(items) > 8 else ""


def candidate_bucket_sizes(catalogue: Catalogue) -> tuple[int | None, ...]:
    """Sizes that coalesced buckets may have had: the args do not always state them."""
    args = saved_args(catalogue)
    ranks = [args.get(k) for k in ("data_parallel_size", "context_parallel_size")]
    dp = math.prod(n for n in ranks if isinstance(n, int) and n > 0)
    declared = args.get("ddp_bucket_size")
    return (
        (None, declared)
        if isinstance(declared, int) and declared > 0
        else (None, default_bucket_size(dp))
    )


def _group_parameters(
    ranks: Mapping[RankPlace, list[Parameter]],
    parallel: ParallelConfig,
    chain: int,
    group: int,
    chunk: int,
    has_expert_chain: bool,
) -> list[Parameter]:
    """Parameters of a data-parallel group's chunk; with ep > 1, experts are in another chain.

    Groups number the model-parallel ranks of a pipeline stage, tensor ranks fastest.
    """
    if has_expert_chain and chain:
        stage, rank_in_stage = divmod(group, parallel.ep * parallel.etp)
        ep, tp = divmod(rank_in_stage, parallel.etp)
        return [p for p in ranks.get(RankPlace(stage, chunk, ep, tp), []) if p.is_expert]
    stage, tp = divmod(group, parallel.tp)
    out = of_tensor_rank(ranks, parallel, stage, chunk, tp)
    return [p for p in out if not (p.is_expert and has_expert_chain)]


def _has_buffer_dtype(p: Parameter, dtype: str) -> bool:
    """With several dtypes, fp8 weights (`uint8`) are the matrices of linear layers."""
    if dtype == "uint8":
        return len(p.local_shape) == 2 and ".linear_" in p.key
    return p.dtype == dtype
