"""Texts longer than the model reads: cut, refused, or read in windows. Tokens in files equal tokens in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partita.core.data import IGNORE_INDEX, Batch, Examples
from partita.core.model import Model, Output
from partita.core.rng import Key, seeded
from partita.core.settings import RunError
from partita.core.tensors import Tensors
from partita.data import DataError, Task, load, split
from partita.data.ragged import RaggedExamples, ragged
from partita.data.task import Subset
from partita.data.tokenization import TextEncoder, text_encoder
from partita.evaluation import evaluate
from partita.evaluation.metrics import Entities, Regression, SingleLabel
from partita.experiment.builder import build as build_experiment
from partita.experiment.config import parse
from partita.experiment.runner import prepare, start
from partita.models import ModelError, build
from partita.models.frozen_cache import cache_frozen
from partita.storage.atomic_files import read_json
from partita.tasks import losses

pytest.importorskip("datasets")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(60)]
CLS, SEP = 2, 3
LIMIT = 10


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest BERT with one token per word."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *WORDS])}
    BertTokenizer(vocab=vocabulary, model_max_length=20).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with seeded(Key(0)):
        BertModel(
            BertConfig(**sizes, vocab_size=len(vocabulary), max_position_embeddings=20, initializer_range=0.5)
        ).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def notes(count: int = 24) -> list[dict[str, Any]]:
    """Texts of 1 to 30 words with targets of all kinds."""
    draw = np.random.default_rng(0)
    rows = []
    for row in range(count):
        words = [str(word) for word in draw.choice(WORDS, 1 + 29 * row // (count - 1))]
        tags = [("B-x", "I-x", "O")[place % 3] for place in range(len(words))]
        rows.append(
            {
                "text": " ".join(words), "tokens": words, "tags": tags, "label": "ab"[row % 2],
                "many": ["a", "b"][: row % 3], "number": row / 7, "site": f"s{row % 3}",
            }
        )  # fmt: skip
    return rows


def write(folder: Path, rows: Sequence[dict[str, Any]] | None = None) -> Path:
    rows = notes() if rows is None else rows
    folder.mkdir(exist_ok=True)
    for part, chosen in ("train", rows), ("test", rows[-6:]):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "single": {"name": "text"},
    "multi": {"name": "text", "label": "many"},
    "number": {"name": "text_regression", "target": "number"},
    "tags": {"name": "tokens"},
}


def load_kind(kind: str, folder: Path, bert: Path, **options: Any) -> Task:
    chosen = {**KINDS[kind], **options}
    return load(chosen.pop("name"), Key(0), path=folder, tokenizer=str(bert), **{"max_length": LIMIT, **chosen})


def rows_of(examples: RaggedExamples) -> list[list[int]]:
    return [part.tolist() for part in examples.ids.tensor_split(examples.offsets[1:-1])]


def take_all(examples: Examples) -> Batch:
    return examples.take(torch.arange(len(examples)))


# Cut and refused


def test_cut_texts_are_counted_warned_about_and_recorded(tmp_path: Path, bert: Path) -> None:
    folder = write(tmp_path / "data")
    lengths = [len(row["tokens"]) + 2 for row in [*notes(), *notes()[-6:]]]
    long, lost = sum(length > LIMIT for length in lengths), sum(max(0, length - LIMIT) for length in lengths)
    told = f"{long} of 30 texts of .* are longer than 10 tokens, and their last {lost} tokens are not read"
    remedy = r"; to read them, raise data.max_length \(up to 20 with this model\), or set data.long_texts = 'windows'"
    for kind in ("single", "number"):
        with pytest.warns(UserWarning, match=told + remedy):
            task = load_kind(kind, folder, bert)
        [note] = task.notes
        assert note.endswith(f"{lost} tokens are not read")
        assert max(map(len, rows_of(task.train))) == LIMIT
    with pytest.warns(UserWarning, match=told + remedy):
        assert load_kind("tags", folder, bert, long_texts="cut").notes == task.notes


def test_remedy_for_a_text_longer_than_the_model_takes_is_not_a_higher_limit(tmp_path: Path, bert: Path) -> None:
    row = {"text": "no cough " * 20, "label": "yes"}
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({**row, "label": label}) + "\n" for label in "ab" * 6))
    options: dict[str, Any] = {"path": str(tmp_path / "all.jsonl"), "tokenizer": str(bert), "max_length": 20}
    with pytest.warns(UserWarning, match=r"tokens are not read; to read them, set data\.long_texts = 'windows'$"):
        load("text", Key(0), **options)
    with pytest.raises(DataError, match=r" with 42; set data\.long_texts to 'windows' or 'cut'$"):
        load("text", Key(0), long_texts="error", **options)


@pytest.mark.parametrize("kind", ["single", "number", "tags"])
def test_long_texts_can_be_an_error(kind: str, tmp_path: Path, bert: Path) -> None:
    with pytest.raises(DataError, match=r"17 of 24 .* max_length = 10 tokens, the first is row 7 of .* with 11; raise"):
        load_kind(kind, write(tmp_path / "data"), bert, long_texts="error")
    assert not load_kind(kind, write(tmp_path / "data", notes()[:6]), bert, long_texts="error").notes


# Windows


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [None, 0, 3, 7])
def test_windows_cover_every_text(kind: str, overlap: int | None, tmp_path: Path, bert: Path) -> None:
    task = load_kind(kind, write(tmp_path / "data"), bert, long_texts="windows", overlap=overlap)
    assert isinstance(task.train, RaggedExamples)
    shared = LIMIT // 4 if overlap is None else overlap
    assert task.train.documents is not None
    assert task.row_count == 24
    documents = task.train.documents.tolist()
    assert documents == sorted(documents)
    for number, row in enumerate(notes()):
        windows = [ids for ids, of in zip(rows_of(task.train), documents, strict=True) if of == number]
        assert all(ids[0] == CLS and ids[-1] == SEP and len(ids) <= LIMIT for ids in windows)
        wanted = [len(SPECIAL) + WORDS.index(word) for word in row["tokens"]]
        joined = windows[0][1:-1]
        for ids in windows[1:]:
            # The last window of a sentence reaches back further than the others, to be full.
            again = len(joined) + len(ids) - 2 - len(wanted) if ids is windows[-1] else shared
            assert again >= shared
            assert joined[-again:] == ids[1 : 1 + again] or not again
            joined += ids[1 + again : -1]
        assert joined == wanted
    if kind != "tags":
        plain = load_kind(kind, tmp_path / "data", bert, max_length=20, long_texts="windows", overlap=1)
        assert plain.train.documents is not None  # type: ignore[union-attr]
        first = [documents.index(number) for number in range(24)]
        assert torch.equal(task.train.targets, task.train.targets[first][task.train.documents])


@given(length=st.integers(1, 60), limit=st.integers(4, 12), data=st.data())
def test_each_word_belongs_to_the_window_with_most_context(length: int, limit: int, data: st.DataObject) -> None:
    class Tokenizer:
        def num_special_tokens_to_add(self) -> int:
            return 2

    overlap = data.draw(st.integers(0, limit - 3))
    windows = TextEncoder(Tokenizer(), limit).word_windows(range(length + 2), 1, overlap)
    for place in range(1, length + 1):
        having = [window for window in windows if place in window.places]
        assert [place in window.own for window in windows].count(True) == 1
        [owner] = [window for window in having if place in window.own]

        def context(window: Any, place: int = place) -> float:
            inner = [each for each in window.places if 1 <= each <= length]
            left = np.inf if inner[0] == 1 else place - inner[0]
            right = np.inf if inner[-1] == length else inner[-1] - place
            return float(min(left, right))

        assert context(owner) >= max(map(context, having)) - 1  # an even number of shared words has no middle one


def test_tags_are_targets_once(tmp_path: Path, bert: Path) -> None:
    task = load_kind("tags", write(tmp_path / "data"), bert, long_texts="windows", overlap=4)
    assert isinstance(task.train, RaggedExamples)
    offsets = task.train.offsets.tolist()
    assert task.train.documents is not None
    for number, row in enumerate(notes()):
        found = [
            tag
            for window in (task.train.documents == number).nonzero().flatten().tolist()
            for tag in task.train.targets[offsets[window] : offsets[window + 1]].tolist()
            if tag != IGNORE_INDEX
        ]
        assert [task.classes[tag] for tag in found] == row["tags"]


def test_impossible_overlap_is_refused(tmp_path: Path, bert: Path) -> None:
    for kind in ("single", "tags"):
        with pytest.raises(DataError, match=r"overlap is 8, but a window of 10 tokens holds only 8 .* at most 7"):
            load_kind(kind, write(tmp_path / "data"), bert, long_texts="windows", overlap=8)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("iid", {"clients": 3}),
        ("dirichlet", {"clients": 2, "alpha": 100.0, "min_examples": 2}),
        ("by_column", {"column": "site"}),
        ("quantity", {"clients": 2, "alpha": 100.0, "min_examples": 2}),
        ("site", {"sites": ["a", "b"], "client": "a"}),
    ],
)
def test_windows_of_a_text_stay_together(name: str, options: dict[str, Any], tmp_path: Path, bert: Path) -> None:
    rows = [{**row, "label": "ab"[place % 2]} for place, row in enumerate(notes())]
    folder = write(tmp_path / "data", rows)
    cuts = {"validation": 0.2, "test": 0.2, "key": Key(5)}
    task = load_kind("single", folder, bert, long_texts="windows")
    with pytest.warns(UserWarning, match="are longer"):
        short = load_kind("single", folder, bert)
    federation, plain = split(task, name, **options, **cuts), split(short, name, **options, **cuts)
    assert list(federation.clients) == list(plain.clients)
    counts = torch.bincount(task.train.documents)  # type: ignore[union-attr, arg-type]
    for client in federation.clients:
        for part in ("train", "validation", "test"):
            windows, documents = getattr(federation[client], part), getattr(plain[client], part)
            assert isinstance(windows, Subset)
            assert windows.documents is not None
            # The split is that of the documents, and each has all its windows, one after another.
            found, each = windows.documents.unique_consecutive(return_counts=True)
            assert torch.equal(found, documents.indices)
            assert torch.equal(each, counts[found])
            assert (windows.indices.diff()[windows.documents.diff() == 0] == 1).all()


def test_flipped_labels_flip_all_windows(tmp_path: Path, bert: Path) -> None:
    task = load_kind("single", write(tmp_path / "data"), bert, long_texts="windows")
    federation = split(task, "iid", clients=2, key=Key(0))
    flipped = federation.with_flipped_labels(federation.clients[:1])
    for client, changed in zip(federation.clients, (True, False), strict=True):
        before, after = (take_all(each[client].train).targets for each in (federation, flipped))
        assert torch.equal(after, 1 - before if changed else before)


# Scores


class Echo(Model):
    """Its logits depend on the tokens of a window."""

    def __init__(self, each_token: bool, loss: Any, width: int = 3) -> None:
        self.name, self.each_token, self.loss, self.width = "echo", each_token, loss, width
        self.initial, self.tags = {"scale": torch.ones(1)}, {"scale": frozenset({"head"})}

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        seen = inputs["input_ids"].float().unsqueeze(-1) * torch.arange(1, self.width + 1)
        wave = torch.sin(seen) * inputs["attention_mask"].unsqueeze(-1)
        return Output(wave if self.each_token else wave.sum(1))

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        result: Tensor = self.loss(out.logits, targets)
        return result


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("size", [1, 2, 64])
def test_score_of_a_text_is_that_of_its_mean_logits(size: int, tmp_path: Path, bert: Path) -> None:
    for kind, evaluator, loss, width in (
        ("single", SingleLabel(), losses.cross_entropy, 2),
        ("number", Regression(), losses.squared_error, 1),
    ):
        task = load_kind(kind, write(tmp_path / "data"), bert, long_texts="windows", overlap=2)
        model, seen = Echo(False, loss, width), []
        smaller = type("Smaller", (type(evaluator),), {"batch": size})()
        federation = split(task, "iid", clients=1, key=Key(0), validation=0.0, test=0.0)
        examples = federation[federation.clients[0]].train
        found = evaluate(model, model.initial, examples, smaller).scores
        for document in examples.documents.unique_consecutive():  # type: ignore[attr-defined]
            batch = examples.take((examples.documents == document).nonzero().flatten())  # type: ignore[attr-defined]
            seen.append((model(model.initial, batch.inputs).logits.mean(0), batch.targets[0]))
        assert len(seen) == 24
        logits, targets = (torch.stack(part) for part in zip(*seen, strict=True))
        assert found["loss"] == pytest.approx(float(loss(logits, targets).mean()), rel=1e-5)
        if kind == "single":
            assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == targets).double().mean()))
        else:
            assert found["mse"] == pytest.approx(float((logits - targets).square().mean()), rel=1e-5)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_tags_of_a_sentence_are_scored_as_without_windows(size: int, tmp_path: Path, bert: Path) -> None:
    """The logits of a token do not depend on its window here, so windows must not change the scores."""
    folder = write(tmp_path / "data")
    windows = load_kind("tags", folder, bert, long_texts="windows", overlap=3)
    encode = replace(text_encoder(str(bert), LIMIT, words=True), limit=100)
    rows = encode.words([row["tokens"] for row in notes()])
    tags = [[IGNORE_INDEX, *(windows.classes.index(tag) for tag in row["tags"]), IGNORE_INDEX] for row in notes()]
    whole = ragged([ids for ids, _ in rows], 100, tags=tags)
    model = Echo(True, losses.token_cross_entropy, len(windows.classes))
    evaluator = type("Smaller", (Entities,), {"batch": size})(windows.classes)
    one, other = (evaluate(model, model.initial, table, evaluator).scores for table in (whole, windows.train))
    assert one == pytest.approx(other, rel=1e-5)
    assert 0 < one["f1"] < 1


def test_frozen_layers_are_cached_for_windows(tmp_path: Path, bert: Path) -> None:
    task = load_kind("single", write(tmp_path / "data"), bert, long_texts="windows")
    model = build("pretrained", task, Key(0), path=str(bert), frozen=("embedding", "layer.0"))
    above, [cached] = cache_frozen(model, task.train)
    plain, again = (
        evaluate(each, each.initial, table, SingleLabel()).scores
        for each, table in ((model, task.train), (above, cached))
    )
    assert plain == pytest.approx(again, rel=1e-4)


# Runs


def config(kind: str, folder: Path, bert: Path, **tables: Any) -> dict[str, Any]:
    data = {"path": str(folder), "max_length": LIMIT, **KINDS[kind], **tables.pop("data", {})}
    return {
        "method": {"name": "fedavg"},
        "data": data,
        "split": {"name": "iid", "clients": 2},
        "model": {"name": "pretrained", "path": str(bert)},
        "federation": {"cohort": 2},
        "evaluate": {"personal_every": 1, "validation_every": 1},
        "rounds": 1,
        **tables,
    }


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_with_windows_score_documents(kind: str, tmp_path: Path, bert: Path) -> None:
    raw = config(kind, write(tmp_path / "data"), bert, data={"long_texts": "windows"})
    [row] = start(parse(raw), tmp_path / "run")
    assert row["test"]["loss"] > 0
    assert row["personal"]
    recorded = read_json(tmp_path / "run" / "split.json")
    assert sum(sum(client[part] for part in ("train", "validation", "test")) for client in recorded["clients"]) > 24


@pytest.mark.slow
def test_privacy_of_examples_is_refused_for_windows(tmp_path: Path, bert: Path) -> None:
    folder = write(tmp_path / "data")
    private = {"privacy": {"noise": 1.0, "delta": 1e-3, "repeatable": True}, "evaluate": {}}
    for long_texts, unit in ("windows", "client"), ("error", "example"):
        raw = config("single", folder, bert, data={"long_texts": long_texts}, **private)
        raw["data"]["max_length"] = LIMIT if long_texts == "windows" else 20
        raw["privacy"]["unit"] = unit
        if long_texts == "error":
            write(folder, notes()[:12])
        build_experiment(parse(raw))
    raw = config("single", folder, bert, data={"long_texts": "windows"}, **private)
    raw["privacy"]["unit"] = "example"
    with pytest.raises(
        RunError, match=r"data\.long_texts is 'windows' and privacy\.unit is 'example': a text is cut into windows"
    ):
        build_experiment(parse(raw))


@pytest.mark.slow
def test_privacy_by_group_hides_all_windows_of_all_texts_of_a_group(tmp_path: Path, bert: Path) -> None:
    rows = notes()
    folder = write(tmp_path / "data", rows)
    (folder / "test.jsonl").write_text("".join(json.dumps({**row, "site": "other"}) + "\n" for row in rows[-6:]))
    tables = {"privacy": {"noise": 1.0, "delta": 1e-3, "unit": "group", "group": "site"}, "evaluate": {}}
    raw = config("single", folder, bert, data={"long_texts": "windows"}, **tables)
    raw["split"], raw["federation"] = {"name": "groups", "column": "site", "clients": 1}, {}
    experiment = build_experiment(parse(raw))
    federation = experiment.federation
    train = federation[federation.clients[0]].train
    assert experiment.guard is not None
    assert isinstance(train, Subset)
    assert train.groups is not None
    assert dict(experiment.guard.sizes) == {federation.clients[0]: len(train.groups.unique())}
    texts = federation.task.train.documents[train.indices]  # type: ignore[union-attr]
    assert len(texts.unique()) < len(texts), "texts have several windows"
    names = federation.task.columns["site"][texts.numpy()]
    for group in train.groups.unique():
        assert len(set(names[(train.groups == group).numpy()])) == 1
    [row] = start(parse({**raw, "rounds": 1}), tmp_path / "run")
    assert row["privacy"]["epsilon"] > 0


@pytest.mark.slow
def test_counts_of_cut_texts_are_withheld_under_privacy(tmp_path: Path, bert: Path) -> None:
    tables = {"privacy": {"noise": 1.0, "delta": 1e-3, "repeatable": True, "unit": "client"}, "evaluate": {}}
    for private, recorded in (False, "tokens are not read"), (True, "withheld"):
        raw = config("single", write(tmp_path / "data"), bert, **(tables if private else {}))
        with pytest.warns(UserWarning, match="tokens are not read"):
            experiment = build_experiment(parse(raw))
        prepare(experiment, tmp_path / str(private))
        assert read_json(tmp_path / str(private) / "environment.json")["data"].endswith(recorded)


def test_rows_beyond_the_positions_of_the_model_are_refused(tmp_path: Path, bert: Path) -> None:
    from transformers import BertTokenizer

    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *WORDS])}
    BertTokenizer(vocab=vocabulary, model_max_length=100).save_pretrained(tmp_path / "longer")
    task = load_kind("single", write(tmp_path / "data"), tmp_path / "longer", max_length=50)
    with pytest.raises(ModelError, match=r"rows of 32 tokens, but '.*bert.*' has 20 positions; lower data.max_length"):
        build("pretrained", task, Key(0), path=str(bert))
    short = load_kind("single", write(tmp_path / "data", notes()[:12]), tmp_path / "longer", max_length=50)
    build("pretrained", short, Key(0), path=str(bert))


# Tokens in files


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", ["single", "multi", "number", "lm", "lm by site"])
@pytest.mark.parametrize("long_texts", ["cut", "windows"])
@pytest.mark.filterwarnings("ignore:.* texts of .* are longer")
def test_tokens_in_files_equal_tokens_in_memory(kind: str, long_texts: str, tmp_path: Path, bert: Path) -> None:
    folder = write(tmp_path / "data")

    def loaded(memory: Any) -> Task:
        if kind.startswith("lm"):
            group = "site" if "site" in kind else None
            return load("lm", Key(0), path=folder, tokenizer=str(bert), block_size=LIMIT, memory=memory, group=group)
        return load_kind(kind, folder, bert, long_texts=long_texts, memory=memory)

    memory, first, second = loaded("auto"), loaded(0), loaded(0)
    assert "tokens are memory-mapped" not in memory.notes
    assert memory.vocabulary_size == first.vocabulary_size == second.vocabulary_size
    for disk in (first, second):
        assert disk.notes == (*memory.notes, "tokens are memory-mapped")
        for one, other in (memory.train, disk.train), (memory.test, disk.test):
            assert isinstance(one, RaggedExamples)
            assert isinstance(other, RaggedExamples)
            for field in ("ids", "offsets", "targets", "documents"):
                left, right = getattr(one, field), getattr(other, field)
                assert (left is None and right is None) or (left.dtype == right.dtype and torch.equal(left, right))


@pytest.mark.slow
def test_cached_tokens_are_used_until_text_tokenizer_or_options_change(
    tmp_path: Path, bert: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertTokenizer

    folder = write(tmp_path / "data", [row for row in notes() if len(row["tokens"]) < 9])
    encoded: list[int] = []
    plain = TextEncoder.texts
    monkeypatch.setattr(TextEncoder, "texts", lambda self, texts: encoded.append(len(texts)) or plain(self, texts))

    def count(tokenizer: Path = bert, **options: Any) -> int:
        encoded.clear()
        load_kind("single", folder, tokenizer, memory=0, **options)
        return sum(encoded)

    rows = sum(1 for row in notes() if len(row["tokens"]) < 9)
    assert count() == rows + 6
    assert count() == 0
    assert count(max_length=12) == rows + 6
    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *reversed(WORDS)])}
    BertTokenizer(vocab=vocabulary, model_max_length=20).save_pretrained(tmp_path / "other")
    assert count(tmp_path / "other") == rows + 6
    assert count() == 0
    changed = [{**row, "text": row["text"] + " w1"} for row in notes() if len(row["tokens"]) < 8]
    write(folder, changed)
    assert count() > 0
    files = list((own_cache / "tokens").glob("*/ids"))
    assert len(files) > 2
    for file in files:
        file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.warns(UserWarning, match="the cached tokens in .* are damaged, so they are computed again"):
        assert count() > 0
    assert count() == 0
