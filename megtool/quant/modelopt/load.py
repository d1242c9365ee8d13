"""Import ModelOpt, quietly, and teach it our modules."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from megtool.errors import MissingPackageError, RecipeError


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
    from megtool.quant.modelopt.unit_modules import register

    with silence_output():
        register()
    return mtq


def check_config(config: Mapping[str, Any]) -> None:
    """Have ModelOpt check its configuration, as it does only when it calibrates.

    Raises:
        RecipeError: a setting or an option that it does not take.
    """
    from modelopt.torch.quantization.config import QuantizeConfig
    from modelopt.torch.quantization.mode import CalibrateModeRegistry, get_modelike_from_algo_cfg

    try:
        QuantizeConfig(**config)
        ((name, options),) = get_modelike_from_algo_cfg(config["algorithm"])
        CalibrateModeRegistry[name].config_class(**options)
    except ValueError as error:
        listed: list[Any] = getattr(error, "errors", list)()
        problems = [f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in listed]
        raise RecipeError(
            f"ModelOpt does not take what the recipe says: {'; '.join(problems) or error}",
            hint="change it as the message says, or leave it out",
        ) from error
    algorithm = config["algorithm"]
    for search in (algorithm, *(v for v in algorithm.values() if isinstance(v, Mapping))):
        first, last = (search.get(f"{end}_multiplier") for end in ("start", "stop"))
        if (first or 0.25) > (last or 4.0):
            raise RecipeError(
                f"the search begins at {first or 0.25:g} times the amax and ends at "
                f"{last or 4.0:g}",
                hint="a stop_multiplier above start_multiplier",
            )
