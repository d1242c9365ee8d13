"""The types of activation hooks, which observe or replace the inputs of a decoder's matrices.

Every linear module of a layer has a plain attribute `tap`, None by default, which costs nothing.
When set, the rows that are multiplied (behind the norm that the module carries) go through it, as
this rank has them: `x = tap(x)`, for experts `rows = tap(rows, counts_E)`, sorted by expert. The
head's is `Decoder.head_tap`, attention's for keys and values `cache_tap`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

ActivationHook = Callable[[Tensor], Tensor]
ExpertHook = Callable[[Tensor, Tensor], Tensor]
KVCacheHook = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
