"""Tokenize: text as Megatron's indexed tokens, and these packed into rows to train on.

python examples/tokenize_text.py ./SmolLM2-135M-Instruct corpus.jsonl ./corpus
"""

import sys
from pathlib import Path

from megtool import tokenize
from megtool.data.indexed import IndexedDataset
from megtool.data.packing import pack
from megtool.data.tokenize_documents import EncodedDocument

checkpoint, source, destination = map(Path, sys.argv[1:4])
report = tokenize(source, destination, tokenizer=checkpoint, append_eos=True)
print("\n".join(report.lines()))

data = IndexedDataset(destination)
rows = list(pack((EncodedDocument(ids=ids) for ids in data.documents()), 8))
labels = sum(row.num_labels for row in rows)
print(f"{data.num_documents} documents, {len(rows)} rows of 8 with {labels} labels")
