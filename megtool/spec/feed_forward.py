"""Fields of feed-forward branches: MLPs, mixtures of experts and their routers."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.spec.checks import check_part
from megtool.spec.facts import fact


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpPart:
    """MLPs, and what experts have in common with them."""

    ffn_hidden_size: int = fact("elements", hf="intermediate_size", megatron="ffn_hidden_size")
    """Width between an MLP's two projections."""
    gated: bool = fact("flag", True, hf=None, megatron="gated_linear_unit")
    """One half of the width is activated and multiplies the other."""
    activation: str = fact("name", "silu", hf="hidden_act", megatron="swiglu")
    """Hugging Face's word for the function. Megatron has a flag each for gated SiLU, quick GELU,
    squared ReLU and the tanh form of GELU, and GELU without any."""
    mlp_bias: bool = fact("flag", False, hf="mlp_bias", megatron="add_bias_linear")
    """Both projections have biases; tensors say so, too."""
    activation_limit: float = fact(
        "number",
        0.0,
        hf="swiglu_limit",
        megatron="activation_func_clamp_value",
        from_family=True,
        limits="not negative",
    )
    """A gated MLP clamps the activated half from above, the other half on both sides; 0: not."""
    glu_offset: float = fact("number", 0.0, hf=None, megatron="glu_linear_offset", from_family=True)
    """A gated MLP adds this to the half that is not activated."""
    mlp_gate_scale: float = fact("factor", 1.0, hf="mlp_multipliers", megatron=None)
    """Multiplies the half that is activated, before that."""
    mlp_out_scale: float = fact("factor", 1.0, hf="mlp_multipliers", megatron=None)
    """Multiplies the output of a gated MLP."""

    def __post_init__(self) -> None:
        check_part(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoePart:
    """Mixtures of experts: which layers have one, and the sizes of experts."""

    num_experts: int = fact("experts", 0, hf="num_experts", megatron="num_experts")
    """Routed experts of a layer; 0: there are none."""
    num_experts_per_token: int = fact(
        "experts", 0, hf="num_experts_per_tok", megatron="moe_router_topk"
    )
    """Routed experts that a token goes to."""
    moe_ffn_hidden_size: int = fact(
        "elements", 0, hf="moe_intermediate_size", megatron="moe_ffn_hidden_size"
    )
    """Width of a routed expert."""
    shared_ffn_hidden_size: int = fact(
        "elements",
        0,
        hf="shared_expert_intermediate_size",
        megatron="moe_shared_expert_intermediate_size",
    )
    """Width of all shared experts together; 0: there are none."""
    moe_layer_freq: int | tuple[int, ...] = fact(
        "layers, or flags by layer", 1, hf="first_k_dense_replace", megatron="moe_layer_freq"
    )
    """An int n makes every n-th layer, from the first, a mixture of experts; a tuple says so layer
    by layer. Families of Hugging Face have several keys for it."""
    moe_latent_size: int = fact("elements", 0, hf="moe_latent_size", megatron="moe_latent_size")
    """Routed experts read and return vectors of this size, between two projections that all of
    them share; 0: they read the residual."""
    expert_norms: bool = fact("flag", False, hf="enable_moe_block", megatron=None)
    """Shared experts have norms of their own before and after them, and so have the routed."""
    shared_expert_gate: bool = fact("flag", False, hf=None, megatron="moe_shared_expert_gate")
    """The output of shared experts is multiplied by the sigmoid of a projection."""

    def __post_init__(self) -> None:
        check_part(self)


SPARSEMIXER = "sparsemixer"
ROUTER_SCORES = ("softmax", "sigmoid", "sqrtsoftplus", SPARSEMIXER)
"""Values of `router_score`; the last is Phi-MoE's, which megatron-core does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPart:
    """How tokens choose among routed experts."""

    router_norm: bool = fact("flag", False, hf="enable_moe_block", megatron=None)
    """The router reads the residual divided by its root mean square and times a weight, and
    multiplies the share of each expert by a number of its own."""
    router_score: str = fact(
        "name", "softmax", hf="scoring_func", megatron="moe_router_score_function"
    )
    """Function that makes scores of logits. With `sparsemixer` experts are chosen one after the
    other (`router_jitter`)."""
    router_pre_softmax: bool = fact(
        "flag", False, hf="norm_topk_prob", megatron="moe_router_pre_softmax"
    )
    """Scores are normalized before the choice of experts, not among the chosen."""
    router_normalized: bool | None = fact("flag or none", None, hf="norm_topk_prob", megatron=None)
    """Scores of the chosen experts that are no softmax are divided by their sum; None: where there
    are several, as in Megatron."""
    router_scaling: float = fact(
        "factor", 1.0, hf="routed_scaling_factor", megatron="moe_router_topk_scaling_factor"
    )
    """Multiplies the shares of the chosen experts."""
    router_num_groups: int = fact("groups", 0, hf="n_group", megatron="moe_router_num_groups")
    """Groups that experts are divided into; 0: none."""
    router_topk_groups: int = fact("groups", 0, hf="topk_group", megatron="moe_router_group_topk")
    """Groups that a token chooses experts from."""
    router_group_best: int = fact("experts", 0, hf=None, megatron=None)
    """A group is ranked by the sum of so many of its best scores; 0: Megatron's number, the
    experts that a token gets from each chosen group."""
    router_bias: bool = fact("flag", False, hf=None, megatron=None, from_family=False)
    """The router's projection has a bias; its tensor says so."""
    router_expert_bias: bool = fact(
        "flag", False, hf="use_expert_bias", megatron="moe_router_enable_expert_bias"
    )
    """A number for each expert is added to scores for the choice alone; its tensor says so, too."""
    router_jitter: float = fact(
        "share", 0.0, hf="router_jitter_noise", megatron=None, limits="not negative"
    )
    """With `sparsemixer` the share of an expert is its part of a softmax over those whose logits
    are less than twice this below its own, relative to their size."""
    router_scales_input: bool = fact(
        "flag", False, hf=None, megatron="moe_apply_probs_on_input", from_family=True
    )
    """What an expert is given is multiplied by its share, not what it returns."""
    router_fp32: bool = fact(
        "flag",
        False,
        hf=None,
        megatron="moe_router_dtype",
        changes_function=False,
        from_family=True,
    )
    """The router and its input are cast to float32: another rounding, not another function."""
    num_hash_layers: int = fact("layers", 0, hf="num_hash_layers", megatron="moe_n_hash_layers")
    """In so many layers, the first ones, a table says which experts a token goes to."""

    def __post_init__(self) -> None:
        check_part(self)
