"""The folder of an EAGLE-3 draft head: config.json and safetensors, checked against a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megtool.convert.families.detection import family
from megtool.convert.families.draft_heads import (
    compare_head,
    find_draft_head,
    find_wrong_size,
    usual_name,
)
from megtool.errors import FormatError, MappingError, UsageError
from megtool.formats import open_checkpoint
from megtool.model.positions.rotary import Rotary
from megtool.model.stacks.draft_head import DraftHead
from megtool.parallel.process_groups import ProcessGroups
from megtool.plan.memory import as_torch
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.reader import CheckpointReader

DEFAULT_DRAFTS = 3
_MOST_DRAFTS = 32
_FLOATS = ("float32", "bfloat16", "float16")
_INTEGERS = ("int64", "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadFiles:
    """A head that was checked, and how many drafts it makes in a step.

    `layers` are those of the model, from 0 on, whose outputs it reads. `names` are the stored names
    of tensors by the ones that they have in ModelOpt's export from Transformers.
    """

    path: Path
    catalogue: Catalogue
    config: ModelConfig
    layers: tuple[int, ...]
    names: Mapping[str, str]
    norm_before_residual: bool
    num_drafts: int

    @classmethod
    def open(cls, path: Path, model: ModelConfig, num_drafts: int | None = None) -> DraftHeadFiles:
        """Read the headers of a head for a model; `num_drafts` is 3 where nothing is said.

        Raises:
            FormatError: there is no checkpoint, or no EAGLE-3 head in it, or config.json has
                impossible sizes, or a tensor does not fit, or is quantized.
            MappingError: tensors are missing, the head is of another model or has settings that no
                Llama has, or the model can have none.
            UsageError: the number of drafts is impossible.
        """
        catalogue = open_checkpoint(path)
        stored = catalogue.metadata.get("config")
        stored = stored if isinstance(stored, dict) else {}
        kind = find_draft_head(stored)
        shapes = {t.name: tuple(t.shape) for t in catalogue.tensors}
        compared = compare_head(stored, shapes)
        if kind is None or compared is None:
            wrong = find_wrong_size(stored, len(shapes)) if kind and kind[1] == "EAGLE-3" else None
            if wrong is not None:
                raise FormatError(
                    f"--speculative: in config.json {wrong}",
                    file=path,
                    hint="copy the head again, with the config.json that was exported with it",
                )
            what = "no draft head" if kind is None else f"a draft head of another kind ({kind[0]})"
            raise FormatError(
                f"--speculative: the folder holds {what}",
                file=path,
                hint="`finetune --eagle` writes EAGLE-3 heads: DST/iter_*/eagle",
            )
        _check_tensors(path, *compared)
        _check_dtypes(path, stored, catalogue)
        _check_model(path, stored, model)
        names = {usual_name(name): name for name in shapes}
        if len(names) < len(shapes):
            raise FormatError(
                "tensors are stored twice, as `layers.0` and as `midlayer`",
                file=path,
                tensor=next(name for name in shapes if name not in names.values()),
                hint="keep those of one export",
            )
        layers = _read_layers(stored, model, path)
        width = shapes[names["fc.weight"]][1]
        if width != len(layers) * model.hidden_size:
            raise MappingError(
                f"the head reads {width} elements of {len(layers)} layers, and the model's states "
                f"have {model.hidden_size} each",
                file=path,
                tensor=names["fc.weight"],
                hint="give the model that the head was trained beside",
            )
        own = stored.get("draft_vocab_size") or stored["vocab_size"]
        if own != model.embedding.vocab_size and "lm_head.weight" not in names:
            raise MappingError(
                f"the head has {own} tokens and no output layer of its own",
                file=path,
                tensor="lm_head.weight",
                error_id="missing-tensors",
            )
        if num_drafts is not None and not 1 <= num_drafts <= _MOST_DRAFTS:
            raise UsageError(f"--num-drafts is {num_drafts}", hint=f"1 to {_MOST_DRAFTS}")
        return cls(
            path=path,
            catalogue=catalogue,
            config=_read_llama_config(path, stored),
            layers=layers,
            names=names,
            norm_before_residual=_read_flag(path, stored, "norm_before_residual"),
            num_drafts=num_drafts or DEFAULT_DRAFTS,
        )

    def load(self, *, dtype: torch.dtype, device: torch.device) -> DraftHead:
        """The head with its weights, in `dtype` on `device`, the same on every rank.

        Raises:
            FormatError: tensors are damaged, or no numbers, or tokens are not the model's.
        """
        head = DraftHead(
            self.config,
            ProcessGroups.alone(device),
            num_states=len(self.layers),
            state_size=self.catalogue[self.names["fc.weight"]].shape[1] // len(self.layers),
            norm_before_residual=self.norm_before_residual,
            dtype=dtype,
        )
        with CheckpointReader(self.catalogue, Files()) as reader:

            def read(name: str) -> Tensor:
                tensor = _read(reader, self.names[name])
                if not bool(torch.isfinite(tensor).all()):
                    raise FormatError(
                        "the tensor holds a NaN or an infinity",
                        file=self.path,
                        tensor=self.names[name],
                    )
                return tensor

            for module, name, parts in _parameters(self.config):
                tensors = [read(part) for part in parts]
                weight = tensors[0]
                if len(parts) == 3:
                    weight = _fuse(tensors, self.config.attention.num_kv_heads)
                elif len(parts) == 2:
                    weight = torch.cat(tensors)
                owner = head.get_submodule(module)
                setattr(owner, name, nn.Parameter(weight.to(device, dtype), requires_grad=False))
            for name, stored in (
                ("lm_head", "lm_head.weight"),
                ("embedding", "embed_tokens.weight"),
            ):
                if stored in self.names:
                    setattr(head, name, read(stored).to(device, dtype))
            if "d2t" in self.names and head.lm_head is not None:
                head.tokens = self._tokens(_read(reader, self.names["d2t"])).to(device)
        return head.eval()

    def _tokens(self, differences: Tensor) -> Tensor:
        """The model's tokens of the head's: differences added to their numbers."""
        tokens = differences.long() + torch.arange(len(differences))
        inside = (tokens >= 0) & (tokens < self.config.embedding.vocab_size)
        if not bool(inside.all()) or len(set(tokens.tolist())) < len(tokens):
            what = "names a token twice" if bool(inside.all()) else "names no token of the model"
            raise FormatError(
                f"the table of tokens {what}", file=self.path, tensor=self.names["d2t"]
            )
        return tokens


def _read(reader: CheckpointReader, name: str) -> Tensor:
    array = np.ascontiguousarray(reader.open_stored(name).read())
    return as_torch(array.reshape(-1).view(np.uint8), reader.catalogue[name])


def _check_tensors(
    path: Path,
    missing: Sequence[str],
    wrong: Sequence[tuple[str, str]],
    unknown: Sequence[str],
) -> None:
    if missing:
        raise MappingError(
            f"the head lacks {len(missing)} tensors",
            file=path,
            tensor=missing[0],
            hint="`megtool lint` lists them",
            error_id="missing-tensors",
        )
    if wrong or unknown:
        name, problem = wrong[0] if wrong else (unknown[0], "is not in an EAGLE-3 head")
        raise FormatError(
            f"the tensor {problem}", file=path, tensor=name, hint="`megtool lint` lists all"
        )


def _check_dtypes(path: Path, stored: Mapping[str, Any], catalogue: Catalogue) -> None:
    """Check that weights are floating point as they are stored, and numbers of tokens integers.

    Raises:
        FormatError: the head is quantized, or a tensor has another dtype.
    """
    if stored.get("quantization_config") is not None:
        raise FormatError(
            "the head is quantized (quantization_config in config.json)",
            file=path,
            hint="give the head from before it was quantized, in float32, bfloat16 or float16",
        )
    for tensor in catalogue.tensors:
        allowed = {"d2t": _INTEGERS, "t2d": None}.get(tensor.name, _FLOATS)
        if allowed is not None and tensor.dtype.name not in allowed:
            raise FormatError(
                f"the tensor has the dtype {tensor.dtype.name}",
                file=path,
                tensor=tensor.name,
                hint=f"a head has {', '.join(allowed)} there",
            )


def _read_flag(path: Path, section: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A setting that is true or false.

    Raises:
        FormatError: it is neither.
    """
    value = section.get(name)
    if value is not None and not isinstance(value, bool):
        raise FormatError(
            f"{name} is {value!r:.80} in config.json", file=path, hint="true or false"
        )
    return default if value is None else value


