"""Move model checkpoints between formats and parallel layouts, quantize, export and train them.

`megtool.reshard(source, destination, tp=3)` and the other verbs are functions; see
`megtool.commands.verbs`. They are imported when they are first used.

The rooms, from the top down: __main__.py, dcp.py, megatron.py, torch_checkpointing.py,
transformers.py; cli, frameworks; commands; export, machine, train; quantize; lint; quant;
inference; access, audit; reshard; fp8_state; run_state; source; adapters, megatron_state;
converters; convert, data, model, optim; formats; staging; plan; digests; transport; parallel,
pickles; kernels, tensors; number_formats, options, report; process, spec, storage; console.py,
dtypes.py; errors.py.
"""

import importlib as _importlib
import sys as _sys
from pathlib import Path as _Path
from types import ModuleType as _ModuleType

__version__ = "0.1.0.dev0"

__all__ = [
    "Checkpoint",
    "Engine",
    "__version__",
    "audit",
    "clean",
    "convert_adapter",
    "demo",
    "derive_amax",
    "doctor",
    "evaluate",
    "explain_recipe",
    "export",
    "finetune",
    "fix_amax",
    "generate",
    "inspect",
    "inspect_adapter",
    "inspect_amax",
    "lint",
    "list_recipes",
    "load_state_dict",
    "open",
    "quantize",
    "reshard",
    "show_recipe",
    "stream",
    "strip_amax",
    "tokenize",
    "verify",
]

_ACCESS = {
    "Checkpoint": ("megtool.access.checkpoint", "Checkpoint"),
    "Engine": ("megtool.inference.generation.text_engine", "Engine"),
    "load_state_dict": ("megtool.access.state_dict", "load_state_dict"),
    "open": ("megtool.access.checkpoint", "open_checkpoint"),
    "stream": ("megtool.access.checkpoint", "stream"),
}
"""What is no verb: where it is, and its name there."""

_MODULES = ("dcp", "megatron", "torch_checkpointing", "transformers")
"""Modules of other frameworks' words, imported when they are first used."""

# In a checkout the folders converters/ and quant_recipes/ are next to this package, not inside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "converters").is_dir():
    __path__.append(str(_root))


class _Package(_ModuleType):
    """The package with its verbs as lazy attributes.

    `reshard`, `export`, `lint` and `audit` are verbs and packages. When a submodule is imported,
    the import system binds it to its parent (`megtool.reshard = <module>`), which would hide the
    verb. So a module never takes a verb's name here; `sys.modules`, by which `from
    megtool.source.checkpoint import X` and `from megtool.source import checkpoint` find it, is not
    concerned.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> object:
        if name in _MODULES:
            return _importlib.import_module(f"{__name__}.{name}")
        if name.startswith("_") or name not in __all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in _ACCESS:
            module, attribute = _ACCESS[name]
            function = getattr(_importlib.import_module(module), attribute)
        else:
            function = _importlib.import_module("megtool.commands.api").make_function(name)
        setattr(self, name, function)
        return function

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


_sys.modules[__name__].__class__ = _Package
