"""Retro's preprocessed data: the chunk database and the neighbors of a Megatron project.

A project is a folder, as `megatron/core/datasets/retro` of megatron-core 0.15.3 (the last release
with Retro) and Megatron-LM's `tools/retro/preprocess_data.py` write it:

    config.json                                  chunk length, block size, data, neighbor folders
    data/PREFIX.bin, .idx                        indexed data sets, one sequence a document
    db/indexed_dataset_infos.json                the data sets and how many chunks each has
    db/individual/PREFIX/FIRST-LAST.hdf5         chunks of a range of documents
    db/merged/train.hdf5, valid, sampled         all chunks by number: the database
    query/SPLIT_HASH/FIRST-LAST.hdf5             numbers of the neighbors of a range of chunks
"""
