"""A world in which real megatron-core builds and reads Retro's preprocessed data, in one process.

python retro_data_world.py build|read PROJECT

`build` makes the chunk database and the neighbours of a project that has its `data/`, as
`tools/retro/preprocess_data.py` does; a bag of tokens embeds chunks, and an exact index searches
them, where that tool has BERT and faiss. Both save what `get_retro_datasets` then gives: for each
split `SPLIT.npz` with all samples. Releases since 0.16 have no Retro: the one to use is on
PYTHONPATH.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, EOD, SEQUENCE, CHUNK, BLOCK, DOC_BLOCK = 97, 96, 32, 8, 24, 5
SAMPLES, SPLIT, NEIGHBORS, SAMPLED = (11, 3, 0), "80,20,0", 4, 12
UNKNOWN = 40
"""Tokens up to this one have no text that a BERT tokenizer knows."""


class GPTTokens:
    """A tokenizer whose text of a token is its number."""

    eod = EOD
    pad = EOD
    unique_identifiers = {"class": "GPTTokens"}  # noqa: RUF012

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class BertTokens:
    """A tokenizer to which small numbers say nothing."""

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split() if int(word) > UNKNOWN]


class BagOfTokens:
    """Embeds a text as how often it has each token."""

    def embed_text_dataset(self, dataset: Any) -> np.ndarray:
        rows = [np.asarray(dataset[i]["text"].split(), np.int64) for i in range(len(dataset))]
        return np.stack([np.bincount(row, minlength=VOCAB) for row in rows]).astype("float32")


class ExactIndex:
    """The nearest of all rows, as faiss gives them."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.ntotal = rows, len(rows)

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        distances = ((queries[:, None] - self.rows[None]) ** 2).sum(-1)
        order = np.argsort(distances, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(distances, order, 1), order


def preprocessing(project: Path) -> Any:
    from megatron.core.datasets.retro.config import RetroPreprocessingConfig, RetroTokenizers

    return RetroPreprocessingConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        retro_project_dir=str(project),
        retro_block_size=BLOCK,
        retro_doc_block_size=DOC_BLOCK,
        retro_gpt_data_path=["3", "a", "1", "more/b"],
        retro_gpt_data_cache_path=str(project / "cache"),
        retro_gpt_split=SPLIT,
        retro_gpt_train_samples=SAMPLES[0],
        retro_gpt_eval_interval=100,
        retro_gpt_eval_iters=1,
        retro_gpt_tokenizer_type="GPT2BPETokenizer",
        retro_gpt_vocab_file="vocab.json",
        retro_gpt_merge_file="merges.txt",
        retro_gpt_seq_length=SEQUENCE,
        retro_gpt_global_batch_size=1,
        retro_gpt_chunk_length=CHUNK,
        retro_bert_tokenizer_type="BertWordPieceLowerCase",
        retro_bert_vocab_file="bert.txt",
        retro_index_str="Flat",
        retro_index_ntrain=SAMPLED,
        retro_query_num_neighbors_query=2 * NEIGHBORS,
        retro_query_num_neighbors_save=NEIGHBORS,
        retro_tokenizers=RetroTokenizers(gpt=GPTTokens(), bert=BertTokens()),
    )


