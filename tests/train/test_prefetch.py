"""Rows built ahead: the same, in the same order, and only by one thread at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from megtool.data.packing import PackedRows
from megtool.errors import FormatError, UsageError
from megtool.options.config_file import build_options
from megtool.train.options.config import TrainConfig
from megtool.train.prefetch import RowPrefetcher
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import curve, save_lines, tune


class _Rows:
    """Rows whose tokens are their numbers; `damaged` is a row that cannot be read."""

    def __init__(self, damaged: int = -1) -> None:
        self.damaged, self.asked, self.threads = damaged, [], set()
        self.is_reading = threading.Lock()

    def __len__(self) -> int:
        return 1000

    def rows(self, first: int, count: int) -> PackedRows:
        assert self.is_reading.acquire(blocking=False)
        self.asked.append(first)
        self.threads.add(threading.get_ident())
        if first <= self.damaged < first + count:
            self.is_reading.release()
            raise FormatError("damaged")
        numbers = np.arange(first, first + count)[:, None]
        self.is_reading.release()
        return PackedRows(
            tokens_BS=numbers, labels_BS=numbers, positions_BS=numbers, documents_BS=numbers
        )


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_rows_come_in_the_order_of_steps(depth: int) -> None:
    data = _Rows()
    with RowPrefetcher(data, 2, 4, depth=depth) as ahead:
        for step in range(10):
            found = ahead.rows(4 * step + 1, 40)
            assert found.tokens_BS[:, 0].tolist() == [4 * step + 1, 4 * step + 2]
    assert sorted(data.asked) == [4 * s + 1 for s in range(10)]
    assert (threading.get_ident() in data.threads) == (depth == 0)


def test_another_step_than_the_next_is_built_anew() -> None:
    data = _Rows()
    with RowPrefetcher(data, 1, 1, depth=2) as ahead:
        for first in (0, 1, 7, 8, 3):
            assert ahead.rows(first, 100).tokens_BS[0, 0] == first


def test_nothing_is_built_beyond_the_end() -> None:
    data = _Rows()
    with RowPrefetcher(data, 1, 1, depth=5) as ahead:
        for first in range(8):
            ahead.rows(first, 8)
    assert max(data.asked) == 7


def test_an_error_is_that_of_its_step() -> None:
    data = _Rows(damaged=3)
    with RowPrefetcher(data, 1, 1, depth=2) as ahead:
        for first in range(3):
            ahead.rows(first, 100)
        with raises(FormatError, "damaged"):
            ahead.rows(3, 100)


def test_a_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    """To the last bit, also where it is resumed in the middle."""
    model = tiny_text.save(tmp_path / "model")
    data = save_lines(tmp_path)
    for name, steps in (("without", 0), ("with", 3)):
        tune(model, tmp_path / name, data, prefetch_steps=steps)
    tune(model, tmp_path / "parts", data, prefetch_steps=2, save_interval=3)
    torch.manual_seed(5)
    (tmp_path / "parts/latest_checkpointed_iteration.txt").write_text("3")
    tune(model, tmp_path / "again", data, load=tmp_path / "parts/iter_0000003", prefetch_steps=1)
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    last = [line for line in curve(tmp_path / "again") if line[1] is not None]
    expected = [line for line in curve(tmp_path / "without") if line[1] is not None]
    assert last == expected[3:]


def test_options_that_need_each_other() -> None:
    with raises(UsageError, "--fim-rate is 1.5"):
        build_options(TrainConfig, {"fim_rate": 1.5})
    with raises(UsageError, "--fim-spm-rate has no effect"):
        build_options(TrainConfig, {"fim_spm_rate": 0.1})
    with raises(UsageError, "--fim-fragment-rate"):
        build_options(TrainConfig, {"fim_rate": 0.5, "fim_split_sample": "<file>"})
