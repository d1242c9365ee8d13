"""Recurrences by flash-linear-attention and mamba-ssm, the convolution by causal-conv1d.

Arguments and results are those of megtool's own functions. Held against the sources of fla-core
0.6.0 (`ops/gated_delta_rule/chunk.py`, `ops/kda/chunk.py`), mamba-ssm 2.3.2
(`ops/triton/ssd_combined.py`) and causal-conv1d 1.6.1 (`causal_conv1d_interface.py`,
`csrc/causal_conv1d.cpp`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megtool.kernels import launch, peers
from megtool.kernels.dispatch import Chosen, requested_implementation

_MAMBA_CHUNK = 256  # the default of mamba-ssm's own modules
_TAPS = range(2, 5)
_CHANNELS = 8  # causal-conv1d takes multiples of so many


def fla_cannot(value_BSNP: Tensor, key_BSKD: Tensor, runs_BS: Tensor | None) -> tuple[Chosen, ...]:
    """Return ("fla",) where its delta rules cannot compute a call as megtool does.

    Its products of fp32 are TF32, which is not taken unasked. Where runs begin the host asks the
    device, which no graph can record.
    """
    wide = (torch.float32,) if requested_implementation() == "fla" else ()
    has_type = value_BSNP.dtype in (torch.bfloat16, torch.float16, *wide)
    is_waiting = runs_BS is not None and value_BSNP.is_cuda and launch.is_for_graph()
    return () if has_type and key_BSKD.shape[-1] <= 256 and not is_waiting else ("fla",)


def mamba_cannot(x_BSND: Tensor) -> tuple[Chosen, ...]:
    """Return ("mamba-ssm",) where its scan cannot compute a call as megtool does."""
    wide = (torch.float32,) if requested_implementation() == "mamba-ssm" else ()
    return () if x_BSND.dtype in (torch.bfloat16, torch.float16, *wide) else ("mamba-ssm",)


def conv_cannot(
    x_BSC: Tensor, weight_CK: Tensor, past_BPC: Tensor | None, runs_BS: Tensor | None
) -> tuple[Chosen, ...]:
    """Return ("causal-conv1d",) where it has no kernel for a call: it takes 2 to 4 taps, channels
    in multiples of 8, no fp64, and runs only where nothing comes before the rows."""
    can = (
        weight_CK.shape[1] in _TAPS
        and x_BSC.shape[2] % _CHANNELS == 0
        and x_BSC.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (past_BPC is None or runs_BS is None)
    )
    return () if can else ("causal-conv1d",)


def gated_delta_rule(
    query_BSKD: Tensor,
    key_BSKD: Tensor,
    value_BSNP: Tensor,
    decay_BSN: Tensor,
    beta_BSN: Tensor,
    state_BNDP: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `delta_rule.gated_delta_rule`; by fla."""
    inputs = (query_BSKD, key_BSKD, value_BSNP, decay_BSN, beta_BSN)
    return _by_fla("chunk_gated_delta_rule", inputs, state_BNDP, runs_BS)


def kimi_delta_rule(
    query_BSND: Tensor,
    key_BSND: Tensor,
    value_BSNP: Tensor,
    decay_BSND: Tensor,
    beta_BSN: Tensor,
    state_BNDP: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `kimi_delta.kimi_delta_rule`; by fla."""
    inputs = (query_BSND, key_BSND, value_BSNP, decay_BSND, beta_BSN)
    return _by_fla("chunk_kda", inputs, state_BNDP, runs_BS)


def _by_fla(
    name: str, inputs: tuple[Tensor, ...], state_BNDP: Tensor | None, runs_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run a delta rule of fla, which takes runs as rows of several lengths, one after the other."""
    run = peers.call("fla", name)
    query, key, value, decay, beta = inputs
    kind = value.dtype
    arguments = (query.to(kind), key.to(kind), value, decay.float(), beta.float())
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    state = None if state_BNDP is None else state_BNDP.float()
    if runs_BS is None:
        return run(*arguments, initial_state=state, **options)  # type: ignore[no-any-return]
    rows, tokens = runs_BS.shape
    begins_BS = torch.ones_like(runs_BS, dtype=torch.bool)
    begins_BS[:, 1:] = runs_BS[:, 1:] != runs_BS[:, :-1]
    starts = begins_BS.flatten().nonzero().flatten()
    offsets = torch.cat((starts, starts.new_full((1,), rows * tokens)))
    row_of_run = starts // tokens
    if state is not None:
        # The state before a row goes into its first run alone.
        is_first = (starts % tokens == 0).to(state.dtype)
        state = state[row_of_run] * is_first.view(-1, 1, 1, 1)
    out, states = run(
        *(x.flatten(0, 1).unsqueeze(0) for x in arguments),
        initial_state=state,
        cu_seqlens=offsets,
        **options,
    )
    last = torch.searchsorted(row_of_run, torch.arange(rows, device=starts.device), right=True) - 1
    return out.view(value.shape), states[last]


def ssd_scan(
    x_BSND: Tensor,
    dt_BSN: Tensor,
    a_N: Tensor,
    b_BSGZ: Tensor,
    c_BSGZ: Tensor,
    d_N: Tensor,
    state_BNDZ: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `ssd.ssd_scan`; by mamba-ssm. It tells runs by their numbers, from 0 in every row."""
    chunk = min(_MAMBA_CHUNK, max(16, launch.power(x_BSND.shape[1])))
    out, state = peers.call("mamba-ssm", "mamba_chunk_scan_combined")(
        x_BSND,
        dt_BSN.float(),
        a_N.float(),
        b_BSGZ.to(x_BSND.dtype),
        c_BSGZ.to(x_BSND.dtype),
        chunk,
        D=d_N.float(),
        initial_states=None if state_BNDZ is None else state_BNDZ.detach().float(),
        seq_idx=None if runs_BS is None else runs_BS.to(torch.int32).contiguous(),
        return_final_states=True,
    )
    return out, state.detach().float()


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    past_BPC: Tensor | None,
    runs_BS: Tensor | None,
    silu: bool,
) -> Tensor:
    """See `causal_conv.causal_conv`; by causal-conv1d, which has channels before tokens and takes
    them where tokens are the outer dim in memory."""
    past = None
    if past_BPC is not None:
        past = past_BPC.detach().to(x_BSC.dtype).contiguous().transpose(1, 2)
    out: Tensor = peers.call("causal-conv1d", "causal_conv1d_fn")(
        x_BSC.contiguous().transpose(1, 2),
        weight_CK.contiguous(),
        bias=None if bias_C is None else bias_C.to(weight_CK.dtype),
        seq_idx=None if runs_BS is None else runs_BS.to(torch.int32).contiguous(),
        initial_states=past,
        activation="silu" if silu else None,
    )
    return out.transpose(1, 2)
