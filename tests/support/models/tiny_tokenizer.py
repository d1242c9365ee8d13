"""A small real tokenizer: byte-level BPE trained on sentences made here."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = "the model reads a text and writes it again while the tokens of every word are counted"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + m['role']) }}{% endif %}"
    "<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|turn|>", "<|end|>"]


def save(folder: Path, *, bos: bool = False, template: str | None = TEMPLATE) -> Path:
    """A folder with its files; with `bos` every text begins with <|bos|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 5, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def save_with_fim_tokens(folder: Path) -> Path:
    """The same, with StarCoder's tokens for filling in."""
    save(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
