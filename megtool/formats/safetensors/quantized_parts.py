"""The parts of one quantized weight: their tensors, and how their shapes correspond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.formats.header_reader import read_exact
from megtool.number_formats.decode import (
    CODES,
    COLUMNS,
    DIVISOR,
    LOW_RANK_DOWN,
    LOW_RANK_UP,
    SCALE,
    SCALE_2,
    ZEROS,
)
from megtool.number_formats.packed_parts import WHOLE, PackedPart, PartSpan
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor

Shape = tuple[int, ...]

MISSING = "missing-tensors"
"""The id of errors of tensors that belong to others, and are not there."""

AS_STORED_HINT = (
    "name one .safetensors file instead of the folder to have its tensors as they are stored"
)
FP8_SCALES = ("_scale_inv", "_scale", "scale")
"""How names of scales end with the method `fp8`; the last is DeepSeek-V4's, of a sibling."""
LOW_RANK_SUFFIXES = {
    LOW_RANK_UP: ("weight_quantizer._svdquant_lora_b", "svdquant_lora_b"),
    LOW_RANK_DOWN: ("weight_quantizer._svdquant_lora_a", "svdquant_lora_a"),
}
"""What ModelOpt 0.47 calls the matrices of SVDQuant's branch: in exports of transformers' models
(`postprocess_state_dict` of `export/quant_utils.py` leaves the names of its modules), and of
diffusers' (`_promote_quantizer_tensors_to_module` of `export/unified_export_hf.py`)."""
_MX_BLOCK = 32
_NV_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantGranularity:
    """The granularity a quantization config declares; any value may apply to any weight.

    `groups` are numbers of columns that share a scale, `blocks` are (rows, columns) that share one,
    `bits` are widths of an element. `is_stated`: the config names groups or blocks, so sizes are
    not guessed. `scale_suffixes` follow a weight's name in the name of its scale, the usual first.
    """

    groups: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    is_stated: bool
    bits: tuple[int, ...]
    scale_suffixes: tuple[str, ...] = ("_scale", "_scale_inv")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantGranularity:
        """Collect the sizes from all levels of the config."""
        method = str(config.get("quant_method", "")).lower()
        groups: list[int] = []
        blocks: list[tuple[int, int]] = []
        bits: list[int] = []
        pending: list[Any] = [config]
        while pending:
            value = pending.pop()
            if isinstance(value, list):
                pending += value
            if not isinstance(value, dict):
                continue
            for key, inner in value.items():
                if key == "group_size" and type(inner) is int and inner > 0:
                    groups.append(inner)
                elif key == "num_bits" and type(inner) is int:
                    bits.append(inner)
                elif key in ("weight_block_size", "block_structure") and _is_block(inner):
                    blocks.append((inner[0], inner[1]))
                else:
                    pending.append(inner)
        return cls(
            groups=tuple(dict.fromkeys(groups)),
            blocks=tuple(dict.fromkeys([*blocks, (128, 128)])),
            is_stated=bool(groups or blocks),
            bits=tuple(dict.fromkeys(bits)),
            scale_suffixes=FP8_SCALES if method == "fp8" else ("_scale", "_scale_inv"),
        )


