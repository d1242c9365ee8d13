"""Fill-in-the-middle: what is drawn, and that nothing of a text is lost.

`tests/peers/test_megatron_fim.py` compares it with Megatron-LM's own data set.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megtool.data.dataset import TokenDataset
from megtool.data.fill_in_middle import FillInMiddle, FimTokens
from megtool.data.packing import IGNORED
from megtool.data.token_cache import Encoding, store_tokens
from megtool.data.tokenizer import Tokenizer
from megtool.errors import UsageError
from tests.support.errors import raises
from tests.support.models import tiny_tokenizer

pytest.importorskip("transformers")

TEXT = "the model reads a text and writes it again"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(
        tiny_tokenizer.save_with_fim_tokens(tmp_path_factory.mktemp("tokenizer"))
    )


@pytest.fixture
def fill_in(tokenizer: Tokenizer) -> FillInMiddle:
    return FillInMiddle.of(tokenizer, 400, FimTokens(), rate=1.0)


def _parts(ids: list[int], f: FillInMiddle) -> tuple[str, str, str]:
    """Prefix, middle and suffix, whichever comes first."""
    middle = ids.index(f.middle_id)
    assert ids[0] == f.prefix_id
    if ids[1] == f.suffix_id:
        rest, tail = ids[2:middle], ids[middle + 1 :]
        return "", f.tokenizer.decode(tail), f.tokenizer.decode(rest)
    suffix = ids.index(f.suffix_id)
    return tuple(
        f.tokenizer.decode(x) for x in (ids[1:suffix], ids[middle + 1 :], ids[suffix + 1 : middle])
    )


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_a_text_is_rearranged_and_nothing_is_lost(fill_in: FillInMiddle, spm_rate: float) -> None:
    f = replace(fill_in, spm_rate=spm_rate)
    ids = np.array([*f.tokenizer.encode(TEXT), f.eod_id])
    found = set()
    for row in range(40):
        out = f.rearrange(ids, f.generator(row)).tolist()
        assert out[-1] == f.eod_id
        assert [out.count(x) for x in (f.prefix_id, f.suffix_id, f.middle_id)] == [1, 1, 1]
        prefix, middle, suffix = _parts(out[:-1], f)
        assert prefix + middle + suffix == TEXT
        found.add(tuple(out))
        assert out == f.rearrange(ids, f.generator(row)).tolist()
    assert len(found) > 30


def test_rates_are_probabilities(fill_in: FillInMiddle) -> None:
    f = replace(fill_in, rate=0.25, spm_rate=0.5)
    ids = np.array(f.tokenizer.encode(TEXT))
    out = [f.rearrange(ids, f.generator(row)) for row in range(400)]
    changed = [x for x in out if len(x) != len(ids) or (x != ids).any()]
    assert 0.17 < len(changed) / len(out) < 0.33
    swapped = [x for x in changed if x[1] == f.suffix_id]
    assert 0.3 < len(swapped) / len(changed) < 0.7


def test_files_of_a_text_are_rearranged_each(fill_in: FillInMiddle) -> None:
    f = replace(fill_in, split_id=2, fragment_rate=1.0, spm_rate=0.0)
    file = f.tokenizer.encode(TEXT)
    ids = np.array([*file, 2, *file, 2, *file])
    out = f.rearrange(ids, f.generator(0)).tolist()
    assert out.count(2) == 2
    assert out.count(f.prefix_id) == 3
    first = out[: out.index(2)]
    assert "".join(_parts(first, f)) == TEXT


def test_texts_with_a_prefix_stay(fill_in: FillInMiddle) -> None:
    f = replace(fill_in, no_prefix="the model")
    ids = np.array(f.tokenizer.encode(TEXT))
    assert (f.rearrange(ids, f.generator(0)) == ids).all()
    assert len(f.rearrange(np.array([f.eod_id]), f.generator(0))) == 1


def test_tokens_that_are_not_there_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with raises(UsageError, "no token 'xyz'"):
        FillInMiddle.of(tokenizer, 400, FimTokens(prefix="xyz"))
    with raises(UsageError, "no token"):
        FillInMiddle.of(tokenizer, 100, FimTokens())
    with raises(UsageError, hint="--fim-middle-token"):
        FillInMiddle.of(tokenizer, 400, FimTokens(prefix="a", middle="b", suffix="a"))
    with raises(UsageError, "needs the tokenizer"):
        FillInMiddle.of(None, 400, FimTokens())
    plain = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path / "plain"))
    with raises(UsageError, hint="--fim-prefix-token"):
        FillInMiddle.of(plain, 400, FimTokens())


def test_rows_have_the_rearranged_tokens_and_their_labels(
    fill_in: FillInMiddle, tmp_path: Path
) -> None:
    """Cut where a row ends; documents stay apart; any row alone is as in the run."""
    (tmp_path / "texts.txt").write_text("\n\n".join(f"{TEXT} {n}" for n in range(30)))
    store = store_tokens(tmp_path / "texts.txt", fill_in.tokenizer, None, Encoding())
    data = TokenDataset(store, 48, change=fill_in)
    plain = TokenDataset(store, 48)
    assert data.fingerprint != plain.fingerprint
    rows = data.rows(0, 12)
    for b in range(12):
        alone = data.rows(b, 1)
        assert (alone.tokens_BS[0] == rows.tokens_BS[b]).all()
        for document in np.unique(rows.documents_BS[b][rows.documents_BS[b] >= 0]):
            columns = np.flatnonzero(rows.documents_BS[b] == document)
            assert (np.diff(columns) == 1).all()
            tokens, labels = rows.tokens_BS[b][columns], rows.labels_BS[b][columns]
            assert (tokens[1:] == labels[:-1]).all()
            assert tokens[0] == fill_in.prefix_id
            assert (rows.positions_BS[b][columns] == np.arange(len(columns))).all()
        assert (rows.labels_BS[b][rows.documents_BS[b] < 0] == IGNORED).all()
    assert (rows.documents_BS >= 0).mean() > 0.9
