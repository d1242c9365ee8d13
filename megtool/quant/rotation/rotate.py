"""A checkpoint whose weights are rotated as they are read, for models that do not notice it.

R1 rotates the hidden state: embeddings and whatever writes it are multiplied from one side,
whatever reads it from the other. RMSNorm commutes with that once its weights are in the weights
after it; the output layer then differs from the embeddings, so tied embeddings become untied. R2
rotates the values of each head, and the columns of the output projection that read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from megtool.digests.crc32c import SIDECAR
from megtool.errors import MappingError
from megtool.formats.safetensors.quantization_config import TRANSFORMS_KEY
from megtool.quant.recipes.rotation import RotationMatrices
from megtool.quant.rotation.orthogonal import OrthogonalMatrix, make_rotation
from megtool.quant.rotation.rotated_tensors import RotatedTensor, with_rotated
from megtool.quant.rotation.transform_config import describe_transforms
from megtool.source.checkpoint import CheckpointSource, require_model
from megtool.source.edited_identity import changed_args, edit_identity, edit_metadata
from megtool.source.subset.layers import set_modelopt_aside
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

EMBEDDING, HEAD, FINAL_NORM = "embed.weight", "head.weight", "norm.weight"

_MLP_PARTS = r"(?:|experts\.\d+\.|shared\.)"
_READS_ATTN = re.compile(r"layers\.\d+\.attn\.(?:q|k|v|gate|q_down|kv_down)\.weight")
_READS_MLP = re.compile(rf"layers\.\d+\.mlp\.{_MLP_PARTS}(?:gate|up|router)\.weight")
_WRITES = re.compile(rf"layers\.\d+\.(?:attn\.o|mlp\.{_MLP_PARTS}down)\.(?:weight|bias)")
_NORMS = re.compile(r"layers\.\d+\.(?:attn|mlp)_norm\.weight|norm\.weight")
_INSIDE = re.compile(
    r"layers\.\d+\.(?:"
    r"attn\.(?:[qkv]\.bias|[qk]_norm\.weight|[qk]_norms\.\d+\.weight|q_down_norm\.weight|q_up\.weight"
    r"|kv_down_norm\.weight|kv_up\.weight|sinks)"
    rf"|mlp\.{_MLP_PARTS}(?:gate|up|router)\.bias|mlp\.router\.expert_bias)"
)
"""Tensors between what reads the hidden state and what writes it."""

_VALUES = re.compile(r"layers\.(\d+)\.attn\.v\.(?:weight|bias)")
_OUTPUTS = re.compile(r"layers\.(\d+)\.attn\.o\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.")


def as_rotated(
    a: CheckpointSource, b: CheckpointSource
) -> tuple[CheckpointSource, CheckpointSource, str | None]:
    """Two checkpoints to compare, and a note: if one of them is rotated, the other one is too.

    Raises:
        FormatError: the record of the rotation is damaged.
        MappingError: it is of another model; or one is rotated, and has no record.
    """
    rotated, plain = (b, a) if a.rotation is None else (a, b)
    record = rotated.rotation
    if not (a.is_canonical and b.is_canonical) or record is None or plain.rotation is not None:
        return a, b, None
    if "settings" not in record:
        raise MappingError(
            "its transform_config says that its weights are rotated, and nothing says by which "
            "matrices",
            file=rotated.path,
            hint=f"megtool quantize records them in {SIDECAR}; compare what both compute: "
            "megtool evaluate",
            error_id="unsupported-rotation",
        )
    settings = RotationMatrices.of_record(record, rotated.path)
    text = f"{plain.path} is compared as if it were rotated by {settings.describe()}"
    other = rotate(plain, settings)
    return (other, b, text) if plain is a else (a, other, text)


def rotate(source: CheckpointSource, settings: RotationMatrices) -> CheckpointSource:
    """The checkpoint as if its weights were rotated, with a record of it; no weights are read here.

    Raises:
        MappingError: the model is not known, is rotated already, would compute something else when
            rotated, or has no rotation of its size.
    """
    config = require_model(source, "a rotation")[1]
    if source.rotation is not None:
        raise MappingError(
            "its weights are rotated already",
            file=source.path,
            hint="leave the rotation out of the recipe, or quantize the original",
            error_id="unsupported-rotation",
        )
    rotations = _Rotations(source, config, settings)
    rotated = rotations.tensors()
    side, catalogue = source.view, source.catalogue
    changed = {t.name for t in rotated}
    touched = frozenset(side.placements[n].stored for n in changed if n in side.placements)
    touched |= {n for n, of in side.copies.items() if _stored(side.placements, of) in touched}
    others = [n for n, p in side.placements.items() if p.stored in touched and n not in changed]
    rotated += [
        RotatedTensor(name=n, placement=side.placements[n], shape=tuple(side.canonical[n].shape))
        for n in others
    ]
    catalogue.check_unchanged()
    new = with_rotated(catalogue, touched, rotated)
    set_modelopt_aside(new)
    placements, canonical = dict(side.placements), dict(side.canonical)
    for t in rotated:
        placements[t.name] = Placement.identity(t.name, t.shape)
        dtype = catalogue[t.placement.stored].dtype
        canonical[t.name] = GlobalTensor(name=t.name, shape=t.shape, dtype=dtype)
    untied = config
    model, edited = source.model, dict(source.edited)
    if settings.r1 and config.embedding.tied_embeddings:
        untied = config.with_fields(tied_embeddings=False)
        args = changed_args(config, untied)
        new.metadata = edit_metadata(catalogue, args)
        if model is not None:
            model, edited = edit_identity(source, model, config, untied, args)
            _check_untied(source, model.hf_config)
    out = replace(
        source,
        catalogue=new,
        model=model,
        view=replace(
            side,
            tensors=tuple(new.tensors),
            placements=placements,
            canonical=canonical,
            dropped=[(n, reason) for n, reason in side.dropped if n not in side.copies],
            copies={},
            padding={n: rows for n, rows in side.padding.items() if n not in touched},
            config=untied,
        ),
        sidecar=None,
        edited=edited,
    )
    transforms = describe_transforms(out, settings, rotations.matrices())
    return replace(out, rotation={"settings": settings.to_json(), TRANSFORMS_KEY: transforms})


def _stored(placements: Mapping[str, Placement], name: str) -> str | None:
    """The stored tensor that another one repeats."""
    if name == HEAD and name not in placements:
        name = EMBEDDING
    return placements[name].stored if name in placements else None


def _check_untied(source: CheckpointSource, hf_config: Mapping[str, object] | None) -> None:
    family = source.model.family if source.model else None
    if family is None or hf_config is None:
        return
    if family.read_config(hf_config).embedding.tied_embeddings:
        raise _refuse(
            source,
            "R1",
            f"a config.json of {family.name!r} always ties the output layer to the embeddings, "
            "which differ once the last norm is in the former",
        )


class _Rotations:
    """The matrices of a model, and what they make of its tensors."""

    def __init__(
        self, source: CheckpointSource, config: ModelConfig, settings: RotationMatrices
    ) -> None:
        self._source, self._config, self._settings = source, config, settings
        self._canonical, self._placements = source.view.canonical, source.view.placements
        self._values: dict[int, OrthogonalMatrix] = {}
        if settings.r1:
            self._check_hidden()
        if settings.r2:
            self._check_values()
        self._hidden = self._make_hidden() if settings.r1 else None

    def matrices(self) -> dict[str, OrthogonalMatrix]:
        """R1 and R2 (that of the first size)."""
        out = {} if self._hidden is None else {"R1": self._hidden}
        return out | ({"R2": next(iter(self._values.values()))} if self._values else {})

    def tensors(self) -> list[RotatedTensor]:
        """All tensors that change."""
        out = []
        for name, tensor in self._canonical.items():
            if name.startswith("layers.") or name in (EMBEDDING, HEAD, FINAL_NORM):
                rotated = self._rotate(name, tensor)
                out += [] if rotated is None else [rotated]
        if self._settings.r1 and HEAD not in self._canonical and EMBEDDING in self._canonical:
            out.append(self._rotate_head(self._canonical[EMBEDDING], EMBEDDING))
        if self._settings.r2 and not self._values:
            raise _refuse(self._source, "R2", "no layer has values of its own")
        return out

    def _rotate(self, name: str, tensor: GlobalTensor) -> RotatedTensor | None:
        rows, columns = self._of_values(name, tensor)
        norm: Placement | None = None
        if self._hidden is not None:
            if name == HEAD:
                return self._rotate_head(tensor, HEAD)
            if _NORMS.fullmatch(name):
                return self._tensor(name, tensor, value=1.0 - self._norm_offset)
            if name == EMBEDDING:
                columns = self._hidden
            elif _READS_ATTN.fullmatch(name) or _READS_MLP.fullmatch(name):
                columns, norm = self._hidden, self._norm_before(name)
            elif _WRITES.fullmatch(name):
                rows = self._hidden
            elif not _INSIDE.fullmatch(name):
                raise _refuse(
                    self._source,
                    "R1",
                    "it is not known whether it reads or writes the hidden state",
                    tensor=name,
                )
        if rows is None and columns is None:
            return None
        return self._tensor(name, tensor, norm=norm, columns=columns, rows=rows)

    def _tensor(
        self,
        name: str,
        tensor: GlobalTensor,
        *,
        norm: Placement | None = None,
        columns: OrthogonalMatrix | None = None,
        rows: OrthogonalMatrix | None = None,
        value: float | None = None,
    ) -> RotatedTensor:
        return RotatedTensor(
            name=name,
            placement=self._placements[name],
            shape=tuple(tensor.shape),
            norm=norm,
            norm_offset=self._norm_offset,
            columns=columns,
            rows=rows,
            value=value,
        )

    def _rotate_head(self, tensor: GlobalTensor, of: str) -> RotatedTensor:
        return RotatedTensor(
            name=HEAD,
            placement=self._placements[of],
            shape=tuple(tensor.shape),
            norm=self._placements.get(FINAL_NORM),
            norm_offset=self._norm_offset,
            columns=self._hidden,
        )

    @property
    def _norm_offset(self) -> float:
        """What is added to the weights of norms."""
        return 1.0 if self._config.norms.zero_centered_norm else 0.0

    def _norm_before(self, name: str) -> Placement | None:
        """The norm whose output a weight reads; None if norms have no weights."""
        match = _LAYER.match(name)
        layer = match[0] if match else ""
        is_mlp = name.startswith(f"{layer}mlp.") and not self._config.norms.shared_norm
        return self._placements.get(f"{layer}{'mlp' if is_mlp else 'attn'}_norm.weight")

    def _of_values(
        self, name: str, tensor: GlobalTensor
    ) -> tuple[OrthogonalMatrix | None, OrthogonalMatrix | None]:
        """R2 of the rows, or of the columns, of a tensor."""
        if not self._settings.r2:
            return None, None
        if match := _VALUES.fullmatch(name):
            return self._value_matrix(int(match[1])), None
        if match := _OUTPUTS.fullmatch(name):
            return None, self._value_matrix(int(match[1]))
        return None, None

    def _value_matrix(self, layer: int) -> OrthogonalMatrix:
        size = self._config.at_layer(layer).attention.value_size
        if size not in self._values:
            self._values[size] = self._make("R2", self._settings.r2, size, 2)
        return self._values[size]

    def _make_hidden(self) -> OrthogonalMatrix:
        size = self._config.hidden_size
        block = self._settings.block_size or size
        if size % block:
            raise _refuse(
                self._source,
                "R1",
                f"block_size {block} does not divide its hidden size {size}",
                hint="a power of two that divides it, or no block_size",
            )
        return self._make("R1", self._settings.r1, block, 1)

    def _make(self, which: str, kind: str, size: int, stream: int) -> OrthogonalMatrix:
        matrix = make_rotation(kind, size, (self._settings.seed, stream))
        if matrix is None:
            hint = "r1: random-matrix takes any size up to 16384"
            raise _refuse(
                self._source,
                which,
                f"no {kind} matrix of order {size} is known",
                hint=hint.replace("r1", which.lower())
                + (", and block_size: 64 smaller matrices" if which == "R1" else ""),
            )
        return matrix

    def _check_hidden(self) -> None:
        c = self._config
        mixers = (
            layer_sets.mamba_layers(c)
            | layer_sets.delta_layers(c)
            | layer_sets.kda_layers(c)
            | layer_sets.conv_layers(c)
        )
        reasons = (
            (
                c.norms.norm != "rmsnorm",
                "its norms are LayerNorm, which subtract the mean: rotated, it is another",
            ),
            (
                c.norms.post_norms or c.norms.norms_after_add or not c.norms.pre_norms,
                "it normalizes what attention and MLP return, with weights for each channel",
            ),
            (c.norms.embedding_norm, "it normalizes embeddings"),
            (not c.norms.first_attn_norm, "its first layer reads embeddings without a norm"),
            (
                c.positions.position_embedding == "learned",
                "it adds learned positions to embeddings",
            ),
            (c.embedding.num_token_types, "it adds token types to embeddings"),
            (c.residual.hyper_streams, "it has several residuals side by side (hyper-connections)"),
            (c.residual.layer_input_size, "its layers read a second embedding"),
            (c.mtp.num_mtp_layers, "it has layers of multi-token prediction"),
            (c.router.router_norm or c.moe.expert_norms, "its experts have norms of their own"),
            (c.moe.moe_latent_size, "its experts read a projection that all of them share"),
            (c.compression.is_compressed, "it compresses keys"),
            (mixers, "it has mixers other than attention"),
            (
                c.bidirectional or c.head.masked_head or c.head.num_labels,
                "it is no decoder of text",
            ),
            (self._source.view.towers(), "it has parts other than text, which write to it"),
        )
        for is_so, reason in reasons:
            if is_so:
                raise _refuse(self._source, "R1", reason)

    def _check_values(self) -> None:
        c = self._config
        reasons = (
            (c.latent.kv_lora_rank, "its values come out of a latent vector (MLA)"),
            (c.compression.is_compressed, "its keys and values are one vector"),
            (
                c.attention.value_norm or layer_sets.tied_value_layers(c),
                "its values are normalized, or are its keys",
            ),
            (c.attention.attn_output_gate, "the output of its heads is multiplied by a gate"),
        )
        for is_so, reason in reasons:
            if is_so:
                raise _refuse(self._source, "R2", reason)


def _refuse(
    source: CheckpointSource,
    which: str,
    reason: str,
    *,
    tensor: str | None = None,
    hint: str | None = None,
) -> MappingError:
    other = "R2" if which == "R1" else "R1"
    return MappingError(
        f"{which} cannot rotate this model: {reason}",
        file=source.path,
        tensor=tensor,
        hint=hint or f"leave {which.lower()} out of the recipe's rotation; {other} may be possible",
        error_id="unsupported-rotation",
    )
