"""Lazy imports of NVIDIA ModelOpt and transformers, with their output silenced."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

from megtool.errors import MissingPackageError


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Suppress what the packages print and warn about."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def without_progress_bars(transformers: Any) -> Iterator[None]:
    """Turn off the progress bars of transformers."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def import_modelopt() -> tuple[Any, Any]:
    """Import `modelopt.torch.quantization` and transformers.

    Raises:
        MissingPackageError: one is not installed.
    """
    try:
        with silence_output():
            import modelopt.torch.quantization as mtq
            import transformers
    except ImportError as e:
        raise MissingPackageError(
            f"--backend modelopt needs a package that is not installed: {e}",
            hint="pip install 'megtool[modelopt]'",
        ) from e
    return mtq, transformers
