"""Adapters in PEFT's format, as `PeftModel.save_pretrained` writes them.

Each linear module has an A `[rank, in]` and a B `[out, rank]`. A parameter of all experts
(`target_parameters`) has A `[E * rank, in]`, expert by expert, and B `[out, rank * E]`, where the
expert is the inner index. Sources: PEFT 0.21's `tuners/lora/layer.py` (`ParamWrapper`) and
`tuners/lora/model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megtool.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, PeftConfig
from megtool.adapters.stored_adapter import (
    AdaptedWeight,
    LazyMatrix,
    StoredAdapter,
    foreign_tensors,
    open_matrix,
    resolve_weight,
    unpaired_matrix,
)
from megtool.adapters.weight_slices import DialectWeights, MatrixSlice
from megtool.errors import FormatError, MappingError, listed
from megtool.formats import open_checkpoint
from megtool.storage.files import Files, is_regular_file
from megtool.tensors.catalogue import Catalogue

PREFIX = "base_model.model."
SAY_TRANSPOSED = ("gpt_oss",)
"""Families whose experts module tells PEFT that its inputs come before its outputs."""

PARAMETERS: tuple[str, str] = ("gate_up_proj", "down_proj")
"""The parameters of a module of all experts, in the order of registration."""

_NAMES = (
    re.compile(
        r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.(?P<adapter>(?!weight$)[^.]+))?\.weight"
    ),
    re.compile(r"(?P<module>.+)\.lora_embedding_(?P<matrix>[AB])(?:\.(?P<adapter>[^.]+))?"),
)


def is_peft(path: Path) -> bool:
    """Whether a folder has an adapter in PEFT's format."""
    return is_regular_file(path / CONFIG_FILE)


def read_peft(path: Path) -> StoredAdapter:
    """The adapter in a folder, of which the headers are read.

    Raises:
        FormatError: files are missing or damaged, or ranks contradict the configuration.
        MappingError: the adapter is more than a low-rank update of each weight.
    """
    config = PeftConfig.read(path / CONFIG_FILE)
    if not is_regular_file(path / WEIGHTS_FILE):
        raise FormatError(
            f"the adapter has no {WEIGHTS_FILE}",
            file=path,
            hint="save it with PEFT's save_pretrained(FOLDER), which writes safetensors",
            error_id="missing-shard",
        )
    catalogue = open_checkpoint(path / WEIGHTS_FILE)
    modules = _pairs(catalogue)
    files = Files()
    weights = [
        _adapted(config, catalogue, module, names, modules, files)
        for module, names in modules.items()
    ]
    return StoredAdapter(
        form="peft",
        path=path,
        dialect="hf",
        weights=tuple(weights),
        settings={
            "rank": config.rank,
            "alpha": config.alpha,
            "dropout": config.dropout,
            "target_modules": config.content.get("target_modules"),
            "base_model": config.content.get("base_model_name_or_path"),
        },
        notes=_notes(config),
        resolve=_resolve,
    )


def _notes(config: PeftConfig) -> tuple[str, ...]:
    if not config.unknown:
        return ()
    return (
        f"{config.path} has settings that PEFT 0.21.2 does not know, and that are ignored, as it "
        f"does: {listed(config.unknown)}",
    )


_EMBEDDING = "#embedding"
_Pair = dict[str, str]
"""The stored names of a module's matrices, by `A` and `B`."""


def _pairs(catalogue: Catalogue) -> dict[str, _Pair]:
    """Modules with both of their matrices, by name; behind that of an embedding is `_EMBEDDING`."""
    modules: dict[str, _Pair] = {}
    others, adapters = [], set()
    for tensor in catalogue.tensors:
        name = tensor.name.removeprefix(PREFIX)
        linear, embedding = (pattern.fullmatch(name) for pattern in _NAMES)
        if (match := linear or embedding) is None:
            others.append(tensor.name)
            continue
        adapters.add(match["adapter"])
        key = match["module"] + (_EMBEDDING if embedding else "")
        modules.setdefault(key, {})[match["matrix"]] = tensor.name
    if others:
        raise foreign_tensors(catalogue, others, "merge it with PEFT (merge_and_unload)")
    if len(adapters) > 1:
        raise MappingError(
            f"the file has several adapters: {listed(sorted(map(str, adapters)))}",
            file=catalogue.root,
            hint="save each to a folder of its own",
            error_id="unsupported-adapter",
        )
    if not modules:
        raise FormatError("the adapter has no matrices", file=catalogue.root)
    for pair in modules.values():
        if len(pair) != 2:
            raise unpaired_matrix(catalogue, pair)
    return modules


