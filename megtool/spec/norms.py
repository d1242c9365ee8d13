"""Fields of norms and of the residual that layers add to."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.errors import MappingError
from megtool.spec.checks import check_choice, check_part, is_number
from megtool.spec.facts import fact

NORMS = ("rmsnorm", "layernorm")
QK_NORMS = ("head", "each", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormPart:
    """Kind of the norms, their weights, and where they stand."""

    norm: str = fact("name", "rmsnorm", hf=None, megatron="normalization")
    """One of `NORMS`; Hugging Face's classes imply it."""
    norm_eps: float = fact(
        "number", 1e-5, hf="rms_norm_eps", megatron="norm_epsilon", limits="positive"
    )
    """Added to the mean square, or the variance, before its root is taken."""
    norm_bias: bool = fact("flag", True, hf="norm_bias", megatron=None)
    """Layer norms have a bias, too, not a weight alone."""
    norm_weight: bool = fact("flag", True, hf="layer_norm_elementwise_affine", megatron=None)
    """Norms have a weight; without one they have no bias either."""
    zero_centered_norm: bool = fact(
        "flag", False, hf=None, megatron="layernorm_zero_centered_gamma"
    )
    """A stored weight w stands for 1 + w."""
    pre_norms: bool = fact("flag", True, hf=None, megatron=None)
    """What attention and MLP read is normalized."""
    first_attn_norm: bool = fact("flag", True, hf=None, megatron=None)
    """The first layer's attention has such a norm, too."""
    shared_norm: bool = fact("flag", False, hf=None, megatron=None)
    """One norm feeds both attention and MLP, in parallel."""
    post_norms: bool = fact("flag", False, hf="use_post_norm", megatron=None)
    """What attention and MLP add to the residual is normalized."""
    norms_after_add: bool = fact("flag", False, hf=None, megatron=None)
    """Post norms are of the sum with the residual."""
    embedding_norm: bool = fact("flag", False, hf=None, megatron=None)
    """Embeddings are normalized."""
    final_norm: bool = fact("flag", True, hf=None, megatron=None)
    """There is a norm after the last layer."""
    qk_norm: bool = fact("flag", False, hf="use_qk_norm", megatron="qk_layernorm")
    """Queries and keys have norms with weights; tensors say so, too."""
    qk_norm_of: str = fact("name", "head", hf=None, megatron=None)
    """How such a norm covers heads: `head`, each alone with one weight `[head_dim]` for all;
    `each`, each alone with a weight of its own; `all`, all heads of a token at once. Kind,
    epsilon and bias are those of the other norms."""
    qk_norm_rotated: bool = fact("flag", False, hf=None, megatron=None)
    """Such a norm comes after rotation."""
    qk_l2_norm: bool = fact(
        "flag", False, hf="use_qk_norm", megatron="qk_l2_norm", from_family=True
    )
    """Queries and keys are divided by their root mean square after rotation."""
    qk_l2_norm_unrotated: bool = fact("flag", False, hf=None, megatron="qk_l2_norm")
    """They are so in layers without rotary embedding, too, as in Megatron."""

    def __post_init__(self) -> None:
        check_part(self)
        check_choice("norm", self.norm, NORMS)
        check_choice("qk_norm_of", self.qk_norm_of, QK_NORMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualPart:
    """How layers add to the residual, what else they read, and residuals side by side."""

    parallel_residual: bool = fact("flag", False, hf="use_parallel_residual", megatron=None)
    """Attention and MLP read the same residual."""
    residual_scale: float = fact("factor", 1.0, hf="residual_multiplier", megatron=None)
    """Multiplies the output of every residual branch."""
    layer_scalar: bool = fact("flag", False, hf=None, megatron=None)
    """The output of every layer is multiplied by a number of its own, which is not trained."""
    layer_input_size: int = fact(
        "elements",
        0,
        hf="hidden_size_per_layer_input",
        megatron="hidden_size_per_layer_input",
    )
    """Every layer adds what it makes of a vector of this size, which it gets for each token from a
    second embedding and the first residual; 0: of none."""
    hyper_streams: int = fact("residuals", 0, hf="hc_mult", megatron="num_residual_streams")
    """Residuals side by side, which every branch reads and adds to by weights that depend on them;
    0: one, without such weights."""
    hyper_iterations: int = fact(
        "steps", 20, hf="hc_sinkhorn_iters", megatron="mhc_sinkhorn_iterations"
    )
    """Steps that make the weights among residuals doubly stochastic."""
    hyper_eps: float = fact("number", 1e-6, hf="hc_eps", megatron=None, limits="unchecked")
    """Added to sums of these weights before a division."""

    def __post_init__(self) -> None:
        check_part(self)
        if not is_number(self.hyper_eps) or self.hyper_eps < 0:
            raise MappingError(f"hyper_eps is {self.hyper_eps!r}", hint="a small positive number")
        if self.hyper_streams and not self.hyper_iterations:
            raise MappingError("hyper_iterations is 0", hint="a positive integer")
