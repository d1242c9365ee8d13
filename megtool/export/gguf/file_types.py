"""What `--outtype` names: the type of most weights of a GGUF file, and which have another one.

The rules are those of llama.cpp's quantizer (`llama_tensor_get_type` of src/llama-quant.cpp) as a
table, of which the last row that fits a tensor decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from megtool.errors import UsageError
from megtool.export.gguf.carried_blocks import NVFP4
from megtool.export.gguf.header import PLAIN
from megtool.number_formats.gguf import block, encodings
from megtool.spec.model_config import ModelConfig

_MIXES = {
    "Q2_K": "Q2_K",
    "Q2_K_S": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
}
"""llama.cpp's names of files of K-quants, and the type of most of their weights."""

_SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_TERNARY = ("TQ1_0", "TQ2_0")
_ALONE = ("Q8_0", "MXFP4", NVFP4, *_TERNARY)
"""Types whose files have rules of their own, or none."""

_FALLBACKS = {
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""What becomes of weights whose rows are no whole super-blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileType:
    """`name` as llama.cpp writes it (`Q4_K_M`), and the type of most weights (`Q4_K`)."""

    name: str
    base: str

    @property
    def is_plain(self) -> bool:
        """Whether weights are elements, not blocks."""
        return self.base in PLAIN


def list_file_types() -> tuple[str, ...]:
    """The names that `--outtype` takes, in lower case."""
    plain = [k for k in (*encodings(), NVFP4) if k not in _MIXES.values()]
    return tuple(k.lower() for k in (*plain, *_MIXES))


def parse_file_type(text: str, *, has_importance: bool = False) -> FileType:
    """The type of file asked for.

    Raises:
        UsageError: there is none of this name, or it needs an importance matrix.
        MissingPackageError: the gguf package is not installed.
    """
    name = _SHORT.get(text.upper(), text.upper())
    if name.lower() not in list_file_types():
        raise UsageError(
            f"--outtype is {text!r}, which is no type of a GGUF file that megtool writes",
            hint="one of " + ", ".join(list_file_types()),
        )
    if name == "Q2_K_S" and not has_importance:
        raise UsageError(
            f"--outtype {text} needs --imatrix: llama.cpp refuses to make one without",
            hint="q2_k has more bits where they matter most, or give a calibration file",
        )
    return FileType(name=name, base=_MIXES.get(name, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """Where a tensor is: `index` of `count` of its kind, in a model."""

    index: int
    count: int
    gqa: int
    num_experts: int
    is_falcon: bool
    is_70b: bool
    has_importance: bool

    @property
    def needs_more_bits(self) -> bool:
        """Whether it is of the first or last eighth, or each third between."""
        eighth = self.count // 8
        return (
            self.index < eighth
            or self.index >= 7 * self.count // 8
            or (self.index - eighth) % 3 == 2
        )


_Condition = Callable[[_Position], bool]


def _always(p: _Position) -> bool:
    return True


def _first(part: int) -> _Condition:
    return lambda p: p.index < p.count // part


def _with_eight_experts(p: _Position) -> bool:
    return p.num_experts == 8


@dataclass(frozen=True, slots=True)
class _TypeRule:
    """Tensors of a category in files of these types have `kind` where `condition` holds."""

    category: str
    files: tuple[str, ...]
    kind: str
    condition: _Condition = _always


_ALL = (*_MIXES, "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_TWOS_AND_THREES = ("Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M")
_UP_TO_FOUR = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
_RULES = (
    _TypeRule("value", ("Q2_K",), "Q3_K"),
    _TypeRule("value", ("Q2_K", "Q2_K_S"), "Q4_K", lambda p: p.gqa >= 4),
    _TypeRule("value", ("Q3_K_M",), "Q4_K"),
    _TypeRule("value", ("Q3_K_M",), "Q5_K", lambda p: p.index < 2),
    _TypeRule("value", ("Q3_K_L",), "Q5_K"),
    _TypeRule("value", ("Q4_K_M", "Q5_K_M"), "Q6_K", lambda p: p.needs_more_bits),
    _TypeRule("value", ("Q4_K_S",), "Q5_K", lambda p: p.index < 4),
    _TypeRule("value", (*_TWOS_AND_THREES, "Q4_K_S"), "Q5_K", lambda p: p.is_70b),
    _TypeRule("value", ("Q4_K_M",), "Q5_K", lambda p: p.is_70b and not p.needs_more_bits),
    _TypeRule("value", _ALL, "Q8_0", _with_eight_experts),
    _TypeRule("key", _ALL, "Q8_0", _with_eight_experts),
    _TypeRule("down", ("Q2_K",), "Q3_K"),
    _TypeRule("down", ("Q2_K_S",), "Q4_K", _first(8)),
    _TypeRule("down", ("Q3_K_M",), "Q4_K", lambda p: not p.is_falcon or p.needs_more_bits),
    _TypeRule("down", ("Q3_K_M",), "Q5_K", _first(16)),
    _TypeRule("down", ("Q3_K_L",), "Q5_K"),
    _TypeRule("down", ("Q3_K_L",), "Q4_K", lambda p: p.is_falcon),
    _TypeRule("down", ("Q4_K_M", "Q5_K_M"), "Q6_K", lambda p: p.needs_more_bits),
    _TypeRule("down", ("Q4_K_M",), "Q5_K", lambda p: p.is_falcon and p.needs_more_bits),
    _TypeRule("down", ("Q4_K_M",), "Q6_K", lambda p: p.is_falcon and _first(16)(p)),
    _TypeRule("down", ("Q4_K_S",), "Q5_K", lambda p: not p.is_falcon and _first(8)(p)),
    _TypeRule("down", ("Q4_0",), "Q4_1", lambda p: p.has_importance and _first(8)(p)),
    _TypeRule("down", ("Q5_0",), "Q5_1", lambda p: p.has_importance and _first(8)(p)),
    _TypeRule("out", ("Q2_K",), "Q3_K", lambda p: not p.is_falcon),
    _TypeRule("out", ("Q3_K_M",), "Q4_K", lambda p: not p.is_falcon),
    _TypeRule("out", ("Q3_K_L",), "Q5_K"),
    _TypeRule("out", ("Q3_K_L",), "Q4_K", lambda p: p.is_falcon),
    _TypeRule("out", ("Q3_K_L",), "Q3_K", _with_eight_experts),
    _TypeRule("out", _UP_TO_FOUR, "Q5_K", lambda p: not p.is_falcon and _with_eight_experts(p)),
)

_CATEGORIES = (
    ("value", ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")),
    ("key", ("attn_k.weight",)),
    ("out", ("attn_output.weight",)),
    ("down", ("ffn_down",)),
)
_LARGE = {"llama": 80, "qwen2": 80, "olmo": 80, "deci": 80, "jais2": 68}
"""Layers of models that llama.cpp calls 70B, by architecture."""

_SMALL = (
    *("_norm.", "ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "hc_", "_ape."),
    "position_embd.",
)
"""Parts of the names of tensors that are F32 in every file."""

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_EMBEDDINGS = (_EMBEDDING, "per_layer_token_embd.weight")
_NUMBER = re.compile(r"blk\.(\d+)\.")


def assign_types(
    shapes: Mapping[str, Sequence[int]],
    file_type: FileType,
    config: ModelConfig,
    architecture: str,
    *,
    has_importance: bool,
    carried: Collection[str] = (),
) -> tuple[dict[str, str], dict[str, str]]:
    """The type of each tensor of floats, and those among them that their shape forced, by name.

    Vectors, norms, routers, short convolutions, hyper-connections and position embeddings are F32.
    The output matrix (the embedding, where it serves as such) is Q6_K in files of less than eight
    bits. Ternary files have both ends in F16, and MXFP4 is for experts alone, beside Q8_0. In NVFP4
    files weights among `carried` are of this type, the others BF16.
    """
    ordered = sorted(shapes, key=lambda n: (int(m[1]) if (m := _NUMBER.match(n)) else -1, n))
    categories = {n: "" if _is_small(n, shapes[n]) else _find_category(n) for n in ordered}
    counts = Counter(categories.values())
    counts["down"] = config.num_layers + config.mtp.num_mtp_layers
    seen: Counter[str] = Counter()
    chosen, forced = {}, {}
    for name in ordered:
        category, index = categories[name], seen[categories[name]]
        if category == "down" and config.moe.num_experts and (number := _NUMBER.match(name)):
            index = int(number[1])
        seen[category] += 1
        position = _Position(
            index=index,
            count=counts[category],
            gqa=config.attention.num_heads // max(config.attention.num_kv_heads, 1),
            num_experts=config.moe.num_experts,
            is_falcon=architecture == "falcon",
            is_70b=config.num_layers == _LARGE.get(architecture)
            and config.attention.num_heads != config.attention.num_kv_heads,
            has_importance=has_importance,
        )
        is_head = name == _HEAD or (_HEAD not in shapes and name in _EMBEDDINGS)
        kind = _choose(name, shapes[name], file_type, category, position, is_head=is_head)
        if kind == NVFP4 and name not in carried:
            kind = "BF16"
        if not has_whole_blocks(kind, shapes[name]):
            kind = _FALLBACKS.get(kind, "F16")
            kind = kind if has_whole_blocks(kind, shapes[name]) else "F16"
            forced[name] = kind
        chosen[name] = kind
    return {n: chosen[n] for n in shapes}, {n: forced[n] for n in shapes if n in forced}


def _find_category(name: str) -> str:
    return next((c for c, parts in _CATEGORIES if any(p in name for p in parts)), "")


def _is_small(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is F32 in every file."""
    return len(shape) < 2 or any(x in name for x in _SMALL) or not name.endswith(".weight")


def _choose(
    name: str,
    shape: Sequence[int],
    file_type: FileType,
    category: str,
    position: _Position,
    *,
    is_head: bool,
) -> str:
    """The type of one tensor, whatever its shape."""
    base = file_type.base
    if _is_small(name, shape):
        return "F32"
    if base in PLAIN:
        return base
    if base in _TERNARY:
        return "F16" if name in (_EMBEDDING, _HEAD) else base
    if base == "MXFP4":
        return base if "_exps." in name else "Q8_0"
    if base in _ALONE:
        return base
    if is_head:
        is_odd = position.is_falcon or not has_whole_blocks(base, shape)
        return "Q8_0" if is_odd else "Q6_K"
    fitting = (
        r.kind
        for r in reversed(_RULES)
        if r.category == category and file_type.name in r.files and r.condition(position)
    )
    return next(fitting, base)


def has_whole_blocks(kind: str, shape: Sequence[int]) -> bool:
    """Whether rows of a tensor are whole blocks."""
    return kind in PLAIN or shape[-1] % block(kind)[0] == 0
