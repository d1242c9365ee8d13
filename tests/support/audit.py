"""What the interpreter is asked to do: imports, files, processes and sockets."""

from __future__ import annotations

from typing import Any

WATCHED = {"import", "open", "exec", "compile", "os", "subprocess", "socket", "ctypes", "shutil"}


class Audit:
    """What the interpreter was asked to do while `watching`: imports, files, processes, sockets."""

    def __init__(self) -> None:
        self.watching = False
        self.seen: list[tuple[str, Any]] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.watching and event.partition(".")[0] in WATCHED:
            self.seen.append((event, args[0] if args else None))