def _adapted(
    config: PeftConfig,
    catalogue: Catalogue,
    key: str,
    names: _Pair,
    modules: Mapping[str, _Pair],
    files: Files,
) -> AdaptedWeight:
    module, embedding, _ = key.partition(_EMBEDDING)
    a, b = (open_matrix(catalogue, names[matrix], files) for matrix in "AB")
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise FormatError(
            f"a matrix of LoRA has shape {list(a.shape if len(a.shape) != 2 else b.shape)}",
            file=catalogue.root,
            tensor=names["A"],
        )
    parameter = _parameter(config, module, modules)
    spelled = module.replace(".base_layer", "")
    named = f"{spelled}.{parameter}" if parameter else spelled
    rank, num_experts = config.rank_of(named), 1
    if parameter is not None and a.shape[0] % rank == 0:
        num_experts = a.shape[0] // rank
    if a.shape[0] != b.shape[1] or a.shape[0] != rank * num_experts:
        raise FormatError(
            f"the matrices are of rank {a.shape[0]} and {b.shape[1]}, and {CONFIG_FILE} says "
            f"{rank}",
            file=catalogue.root,
            tensor=names["A"],
            hint="rank_pattern there belongs to another adapter, or is incomplete",
        )
    if num_experts > 1:
        a, b = _split_experts(a, b, num_experts)
    if embedding:  # the weight [vocabulary, hidden] gets the transpose of B A
        a, b = _transposed(b), _transposed(a)
    if parameter is None and not config.targets(spelled):
        raise FormatError(
            f"the adapter has matrices for {spelled!r}, which {CONFIG_FILE} leaves out, and PEFT "
            "would leave them out",
            file=catalogue.root,
            tensor=names["A"],
            hint="target_modules, exclude_modules or layers_to_transform there belongs to another "
            "adapter",
        )
    is_weight = parameter is None or parameter == "weight"
    return AdaptedWeight(
        name=f"{spelled}.weight" if is_weight else named,
        down=a,
        up=b,
        scale=config.scale_of(named),
        tensor=names["A"],
    )


def _parameter(config: PeftConfig, module: str, modules: Mapping[str, _Pair]) -> str | None:
    """The parameter of a module that its matrices are for, where PEFT wraps parameters."""
    spelled = module.replace(".base_layer", "")
    targets = [
        name
        for target in config.target_parameters
        if (parent := target.rpartition(".")[0]) in ("", spelled) or spelled.endswith(f".{parent}")
        for name in [target.rpartition(".")[2]]
    ]
    if len(targets) < 2:
        return targets[0] if targets else None
    ordered = sorted(targets, key=lambda n: PARAMETERS.index(n) if n in PARAMETERS else -1)
    # A module's second parameter is wrapped around the first.
    is_inner = module != spelled or f"{spelled}.base_layer" not in modules
    return ordered[0 if is_inner else 1]


def _split_experts(a: LazyMatrix, b: LazyMatrix, num_experts: int) -> tuple[LazyMatrix, LazyMatrix]:
    """A `[E, rank, in]` and B `[E, out, rank]` of PEFT's matrices for a parameter."""
    rank, (out, inner) = a.shape[0] // num_experts, (b.shape[0], a.shape[1])
    return (
        a.derive(lambda t: t.view(num_experts, rank, inner), (num_experts, rank, inner)),
        b.derive(
            lambda t: t.view(out, rank, num_experts).permute(2, 0, 1).contiguous(),
            (num_experts, out, rank),
        ),
    )


def _transposed(matrix: LazyMatrix) -> LazyMatrix:
    *first, rows, columns = matrix.shape
    return matrix.derive(lambda t: t.mT.contiguous(), (*first, columns, rows))


def _resolve(
    weight: AdaptedWeight, weights: DialectWeights
) -> tuple[AdaptedWeight, list[MatrixSlice]] | None:
    """A weight of a module, or a parameter of all experts, and the canonical weights in it."""
    direct = resolve_weight(weight, weights)
    module, _, parameter = weight.name.rpartition(".")
    if parameter not in PARAMETERS:
        return direct
    if direct is None:
        parts = ("gate", "up") if parameter == PARAMETERS[0] else ("down",)
        slices = weights.expert_slices(module, parts)
        return (weight, slices) if slices else None
    _, slices = direct
    is_told = weights.family is not None and weights.family.name in SAY_TRANSPOSED
    if slices[0].is_transposed and not is_told:
        down, up = _transposed(weight.up), _transposed(weight.down)
        weight = replace(weight, down=down, up=up)
    return weight, slices
