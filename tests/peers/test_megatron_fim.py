"""Megatron-LM's own fill-in-the-middle data set draws and writes what ours does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megtool.data.fill_in_middle import FillInMiddle, FimTokens
from megtool.data.tokenizer import Tokenizer
from tests.support.models import tiny_tokenizer
from tests.support.peers.release import install_release

pytestmark = [pytest.mark.peers, pytest.mark.slow]

THEIRS = """
import importlib.util, json, sys
from pathlib import Path
import numpy as np
from transformers import AutoTokenizer

folder, source = Path(sys.argv[1]), sys.argv[2]
spec = importlib.util.spec_from_file_location("fim_dataset", source)
module = importlib.util.module_from_spec(spec)
sys.modules["fim_dataset"] = module
spec.loader.exec_module(module)
full = AutoTokenizer.from_pretrained(folder / "tokenizer")

class Inner:
    def ids_to_text(self, ids, remove_special_tokens=True):
        return full.decode(ids, skip_special_tokens=remove_special_tokens,
                           clean_up_tokenization_spaces=False)
    def text_to_ids(self, text):
        return full.encode(text, add_special_tokens=False)

class Outer:
    _tokenizer = Inner()

class Config:
    tokenizer = Outer()

answers = []
for job in json.loads((folder / "jobs.json").read_text()):
    data = object.__new__(module.GPTFIMDataset)
    data.config = Config()
    data.np_rng = np.random.RandomState(np.array(job["words"], np.uint32))
    data.fim_rate, data.fim_spm_rate = job["rate"], job["spm_rate"]
    data.fragment_fim_rate, data.fim_split_sample = job["fragment_rate"], job["split_id"]
    data.no_fim_prefix = job["no_prefix"]
    data.prefix_tok_id, data.middle_tok_id, data.suffix_tok_id = job["tokens"]
    data.pad_tok_id, data.eod_tok_id = 0, 1
    out = data._fim_split_and_permute_sequence(np.array(job["ids"]))
    answers.append([int(x) for x in out])
(folder / "answers.json").write_text(json.dumps(answers))
"""


def test_draws_and_tokens_are_those_of_its_data_set(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("transformers")
    release = install_release(
        "megatron-core==0.19.2", tmp_path_factory.mktemp("core"), "--ignore-requires-python"
    )
    source = release / "megatron/training/datasets/fim_dataset.py"
    if not source.is_file():
        pytest.skip("this release of megatron-core has no training package")
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.save_with_fim_tokens(tmp_path / "tokenizer"))
    words = tiny_tokenizer.WORDS.split()
    generator = np.random.default_rng(0)
    jobs, expected = [], []
    for number in range(120):
        fill_in = FillInMiddle.of(
            tokenizer,
            400,
            FimTokens(),
            split_token="<file>" if number % 3 == 0 else None,
            rate=[1.0, 0.5][number % 2],
            spm_rate=[0.0, 0.5, 1.0][number % 3],
            fragment_rate=0.7 if number % 3 == 0 else None,
            no_prefix="the" if number % 5 == 0 else None,
            seed=number,
        )
        texts = [" ".join(generator.choice(words, 12)) for _ in range(1 + number % 3)]
        split = tokenizer.token_id("<file>")
        ids = [x for t in texts for x in (*tokenizer.encode(t), split)][:-1]
        random = fill_in.generator(number)
        expected.append(fill_in.rearrange(np.array(ids), random).tolist())
        jobs.append(
            {
                "ids": ids,
                "words": np.frombuffer(_seed_words(fill_in, number), np.uint32).tolist(),
                "rate": fill_in.rate,
                "spm_rate": fill_in.spm_rate,
                "fragment_rate": fill_in.fragment_rate,
                "split_id": fill_in.split_id,
                "no_prefix": fill_in.no_prefix,
                "tokens": [fill_in.prefix_id, fill_in.middle_id, fill_in.suffix_id],
            }
        )
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = tmp_path / "theirs.py"
    script.write_text(THEIRS)
    subprocess.run(
        [sys.executable, script, tmp_path, source],
        env=os.environ | {"PYTHONPATH": str(release)},
        check=True,
        timeout=300,
    )
    assert json.loads((tmp_path / "answers.json").read_text()) == expected
    assert sum(a != j["ids"] for a, j in zip(expected, jobs, strict=True)) > 60


def _seed_words(fill_in: FillInMiddle, row: int) -> bytes:
    import hashlib

    return hashlib.sha256(f"{fill_in.seed} fim {row}".encode()).digest()
