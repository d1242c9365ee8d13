"""Rows of the next steps, built by a thread while the model computes."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from megtool.data.packing import PackedRows
from megtool.inference.collate import RowDataset


class RowPrefetcher:
    """The rows of a run's steps in order, up to `depth` of them ahead; use in `with`.

    One thread builds them, one step after the other, so a data set is read by one thread alone.
    Rows are those of the data set: which number they have is said at each step, and what was built
    for another one is dropped. An error is raised at the step whose rows it concerns.
    """

    def __init__(self, dataset: RowDataset, count: int, stride: int, *, depth: int) -> None:
        """Build `count` rows for each step, the first of which is `stride` after the last step's.

        With `depth` 0 nothing is built ahead, and there is no thread.
        """
        self._dataset, self._count, self._stride, self._depth = dataset, count, stride, depth
        self._built: deque[tuple[int, Future[PackedRows]]] = deque()
        self._executor = ThreadPoolExecutor(1, "megtool-rows") if depth else None

    def __enter__(self) -> RowPrefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def rows(self, first: int, end: int) -> PackedRows:
        """The rows from number `first`; those of later steps below `end` are begun.

        Raises:
            FormatError: the data is damaged.
        """
        if self._executor is None:
            return self._dataset.rows(first, self._count)
        while self._built and self._built[0][0] != first:
            self._built.popleft()[1].cancel()
        following = self._built[-1][0] + self._stride if self._built else first
        while len(self._built) <= self._depth and following < end:
            rows = self._executor.submit(self._dataset.rows, following, self._count)
            self._built.append((following, rows))
            following += self._stride
        if not self._built:
            return self._dataset.rows(first, self._count)
        return self._built.popleft()[1].result()
