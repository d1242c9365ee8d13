"""Moves model checkpoints between formats and parallel layouts; the Python API is `commands`."""

from pathlib import Path as _Path

__version__ = "0.1.0.dev0"

# In a checkout the folders converters/ and quant_recipes/ lie beside this package, not inside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "converters").is_dir():
    __path__.append(str(_root))
