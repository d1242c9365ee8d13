"""From buckets: Megatron's default optimizer format (`dp_reshardable`), by its names on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.containers.pickle_reader import is_global
from megtool.checkpoint.formats.torch_dist_gathered import COALESCED
from megtool.checkpoint.megatron_metadata import args_of, object_value
from megtool.checkpoint.param_groups import OBJECT
from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.megatron import split_state
from megtool.convert.rank_parameters import Parameter, RankPlace, of_tensor_rank, rank_parameters
from megtool.errors import FormatError
from megtool.reshard.megatron.bucket_decoding import Bucket, Holder, decode
from megtool.reshard.megatron.master_weight_check import check_copies
from megtool.tensors.buckets import default_bucket_size
from megtool.tensors.sharded import GlobalTensor

BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.(\w+)\)\.bucket_idx_(\d+)\.(\w+)"
)


@dataclass(frozen=True, slots=True, order=True)
class Buffer:
    """One flat buffer: the optimizer of a chain, its data-parallel group, number and dtype."""

    chain: int
    group: int
    number: int
    dtype: str
    grad_dtype: str


def has_buckets(catalogue: Catalogue) -> bool:
    """The checkpoint holds optimizer state in buckets."""
    return any(BUCKET.fullmatch(t.name) for t in catalogue.tensors)


def buffers_of(catalogue: Catalogue) -> dict[Buffer, list[Bucket]]:
    """The buffers a checkpoint holds, each with its buckets in order.

    Raises:
        FormatError: a bucket is missing, or its states differ in size.
    """
    found: dict[Buffer, dict[int, dict[str, GlobalTensor]]] = {}
    for t in catalogue.tensors:
        if match := BUCKET.fullmatch(t.name):
            chain, group, number, dtype, grad, bucket, state = match.groups()
            buffer = Buffer(int(chain or 0), int(group), int(number), dtype, grad)
            found.setdefault(buffer, {}).setdefault(int(bucket), {})[state] = t
    out: dict[Buffer, list[Bucket]] = {}
    for buffer, numbered in sorted(found.items()):
        if sorted(numbered) != list(range(len(numbered))):
            missing = min(set(range(max(numbered) + 1)) - set(numbered))
            raise FormatError(
                f"bucket {missing} of buffer {buffer.number} ({buffer.dtype}) is missing",
                file=catalogue.root,
                tensor=re.sub(r"bucket_idx_\d+", f"bucket_idx_{missing}", _any_name(numbered)),
                hint="the optimizer state is incomplete; --optimizer none leaves it out",
            )
        out[buffer] = []
        for _, states in sorted(numbered.items()):
            sizes = {t.numel for t in states.values()}
            if len(sizes) != 1:
                said = ", ".join(f"{s} {t.numel}" for s, t in sorted(states.items()))
                raise FormatError(
                    f"states of one bucket differ in size: {said} elements",
                    file=catalogue.root,
                    tensor=min(states.values(), key=lambda t: t.numel).name,
                    hint=f"the optimizer state is damaged; {_LEAVE_OUT}",
                )
            out[buffer].append(Bucket(sizes.pop(), {s: t.name for s, t in states.items()}))
    return out


def _any_name(numbered: Mapping[int, Mapping[str, GlobalTensor]]) -> str:
    return next(t.name for states in numbered.values() for t in states.values())


def from_buckets(
    catalogue: Catalogue,
    config: ModelConfig,
    parallel: ParallelConfig,
    *,
    whole: bool = False,
    alike: bool = True,
) -> Catalogue:
    """The catalogue with its buckets' state as `optimizer.state.STATE.KEY`, one per layer.

    `parallel` is the layout the checkpoint was saved at. `alike` demands that what several ranks
    hold is the same on all.

    Raises:
        FormatError: buckets are missing, or of another size than is said; see also `decode`.
    """
    weights = [t for t in catalogue.tensors if _is_weight(t)]
    found = buffers_of(catalogue)
    if not catalogue.metadata.get(COALESCED):
        check_sizes(catalogue, found)
    ranks = rank_parameters(weights, config, parallel)
    holders = list(_holders(found, ranks, parallel, catalogue))
    out = decode(catalogue, holders, lambda n: BUCKET.fullmatch(n) is not None, whole=whole)
    out.metadata["bucket_dtypes"] = next((b.dtype, b.grad_dtype) for b in found)
    if alike:
        check_copies(out, whole=whole)
    return out


def check_sizes(catalogue: Catalogue, found: Mapping[Buffer, Sequence[Bucket]]) -> None:
    """Compare the buckets with the sizes that every data-parallel group keeps of its own.

    Raises:
        FormatError: a bucket is missing, or has another size.
    """
    for name in catalogue.objects:
        match = OBJECT.fullmatch(name)
        if match is None or match[3] != _SIZES:
            continue
        chain, group = int(match[1] or 0), int(match[2])
        value = object_value(catalogue, catalogue.objects[name])
        said = {
            (number, dtypes[0].qualname, k): size
            for number, by_dtype in enumerate(value if isinstance(value, list) else ())
            for dtypes, sizes in (by_dtype.items() if isinstance(by_dtype, dict) else ())
            if isinstance(dtypes, tuple) and is_global(dtypes[0]) and isinstance(sizes, list)
            for k, size in enumerate(sizes)
        }
        held = {
            (b.number, b.dtype, k): bucket.size
            for b, buckets in found.items()
            if (b.chain, b.group) == (chain, group)
            for k, bucket in enumerate(buckets)
        }
        for key in sorted(said.keys() | held.keys()):
            if said.get(key) != held.get(key):
                number, dtype, bucket = key
                raise FormatError(
                    f"bucket {bucket} of buffer {number} ({dtype}) has {_count(held.get(key))}, "
                    f"and {_count(said.get(key))} by this object",
                    file=catalogue.root,
                    tensor=name,
                    hint="the optimizer state is damaged or of two saves; --optimizer none leaves "
                    "it out",
                )


_SIZES = "per_bucket_numel_unpadded"


def _count(size: object) -> str:
    return "no tensor" if size is None else f"{size!r:.20} elements"


def _is_weight(t: GlobalTensor) -> bool:
    name = t.name
    return not BUCKET.fullmatch(name) and split_state(name)[0] == "" and not is_buffer(name)


def is_buffer(name: str) -> bool:
    """Buffers of modules are no parameters: no optimizer has state for them."""
    return name.endswith((".expert_bias", ".inv_freq", ".local_tokens_per_expert"))


def _holders(
    found: Mapping[Buffer, list[Bucket]],
    ranks: Mapping[RankPlace, list[Parameter]],
    parallel: ParallelConfig,
    catalogue: Catalogue,
) -> Iterator[Holder]:
    """Every buffer with the parameters in it."""
    chunks = parallel.vpp
    has_own = parallel.ep > 1 and any(p.is_expert for ps in ranks.values() for p in ps)
    per_group: dict[tuple[int, int], list[Buffer]] = {}
    for buffer in found:
        per_group.setdefault((buffer.chain, buffer.group), []).append(buffer)
    _check_groups(per_group, ranks, parallel, has_own, catalogue)
    is_coalesced = bool(catalogue.metadata.get(COALESCED))
    sizes = bucket_sizes(catalogue)
    for (chain, group), own in sorted(per_group.items()):
        members = [_members(ranks, parallel, chain, group, k, has_own) for k in range(chunks)]
        # Buffers are numbered over those chunks that have any parameters of the group.
        filled = [found for found in members if found]
        dtypes = max(len(own) // len(filled), 1)
        for buffer in own:
            if buffer.number >= dtypes * len(filled):
                raise FormatError(
                    f"buffer {buffer.number} of {_group(chain, group)}, which by the args has "
                    f"{len(filled)} model chunks",
                    file=catalogue.root,
                    tensor=next(iter(found[buffer][0].states.values())),
                    hint=f"the args are of another layout; {_LEAVE_OUT}",
                )
            held = filled[buffer.number // dtypes]
            if dtypes > 1:
                held = [p for p in held if _belongs(p, buffer.dtype)]
            yield Holder(
                members=held,
                buckets=found[buffer],
                is_coalesced=is_coalesced and len(found[buffer]) == 1,
                bucket_sizes=sizes,
            )


def _check_groups(
    per_group: Mapping[tuple[int, int], Sequence[Buffer]],
    ranks: Mapping[RankPlace, list[Parameter]],
    parallel: ParallelConfig,
    has_own: bool,
    catalogue: Catalogue,
) -> None:
    """Every data-parallel group that has parameters has a buffer for each chunk of them.

    Raises:
        FormatError: groups or buffers are missing, or there are some that the layout does not have.
    """
    p = parallel
    counts = [p.tp * p.pp, p.ep * p.etp * p.pp] if has_own else [p.tp * p.pp]
    layout = f"tp={p.tp} pp={p.pp}" + (f" ep={p.ep} etp={p.etp}" if has_own else "")
    wanted: set[tuple[int, int]] = set()
    for chain, count in enumerate(counts):
        for group in range(count):
            chunks = [k for k in range(p.vpp) if _members(ranks, p, chain, group, k, has_own)]
            found = {b.number for b in per_group.get((chain, group), ())}
            if chunks:
                wanted.add((chain, group))
            if found and len(found) % p.vpp and len(found) < len(chunks):
                raise FormatError(
                    f"{len(found)} buffers of optimizer state for {len(chunks)} model chunks of "
                    f"{_group(chain, group)}, which vpp={p.vpp} in the args makes",
                    file=catalogue.root,
                    hint=f"state is missing, or the args are of another layout; {_LEAVE_OUT}",
                )
    if missing := sorted(wanted - per_group.keys()):
        raise FormatError(
            f"optimizer state of {len(per_group)} data-parallel groups, but {layout} in the args "
            f"make {len(wanted)}",
            file=catalogue.root,
            tensor=_group(*missing[0]),
            hint="ranks are missing: "
            + ", ".join(_group(*g) for g in missing[:8])
            + _more(missing),
        )
    if extra := sorted(per_group.keys() - wanted):
        raise FormatError(
            f"optimizer state of {_group(*extra[0])}, but {layout} in the args have "
            f"{len(wanted)} data-parallel groups",
            file=catalogue.root,
            tensor=next(iter(_group(*g) for g in extra)),
            hint=f"the args belong to another layout; {_LEAVE_OUT}",
        )


_LEAVE_OUT = "--optimizer none leaves the optimizer out"


def _group(chain: int, group: int) -> str:
    return f"chained_{chain}." * bool(chain) + f"optimizer.distributed.dp_group_idx_{group}"


def _more(found: Sequence[object]) -> str:
    return ", ..." if len(found) > 8 else ""


def bucket_sizes(catalogue: Catalogue) -> tuple[int | None, ...]:
    """Sizes that buckets stored one after the other may have had: the args do not always say."""
    args = args_of(catalogue)
    ranks = [args.get(k) for k in ("data_parallel_size", "context_parallel_size")]
    dp = math.prod(n for n in ranks if isinstance(n, int) and n > 0)
    said = args.get("ddp_bucket_size")
    return (None, said) if isinstance(said, int) and said > 0 else (None, default_bucket_size(dp))


def _members(
    ranks: Mapping[RankPlace, list[Parameter]],
    parallel: ParallelConfig,
    chain: int,
    group: int,
    chunk: int,
    has_own: bool,
) -> list[Parameter]:
    """Parameters of a data-parallel group's chunk; experts have a chain of their own when spread.

    Groups count the model-parallel ranks of a pipeline stage, tensor ranks fastest.
    """
    if has_own and chain:
        stage, rest = divmod(group, parallel.ep * parallel.etp)
        ep, tp = divmod(rest, parallel.etp)
        return [p for p in ranks.get(RankPlace(stage, chunk, ep, tp), []) if p.is_expert]
    stage, tp = divmod(group, parallel.tp)
    out = of_tensor_rank(ranks, parallel, stage, chunk, tp)
    return [p for p in out if not (p.is_expert and has_own)]


def _belongs(p: Parameter, dtype: str) -> bool:
    """With several dtypes, fp8 weights (`uint8`) are the matrices of linear layers."""
    if dtype == "uint8":
        return len(p.local_shape) == 2 and ".linear_" in p.key
    return p.dtype == dtype
