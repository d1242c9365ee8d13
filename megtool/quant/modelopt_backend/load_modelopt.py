"""Import ModelOpt, quietly, and teach it our modules."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from megtool.errors import MissingPackageError


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Suppress what the package prints and warns about, and what it has Transformers log."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def import_modelopt() -> Any:
    """Import `modelopt.torch.quantization`, and register our modules with it.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        with silence_output():
            import modelopt.torch.quantization as mtq
    except ImportError as e:
        raise MissingPackageError(
            f"--backend modelopt needs a package that is not installed: {e}",
            hint="pip install 'megtool[modelopt]'",
        ) from e
    from megtool.quant.modelopt_backend.unit_modules import register

    with silence_output():
        register()
    return mtq
