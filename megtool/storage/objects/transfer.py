"""Complete reads, writes and copies between open files and memory, with typed errors."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megtool.errors import StorageError
from megtool.storage.objects.open_objects import (
    FIRST_NUMBER,
    Buffer,
    MemoryObject,
    ReadableObject,
    as_bytes,
    open_objects,
)
from megtool.storage.objects.populate import populate

T = TypeVar("T")
FileRef = Path | int  # a path, or an open file descriptor

IOV_MAX = 1024  # buffers one preadv may fill
KERNEL_STEP = 64 << 20  # bytes per copy_file_range or sendfile: Ctrl-C waits for one at most
SCRATCH_BYTES = 256 << 10  # larger copy buffers fall out of the CPU's cache
OBJECT_STEP = 4 << 20  # bytes of an object that one request reads
SENDFILE_FROM = 256 << 10  # sendfile needs a descriptor of its own, not worth it below this
BLOCK = 4096  # file systems share whole blocks only

# Errors that mean a copy method does not support these files; other errors are failures.
UNSUPPORTED = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY, errno.EPERM}
)
HINTS = {
    errno.ENOSPC: "free some space, then run the same command again: it resumes",
    errno.EDQUOT: "`quota -s` shows your limits; free some space, then run the same command again",
    errno.EROFS: "the file system is mounted read-only: choose another destination",
    errno.EACCES: "check the permissions of the file and of the folders above it",
    errno.EPERM: "check the permissions, and whether the file is immutable (`lsattr`)",
    errno.EIO: "the disk or the network storage failed: see `dmesg`, and do not trust the copy",
    errno.EMFILE: "too many open files: raise the limit with `ulimit -n`",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EBUSY: "a mount point cannot be replaced: name a folder inside it",
    errno.EFBIG: "the file system or `ulimit -f` does not allow files of this size",
}


class WriteRecorder(Protocol):
    """Follows what is written to files, by their paths."""

    def record(self, path: Path | None, offset: int, buffers: Iterable[bytes | Buffer]) -> None:
        """Consecutive bytes were written at `offset`, or are about to be overwritten there."""

    def forget(self, path: Path | None, offset: int = 0, num_bytes: int | None = None) -> None:
        """The kernel wrote bytes that did not pass through this process, or a store copied some."""


class FileTransfer:
    """Reads, writes and copies at given offsets of open files. Thread-safe.

    Each method completes (short reads and writes continue, interrupted calls are repeated) or
    raises `StorageError` with the file. Every system call goes through `system`, so a subclass can
    count, refuse or shorten it.
    """

    def __init__(self) -> None:
        self.recorder: WriteRecorder | None = None
        self._methods: dict[
            tuple[int, int], int
        ] = {}  # (device, device) -> first method that may work
        self._scratch = threading.local()
        self._paths: dict[int, Path] = {}  # of open files: after a failed close the name is gone
        self.objects = open_objects()

    def system(self, function: Callable[..., T], /, *args: Any) -> T:
        """Make one system call."""
        return function(*args)

    def call(self, file: FileRef, verb: str, function: Callable[..., T], /, *args: Any) -> T:
        """Make one system call on `file`, repeated while it is interrupted."""
        while True:
            try:
                return self.system(function, *args)
            except InterruptedError:
                continue
            except OSError as e:
                raise to_storage_error(e, file, verb) from e

    def pread_into(self, fd: int, buffer: Buffer, offset: int) -> None:
        """Fill `buffer` with the bytes at `offset`.

        Raises:
            FormatError: the file is shorter.
            StorageError: the read failed.
        """
        self._preadv(fd, (buffer,), offset, buffer.nbytes)

    def pread_scatter(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill the buffers, in order, with the consecutive bytes at `offset`."""
        for start in range(0, len(buffers), IOV_MAX):
            batch = buffers[start : start + IOV_MAX]
            num_bytes = sum(b.nbytes for b in batch)
            self._preadv(fd, batch, offset, num_bytes)
            offset += num_bytes

    def pread_batch(
        self,
        fd: int,
        runs: Sequence[tuple[int, memoryview]],
        *,
        span: tuple[int, int] | None = None,
    ) -> None:
        """Fill memory with runs (offset, memory), in any order.

        Of an object many are requested at a time, and short runs are read in blocks of `span`, the
        range that holds others like them.

        Raises:
            FormatError: the file is shorter.
            StorageError: the read failed.
        """
        if fd >= FIRST_NUMBER:
            opened = self.objects[fd]
            if isinstance(opened, ReadableObject):
                opened.read_batch(runs, span)
                return
        for offset, memory in runs:
            self.pread_into(fd, memory, offset)

    def _preadv(self, fd: int, buffers: Sequence[Buffer], offset: int, expected: int) -> None:
        if fd >= FIRST_NUMBER:
            self.objects[fd].read_into(buffers, offset)
            return
        done = self.call(fd, "read", os.preadv, fd, buffers, offset)
        if done == expected:
            return
        skip = done
        for buffer in buffers:
            if skip >= buffer.nbytes:
                skip -= buffer.nbytes
                continue
            remaining = np.frombuffer(buffer, np.uint8)[skip:]
            skip = 0
            while remaining.nbytes:
                step = self.call(fd, "read", os.preadv, fd, (remaining,), offset + done)
                if step == 0:
                    from megtool.storage.stores.protocol import truncated

                    hint = "the file is incomplete, or was shortened while it was read"
                    raise truncated(find_path(fd), offset + done, offset + expected, hint=hint)
                done += step
                remaining = remaining[step:]

    def pwrite_all(self, fd: int, data: bytes | Buffer, offset: int) -> None:
        """Write all of `data` at `offset`."""
        expected = len(data) if isinstance(data, bytes) else data.nbytes
        if fd >= FIRST_NUMBER:
            self.objects[fd].write(data, offset)
            self.record(fd, offset, (data,))
            return
        done = self._write(fd, data, offset, expected)
        if done < expected:
            remaining = np.frombuffer(data, np.uint8)
            while done < expected:
                done += self._write(fd, remaining[done:], offset + done, expected - done)
        self.record(fd, offset, (data,))

    def record(self, fd: int, offset: int, buffers: Sequence[bytes | Buffer]) -> None:
        """Tell the recorder, if there is one, of bytes written or about to be overwritten."""
        if self.recorder is not None:
            self.recorder.record(self._paths.get(fd), offset, buffers)

    def pwrite_gather(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write the buffers, in order, to the consecutive bytes at `offset`."""
        for start in range(0, len(buffers), IOV_MAX):
            batch = buffers[start : start + IOV_MAX]
            expected = sum(b.nbytes for b in batch)
            if fd >= FIRST_NUMBER:
                self.pwrite_all(fd, b"".join(map(as_bytes, batch)), offset)
                offset += expected
                continue
            done = self.call(fd, "write", os.pwritev, fd, batch, offset)
            self.record(fd, offset, _head(batch, done))
            if done != expected:
                for buffer in batch:
                    if done < buffer.nbytes:
                        self.pwrite_all(fd, np.frombuffer(buffer, np.uint8)[done:], offset + done)
                    done = max(done - buffer.nbytes, 0)
                    offset += buffer.nbytes
            else:
                offset += expected

    def _write(self, fd: int, data: bytes | Buffer, offset: int, expected: int) -> int:
        while True:
            try:
                done = self.system(os.pwrite, fd, data, offset)
            except InterruptedError:
                continue
            except OSError as e:
                raise to_storage_error(e, fd, "write", needed=expected) from e
            if done == 0 and expected:
                raise StorageError(f"wrote 0 of {expected:,} bytes", file=find_path(fd))
            return done

    def copy_range(
        self, source: int, source_offset: int, target: int, target_offset: int, num_bytes: int
    ) -> None:
        """Copy bytes between two open files by the fastest method the two devices support.

        `copy_file_range` comes first (it shares blocks if the file system can), then `sendfile`,
        then a small buffer. A method that a pair of devices rejects is not tried on it again.

        Raises:
            FormatError: the source is shorter.
            StorageError: the copy failed.
        """
        if source >= FIRST_NUMBER or target >= FIRST_NUMBER:
            self._copy_object(source, source_offset, target, target_offset, num_bytes)
            return
        if self.recorder is not None:
            self.recorder.forget(self._paths.get(target))
        head = -source_offset % BLOCK
        if 0 < head < num_bytes - BLOCK and head == -target_offset % BLOCK:
            # Only calls that start at a block boundary share blocks: copy up to it first.
            self._copy(source, source_offset, target, target_offset, head)
        else:
            head = 0
        self._copy(source, source_offset + head, target, target_offset + head, num_bytes - head)

    def _devices(self, source: int, target: int) -> tuple[int, int]:
        source_stat, target_stat = (
            self.call(fd, "look at", os.fstat, fd) for fd in (source, target)
        )
        return source_stat.st_dev, target_stat.st_dev

    def _copy(
        self, source: int, source_offset: int, target: int, target_offset: int, num_bytes: int
    ) -> None:
        first = self._methods.get(self._devices(source, target), 0) if self._methods else 0
        done = 0
        methods = (self._copy_in_kernel, self._copy_by_sendfile)
        for number in range(first, len(methods)):
            try:
                for copied in methods[number](
                    source, source_offset, target, target_offset, num_bytes
                ):
                    done += copied
            except OSError as e:
                if e.errno not in UNSUPPORTED:
                    verb = f"copy from {find_path(source)}"
                    raise to_storage_error(e, target, verb, needed=num_bytes - done) from e
                self._methods[self._devices(source, target)] = number + 1
            if done == num_bytes:
                return
            source_offset, target_offset, num_bytes, done = (
                source_offset + done,
                target_offset + done,
                num_bytes - done,
                0,
            )
        self._copy_through_memory(source, source_offset, target, target_offset, num_bytes)

    def _copy_object(
        self, source: int, source_offset: int, target: int, target_offset: int, num_bytes: int
    ) -> None:
        """Copy where a side is an object of a store: by the store itself, if both are in it."""
        if (memory := self.opened_memory(target)) is not None:
            part = memory[target_offset : target_offset + num_bytes]
            populate(part)
            self.pread_into(source, part, source_offset)
            return
        if min(source, target) >= FIRST_NUMBER and self.objects[target].copy_from(
            self.objects[source], source_offset, target_offset, num_bytes
        ):
            if self.recorder is not None:
                self.recorder.forget(self._paths.get(target), target_offset, num_bytes)
            return
        self._copy_through_memory(source, source_offset, target, target_offset, num_bytes)

    def _copy_through_memory(
        self, source: int, source_offset: int, target: int, target_offset: int, num_bytes: int
    ) -> None:
        if not hasattr(self._scratch, "buffer"):
            self._scratch.buffer = memoryview(bytearray(SCRATCH_BYTES))
        step = SCRATCH_BYTES
        buffer = self._scratch.buffer
        if source >= FIRST_NUMBER:  # one request each
            step = OBJECT_STEP
            buffer = memoryview(bytearray(min(step, num_bytes)))
        for start in range(0, num_bytes, step):
            part = buffer[: num_bytes - start]
            self.pread_into(source, part, source_offset + start)
            self.pwrite_all(target, part, target_offset + start)

    def _copy_in_kernel(
        self, source: int, source_offset: int, target: int, target_offset: int, num_bytes: int
    ) -> Iterator[int]:
        done = 0
        while done < num_bytes:
            step = min(num_bytes - done, KERNEL_STEP)
            try:
                copied = self.system(
                    os.copy_file_range,
                    source,
                    target,
                    step,
                    source_offset + done,
                    target_offset + done,
                )
            except InterruptedError:
                continue
            if copied == 0:  # end of file, or a file system that returns 0 instead of an error
                return
            done += copied
            yield copied

    def _copy_by_sendfile(
        self, source: int, source_offset: int, target: int, target_offset: int, num_bytes: int
    ) -> Iterator[int]:
        """Sendfile writes at its descriptor's position: open one that no other thread uses."""
        if num_bytes < SENDFILE_FROM:
            return
        try:
            private = self.system(os.open, f"/proc/self/fd/{target}", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # no /proc or no permission: use the buffer
            return
        try:
            self.system(os.lseek, private, target_offset, os.SEEK_SET)
            done = 0
            while done < num_bytes:
                step = min(num_bytes - done, KERNEL_STEP)
                try:
                    copied = self.system(os.sendfile, private, source, source_offset + done, step)
                except InterruptedError:
                    continue
                if copied == 0:
                    return
                done += copied
                yield copied
        finally:
            self.close(private)

    def opened_memory(self, fd: int) -> NDArray[np.uint8] | None:
        """The memory of this process that is open under a number; None for files and objects."""
        opened = self.objects[fd] if fd >= FIRST_NUMBER else None
        return opened.data if isinstance(opened, MemoryObject) else None

    def close(self, fd: int) -> None:
        """Close a descriptor; network file systems report failed writes here."""
        path = self._paths.pop(fd, None)
        if fd >= FIRST_NUMBER:
            self.objects.close(fd)
            return
        try:
            self.system(os.close, fd)
        except InterruptedError:
            return  # Linux has closed it anyway
        except OSError as e:
            raise to_storage_error(e, path or fd, "close") from e


def _head(buffers: Sequence[Buffer], num_bytes: int) -> Sequence[Buffer]:
    """The first `num_bytes` of consecutive buffers."""
    if num_bytes == sum(b.nbytes for b in buffers):
        return buffers
    out: list[Buffer] = []
    for buffer in buffers:
        if num_bytes > 0 and buffer.nbytes:
            out.append(np.frombuffer(buffer, np.uint8)[:num_bytes])
        num_bytes -= buffer.nbytes
    return out


def find_path(file: FileRef) -> Path | None:
    """The path of a descriptor, looked up only for errors."""
    if isinstance(file, Path):
        return file
    if file >= FIRST_NUMBER:
        return open_objects().path(file)
    try:
        return Path(os.readlink(f"/proc/self/fd/{file}"))
    except OSError:
        return None


def to_storage_error(error: OSError, file: FileRef, verb: str, *, needed: int = 0) -> StorageError:
    """Convert an OSError to a typed error; `needed` bytes are reported with the free bytes."""
    path = find_path(file)
    message = f"cannot {verb}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and needed:
        message += f" ({needed:,} bytes needed"
        with contextlib.suppress(OSError):
            status = os.statvfs(path or file)
            message += f", {status.f_bavail * status.f_frsize:,} free"
        message += ")"
    return StorageError(message, file=path, hint=HINTS.get(error.errno or 0))
