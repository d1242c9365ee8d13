"""Sound checkpoints of every format, and what an attempt to reshard a damaged one ends in."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from megtool import reshard
from megtool.errors import MegtoolError
from megtool.formats import open_checkpoint
from tests.support.folders import stored_tensors
from tests.support.models import tiny_llama

SMALL = {"num_hidden_layers": 1, "vocab_size": 5}
FORMATS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "max_shard_size": "6KB"},
    "safetensors": {"to": "safetensors"},
    "torch_dist": {"to": "torch_dist", "tp": 2},
    "dcp": {"to": "dcp", "dp": 2},
    "torch_checkpointing": {"to": "torch_checkpointing", "dp": 2},
}
DATA_FILES = (".distcp", ".safetensors", "_0.pt", "_1.pt")
DIGESTED = ("hf", "torch_dist", "dcp", "torch_checkpointing")


def save_formats(root: Path) -> dict[str, Path]:
    """One tiny model in every format, below `root`; those in folders have digests."""
    original = tiny_llama.save(root / "original", dtype="float16", **SMALL)
    out = {}
    for name, options in FORMATS.items():
        out[name] = root / (f"{name}.safetensors" if name == "safetensors" else name)
        reshard(original, out[name], digest="all", **options)
    out["gguf"] = root / "model.gguf"
    save_gguf(out["gguf"], original)
    return out


def save_gguf(path: Path, original: Path) -> None:
    """The same model as llama.cpp's tools write it."""
    writer = gguf.GGUFWriter(path, "llama")
    c = json.loads((original / "config.json").read_text())
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_vocab_size(c["vocab_size"])
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, (_, shape, data) in stored_tensors(original).items():
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, np.frombuffer(data, np.float16).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def files_of(path: Path) -> list[Path]:
    """All files of a checkpoint but the tokenizer, which is carried along unread."""
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return [p for p in found if p.name != "tokenizer.json"]


def attempt(path: Path, **options: Any) -> MegtoolError | None:
    """Reshard with every byte digested; the typed error it ends in, with nothing written."""
    out = path.parent / "result"
    try:
        reshard(path, out, fsync=False, threads=1, digest="all", **options)
    except MegtoolError as e:
        assert not out.exists()
        assert e.message
        assert e.exit_status in (2, 3, 5), e
        return e
    return None


def result(path: Path) -> dict[str, Any]:
    """The tensors that `attempt` wrote; they are removed."""
    out = path.parent / "result"
    if out.is_file():
        found: dict[str, Any] = stored_tensors(out)
        out.unlink()
        return found
    if not list(out.glob("*.safetensors")):
        reshard(out, path.parent / "plain", to="hf")
        shutil.rmtree(out)
        out = path.parent / "plain"
    found = stored_tensors(out)
    shutil.rmtree(out)
    return found


def put(file: Path, data: bytes) -> None:
    """Write a file and leave its times as they were."""
    found = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def payload(path: Path) -> list[tuple[Path, int, int, str]]:
    """File, offset, length and name of all tensor data."""
    c = open_checkpoint(path)
    at = c.locate(np.arange(len(c.shards))).offset
    item = np.array([t.dtype.itemsize for t in c.tensors])[c.shards.tensor]
    length = c.shards.boxes.volume() * item
    file = c.extents.file.tolist()
    names = [c.tensors[t].name for t in c.shards.tensor.tolist()]
    rows = zip(file, at.tolist(), length.tolist(), names, strict=True)
    return [(c.path(f), a, n, name) for f, a, n, name in rows]