def _check_model(path: Path, stored: Mapping[str, Any], model: ModelConfig) -> None:
    """Check that a head is of a model of these sizes.

    Raises:
        MappingError: it is not, or the model cannot have a head.
    """
    for is_so, kind in (
        (model.num_decoder_layers, "a model of an encoder and a decoder"),
        (model.residual.hyper_streams, "a model with several residuals (hyper-connections)"),
    ):
        if is_so:
            raise MappingError(f"--speculative: {kind} has no draft head", file=path)
    for name, own in (
        ("vocab_size", model.embedding.vocab_size),
        ("hidden_size", model.hidden_size),
    ):
        if stored[name] != own:
            raise MappingError(
                f"the head is of a model with {name} {stored[name]}, and this one has {own}",
                file=path,
                hint="give the model that the head was trained beside",
            )


def _read_layers(stored: Mapping[str, Any], model: ModelConfig, path: Path) -> tuple[int, ...]:
    """The layers whose outputs the head reads, from 0 on, ascending as ModelOpt and engines read
    them, in whatever order they are listed.

    Where config.json names none they are those of EAGLE-3's authors. Some heads number the layer
    that comes after such an output: the same three layers are then [2, n / 2, n - 3], as engines
    count them (sgl-project/sglang#25454).

    Raises:
        FormatError: a layer is listed twice.
        MappingError: the model has no such layer, or the head reads none.
    """
    total = model.num_layers
    usual = sorted({min(1, total - 1), max(0, total // 2 - 1), max(0, total - 4)})
    section = stored.get("eagle_config") or {}
    if not _read_flag(path, section, "use_aux_hidden_state", default=True):
        raise MappingError(
            "the head reads no states of layers (use_aux_hidden_state is false in config.json)",
            file=path,
            hint="give a head that `finetune --eagle` wrote, or --speculative none",
        )
    listed = section.get("eagle_aux_hidden_state_layer_ids")
    if not listed or listed == [2, total // 2, total - 3]:
        return tuple(usual)
    if not all(type(n) is int and 0 <= n < total for n in listed):
        raise MappingError(
            f"the head reads layers {str(listed)[:80]}, and the model has {total}",
            file=path,
            hint="give the model that the head was trained beside",
        )
    if len(set(listed)) < len(listed):
        raise FormatError(
            f"eagle_aux_hidden_state_layer_ids is {str(listed)[:80]} in config.json",
            file=path,
            hint="every layer once",
        )
    return tuple(sorted(listed))


def _read_llama_config(path: Path, stored: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Llama with the head's layers, whose rotary embedding can be computed.

    Raises:
        MappingError: a setting is impossible, or no Llama's.
    """
    try:
        own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        config = family("llama").read_config({**stored, **own, "tie_word_embeddings": False})
        Rotary(config)
    except MappingError as e:
        problem, hint = e.message, e.hint
    except (TypeError, ValueError, ArithmeticError, AttributeError) as e:
        problem, hint = str(e), None
    else:
        return config
    raise MappingError(
        f"the head's config.json cannot be used: {problem}",
        file=path,
        hint=hint or "copy the head again, with the config.json that was exported with it",
    )


def _parameters(config: ModelConfig) -> Iterator[tuple[str, str, list[str]]]:
    """Every parameter: its module, its name there, and the stored tensors that make it."""
    yield "fc", "weight", ["fc.weight"]
    yield "norm", "weight", ["norm.weight"]
    for n in range(config.num_layers):
        layer, prefix = f"layers.{n - 1}" if n else "first_layer", f"layers.{n}."
        attention, mlp = f"{layer}.self_attention", f"{layer}.mlp"
        if n:
            norm = f"{attention}.linear_qkv", "layer_norm_weight"
            yield *norm, [f"{prefix}input_layernorm.weight"]
        else:
            yield f"{layer}.embedding_norm", "weight", [f"{prefix}input_layernorm.weight"]
            yield f"{layer}.hidden_norm", "weight", [f"{prefix}hidden_norm.weight"]
        fc1 = f"{mlp}.linear_fc1"
        yield fc1, "layer_norm_weight", [f"{prefix}post_attention_layernorm.weight"]
        for name, has in (
            ("weight", (True, True, True)),
            (
                "bias",
                (config.attention.qkv_bias, config.attention.attn_out_bias, config.mlp.mlp_bias),
            ),
        ):
            in_attention = [f"{prefix}self_attn.{x}_proj.{name}" for x in "qkvo"]
            in_mlp = [f"{prefix}mlp.{x}_proj.{name}" for x in ("gate", "up", "down")]
            if has[0]:
                yield f"{attention}.linear_qkv", name, in_attention[:3]
            if has[1]:
                yield f"{attention}.linear_proj", name, in_attention[3:]
            if has[2]:
                yield fc1, name, in_mlp[:2]
                yield f"{mlp}.linear_fc2", name, in_mlp[2:]


def _fuse(tensors: Sequence[Tensor], num_groups: int) -> Tensor:
    """Queries, keys and values of one group of heads after another, as Megatron stores them."""
    parts = [t.reshape(num_groups, -1, *t.shape[1:]) for t in tensors]
    return torch.cat(parts, 1).flatten(0, 1)
