"""A Llama of a few thousand parameters that reads and writes text: every byte is a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models import tiny_llama

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
VOCABULARY = 262
END = 257


def save(folder: Path, *, positions: int = 128, dtype: str = "float32", **more: Any) -> Path:
    """A Hugging Face folder with random weights, a tokenizer of bytes, and a chat template."""
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": positions, "num_hidden_layers": 2}
    tiny_llama.save(folder, dtype=dtype, **(shape | {"eos_token_id": END} | more))
    save_tokenizer(folder)
    return folder


def save_wide(folder: Path, num_layers: int) -> Path:
    """The same in bfloat16, with matrices that blocks of 128 divide."""
    return save(
        folder,
        dtype="bfloat16",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def save_tokenizer(folder: Path, *, has_mask: bool = False) -> None:
    """Write tokenizer files: 256 bytes, then `<s>` and `</s>` (and `<mask>`), and a few words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ("<s>", "</s>", "<mask>") if has_mask else ("<s>", "</s>")
    made.add_special_tokens([AddedToken(t, special=True) for t in special])
    more = {"mask_token": "<mask>"} if has_mask else {}
    save_files(folder, made, chat_template=TEMPLATE, **more)


def save_files(folder: Path, tokenizer: Any, **more: Any) -> None:
    """Write the files of a tokenizer with `<s>` and `</s>`; `more` goes into its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
