"""Time of a step with rows built in it, and built ahead by a thread.

python examples/benchmarks/prefetch_speed.py [--rounds 3] [--steps 20] [--samples 16]

The model is a stand-in that waits as the host does for a GPU (`--compute-ms`), so that what a step
takes beyond it is the rows: packed texts, and texts that are rearranged to be filled in, which are
decoded and tokenized again.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.table import Table, parser, show, times, workplace

from megtool.data.dataset import TokenDataset
from megtool.data.fill_in_middle import FillInMiddle, FimTokens
from megtool.data.token_cache import Encoding, store_tokens
from megtool.data.tokenizer import Tokenizer
from megtool.train.prefetch import RowPrefetcher

LENGTH = 1024


def make_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE of this checkout's guides, with StarCoder's tokens for filling in."""
    from tokenizers import Tokenizer as Bpe
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = Bpe(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
    trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=special, show_progress=False)
    made.train([str(p) for p in texts()], trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    return Tokenizer.from_folder(folder)


def texts() -> list[Path]:
    """Pages of this checkout."""
    return sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))


def seconds(data: TokenDataset, given: object, depth: int) -> float:
    """The time of a step."""
    steps, count = given.steps, given.samples  # type: ignore[attr-defined]
    wait = given.compute_ms / 1000  # type: ignore[attr-defined]
    with RowPrefetcher(data, count, count, depth=depth) as ahead:
        ahead.rows(0, steps * count)
        begin = time.perf_counter()
        for step in range(1, steps):
            ahead.rows(step * count, steps * count)
            time.sleep(wait)
        return (time.perf_counter() - begin) / (steps - 1)


def main() -> None:
    """Time both in turn, round by round, and print the table."""
    options = parser(__doc__, gib=None)
    options.add_argument("--steps", type=int, default=20, help="steps of a run")
    options.add_argument("--samples", type=int, default=16, help="rows of a step")
    options.add_argument("--compute-ms", type=float, default=60, help="what the model takes")
    given = options.parse_args()
    table = Table(
        title=f"Milliseconds of a step beyond the model's {given.compute_ms:g}",
        head=("rows", "in the step", "built ahead", "x"),
    )
    with workplace(given) as folder, tempfile.TemporaryDirectory() as place:
        tokenizer = make_tokenizer(Path(place))
        text = Path(place) / "pages.txt"
        text.write_text("\n\n".join(p.read_text() for p in texts()))
        store = store_tokens(text, tokenizer, None, Encoding())
        fill_in = FillInMiddle.of(tokenizer, tokenizer.vocab_size, FimTokens(), rate=1.0)
        kinds = {
            f"packed, {given.samples} x {LENGTH}": TokenDataset(store, LENGTH),
            f"filled in, {given.samples} x {LENGTH}": TokenDataset(store, LENGTH, change=fill_in),
        }
        for name, data in kinds.items():
            best = {0: 1e9, 2: 1e9}
            for _ in range(given.rounds):
                for depth in best:
                    best[depth] = min(best[depth], seconds(data, given, depth))
            inside, ahead = (1000 * best[d] - given.compute_ms for d in (0, 2))
            table.add(
                name,
                f"{inside:.1f}",
                f"{ahead:.1f}",
                times(ahead / max(inside, 1e-9)),
                rows=name,
                inside=inside,
                ahead=ahead,
            )
        show(given, Path(folder), [table])


if __name__ == "__main__":
    main()
