"""Copy a compressed-tensors folder to the same form, with its configuration unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megtool.checkpoint.formats.quantized import QUANT_FILE
from megtool.export.folders.config_edit import edit_config
from megtool.export.folders.tensor_specs import ModuleTensors
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.tensors.sharded import GlobalTensor


class PassthroughForm:
    """All tensors under their own names. compressed-tensors says more than any format of ours:
    what is read of it would lose some, and nothing of it is to change."""

    name = "compressed-tensors, as it is"

    def check(self, folder: QuantizedModules) -> None:
        """It says what it said before."""

    def notes(self, folder: QuantizedModules) -> Sequence[str]:
        """Nothing becomes otherwise."""
        return ()

    def plan_module(self, module: QuantizedModule) -> ModuleTensors:
        """See `FolderForm`; there are no modules to be written."""
        raise ValueError(f"{module.name} is carried as it is")

    def plan_kv_cache(self, folder: QuantizedModules) -> Sequence[tuple[GlobalTensor, str]]:
        """They are tensors like others."""
        return ()

    def edit_files(self, folder: QuantizedModules, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """As they are; an output layer with codes of its own is said to be no embedding."""
        out = {n: d for n, d in files.items() if n != QUANT_FILE}
        if folder.has_untied_head and "config.json" in out:
            out["config.json"] = edit_config(out["config.json"], add={}, untie=True)
        return out
