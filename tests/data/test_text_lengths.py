"""All examples of texts know how many tokens they have: what `take` gives of each alone, without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architecture_fixtures import make_model

from partita.core.data import IGNORE_INDEX, Batch, ClientData, Examples, text_lengths
from partita.core.rng import Key
from partita.data.choice_examples import ChoiceExamples
from partita.data.packing import pack
from partita.data.ragged import RaggedExamples, ragged
from partita.data.seq2seq_examples import Seq2SeqExamples
from partita.data.task import Subset, Table
from partita.models.frozen_cache import cache_frozen
from partita.privacy.canaries import Canaries, CanaryPopulation
from partita.site.doctor.rehearsal import FewExamples
from partita.testing.toy import ToyExamples

LENGTHS = (5, 2, 9, 1, 7, 4, 4, 8)


def rows(lengths: tuple[int, ...]) -> list[list[int]]:
    return [[2 + place % 9] * length for place, length in enumerate(lengths)]


def texts() -> RaggedExamples:
    return ragged(rows(LENGTHS), 12, torch.arange(len(LENGTHS)) % 2)


def tagged() -> RaggedExamples:
    return ragged(rows(LENGTHS), 12, tags=rows(LENGTHS))


def pairs() -> Seq2SeqExamples:
    answers = rows(LENGTHS[::-1])
    return Seq2SeqExamples(tagged(), ragged(answers, 12, tags=answers), 1)


def questions() -> ChoiceExamples:
    return ChoiceExamples(tagged(), torch.tensor([0, 3, 5, 8]), torch.tensor([1, 0, 2]))


def some(table: Any) -> Subset:
    return Subset(table, torch.tensor([6, 0, 2, 3]))


class OneClient:
    clients = ("a",)

    def __getitem__(self, client: str) -> ClientData:
        return ClientData(*[some(texts())] * 3)


def with_canaries() -> Examples:
    canaries = Canaries({"a": torch.tensor([1])}, {"a": torch.tensor([False])}, mislabeled=False)
    return CanaryPopulation(OneClient(), canaries)["a"].train


def cached() -> Examples:
    _, (table,) = cache_frozen(make_model("bert-text", ("embedding", "layer.0")), texts())
    return some(table)


EXAMPLES = {
    "texts": texts,
    "tagged": tagged,
    "pairs": pairs,
    "questions": questions,
    "rows of a table": lambda: some(texts()),
    "pairs of a table": lambda: some(pairs()),
    "packed": lambda: pack(some(tagged())),
    "few": lambda: FewExamples(some(texts()), 3),
    "canaries": with_canaries,
    "cached": cached,
}


def tokens(batch: Batch) -> int:
    """The tokens of a batch, and those of a decoder."""
    own = int(batch.inputs["attention_mask"].sum())
    return own + int((batch.targets != IGNORE_INDEX).sum()) * ("decoder_input_ids" in batch.inputs)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_lengths_are_the_numbers_of_tokens(kind: str) -> None:
    examples = EXAMPLES[kind]()
    found = text_lengths(examples, torch.arange(len(examples)))
    assert found is not None
    assert found.tolist() == [tokens(examples.take(torch.tensor([row]))) for row in range(len(examples))]
    back = torch.arange(len(examples)).flip(0)
    assert torch.equal(text_lengths(examples, back), found.flip(0))  # type: ignore[arg-type]
    assert len(text_lengths(examples, back[:0])) == 0  # type: ignore[arg-type]


def test_other_examples_have_no_lengths() -> None:
    table = Table({"x": torch.zeros(4, 3)}, torch.zeros(4))
    draw = torch.randn(4, 2, 4, generator=Key(0).generator())
    for examples in (table, Subset(table, torch.arange(2)), FewExamples(table, 2), ToyExamples(draw, torch.zeros(4))):
        assert text_lengths(examples, torch.arange(2)) is None