def _is_block(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A packed tensor: its plain name, and its parts (codes first) with the names of their stored
    tensors. `packing` is as `number_formats.layout` writes it."""

    name: str
    shape: Shape
    packing: str
    parts: tuple[tuple[PackedPart, str], ...]

    @property
    def codes(self) -> str:
        """The name of the stored tensor of codes."""
        return self.parts[0][1]

    def part(self, role: str) -> tuple[PackedPart, str] | None:
        """The part of a role and the tensor that holds it; None where there is none."""
        return next(((p, n) for p, n in self.parts if p.role == role), None)


@dataclass(slots=True)
class PartFinder:
    """Finds the stored tensors of packed weights. `used` are those that belong to one;
    `requantization_scales` are those among them that decoding does not need."""

    catalogue: Catalogue
    granularity: QuantGranularity
    used: set[str] = field(default_factory=set)
    requantization_scales: set[str] = field(default_factory=set)

    def find(self, base: str, *suffixes: str) -> GlobalTensor | None:
        """The companion of a weight `base` that has one of `suffixes`, counted as used.

        Names are `weight` and `weight_scale`, `gate_up_proj` and `gate_up_proj_weight_scale`, or a
        sibling of the weight (`pre_quant_scale`).
        """
        stem = base.rpartition(".")[0]
        for suffix in suffixes:
            names = [base + suffix, f"{base}_weight{suffix}"]
            if not suffix.startswith("_"):
                names = [f"{stem}.{suffix}" if stem else suffix, f"{base}_{suffix}"]
            for name in names:
                if name in self.catalogue:
                    self.used.add(name)
                    return self.catalogue[name]
        return None

    def require(self, codes: GlobalTensor, *suffixes: str, base: str | None = None) -> GlobalTensor:
        """Like `find`, but the tensor is required.

        Raises:
            FormatError: it is missing.
        """
        base = codes.name if base is None else base
        tensor = self.find(base, *suffixes)
        if tensor is None:
            raise self.error(
                codes,
                f"its scale {base + suffixes[0]!r} is missing",
                hint="is the download complete?",
                error_id=MISSING,
            )
        return tensor

    def read(self, t: GlobalTensor) -> tuple[bytes, Path]:
        """Read a small stored tensor; also returns its file.

        Raises:
            FormatError: the file is truncated.
        """
        row, extents = self.catalogue.index[t.name], self.catalogue.extents
        path = self.catalogue.path(int(extents.file[row]))
        return read_exact(path, int(extents.offset[row]), t.num_bytes), path

    def error(
        self,
        t: GlobalTensor,
        message: str,
        hint: str | None = None,
        error_id: str | None = None,
    ) -> FormatError:
        """An error about a stored tensor."""
        row = self.catalogue.index[t.name]
        file = self.catalogue.path(int(self.catalogue.extents.file[row]))
        hint = f"{hint} {AS_STORED_HINT}" if hint else AS_STORED_HINT
        return FormatError(message, file=file, tensor=t.name, hint=hint, error_id=error_id)

    def scale_spans(
        self, scale: GlobalTensor, shape: Shape, t: GlobalTensor
    ) -> tuple[PartSpan, ...]:
        """The elements that each dimension of a scale (or zero point) of `t` applies to.

        Raises:
            FormatError: the two shapes do not match.
        """
        # FP4 is stored two per byte; its group sizes are checked in `find_byte_codes`.
        guess = not self.granularity.is_stated or shape != t.shape
        spans = match_spans(scale.shape, shape, self.granularity, guess=guess)
        if spans is None:
            sizes = [*self.granularity.groups, *(f"{r} x {c}" for r, c in self.granularity.blocks)]
            raise self.error(
                t,
                f"{scale.name!r} of shape {list(scale.shape)} cannot scale a tensor of shape "
                f"{list(shape)} in blocks of {' or '.join(map(str, sizes))}",
                hint="do the files belong together?",
            )
        return spans

    def make_part(
        self, role: str, t: GlobalTensor, shape: Shape, codes: GlobalTensor
    ) -> PackedPart:
        """A scale or zero point as a part."""
        kind = "float8_e8m0fnu" if role == SCALE and t.dtype.name == "uint8" else t.dtype.name
        spans = self.scale_spans(t, shape, codes)
        return PackedPart(role=role, dtype=kind, shape=t.shape, spans=spans)

    def find_parts(
        self,
        codes: GlobalTensor,
        base: str,
        shape: Shape,
        *,
        codes_parts: Sequence[tuple[PackedPart, str]],
    ) -> tuple[tuple[PackedPart, str], ...]:
        """The parts of a weight: `codes_parts`, its scale, and optional further scales."""
        out = list(codes_parts)
        scale = self.require(codes, *self.granularity.scale_suffixes, base=base)
        out.append((self.make_part(SCALE, scale, shape, codes), scale.name))
        for role, suffix in ((SCALE_2, "_scale_2"), (DIVISOR, "_global_scale")):
            if second_scale := self.find(base, suffix):
                out.append((self.make_part(role, second_scale, shape, codes), second_scale.name))
        if smoothing := self.find(base, "pre_quant_scale"):
            if smoothing.shape not in ((shape[-1],), (1,), ()):
                raise self.error(codes, f"{smoothing.name!r} has shape {list(smoothing.shape)}")
            span = (
                (PartSpan(len(shape) - 1),)
                if smoothing.shape == (shape[-1],)
                else (PartSpan(WHOLE),)
            )
            part = PackedPart(
                role=COLUMNS,
                dtype=smoothing.dtype.name,
                shape=smoothing.shape,
                spans=span if smoothing.shape else (),
            )
            out.append((part, smoothing.name))
        if unsupported := self.find(base, "_g_idx"):
            raise self.error(
                codes, f"is quantized with activation order ({unsupported.name!r}), not decoded"
            )
        return tuple(out) + self._find_low_rank(codes, base, shape)

    def _find_low_rank(
        self, codes: GlobalTensor, base: str, shape: Shape
    ) -> tuple[tuple[PackedPart, str], ...]:
        """The two matrices of SVDQuant's branch; none if the weight has no branch."""
        tensors = {role: self.find(base, *names) for role, names in LOW_RANK_SUFFIXES.items()}
        up, down = tensors[LOW_RANK_UP], tensors[LOW_RANK_DOWN]
        if up is None and down is None:
            return ()
        if up is None or down is None:
            have, role = (up, LOW_RANK_DOWN) if down is None else (down, LOW_RANK_UP)
            raise self.error(
                codes,
                f"has {have.name if have else ''!r} of a low-rank branch and no "
                f"{LOW_RANK_SUFFIXES[role][0]}",
                hint="is the download complete?",
                error_id=MISSING,
            )
        rank = up.shape[-1] if up.shape else 0
        if not rank or (up.shape, down.shape) != ((shape[0], rank), (rank, shape[-1])):
            raise self.error(
                codes,
                f"{up.name!r} of shape {list(up.shape)} and {down.name!r} of "
                f"{list(down.shape)} are no low-rank branch of a weight of {list(shape)}",
                hint="do the files belong together?",
            )
        spans = {
            LOW_RANK_UP: (PartSpan(0), PartSpan(WHOLE)),
            LOW_RANK_DOWN: (PartSpan(WHOLE), PartSpan(1)),
        }
        return tuple(
            (PackedPart(role=role, dtype=t.dtype.name, shape=t.shape, spans=spans[role]), t.name)
            for role, t in ((LOW_RANK_UP, up), (LOW_RANK_DOWN, down))
        )


def match_spans(
    scale: Shape, shape: Shape, granularity: QuantGranularity, *, guess: bool = True
) -> tuple[PartSpan, ...] | None:
    """The elements of a tensor of `shape` that each dimension of a scale applies to.

    None if they do not match. A single value applies to all; a missing last dimension means one
    value per row.

    Without `guess`, only declared block sizes are allowed: otherwise a scale that lost rows would
    look like one of larger blocks.
    """
    if all(n == 1 for n in scale):
        return tuple(PartSpan(WHOLE) for _ in scale)
    if len(scale) == 4 and len(shape) == 2 and scale[1] == scale[3] == 1:  # blocks of ModelOpt
        inner = match_spans((scale[0], scale[2]), shape, granularity, guess=guess)
        return None if inner is None else (inner[0], PartSpan(WHOLE), inner[1], PartSpan(WHOLE))
    if 0 < len(scale) < len(shape) and scale == shape[: len(scale)]:
        return tuple(PartSpan(d) for d in range(len(scale)))
    if len(scale) != len(shape):
        return None
    out: list[PartSpan] = []
    for d, (n, size) in enumerate(zip(scale, shape, strict=True)):
        last = len(shape) - 1
        block_sizes = (
            [b[1] for b in granularity.blocks] if d == last else [b[0] for b in granularity.blocks]
        )
        block_sizes = (
            [*granularity.groups, *block_sizes]
            if d == last
            else block_sizes
            if d == last - 1
            else []
        )
        per = next((p for p in block_sizes if -(-size // p) == n), None)
        if n == size:
            out.append(PartSpan(d))
        elif n == 1 and (guess or per is not None or _is_plain(scale, shape)):
            out.append(PartSpan(WHOLE))
        elif per is not None:
            out.append(PartSpan(d, per))
        elif guess and d >= last - 1 and n and size % n == 0:
            out.append(PartSpan(d, size // n))
        else:
            return None
    return tuple(out)


def _is_plain(scale: Shape, shape: Shape) -> bool:
    """Whether every dimension has one value for all or one for each: no blocks."""
    return all(n in (1, size) for n, size in zip(scale, shape, strict=True))


def find_one_byte_codes(stored: PartFinder, t: GlobalTensor, kind: str) -> PackedWeight:
    """A weight of one byte per element: FP8, INT8, or MXFP8 (whose scale is uint8)."""
    codes = PackedPart(
        role=CODES,
        dtype=t.dtype.name,
        shape=t.shape,
        spans=tuple(PartSpan(d) for d in range(len(t.shape))),
    )
    parts = stored.find_parts(t, t.name, t.shape, codes_parts=[(codes, t.name)])
    if zeros := stored.find(t.name, "_zero_point"):
        parts += ((stored.make_part(ZEROS, zeros, t.shape, t), zeros.name),)
    return _make_weight(t, t.name, t.shape, kind, parts)


def find_byte_codes(stored: PartFinder, t: GlobalTensor, base: str) -> PackedWeight:
    """FP4 codes, two per byte along the columns: NVFP4 (E4M3 scales) or MXFP4 (E8M0 scales)."""
    if t.dtype.itemsize != 1 or not t.shape:
        raise stored.error(t, f"codes of {t.dtype} {list(t.shape)} are not known")
    shape = (*t.shape[:-1], t.shape[-1] * 2)
    last = len(shape) - 1
    spans = (*(PartSpan(d) for d in range(last)), PartSpan(last, 2))
    codes = PackedPart(role=CODES, dtype="uint8", shape=t.shape, spans=spans)
    parts = stored.find_parts(t, base, shape, codes_parts=[(codes, t.name)])
    scale = parts[1][0]
    if scale.dtype not in ("float8_e4m3fn", "float8_e8m0fnu"):
        raise stored.error(t, f"FP4 scales of {scale.dtype} are not known")
    per = next((s.per for s in scale.spans if s.dim == last), shape[last])
    block_sizes = (_MX_BLOCK,) if scale.dtype == "float8_e8m0fnu" else (_NV_BLOCK, _MX_BLOCK)
    if per not in block_sizes:
        raise stored.error(t, f"FP4 scales for every {per} columns are not known")
    kind = "mxfp4" if scale.dtype == "float8_e8m0fnu" else "nvfp4"
    if kind == "nvfp4" and not any(p.role in (SCALE_2, DIVISOR) for p, _ in parts):
        raise stored.error(
            t,
            "its second scale (weight_scale_2 or weight_global_scale) is missing",
            hint="is the download complete?",
            error_id=MISSING,
        )
    return _make_weight(t, base, shape, kind, parts)


def find_word_codes(stored: PartFinder, t: GlobalTensor) -> PackedWeight:
    """`pack-quantized` of compressed-tensors: 4 or 8 bits per element in int32 words."""
    base = t.name.removesuffix("_packed")
    shape_tensor = stored.find(base, "_shape")
    if shape_tensor is None or len(t.shape) != 2:
        is_missing = shape_tensor is None
        raise stored.error(
            t,
            "its shape is missing" if is_missing else "is not a matrix",
            error_id=MISSING if is_missing else None,
        )
    shape = _read_shape(stored, shape_tensor)
    bits = next(
        (
            b
            for b in (*stored.granularity.bits, 4, 8)
            if len(shape) == 2 and (shape[0], -(-shape[1] * b // 32)) == t.shape
        ),
        None,
    )
    if bits not in (4, 8):
        reason = f"{bits} bits per element" if bits else f"shape {list(shape)}"
        raise stored.error(t, f"{list(t.shape)} words, declared as {reason}, are not decoded")
    per = 32 // bits
    codes = PackedPart(
        role=CODES, dtype="int32", shape=t.shape, spans=(PartSpan(0), PartSpan(1, per))
    )
    parts = stored.find_parts(t, base, shape, codes_parts=[(codes, t.name)])
    if zeros := stored.find(base, "_zero_point"):
        columns = parts[1][0].spans[-1] if len(parts[1][0].shape) == 2 else PartSpan(WHOLE)
        packed = -(-shape[0] // per)
        groups = parts[1][0].shape[-1] if len(parts[1][0].shape) == 2 else 1
        if zeros.dtype.name == "int32" and zeros.shape == (packed, groups):
            part = PackedPart(
                role=ZEROS, dtype="int32", shape=zeros.shape, spans=(PartSpan(0, per), columns)
            )
        else:
            part = stored.make_part(ZEROS, zeros, shape, t)
        parts += ((part, zeros.name),)
    return _make_weight(t, base, shape, "int4" if bits == 4 else "int8words", parts)


def find_row_pair_codes(stored: PartFinder, t: GlobalTensor) -> PackedWeight:
    """INT4 of ModelOpt: two rows per byte; a second scale is for requantization (W4A8)."""
    shape = (*t.shape[:-2], t.shape[-2] * 2, t.shape[-1])
    last = len(shape) - 1
    spans = (*(PartSpan(d) for d in range(last - 1)), PartSpan(last - 1, 2), PartSpan(last))
    codes = PackedPart(role=CODES, dtype="uint8", shape=t.shape, spans=spans)
    parts = stored.find_parts(t, t.name, shape, codes_parts=[(codes, t.name)])
    stored.requantization_scales |= {name for p, name in parts if p.role == SCALE_2}
    decoded_parts = tuple((p, name) for p, name in parts if p.role != SCALE_2)
    return _make_weight(t, t.name, shape, "int4rows", decoded_parts)


def find_transposed_blocks(stored: PartFinder, t: GlobalTensor) -> PackedWeight:
    """gpt-oss: blocks `[experts, rows, groups, 16]`, decoded `[experts, groups * 32, rows]`."""
    base = t.name.removesuffix("_blocks")
    scale = stored.require(t, "_scales", base=base)
    if len(t.shape) != 4 or t.shape[-1] != _MX_BLOCK // 2 or scale.shape != t.shape[:-1]:
        raise stored.error(
            t,
            f"blocks {list(t.shape)} and scales {list(scale.shape)} do not match",
            hint="do the files belong together?",
        )
    experts, rows, groups, _ = t.shape
    spans = (PartSpan(0), PartSpan(2), PartSpan(1, _MX_BLOCK))
    codes = PackedPart(role=CODES, dtype="uint8", shape=t.shape, spans=(*spans, PartSpan(WHOLE)))
    scales = PackedPart(role=SCALE, dtype="float8_e8m0fnu", shape=scale.shape, spans=spans)
    shape = (experts, groups * _MX_BLOCK, rows)
    return _make_weight(t, base, shape, "mxfp4", ((codes, t.name), (scales, scale.name)))


def _make_weight(
    t: GlobalTensor, name: str, shape: Shape, kind: str, parts: tuple[tuple[PackedPart, str], ...]
) -> PackedWeight:
    scale = next(p for p, _ in parts if p.role == SCALE)
    per = {s.dim: s.per for s in scale.spans if s.dim != WHOLE}
    size = [per.get(d, n) for d, n in enumerate(shape)]
    last = len(shape) - 1
    if kind == "fp8" and scale.dtype == "float8_e8m0fnu" and per.get(last) == _MX_BLOCK:
        kind = "mxfp8"
    if not per:
        text = "tensor"
    elif last not in per and len(shape) > 1:
        text = "channel" if per.get(last - 1) == 1 else "expert"
    elif len(shape) == 1 or per.get(last - 1) == 1:
        text = str(per.get(last, 1))
    else:
        text = f"{size[-2]}x{size[-1]}"
    if t.name.endswith("_blocks"):
        text = str(_MX_BLOCK)
    return PackedWeight(name=name, shape=shape, packing=f"{kind}:{text}", parts=parts)


def _read_shape(stored: PartFinder, t: GlobalTensor) -> Shape:
    """The few integers of a `weight_shape` tensor."""
    width = t.dtype.itemsize
    if t.dtype.name not in ("int64", "int32") or len(t.shape) != 1 or not 0 < t.shape[0] <= 8:
        raise stored.error(t, f"{t.dtype} {list(t.shape)} is not a shape")
    raw, _ = stored.read(t)
    return tuple(
        int.from_bytes(raw[i : i + width], "little", signed=True) for i in range(0, len(raw), width)
    )
