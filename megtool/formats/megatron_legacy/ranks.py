"""The rank folders of a legacy Megatron checkpoint: their ranks, completeness and agreement.

`mp_rank_TT`, `mp_rank_TT_PPP`, `mp_rank_TT_EEE` or `mp_rank_TT_PPP_EEE`: the second part is the
pipeline rank if there is a pipeline, else the expert rank. The args determine which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megtool.errors import FormatError
from megtool.formats.header_reader import short_repr

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_COPY_HINT = "copy the whole folder, from every node that wrote to it"
_ARGS_HINT = "load it with the Megatron that wrote it and save it again, with its args"

_MAX_RANKS = 1 << 20

RankId = tuple[int, int | None, int | None]
"""Tensor, pipeline and expert ranks; None if the folder name has no such part."""

SHARED_ARGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "encoder_pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "max_position_embeddings",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "add_bias_linear",
    "normalization",
    "bf16",
    "fp16",
    "use_distributed_optimizer",
)
"""Args that are equal in all ranks of one checkpoint."""


class RankSizes(NamedTuple):
    """Parallel sizes: tensor, pipeline, expert, and tensor inside experts."""

    tp: int
    pp: int
    ep: int
    etp: int

    def writing_ranks(self) -> dict[RankId, bool]:
        """Every rank that writes a folder; true if it is also the first of its data-parallel ranks.

        A rank writes if it is the first that holds its part of the dense layers or of the experts
        (checkpointing.py). Rank order is tp first; inside experts tp, then ep.
        """
        out: dict[RankId, bool] = {}
        for p in range(self.pp):
            for i in range(max(self.tp, self.etp * self.ep)):
                expert = i // self.etp % self.ep
                rank = (
                    i % self.tp,
                    p if self.pp > 1 else None,
                    expert if self.ep > 1 else None,
                )
                out[rank] = out.get(rank, False) or i < self.tp
        return out


def rank_folder_name(rank: RankId) -> str:
    """The folder name of a rank."""
    return f"mp_rank_{rank[0]:02d}" + "".join(f"_{n:03d}" for n in rank[1:] if n is not None)


def parse_rank_folder(folder: str) -> tuple[int, ...] | None:
    """The numbers in the name of a rank folder; None if it is not a rank folder."""
    match = _FOLDER.fullmatch(folder)
    return tuple(int(g) for g in match.groups() if g is not None) if match else None


def parse_rank_sizes(args: Mapping[str, Any], *, file: Path) -> RankSizes | None:
    """The parallel sizes in args; None if there are none, as in the oldest checkpoints.

    Raises:
        FormatError: a size is invalid.
    """

    def size(default: int, *names: str) -> int:
        for name in names:
            value = args.get(name)
            if value is not None:
                if type(value) is not int or not 0 < value < 1 << 20:
                    raise FormatError(
                        f"args have {name} {short_repr(value)}", file=file, hint=_ARGS_HINT
                    )
                return value
        return default

    tp = size(0, "tensor_model_parallel_size", "model_parallel_size")
    # Releases 0.8 to 0.13 have it, and 0 where a model has no stages of an encoder alone.
    encoder_stages = args.get("encoder_pipeline_model_parallel_size") or 0
    if type(encoder_stages) is not int or not 0 <= encoder_stages < 1 << 20:
        raise FormatError(
            f"args have encoder_pipeline_model_parallel_size {short_repr(encoder_stages)}",
            file=file,
            hint=_ARGS_HINT,
        )
    if not tp:
        return None
    out = RankSizes(
        tp=tp,
        pp=size(1, "pipeline_model_parallel_size") + encoder_stages,
        ep=size(1, "expert_model_parallel_size"),
        etp=size(tp, "expert_tensor_parallel_size"),
    )
    if out.pp * max(out.tp, out.etp * out.ep) > _MAX_RANKS:
        raise FormatError(f"args have too many ranks: {out}", file=file, hint=_ARGS_HINT)
    return out


def identify_ranks(
    folders: Mapping[str, tuple[int, ...]],
    sizes: RankSizes | None,
    names: Mapping[str, Iterable[str]],
    *,
    root: Path,
) -> dict[str, RankId]:
    """The rank of each folder; checks that the checkpoint is complete.

    `names` are the names of each folder's tensors, the same for one layer on every rank. Without
    args they distinguish a pipeline, whose stages have different layers, from experts.

    Raises:
        FormatError: ranks are missing, surplus or ambiguous.
    """
    counts = {len(parts) for parts in folders.values()}
    if len(counts) > 1:
        outlier = next(f for f, parts in folders.items() if len(parts) != max(counts))
        raise FormatError(
            f"{outlier} is named like a rank of another layout than {max(folders, key=len)}",
            file=root,
            hint="folders of two checkpoints are mixed: keep those of one",
        )
    count = counts.pop()
    if sizes is None:
        return _ranks_without_args(folders, names, count, root)
    expected = {rank_folder_name(rank): rank for rank in sizes.writing_ranks()}
    # Some versions numbered pipeline or expert ranks even if their size is 1.
    numbered = {f"{f}_000": r for f, r in expected.items()} if sizes.pp == sizes.ep == 1 else {}
    if count == 2 and numbered:
        expected = numbered
    missing = [f for f in expected if f not in folders]
    if missing:
        raise _missing_ranks_error(missing, len(missing), len(expected), root)
    extra = [f for f in folders if f not in expected]
    if extra:
        raise FormatError(
            f"{extra[0]} is not a rank of tp={sizes.tp} pp={sizes.pp} ep={sizes.ep}, the sizes "
            "in args",
            file=root,
            hint="folders of two checkpoints are mixed: keep those of one",
        )
    return {f: expected[f] for f in folders}


def _ranks_without_args(
    folders: Mapping[str, tuple[int, ...]],
    names: Mapping[str, Iterable[str]],
    count: int,
    root: Path,
) -> dict[str, RankId]:
    experts = False
    if count == 2:
        numbers = sorted({parts[1] for parts in folders.values()})
        first, last = (
            next(f for f, parts in folders.items() if parts[1] == n)
            for n in (numbers[0], numbers[-1])
        )
        if first == last:
            raise FormatError(
                f"cannot decide whether {first} is a pipeline or an expert rank, because there "
                "are no args",
                file=root / first,
                hint=_ARGS_HINT,
            )
        experts = set(names[first]) == set(names[last])
    out: dict[str, RankId] = {}
    for folder, parts in folders.items():
        second = parts[1] if count > 1 else None
        third = parts[2] if count > 2 else None
        out[folder] = (parts[0], None, second) if experts else (parts[0], second, third)
    dense = {(r[0], r[1]) for r in out.values()}
    tp, pp = max(t for t, _ in dense) + 1, max(p or 0 for _, p in dense) + 1
    if len(dense) < tp * pp:
        stages = range(pp) if count > 1 and not experts else (None,)
        absent = ((t, p, None) for t in range(tp) for p in stages if (t, p) not in dense)
        missing = [rank_folder_name(rank) for rank in islice(absent, _MAX_LISTED)]
        raise _missing_ranks_error(missing, tp * pp - len(dense), tp * pp, root)
    return out


_MAX_LISTED = 8


def _missing_ranks_error(folders: list[str], count: int, total: int, root: Path) -> FormatError:
    listed = ", ".join(folders[:_MAX_LISTED]) + (", ..." if count > _MAX_LISTED else "")
    return FormatError(
        f"{count} of {total} ranks are missing: {listed}",
        file=root,
        hint=_COPY_HINT,
        error_id="missing-shard",
    )


def check_agreement(args: Mapping[str, Mapping[str, Any]], *, root: Path) -> None:
    """Compare the args of every folder with those of the first.

    Raises:
        FormatError: args differ that are equal in one checkpoint.
    """
    first = next(iter(args), "")
    for folder, rank_args in args.items():
        for key in SHARED_ARGS:
            value, first_value = rank_args.get(key), args[first].get(key)
            if (
                isinstance(value, _COMPARED)
                and isinstance(first_value, _COMPARED)
                and value != first_value
            ):
                raise FormatError(
                    f"args have {key} {short_repr(value)} here and {short_repr(first_value)} "
                    f"in {first}",
                    file=root / folder,
                    hint="folders of two checkpoints are mixed: keep those of one",
                )


_COMPARED = (int, float, str, type(None))


def check_iterations(iterations: Mapping[str, int | None], *, root: Path) -> int | None:
    """The iteration of all ranks; None if no rank has one.

    Raises:
        FormatError: ranks have different iterations.
    """
    first = next(iter(iterations), "")
    for folder, iteration in iterations.items():
        if iteration != iterations[first]:
            raise FormatError(
                f"is of iteration {iteration}, and {first} of iteration {iterations[first]}",
                file=root / folder,
                hint="a save was interrupted, or two are mixed: choose another iteration",
                error_id="mixed-iterations",
            )
    return iterations.get(first)
