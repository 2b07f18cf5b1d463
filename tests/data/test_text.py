"""Text, token and language-model tasks: formats, errors, metrics, and end-to-end runs."""

from __future__ import annotations

import json
import math
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import client_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from partita.core.data import IGNORE_INDEX, Batch, Examples
from partita.core.optim import SGD
from partita.core.options import OptionError
from partita.core.rng import Key, seeded
from partita.core.rounds import rounds
from partita.core.settings import Run, Training
from partita.data import DataError, Task, load, split
from partita.data.ragged import RaggedExamples, ragged
from partita.engines.simulation import SimulationEngine
from partita.evaluation import ACCURACY, score
from partita.evaluation.evaluator import Predictions
from partita.evaluation.metrics import Entities, MultiLabel, NextToken, SingleLabel
from partita.experiment import run_folder
from partita.experiment.config import parse
from partita.experiment.runner import start
from partita.methods.fedavg import fedavg
from partita.models import build
from partita.report import compare, load_run
from partita.tasks import LM, MULTI_LABEL_TEXT, TEXT, TOKENS

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["no", "mild", "severe", "heart", "##burn", "ache", "fever", "cough", "patient", "has", "reports", "the", "##s"]
VOCABULARY = {word: place for place, word in enumerate([*SPECIAL, *WORDS, "head", "##ache", "a"])}
TAGS = ["O", "B-Sign", "I-Sign"]
SHARED = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest BERT with a tokenizer of few words."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    BertTokenizer(vocab=VOCABULARY, model_max_length=20).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"vocab_size": len(VOCABULARY), "max_position_embeddings": 20}
    with seeded(Key(0)):
        BertModel(BertConfig(**sizes, initializer_range=0.5)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest GPT-2, with a token for each byte."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

    folder = tmp_path_factory.mktemp("gpt")
    vocabulary = {word: place for place, word in enumerate([*sorted(ByteLevel.alphabet()), "<|endoftext|>"])}
    GPT2Tokenizer(vocab=vocabulary, merges=[], model_max_length=32).save_pretrained(folder)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
    with seeded(Key(0)):
        GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return folder


def notes(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts labeled by their symptom; the south has fewer and longer ones."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        sign, site = str(draw.choice(["fever", "cough"])), str(draw.choice(["north", "south"], p=[0.7, 0.3]))
        filler = draw.choice(["patient", "has", "the", "mild", "severe"], draw.integers(1, 4) + 8 * (site == "south"))
        rows.append({"text": f"{' '.join(filler)} {sign}", "label": sign, "site": site})
    return rows


def tagged_sentences(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences with one entity of one or two words; sentence lengths differ between documents."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        sign = [["fever"], ["severe", "headache"], ["heartburns"]][draw.integers(3)]
        document = draw.integers(3)
        before = ["patient", "has", "the"] * (1 + document)
        names = ["O"] * len(before) + ["B-Sign", "I-Sign"][: len(sign)]
        rows.append({"tokens": before + sign, "tags": names, "document": f"d{document}"})
    return rows


def write_table(file: Path, rows: list[dict[str, Any]], **features: Any) -> None:
    """Write the rows in the format of the file's suffix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    table = table.cast(datasets.Features({**table.features, **features}))
    if file.suffix == ".parquet":
        table.to_parquet(file)
    elif file.suffix == ".csv":
        table.to_csv(file)
    else:
        lines = [json.dumps(row) for row in rows]
        file.write_text("[" + ",".join(lines) + "]" if file.suffix == ".json" else "\n".join(lines) + "\n")


def take_all(examples: Examples) -> Batch:
    return examples.take(torch.arange(len(examples)))


def sentences_of(task: Task, tokenizer: Path) -> list[str]:
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(tokenizer)
    return decode.batch_decode(take_all(task.train).inputs["input_ids"], skip_special_tokens=True)


# Rows of tokens


@given(
    rows=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=19), min_size=1, max_size=9),
    limit=st.integers(19, 30),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_batch_is_padded_to_its_longest_row(rows: list[list[int]], limit: int, data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
    longest = max(len(rows[place]) for place in picked)
    width = min(limit, 8 * math.ceil(longest / 8))
    plain = ragged(rows, limit, targets=torch.arange(len(rows))).take(torch.tensor(picked))
    each = ragged(rows, limit, tags=[[3 * value for value in row] for row in rows]).take(torch.tensor(picked))
    assert plain.inputs["input_ids"].tolist() == [rows[place] + [0] * (width - len(rows[place])) for place in picked]
    assert plain.inputs["attention_mask"].tolist() == [
        [1] * len(rows[place]) + [0] * (width - len(rows[place])) for place in picked
    ]
    assert plain.targets.tolist() == picked
    assert torch.equal(each.inputs["input_ids"], plain.inputs["input_ids"])
    assert each.targets.tolist() == [
        [3 * value for value in rows[place]] + [IGNORE_INDEX] * (width - len(rows[place])) for place in picked
    ]


def test_ragged_rows_must_fit_limit_and_targets() -> None:
    with pytest.raises(DataError, match="rows have 0 to 2 tokens, not 1 to 4"):
        ragged([[1, 2], []], 4, targets=torch.zeros(2))
    with pytest.raises(DataError, match="rows have 1 to 5 tokens, not 1 to 4"):
        ragged([[1], [1] * 5], 4, targets=torch.zeros(2))
    with pytest.raises(DataError, match="3 targets for 2 rows"):
        ragged([[1], [2]], 4, targets=torch.zeros(3))
    with pytest.raises(DataError, match="1 targets for 2 tokens"):
        ragged([[1], [2]], 4, tags=[[1]])


# Tables of many kinds


def as_parquet(folder: Path) -> Path:
    for part, seed in ("train", 0), ("test", 1):
        write_table(folder / f"{part}.parquet", notes(12, seed))
    return folder


def as_named_classes(folder: Path) -> Path:
    for part, seed in ("train", 0), ("test", 1):
        write_table(folder / f"{part}.parquet", notes(12, seed), label=datasets.ClassLabel(names=["cough", "fever"]))
    return folder


def as_csv(folder: Path) -> Path:
    for part, seed in ("train", 0), ("test", 1):
        write_table(folder / f"{part}.csv", notes(12, seed))
    return folder


def as_json(folder: Path) -> Path:
    for part, seed in ("train", 0), ("test", 1):
        write_table(folder / f"{part}.json", notes(12, seed))
    return folder


def as_shards(folder: Path) -> Path:
    rows = notes(12)
    write_table(folder / "data" / "train-00000-of-00002.jsonl", rows[:5])
    write_table(folder / "data" / "train-00001-of-00002.jsonl", rows[5:])
    write_table(folder / "data" / "test-00000-of-00001.jsonl", notes(12, 1))
    return folder


def as_saved(folder: Path) -> Path:
    parts = {part: datasets.Dataset.from_list(notes(12, seed)) for part, seed in (("train", 0), ("test", 1))}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return folder


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("make", [as_parquet, as_named_classes, as_csv, as_json, as_shards, as_saved])
def test_every_format_gives_the_same_task(make: Callable[[Path], Path], tmp_path: Path, bert: Path) -> None:
    task = load("text", Key(0), path=str(make(tmp_path / "notes")), tokenizer=str(bert), max_length=16)
    rows = notes(12)
    assert (task.name, task.kind) == ("notes", TEXT)
    assert task.classes == ("cough", "fever")
    assert task.labels().tolist() == [task.classes.index(row["label"]) for row in rows]
    assert task.test.targets.tolist() == [task.classes.index(row["label"]) for row in notes(12, 1)]
    assert sentences_of(task, bert) == [row["text"] for row in rows]
    assert {name: values.tolist() for name, values in task.columns.items()} == {"site": [row["site"] for row in rows]}
    assert list(split(task, "by_column", key=Key(0), column="site").clients) == ["north", "south"]


def test_token_ids_match_the_tokenizer(tmp_path: Path, bert: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bert)
    longer = sum(len(tokenizer(row["text"])["input_ids"]) > 7 for row in (*notes(12), *notes(12, 1)))
    told = f"{longer} of 24 texts of .* are longer than 7 tokens, .* raise data.max_length .up to 20 with this model"
    assert 0 < longer < 24
    with pytest.warns(UserWarning, match=told) as seen:
        task = load("text", Key(0), path=as_csv(tmp_path), tokenizer=str(bert), max_length=7)
    assert len(seen) == 1
    for place, row in enumerate(notes(12)):
        alone = tokenizer(row["text"], truncation=True, max_length=7)["input_ids"]
        batch = task.train.take(torch.tensor([place]))
        assert batch.inputs["input_ids"][0, : len(alone)].tolist() == alone
        assert (
            batch.inputs["attention_mask"].sum() == len(alone) <= 7 == batch.inputs["input_ids"].shape[1]
            or len(alone) < 7
        )


@pytest.mark.parametrize("numbers", [True, False])
def test_labels_can_be_numbers_or_texts(numbers: bool, tmp_path: Path, bert: Path) -> None:
    rows = [{**row, "label": 7 if row["label"] == "fever" else 12} if numbers else row for row in notes(12)]
    write_table(tmp_path / "train.csv", rows)
    write_table(tmp_path / "test.csv", rows[:3])
    task = load("text", Key(0), path=tmp_path, tokenizer=str(bert), max_length=16)
    assert task.classes == (("7", "12") if numbers else ("cough", "fever"))
    assert [task.classes[code] for code in task.labels()] == [str(row["label"]) for row in rows]


def test_label_lists_become_multi_label_targets(tmp_path: Path, bert: Path) -> None:
    rows = [{"text": "fever", "labels": labels} for labels in ([0, 2], [], [1], [2, 2])]
    named = datasets.List(datasets.ClassLabel(names=["x", "y", "z"]))
    for part in "train", "test":
        write_table(tmp_path / f"{part}.parquet", rows, labels=named)
        write_table(
            tmp_path / "other" / f"{part}.jsonl", [{**row, "labels": ["xyz"[n] for n in row["labels"]]} for row in rows]
        )
    for folder in tmp_path, tmp_path / "other":
        task = load("text", Key(0), path=folder, label="labels", tokenizer=str(bert), max_length=8)
        assert task.kind is MULTI_LABEL_TEXT
        assert task.classes == ("x", "y", "z")
        assert task.train.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
        with pytest.raises(DataError, match="one class per example"):
            split(task, "dirichlet", 2, key=Key(0), alpha=1.0, min_examples=1)


def test_missing_test_part_is_split_off_by_key(tmp_path: Path, bert: Path) -> None:
    rows = [{"text": " ".join(["fever"] * (1 + number)), "label": number % 2} for number in range(10)]
    write_table(tmp_path / "all.csv", rows)

    def lengths(seed: int, **more: Any) -> tuple[list[int], list[int]]:
        task = load("text", Key(seed), path=tmp_path / "all.csv", tokenizer=str(bert), max_length=16, **more)
        assert task.name == "all"
        kept, held = (take_all(part).inputs["attention_mask"].sum(1) - 2 for part in (task.train, task.test))
        return kept.tolist(), held.tolist()

    kept, held = lengths(0)
    assert (len(kept), len(held)) == (8, 2)
    assert sorted(kept + held) == list(range(1, 11))
    assert kept == sorted(kept)
    assert lengths(0) == (kept, held)
    assert any(lengths(seed)[1] != held for seed in (1, 2, 3))
    assert len(lengths(0, test=0.29)[1]) == 2
    assert len(lengths(0, test=0.5)[1]) == 5
    with pytest.raises(DataError, match=r"test = 0\.05 would hold out 0 of the 10 rows"):
        lengths(0, test=0.05)
    for share in 0.0, 1.0, -0.5:
        with pytest.raises(OptionError, match=f"data.test is {share}; it must be a number above 0 and below 1"):
            lengths(0, test=share)


def test_another_part_can_be_the_test_part(tmp_path: Path, bert: Path) -> None:
    write_table(tmp_path / "train.csv", notes(12))
    write_table(tmp_path / "validation.csv", notes(5, 2))
    options = {"path": tmp_path, "tokenizer": str(bert), "max_length": 16}
    assert len(load("text", Key(0), test="validation", **options).test) == 5
    assert len(load("text", Key(0), **options).test) == 2  # cut from the twelve: a validation part is not meant for it
    with pytest.raises(DataError, match="no part 'valid' to test on; did you mean 'validation'"):
        load("text", Key(0), test="valid", **options)


def test_path_that_is_no_folder_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch, bert: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def fake(name: str, config: str | None) -> Any:
        assert datasets.config.HF_HUB_OFFLINE, "the Hub is not asked if it cannot be reached"
        asked.append((name, config))
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(notes(12))})

    options = {"path": "clinic/notes", "tokenizer": str(bert), "max_length": 16}
    monkeypatch.setattr(datasets, "load_dataset", fake)
    task = load("text", Key(0), config="plain", **options)
    assert (task.name, len(task.train), len(task.test)) == ("clinic/notes", 10, 2)
    assert asked == [("clinic/notes", "plain")]

    def fail(error: Exception) -> Callable[..., Any]:
        def raising(*_: Any) -> Any:
            raise error

        return raising

    monkeypatch.setattr(datasets, "load_dataset", fail(ConnectionError("no route")))
    with pytest.raises(DataError, match="no folder 'clinic/notes' here, and HF_HUB_OFFLINE is set; give a local"):
        load("text", Key(0), **options)
    monkeypatch.setattr(datasets, "load_dataset", fail(FileNotFoundError("Dataset 'clinic/notes' doesn't exist\nmore")))
    with pytest.raises(DataError, match="the Hub failed with: Dataset 'clinic/notes' doesn't exist; give a file"):
        load("text", Key(0), **options)


# Refusals before training


def table_file(file: str, rows: list[dict[str, Any]]) -> Callable[[Path], Any]:
    return lambda folder: write_table(folder / file, rows)


def raw_file(file: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_bytes(content)


GOOD = [{"text": "fever", "label": "a"}, {"text": "cough", "label": "b"}]


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize(
    ("makes", "options", "message"),
    [
        ([], {"text": "txet"}, "the train part of .* has no column 'txet'; did you mean 'text'"),
        ([], {"label": "lable"}, "has no column 'lable'; did you mean 'label'"),
        ([], {"text": "number"}, "column 'number' of the train part .* holds no text"),
        ([], {"label": "share"}, "column 'share' .* holds float64, but labels are classes, texts or integers"),
        (
            [table_file("train.csv", [*GOOD, {"text": " ", "label": "a"}])],
            {},
            "row 2 of the train part .* no text in 'text'",
        ),
        (
            [table_file("test.csv", [*GOOD, {"text": "fever", "label": ""}])],
            {},
            "row 2 of the test part .* has no label",
        ),
        (
            [table_file("test.csv", [*GOOD, {"text": "fever", "label": "c"}])],
            {},
            "row 2 of the test part .* has the label 'c' in 'label', which no train row has",
        ),
        ([raw_file("test.csv", b"text,label\n")], {}, "the test part of .* is empty"),
        ([raw_file("test.csv", b"")], {}, r"the csv file '.*test\.csv' cannot be read: "),
        (
            [raw_file("train.parquet", b"PAR1 not really")],
            {},
            r"has the part 'train' as \.csv and \.parquet; keep one",
        ),
        ([lambda folder: (folder / "train.csv").unlink()], {}, "has no part 'train', only: test; rename one"),
        ([], {"path": "no/such/folder"}, "there is no file or folder 'no/such/folder'; give a file"),
        ([], {"config": "plain"}, "config = 'plain' is for Hub datasets"),
        ([], {"tokenizer": None}, "a text task needs a tokenizer; set data.tokenizer"),
        ([], {"max_length": 21}, "takes rows of 3 to 20 tokens, not 21"),
        ([], {"max_length": 2}, "tokens, not 2"),
    ],
)
def test_invalid_text_data_is_refused(
    makes: list[Callable[[Path], Any]], options: dict[str, Any], message: str, tmp_path: Path, bert: Path
) -> None:
    more = {"number": 1, "share": 0.5}
    for part in "train", "test":
        write_table(tmp_path / f"{part}.csv", [{**row, **more} for row in GOOD])
    for make in makes:
        make(tmp_path)
    with pytest.raises(DataError, match=message):
        load("text", Key(0), **{"path": tmp_path, "tokenizer": str(bert), "max_length": 16, **options})


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("all.parquet", b"PAR1 not really", r"the parquet file '.*all\.parquet' cannot be read: "),
        ("all.jsonl", b'{"text": "a", "label": 1}\n{"text"\n', r"line 2 of '.*all\.jsonl' is not JSON"),
        ("all.json", b"[1, 2]", r"row 0 of '.*all\.json' is not an object"),
        ("all.txt", b"fever", r"all\.txt' is not one of parquet, csv, json, jsonl"),
    ],
)
def test_unreadable_data_files_are_refused(file: str, content: bytes, message: str, tmp_path: Path, bert: Path) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("text", Key(0), path=tmp_path / file, tokenizer=str(bert), max_length=16)


def test_errors_number_rows_as_in_the_file(tmp_path: Path, bert: Path) -> None:
    rows = [{"text": "fever", "label": label} for label in "ab" * 20]
    rows[33] = {"text": "", "label": "a"}
    write_table(tmp_path / "all.jsonl", rows)
    for seed in range(8):  # it is cut off with the test part for some of them
        with pytest.raises(DataError, match=r"row 33 of the train part of '.*all\.jsonl' has no text in 'text'"):
            load("text", Key(seed), path=tmp_path / "all.jsonl", tokenizer=str(bert), max_length=16)


def test_unusable_tokenizers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig

    as_csv(tmp_path / "notes")
    BertConfig(hidden_size=8, num_attention_heads=2).save_pretrained(tmp_path / "bare")
    with pytest.raises(DataError, match=r"'.*bare' has no tokenizer; copy the files of the original model's"):
        load("text", Key(0), path=tmp_path / "notes", tokenizer=str(tmp_path / "bare"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"cannot load the tokenizer '.*empty'"):
        load("text", Key(0), path=tmp_path / "notes", tokenizer=str(tmp_path / "empty"))


def labeled(labels: str) -> list[dict[str, Any]]:
    return [{"text": "fever", "label": label, "row": place} for place, label in enumerate(labels)]


def test_one_class_is_refused_or_told(tmp_path: Path, bert: Path) -> None:
    options = {"tokenizer": str(bert), "max_length": 16}
    write_table(tmp_path / "one.jsonl", labeled("a" * 10))
    with pytest.raises(
        DataError, match=r"all rows of '.*one\.jsonl' have the label 'a' in 'label', so any model would"
    ):
        load("text", Key(0), path=tmp_path / "one.jsonl", **options)
    (tmp_path / "named").mkdir()
    label = datasets.ClassLabel(names=["a", "b"])
    datasets.Dataset.from_list(labeled("a" * 10)).cast_column("label", label).save_to_disk(tmp_path / "named")
    with pytest.warns(UserWarning, match=r"all train rows of .* have the label 'a' in 'label', so a model learns"):
        assert load("text", Key(0), path=tmp_path / "named", **options).classes == ("a", "b")
    write_table(tmp_path / "o.jsonl", [{"tokens": ["fever"], "tags": ["O"]}] * 5)
    with pytest.raises(DataError, match=r"no word of .* has an entity tag in 'tags'; tag some"):
        load("tokens", Key(0), path=tmp_path / "o.jsonl", **options)


def test_limit_draws_rows_by_key_and_keeps_the_share_of_each_class(tmp_path: Path, bert: Path) -> None:
    write_table(tmp_path / "all.jsonl", labeled("aaab" * 50))
    options = {"path": tmp_path / "all.jsonl", "tokenizer": str(bert), "max_length": 16}
    whole, some, other = (load("text", Key(seed), **options, **limit) for seed, limit in (
        (0, {}), (0, {"limit": 40}), (1, {"limit": 40}),
    ))  # fmt: skip
    assert (len(whole.train), len(whole.test)) == (160, 40)
    assert (len(some.train), len(some.test)) == (40, 40)
    share = whole.train.targets.float().mean()
    assert abs(some.train.targets.sum() - 40 * share) <= 1
    assert some.classes == ("a", "b")
    again = load("text", Key(0), **options, limit=40)
    drawn, redrawn, others, rows = (task.columns["row"].tolist() for task in (some, again, other, whole))
    assert drawn == redrawn
    assert drawn != others
    assert set(drawn) <= set(rows)
    assert load("text", Key(0), **options, limit=1).classes == ("a", "b"), "the classes are those of all rows"
    assert len(load("text", Key(0), **options, limit=10**6).train) == 160


@pytest.mark.parametrize("kind", ["tokens", "lm", "text_regression"])
def test_limit_keeps_rows_and_targets_together(kind: str, tmp_path: Path, bert: Path) -> None:
    rows = [
        {"text": "fever " * (place + 1), "tokens": ["fever"] * (place + 1), "target": float(place)}
        | {"tags": ["B-Sign"] * (place + 1)}
        for place in range(18)
    ]
    write_table(tmp_path / "all.jsonl", rows)
    length = {"block_size" if kind == "lm" else "max_length": 20}
    task = load(kind, Key(0), path=tmp_path / "all.jsonl", tokenizer=str(bert), limit=5, **length)
    batch = task.train.take(torch.arange(len(task.train)))
    words = batch.inputs["attention_mask"].sum(1)
    if kind == "lm":
        assert len(task.train) < 5, "blocks of 20 tokens from five texts of 1 to 18"
        return
    assert (len(task.train), len(task.test)) == (5, 3)
    found = (batch.targets >= 0).sum(1) if kind == "tokens" else batch.targets[:, 0] + 1
    assert torch.equal(found.long(), words - 2)


# Words and tags


def test_first_token_of_a_word_gets_its_tag(tmp_path: Path, bert: Path) -> None:
    words = ["patient", "reports", "severe", "heartburns", "\u200b", "zebra", "fever"]
    names = ["O", "O", "B-Sign", "I-Sign", "O", "O", "B-Sign"]
    for part in "train", "test":
        write_table(tmp_path / f"{part}.jsonl", [{"tokens": words, "tags": names}, {"tokens": ["a"], "tags": ["O"]}])
    task = load("tokens", Key(0), path=tmp_path, tokenizer=str(bert), max_length=16)
    assert task.kind is TOKENS
    assert task.classes == ("B-Sign", "I-Sign", "O")
    batch = task.train.take(torch.tensor([0, 1]))
    pieces = ["[CLS]", "patient", "reports", "severe", "heart", "##burn", "##s", "[UNK]", "[UNK]", "fever", "[SEP]"]
    assert batch.inputs["input_ids"][0, :11].tolist() == [VOCABULARY[piece] for piece in pieces]
    begin, inside, outside, none = 0, 1, 2, IGNORE_INDEX
    assert batch.targets[0].tolist() == [
        none, outside, outside, begin, inside, none, none, outside, outside, begin, none, *[none] * 5,
    ]  # fmt: skip
    assert batch.targets[1].tolist() == [none, outside, *[none] * 14]


def test_byte_level_tokenizer_gets_a_space_before_each_word(tmp_path: Path, gpt: Path) -> None:
    write_table(tmp_path / "all.jsonl", [{"tokens": ["no", "fever"], "tags": ["O", "B-Sign"]}] * 5)
    task = load("tokens", Key(0), path=tmp_path / "all.jsonl", tokenizer=str(gpt), max_length=16)
    batch = task.train.take(torch.tensor([0]))
    assert (batch.targets[0] != IGNORE_INDEX).nonzero().flatten().tolist() == [0, 3]  # of " no fever"


def load_cut(name: str, **options: Any) -> Task:
    with pytest.warns(UserWarning, match="tokens are not read; to read them, raise data.max_length"):
        return load(name, Key(0), long_texts="cut", **options)


def test_long_sentences_are_refused_unless_cut(tmp_path: Path, bert: Path) -> None:
    long = {"tokens": ["fever"] * 9, "tags": ["B-Sign"] * 9}
    short = {"tokens": ["no", "fever"], "tags": ["O", "B-Sign"]}
    write_table(tmp_path / "train.jsonl", [short, long, long])
    write_table(tmp_path / "test.jsonl", [short])
    options = {"path": tmp_path, "tokenizer": str(bert), "max_length": 8}
    told = "2 of 3 sentences are longer than max_length = 8 tokens, the first is row 1 .* with 11; raise max_length"
    with pytest.raises(DataError, match=told):
        load("tokens", Key(0), **options)
    batch = load_cut("tokens", **options).train.take(torch.tensor([1]))
    assert batch.targets.tolist() == [[IGNORE_INDEX, *[0] * 7]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["no", "fever"], "tags": ["O"]}, "row 1 of the test part .* has 2 words, but 1 tags"),
        (
            {"tokens": ["fever"], "tags": ["I-Sign"]},
            "row 1 .* has 'I-Sign' after 'O'; an entity must start with 'B-Sign'",
        ),
        ({"tokens": [], "tags": []}, "row 1 .* has no words in 'tokens'"),
        (
            {"tokens": ["fever"], "tags": ["B-Drug"]},
            "row 1 .* has the label 'B-Drug' in 'tags', which no train row has",
        ),
        ({"tokens": ["fever"], "tags": [None]}, "row 1 .* has no label in 'tags'"),
    ],
)
def test_invalid_tagged_sentences_are_refused(row: dict[str, Any], message: str, tmp_path: Path, bert: Path) -> None:
    good = {"tokens": ["severe", "fever"], "tags": ["B-Sign", "I-Sign"]}
    write_table(tmp_path / "train.jsonl", [good, {"tokens": ["no"], "tags": ["O"]}])
    write_table(tmp_path / "test.jsonl", [good, row])
    with pytest.raises(DataError, match=message):
        load("tokens", Key(0), path=tmp_path, tokenizer=str(bert), max_length=16)


def test_tags_must_be_bio(tmp_path: Path, bert: Path) -> None:
    write_table(tmp_path / "all.jsonl", [{"tokens": ["fever"], "tags": ["NOUN"], "text": "fever"}] * 5)
    options = {"path": tmp_path / "all.jsonl", "tokenizer": str(bert), "max_length": 16}
    with pytest.raises(DataError, match=r"'NOUN' in .* is not a BIO tag; use O, B-type and I-type"):
        load("tokens", Key(0), **options)
    with pytest.raises(DataError, match=r"column 'text' .* holds no lists"):
        load("tokens", Key(0), tokens="text", **options)


# Running text


def test_language_model_blocks_cover_every_token_of_a_group_once(tmp_path: Path, gpt: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gpt)
    rows = [
        {"text": text, "role": role}
        for role, text in zip("abab", ["to be or not", "ayes", "to be", "not"], strict=True)
    ]
    write_table(tmp_path / "train.csv", rows)
    write_table(tmp_path / "test.csv", [{"text": "or", "role": "c"}])
    options = {"path": tmp_path, "tokenizer": str(gpt), "block_size": 8}
    task = load("lm", Key(0), group="role", **options)
    assert (task.kind, task.classes) == (LM, ())
    end = [tokenizer.eos_token_id]
    for role, texts in ("a", ["to be or not", "to be"]), ("b", ["ayes", "not"]):
        stream = [token for text in texts for token in tokenizer(text)["input_ids"] + end]
        places = np.flatnonzero(task.columns["role"] == role)
        inputs, targets = [], []
        for place in places:
            batch = task.train.take(torch.tensor([place]))
            real = batch.inputs["attention_mask"][0].bool()
            assert torch.equal(real, batch.targets[0] != IGNORE_INDEX)
            inputs += batch.inputs["input_ids"][0][real].tolist()
            targets += batch.targets[0][real].tolist()
        assert inputs == stream[:-1]
        assert targets == stream[1:]
        assert len(places) == math.ceil((len(stream) - 1) / 8)
    whole = load("lm", Key(0), **options)
    assert whole.columns == {}
    assert int((take_all(whole.train).targets != IGNORE_INDEX).sum()) == sum(len(row["text"]) + 1 for row in rows) - 1
    assert list(split(task, "by_column", key=Key(0), column="role").clients) == ["a", "b"]
    with pytest.raises(DataError, match="one class per example"):
        split(task, "dirichlet", 2, key=Key(0), alpha=1.0, min_examples=1)
    with pytest.raises(DataError, match="has no column 'roles'; did you mean 'role'"):
        load("lm", Key(0), group="roles", **options)


# Metrics


def prediction_batches(logits: Tensor, targets: Tensor, losses: Tensor, size: int = 7) -> Iterator[Predictions]:
    for part in torch.arange(len(targets)).split(size):
        yield Predictions(logits[part], targets[part], losses[part])


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_single_label_metrics_match_scikit_learn() -> None:
    from sklearn import metrics

    logits, targets = random_normal(60, 5), torch.arange(60) % 4  # the last class never occurs
    logits[range(60), targets] += 1.0
    logits[:, 4] -= 9.0
    losses = functional.cross_entropy(logits, targets, reduction="none")
    found = SingleLabel()(prediction_batches(logits, targets, losses))
    guesses, chances = logits.argmax(1), logits.softmax(1)
    apart = [metrics.roc_auc_score(targets == place, chances[:, place]) for place in range(4)]
    assert found == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(targets, guesses),
            "macro_f1": metrics.f1_score(targets, guesses, average="macro", labels=range(4)),
            "micro_f1": metrics.f1_score(targets, guesses, average="micro"),
            "auroc": np.mean(apart),
            "ece": found["ece"],
            "loss": float(losses.mean()),
        }
    )
    plain = ACCURACY(prediction_batches(logits, targets, losses))
    assert plain == pytest.approx({name: found[name] for name in ("accuracy", "ece", "loss")})
    alone = SingleLabel()(prediction_batches(logits[:1], targets[:1], losses[:1]))
    assert "auroc" not in alone  # one class cannot be ranked against others
    unsound = SingleLabel()(prediction_batches(logits * math.nan, targets, losses))
    assert "auroc" not in unsound


def test_multi_label_metrics_match_scikit_learn() -> None:
    from sklearn import metrics

    truth = (random_normal(60, 5, seed=1) > 0.5).float()
    truth[:, 4] = 0.0
    logits = random_normal(60, 5) + truth
    logits[:, 4] = -1.0  # a class that neither occurs nor is predicted
    losses = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(1)
    found = MultiLabel()(prediction_batches(logits, truth, losses))
    guesses = (logits.sigmoid() > 0.5).long()
    assert found == pytest.approx(
        {
            "micro_f1": metrics.f1_score(truth, guesses, average="micro"),
            "macro_f1": metrics.f1_score(truth[:, :4], guesses[:, :4], average="macro"),
            "auroc": metrics.roc_auc_score(truth[:, :4], logits[:, :4], average="macro"),
            "macro_auprc": metrics.average_precision_score(truth[:, :4], logits[:, :4], average="macro"),
            "micro_auprc": metrics.average_precision_score(truth, logits, average="micro"),
            "loss": float(losses.mean()),
        }
    )
    nothing = MultiLabel()(prediction_batches(-torch.ones(3, 5), torch.zeros(3, 5), torch.ones(3)))
    assert nothing == {"loss": 1.0}  # with nothing to find and nothing found, there is no F1


def tokens_table() -> RaggedExamples:
    return ragged([[1, 2]], 4, tags=[[0, 1]])


def test_perplexity_averages_over_tokens_not_texts(tmp_path: Path, gpt: Path) -> None:
    write_table(
        tmp_path / "all.csv",
        [{"text": "to be or not to be, " * count, "role": str(count)} for count in (1, 2, 3, 9) * 3],
    )
    task = load("lm", Key(0), path=tmp_path / "all.csv", group="role", tokenizer=str(gpt), block_size=16)
    model = build("pretrained", task, Key(0), path=str(gpt))
    found = score(model, model.initial, task.train, NextToken())
    batch = take_all(task.train)
    with torch.no_grad():
        logits = model(model.initial, batch.inputs).logits
    loss = float(functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX))
    assert found == pytest.approx({"loss": loss, "perplexity": math.exp(loss)}, rel=1e-4)
    far = NextToken()(iter([Predictions(torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.tensor([800.0]))]))
    assert far["perplexity"] == math.inf


# Blocks of clients, and whole runs


def table_for(kind: str, folder: Path) -> dict[str, Any]:
    """Write a small table of this kind of task, and return the options that load it."""
    if kind == "text":
        for part, seed in ("train", 0), ("test", 1):
            write_table(folder / f"{part}.csv", notes(30, seed))
        return {"name": "text", "path": str(folder), "max_length": 20}
    if kind == "tokens":
        named = datasets.List(datasets.ClassLabel(names=TAGS))
        numbers = [{**row, "tags": [TAGS.index(tag) for tag in row["tags"]]} for row in tagged_sentences(30)]
        write_table(folder / "train.parquet", numbers, tags=named)
        write_table(folder / "test.parquet", numbers[:10], tags=named)
        return {"name": "tokens", "path": str(folder), "max_length": 20}
    rows = [{"text": "to be or not to be, " * length, "role": f"r{length}"} for length in (1, 2, 3)] * 4
    write_table(folder / "train.jsonl", [*rows, {"text": "to be", "role": "r0"}])
    write_table(folder / "test.jsonl", rows[:3])
    return {"name": "lm", "path": str(folder), "group": "role", "block_size": 20}


COLUMN = {"text": "site", "tokens": "document", "lm": "role"}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["text", "tokens", "lm"])
def test_clients_with_texts_of_different_lengths_train_in_a_block_as_alone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = str(request.getfixturevalue("gpt" if kind == "lm" else "bert"))
    options = table_for(kind, tmp_path)
    task = load(options.pop("name"), Key(0), tokenizer=path, **options)
    federation = split(task, "by_column", key=Key(0), column=COLUMN[kind])
    model = build("pretrained", task, Key(0), path=path)
    run = Run(fedavg(), Training(0.1, SGD(), batch_size=3), 1, Key(0))
    widths = [
        [part.take(indices).inputs["input_ids"].shape[1] for indices in client_batches(run, 0, client, part)]
        for client, part in ((client, federation[client].train) for client in federation.clients)
    ]  # (client, step)
    assert any(len(set(at_one_step)) > 1 for at_one_step in zip(*widths, strict=False))
    results = []
    for block in 1, len(federation.clients):
        (played,) = rounds(run, model, SimulationEngine(run, model, federation, block))
        results.append(played.server.params)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-5, rtol=0)
    assert any(not torch.equal(value, model.initial[name]) for name, value in results[0].items())


PRIMARY = {"text": ("accuracy", True), "tokens": ("f1", True), "lm": ("perplexity", False)}
SCORES = {
    "text": {"accuracy", "macro_f1", "micro_f1", "auroc", "ece", "loss"},
    "tokens": {metric.name for metric in Entities.metrics},
    "lm": {"loss", "perplexity"},
}
CONFIG = """
rounds = 2
[method]
name = "fedavg"
[training]
lr = 0.02
batch_size = 4
[evaluate]
personal_every = 1
[split]
name = "by_column"
test = 0.3
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["text", "tokens", "lm"])
def test_text_runs_work_end_to_end(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    raw = tomllib.loads(CONFIG)
    raw["data"] = table_for(kind, tmp_path / "data")  # no tokenizer is named: it is the model's
    raw["model"] = {"name": "pretrained", "path": str(request.getfixturevalue("gpt" if kind == "lm" else "bert"))}
    raw["split"]["column"] = COLUMN[kind]
    if kind == "tokens":
        raw["evaluate"] |= {"subgroups": COLUMN[kind], "validation_every": 1}
    config = parse(raw)
    rows = list(start(config, tmp_path / "run"))
    assert len(rows) == 2
    for row in rows:
        assert row["test"].keys() == SCORES[kind]
        if kind == "tokens":
            assert row["validation"].keys() <= SCORES[kind]
            assert row["subgroups"]["groups"].keys() == {"d0", "d1", "d2"}
        assert SCORES[kind] - {"auroc"} <= row["personal"].keys() <= SCORES[kind]
        assert list(row.get("by_type", {})) == (["Sign"] if kind == "tokens" else [])
    assert rows[1]["test"]["loss"] < rows[0]["test"]["loss"]
    if kind == "lm":
        assert rows[1]["test"]["perplexity"] == pytest.approx(math.exp(rows[1]["test"]["loss"]))
    name, higher = PRIMARY[kind]
    read_back = load_run(tmp_path / "run")
    assert (read_back.metric.name, read_back.metric.higher_is_better) == (name, higher)
    assert compare([read_back]).lines[0].final == rows[1]["test"].get(name)
    assert run_folder.finished(tmp_path / "run") is not None


def test_text_task_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    from partita.experiment.builder import build as build_experiment

    raw = tomllib.loads(CONFIG)
    raw["data"] = table_for("text", tmp_path / "data")
    raw["split"]["column"] = "site"
    with pytest.raises(DataError, match="a text task needs a tokenizer"):
        build_experiment(parse(raw))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not here")
@pytest.mark.parametrize(
    ("name", "folder", "options", "sizes"),
    [
        ("text", "trec", {}, (5452, 500, 6)),
        ("text", "hoc", {"label": "labels"}, (14067, 3397, 10)),
        ("tokens", "maccrobat2020", {"long_texts": "cut"}, (3530, 998, 82)),
        ("tokens", "bc5cdr", {"long_texts": "cut"}, (4560, 4797, 5)),
    ],
)
def test_real_data_sets_load_with_known_sizes(
    name: str, folder: str, options: dict[str, Any], sizes: tuple[int, int, int], bert: Path
) -> None:
    if not (SHARED / folder).is_dir():
        pytest.skip(f"{folder} is not here")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* longer than 20 tokens")
        task = load(name, Key(0), path=SHARED / folder, tokenizer=str(bert), max_length=20, **options)
    assert (len(task.train), len(task.test), len(task.classes)) == sizes
