"""Models that score labels instead of tokens: what is other about a family's model that does.

transformers' `*ForSequenceClassification`: decoders multiply the state of a text's last token by
`score`, encoders that of its first token, behind a dense layer, by `classifier`. With one label
that is a reward, or any other number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megtool.convert.config.keys import Setting
from megtool.convert.families.family import Family
from megtool.convert.language.mapping import Dropped, Row, Table, Tower, word
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

SUFFIX = "ForSequenceClassification"
_OTHER_HEADS = ("ForTokenClassification", "ForMultipleChoice", "ForQuestionAnswering")

_TIED = "tie_word_embeddings"
_NO_SUCH_HEAD = (
    "Megatron's models have no head that scores labels: it is kept as score.weight, for megtool"
)

_SCORE: Table = (
    Row("score.weight", "score.weight"),
    Row("score.bias", "score.bias"),
)
_ENCODERS: Mapping[str, Table] = {
    "bert": (
        Row("bert.pooler.dense.weight", "score_dense.weight"),
        Row("bert.pooler.dense.bias", "score_dense.bias"),
        Row("classifier.weight", "score.weight"),
        Row("classifier.bias", "score.bias"),
    ),
    "bert_post_norm": (
        Row("bert.pooler.dense.weight", "score_dense.weight"),
        Row("bert.pooler.dense.bias", "score_dense.bias"),
        Row("classifier.weight", "score.weight"),
        Row("classifier.bias", "score.bias"),
    ),
    "roberta": (
        Row("classifier.dense.weight", "score_dense.weight"),
        Row("classifier.dense.bias", "score_dense.bias"),
        Row("classifier.out_proj.weight", "score.weight"),
        Row("classifier.out_proj.bias", "score.bias"),
    ),
    "modernbert": (
        Row("classifier.weight", "score.weight"),
        Row("classifier.bias", "score.bias"),
    ),
}
"""What encoders have behind their layers, by family. ModernBERT's dense layer and norm are those
that it has before its vocabulary, too."""


def with_label_head(family: Family, metadata: Mapping[str, Any]) -> Family:
    """The family as its models are that a config.json says to score labels; itself for others.

    Raises:
        MappingError: the model has another head, or the family none that scores labels.
    """
    listed = metadata.get("architectures")
    names = [n for n in listed if isinstance(n, str)] if isinstance(listed, list | tuple) else []
    if other := next((n for n in names if n.endswith(_OTHER_HEADS)), None):
        raise MappingError(
            f"the model is a {other}, and of such heads only those of whole texts are known",
            hint=f"*{SUFFIX} and models of tokens are read",
        )
    name = next((n for n in names if n.endswith(SUFFIX)), None)
    if name is None:
        return family
    is_encoder = bool(family.traits.get("bidirectional"))
    if family.nested is not None or (is_encoder and family.name not in _ENCODERS):
        raise MappingError(
            f"the model is a {name}, and family {family.name!r} has no such models",
            hint="decoders of texts, BERT, RoBERTa and ModernBERT have",
        )
    keeps_transform = family.name == "modernbert"
    rows = tuple(r for r in family.hf if not _is_of_vocabulary(r, keeps_transform=keeps_transform))
    traits: dict[str, Any] = dict(family.traits)
    if is_encoder:
        traits |= {"score_bias": True, "score_dense": not keeps_transform, "head_bias": False}
        traits |= {} if keeps_transform else {"masked_head": False, "head_dense_bias": False}
    return replace(
        family,
        architectures=(name,),
        traits=traits,
        config=(*family.config, Labels()),
        hf=(*rows, *(_ENCODERS[family.name] if is_encoder else _SCORE)),
        megatron=tuple(r for r in family.megatron if not isinstance(r, Tower)),
        gguf=(),
        torchtitan=(),
        limits=(*family.limits, (True, _NO_SUCH_HEAD)),
    )


def _is_of_vocabulary(row: Row | Dropped | Tower, *, keeps_transform: bool) -> bool:
    """Whether a row is of what scores tokens, or of a part that is placed otherwise here."""
    if isinstance(row, Dropped):
        return row.copy_of in ("embed.weight", "head.weight", "head.bias")
    if isinstance(row, Tower):
        return row.name in ("pooler.", "binary_head.")
    names = word(row.word).names()
    parts = ("head.",) if keeps_transform else ("head.", "transform", "pooler.", "next_sentence.")
    return any(n.startswith(parts) for n in names)


@dataclass(frozen=True, slots=True)
class Labels(Setting):
    """How many labels there are: `id2label`, `num_labels`, or two.

    There is no output layer that could be the embedding; what config.json says of that stays.
    """

    reads_keys: ClassVar[tuple[str, ...]] = ("id2label", "num_labels", "classifier_pooling", _TIED)

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The number of labels; their names stay among the keys that nobody else understands."""
        names, count = stored.get("id2label"), stored.get("num_labels")
        if isinstance(names, Mapping):
            count = len(names)
        if count is None:
            count = 2  # as transformers has it
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise MappingError(f"the model has {count!r} labels", hint="id2label names them")
        if stored.get("classifier_pooling", "cls") != "cls" and into.get("bidirectional"):
            raise MappingError(
                f"classifier_pooling is {stored['classifier_pooling']!r}",
                hint="'cls', the first token of a text, is known",
            )
        into["num_labels"] = count
        if _TIED in stored:
            into.setdefault("extra", {})[_TIED] = stored[_TIED]
        into["tied_embeddings"] = False
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """Numbers as names, where there are none."""
        if _TIED in config.extra:
            into[_TIED] = config.extra[_TIED]
        if "id2label" not in config.extra and "num_labels" not in config.extra:
            into["id2label"] = {str(n): f"LABEL_{n}" for n in range(config.head.num_labels)}
            into["label2id"] = {f"LABEL_{n}": n for n in range(config.head.num_labels)}


def label_names(config: ModelConfig) -> tuple[str, ...]:
    """The names of labels by their numbers, `LABEL_0` and so on where config.json has none."""
    names = config.extra.get("id2label")
    known = {str(k): str(v) for k, v in names.items()} if isinstance(names, Mapping) else {}
    return tuple(known.get(str(n), f"LABEL_{n}") for n in range(config.head.num_labels))