def gpt_datasets(project: Path, blend: list[str]) -> dict[str, Any]:
    """The samples of each split, in Megatron's order."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.retro.query.multi_split_gpt_dataset import (
        MultiSplitGPTDataset,
        MultiSplitGPTDatasetConfig,
    )
    from megatron.core.datasets.utils import get_blend_from_list

    blend = [str(project / "data" / name) if i % 2 else name for i, name in enumerate(blend)]
    config = MultiSplitGPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE,
        blend=get_blend_from_list(blend),
        split=SPLIT,
        split_preprocessing=SPLIT,
        path_to_cache=str(project / "cache"),
        return_document_ids=True,
        tokenizer=GPTTokens(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    build = BlendedMegatronDatasetBuilder(
        MultiSplitGPTDataset, list(SAMPLES), lambda: True, config
    ).build
    return dict(zip(("train", "valid", "test"), zip(build(), SAMPLES, strict=True), strict=True))


def build(project: Path) -> None:
    from megatron.core.datasets.retro.config import RetroBertEmbedders, RetroGPTChunkDatasets
    from megatron.core.datasets.retro.db import build as db_build
    from megatron.core.datasets.retro.db.utils import get_merged_train_dataset
    from megatron.core.datasets.retro.query.gpt_chunk_dataset import (
        build_gpt_chunk_datasets_from_gpt_datasets,
    )
    from megatron.core.datasets.retro.query.query import query_dataset_neighbors
    from megatron.core.datasets.retro.utils import GPTToTextDataset

    executor = concurrent.futures.ProcessPoolExecutor
    db_build.ProcessPoolExecutor = lambda max_workers: executor(2)  # not 128
    config = preprocessing(project)
    config.retro_bert_embedders = RetroBertEmbedders(disk=None, mem=BagOfTokens())
    chunked = build_gpt_chunk_datasets_from_gpt_datasets(
        str(project), gpt_datasets(project, config.retro_gpt_data_path), SEQUENCE, CHUNK
    )
    config.retro_gpt_chunk_datasets = RetroGPTChunkDatasets(**chunked)
    db_build.build_db(config)
    database = get_merged_train_dataset(str(project), CHUNK, EOD)
    database.load_doc_tuples()
    texts = GPTToTextDataset(database, config.retro_tokenizers.gpt)
    index = ExactIndex(BagOfTokens().embed_text_dataset(texts))
    for split, info in chunked.items():
        if info is not None:
            count, folder = info["num_active_chunks"], info["neighbor_dir"]
            query_dataset_neighbors(config, database, info["dataset"], count, split, folder, index)
    save_config(config, project)


def save_config(config: Any, project: Path) -> None:
    """What `save_config` of tools/retro/preprocess_data.py saves."""
    subset = {
        k: v
        for k, v in vars(config).items()
        if k.startswith("retro_gpt") and k != "retro_gpt_chunk_datasets"
    }
    for name in ("retro_block_size", "retro_bert_tokenizer_type", "retro_bert_vocab_file"):
        subset[name] = getattr(config, name)
    subset["retro_neighbor_dirs"] = {
        k: (os.path.relpath(v["neighbor_dir"], project / "query") if v is not None else None)
        for k, v in vars(config.retro_gpt_chunk_datasets).items()
    }
    (project / "config.json").write_text(json.dumps(subset, indent=4, sort_keys=True))


def read(project: Path) -> None:
    """Save the samples of each split, as a run that trains reads them."""
    from megatron.core.datasets.retro.query.retro_dataset import get_retro_datasets
    from megatron.core.models.retro import RetroConfig
    from megatron.core.models.retro import config as retro_config

    retro_config.is_te_min_version = lambda version: False  # it asks, and there is none here
    kept = json.loads((project / "config.json").read_text())
    config = RetroConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        retro_project_dir=str(project),
        retro_block_size=kept["retro_block_size"],
        retro_chunk_length=kept["retro_gpt_chunk_length"],
        retro_neighbor_dirs=kept["retro_neighbor_dirs"],
        retro_num_neighbors=3,
        retro_split_preprocessing=kept["retro_gpt_split"],
    )
    samples = gpt_datasets(project, kept["retro_gpt_data_path"])
    datasets = get_retro_datasets(config, samples, kept["retro_gpt_seq_length"], EOD)
    for split, dataset in zip(("train", "valid"), datasets, strict=False):
        rows = [dataset[i] for i in range(samples[split][1])]
        names = ("text", "document_ids", "dataset_id", "neighbor_chunks", "neighbor_tokens")
        same = {n: np.stack([r[n] for r in rows]) for n in names if n != "document_ids"}
        documents = np.concatenate([r["document_ids"] for r in rows])
        np.savez(project / f"{split}.npz", document_ids=documents, **same)


def main() -> None:
    from megatron.core import parallel_state

    torch.cuda.LongTensor = torch.LongTensor  # counts of blocks go over the ranks from a GPU
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        project = Path(sys.argv[2])
        if sys.argv[1] == "build":
            build(project)
        read(project)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
