"""Fields of both ends of a model: embeddings, the output layer, and further predicted tokens."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.spec.checks import check_part
from megtool.spec.facts import fact
from megtool.spec.layer_symbols import EXPERTS, MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPart:
    """Embeddings of words."""

    vocab_size: int = fact("words", hf="vocab_size", megatron="vocab_size")
    """Words, without padding."""
    tied_embeddings: bool = fact(
        "flag",
        False,
        hf="tie_word_embeddings",
        megatron="untie_embeddings_and_output_weights",
    )
    """The output layer is the embedding."""
    num_token_types: int = fact("types", 0, hf="type_vocab_size", megatron="num_tokentypes")
    """Types that words have one of, each with an embedding; 0: they have none."""
    embedding_scale: float = fact(
        "factor",
        1.0,
        hf="embedding_multiplier",
        megatron="mup_embedding_mult",
        from_family=True,
    )
    """Multiplies embeddings."""

    def __post_init__(self) -> None:
        check_part(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPart:
    """What turns hidden states into logits, or into scores of labels."""

    logit_scale: float = fact(
        "factor", 1.0, hf="logits_scaling", megatron="mup_output_mult", from_family=True
    )
    """Multiplies logits (some families store its inverse)."""
    logit_softcap: float = fact(
        "logit", 0.0, hf="final_logit_softcapping", megatron=None, limits="not negative"
    )
    """A cap c bends logits x to `c * tanh(x / c)`; 0: no cap."""
    masked_head: bool = fact("flag", False, hf=None, megatron=None)
    """A linear layer, an activation and a norm come before the output layer."""
    head_activation: str = fact("name", "", hf="classifier_activation", megatron=None)
    """This activation; empty: that of MLPs."""
    head_dense_bias: bool = fact("flag", False, hf="classifier_bias", megatron=None)
    """This linear layer has a bias."""
    head_bias: bool = fact("flag", False, hf="lm_head_bias", megatron=None)
    """The output layer has a bias."""
    num_labels: int = fact("labels", 0, hf="num_labels", megatron=None, from_family=False)
    """There is no output layer, and labels are scored: of a text by its last token, of a
    bidirectional model by its first. One label is a reward, or another number."""
    score_dense: bool = fact("flag", False, hf=None, megatron=None, from_family=False)
    """A linear layer and tanh come before the scores."""
    score_bias: bool = fact("flag", False, hf=None, megatron=None, from_family=False)
    """Scores of labels have a bias."""

    def __post_init__(self) -> None:
        check_part(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpPart:
    """Multi-token prediction: layers after the last one that predict further tokens."""

    num_mtp_layers: int = fact(
        "layers",
        0,
        hf="num_nextn_predict_layers",
        megatron="mtp_num_layers",
        changes_function=False,
    )
    """How many such layers there are, each like the last layer. The next token is predicted
    without them."""
    mtp_hidden_first: bool = fact("flag", False, hf=None, megatron=None)
    """What projects their two inputs to one has columns for the hidden state first, not for the
    embedding."""
    mtp_own_embedding: bool = fact("flag", False, hf=None, megatron=None, changes_function=False)
    """They have an embedding each, which is not the model's: tensors say so, and no key."""
    mtp_own_head: bool = fact("flag", False, hf=None, megatron=None, changes_function=False)
    """They have an output layer each, which is not the model's: tensors say so, and no key."""
    mtp_window: bool = fact("flag", False, hf=None, megatron="swa_num_query_groups")
    """They have a window, and the sizes of layers that have one."""
    mtp_kind: str = fact("symbols", "", hf="mtp_layers_block_type", megatron="hybrid_layer_pattern")
    """Branches of each, as in `layer_kinds`; empty: those of the last layer. Megatron's
    HybridModel may have more there than a mixer and an MLP."""

    def __post_init__(self) -> None:
        check_part(self)

    @property
    def num_mtp_inner(self) -> int:
        """How many layers a layer of multi-token prediction has inside, numbered and of one branch
        each; 0 where it is a mixer, an MLP or experts, or a mixer and one of these."""
        kind = self.mtp_kind
        is_one = len(kind) < 2 or (
            len(kind) == 2 and kind[0] not in MLP + EXPERTS and kind[1] in MLP + EXPERTS
        )
        return 0 if is_one else len(kind)
