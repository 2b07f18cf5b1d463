"""Pairs of texts: the tokens, the segments, and models that read both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architecture_fixtures import perturbed

from partita.core.rng import Key
from partita.data import DataError, Task, load
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.models import build
from partita.models.functional import FunctionalModel, without_logs
from partita.models.tiny_encoder import write_tiny_encoder

pytest.importorskip("datasets")

WORDS = ("fever", "cough", "rash", "pain", "mild", "severe", "no", "yes")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    write_tiny_encoder(folder, WORDS, Key(0), layers=2, width=8)
    return str(folder)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import GPT2Tokenizer

    folder = tmp_path_factory.mktemp("gpt")
    vocabulary = {word: place for place, word in enumerate([*sorted(ByteLevel.alphabet()), "<|endoftext|>"])}
    GPT2Tokenizer(vocab=vocabulary, merges=[], model_max_length=32).save_pretrained(folder)
    return str(folder)


def pairs(count: int = 40) -> list[dict[str, Any]]:
    """Two texts of different lengths. They agree if the second names a word of the first."""
    draws = np.random.default_rng(0)
    rows = []
    for number in range(count):
        first = [str(word) for word in draws.choice(WORDS[:6], draws.integers(2, 7), replace=False)]
        other = str(draws.choice([word for word in WORDS[:6] if word not in first] or ["no"]))
        second = first[0] if number % 2 else other
        rows.append(
            {
                "premise": " ".join(first),
                "hypothesis": f"{second} yes",
                "label": ["contradicts", "entails"][number % 2],
                "labels": ["entails"] * (number % 2),
                "score": float(number % 2),
                "site": f"s{number % 3}",
            }
        )
    return rows


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read(folder: Path, encoder: str, rows: list[dict[str, Any]] | None = None, **options: Any) -> Task:
    path = write(folder / "pairs.jsonl", pairs() if rows is None else rows)
    given = {"text": "premise", "pair": "hypothesis", "tokenizer": encoder, "max_length": 32}
    return load("text", Key(0), path=path, **{**given, **options})


def test_tokens_and_segments_are_those_of_the_tokenizer(tmp_path: Path, encoder: str) -> None:
    from transformers import AutoTokenizer

    task = read(tmp_path, encoder)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    batch = task.train.take(torch.arange(len(task.train)))
    found = {name: value.tolist() for name, value in batch.inputs.items()}
    assert found.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    texts = {(row["premise"], row["hypothesis"]) for row in pairs()}
    seen = set()
    for row, (ids, mask) in enumerate(zip(found["input_ids"], found["attention_mask"], strict=True)):
        first, second = tokenizer.decode([token for token, real in zip(ids, mask, strict=True) if real])[6:].split(
            " [SEP]"
        )[:2]
        expected = tokenizer(first, second.strip(), padding="max_length", max_length=len(ids))
        assert {name: value[row] for name, value in found.items()} == dict(expected)
        seen.add((first, second.strip()))
    assert len(seen) > 20
    assert seen <= texts
    assert "hypothesis" not in task.columns
    assert "premise" not in task.columns


def test_single_texts_have_no_segments(tmp_path: Path, encoder: str) -> None:
    assert "token_type_ids" not in read(tmp_path, encoder, pair=None).train.take(torch.arange(2)).inputs


def test_the_longer_text_is_cut_first_and_a_warning_counts_the_pairs(tmp_path: Path, encoder: str) -> None:
    long = " ".join(["fever"] * 20)
    rows = [{"premise": long, "hypothesis": "no", "label": "a"}, {"premise": "no", "hypothesis": long, "label": "b"}]
    rows += [{"premise": "no", "hypothesis": "no", "label": "a"}] * 8
    with pytest.warns(UserWarning, match=r"^2 of 10 texts .* longer than 10 tokens"):
        task = read(tmp_path, encoder, rows, max_length=10)
    parts = [part.take(torch.arange(len(part))).inputs for part in (task.train, task.test)]
    rows_of = [row for part in parts for row in zip(part["input_ids"].tolist(), part["token_type_ids"], strict=True)]
    lengths = {int(segments.sum()) for ids, segments in rows_of if all(ids)}
    assert lengths == {2, 7}, "special tokens and six words of the long text, one of the short"


@pytest.mark.parametrize("label", ["label", "labels"])
def test_a_model_reads_both_texts_as_transformers_does(label: str, tmp_path: Path, encoder: str) -> None:
    from transformers import AutoModelForSequenceClassification

    rows = [{**row, "labels": row["labels"] or ["contradicts"]} for row in pairs()]
    task = read(tmp_path, encoder, rows, label=label)
    model = build("pretrained", task, Key(0), path=encoder)
    assert isinstance(model, FunctionalModel)
    params = perturbed(model.initial)
    inputs = task.train.take(torch.arange(6)).inputs
    model.save_pretrained(params, tmp_path / "saved")
    with without_logs():
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    logits = model(params, inputs).logits
    torch.testing.assert_close(logits, plain(**inputs).logits, atol=1e-5, rtol=0)
    without = model(params, {**inputs, "token_type_ids": torch.zeros_like(inputs["token_type_ids"])}).logits
    assert (without - logits).abs().max() > 1e-3, "the segments matter"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "score"), [("text", "accuracy"), ("text_regression", "mse")])
def test_a_run_on_pairs_is_the_same_with_cached_layers(name: str, score: str, tmp_path: Path, encoder: str) -> None:
    path = write(tmp_path / "pairs.jsonl", pairs())
    target = {"target": "score"} if name == "text_regression" else {}
    losses = []
    for cached in (False, True):
        raw = {
            "rounds": 1,
            "data": {"name": name, "path": path, "text": "premise", "pair": "hypothesis", "max_length": 32, **target},
            "split": {"name": "by_column", "column": "site"},
            "model": {"name": "pretrained", "path": encoder, "frozen": ["embedding", "layer.0"]},
            "method": {"name": "fedavg"},
            "training": {"optimizer": "adamw", "lr": 1e-3, "batch_size": 8, "dropout": False},
            "engine": {"cache_frozen": cached},
        }
        [row] = start(parse(raw), tmp_path / f"run-{cached}")
        assert score in row["test"]
        losses.append(row["test"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (None, {"pair": "conclusion"}, r"has no column 'conclusion'"),
        (None, {"max_length": 4}, r"max_length = 4 has no room for a pair of texts; .* needs at least 5 tokens; raise"),
        ([*pairs(9), pairs(1)[0] | {"hypothesis": " "}], {}, r"row 9 of the train part .* has no text in 'hypothesis'"),
    ],
)
def test_wrong_pairs_are_refused(
    rows: list[dict[str, Any]] | None, options: dict[str, Any], message: str, tmp_path: Path, encoder: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, encoder, rows, **options)


def test_a_tokenizer_that_cannot_separate_two_texts_is_refused(tmp_path: Path, gpt: str) -> None:
    with pytest.raises(DataError, match=r"puts nothing between the two texts of a pair; join them in one column"):
        read(tmp_path, gpt)
