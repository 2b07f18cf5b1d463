"""Reading texts with the texts that answer them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from seq2seq_fixtures import ROWS, write_bart, write_t5

from partita.core.rng import Key
from partita.data import DataError, Task, load
from partita.models.tiny_encoder import write_tiny_encoder
from partita.tasks import SEQ2SEQ

pytest.importorskip("datasets")


@pytest.fixture(scope="module", params=["t5", "bart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    (write_t5 if request.param == "t5" else write_bart)(path)
    return path


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5")
    write_t5(path)
    return path


def read(path: Path, model: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> Task:
    file = path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROWS if rows is None else rows)))
    given = {"tokenizer": str(model), "max_length": 24, "max_target_length": 24}
    return load("seq2seq", Key(0), path=str(file), **{**given, **options})


def test_inputs_and_targets_are_those_of_transformers(tmp_path: Path, folder: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    task = read(tmp_path, folder)
    assert (task.kind, task.classes, list(task.columns)) == (SEQ2SEQ, (), ["site"])
    tokenizer, module = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    batch = task.train.take(torch.arange(len(task.train)))
    shifted = module.prepare_decoder_input_ids_from_labels(batch.targets)
    known = {(row["source"], row["target"]) for row in ROWS}
    for row, targets in enumerate(batch.targets):
        length = int((targets != -100).sum())
        answer = tokenizer.decode(targets[:length], skip_special_tokens=True)
        text = tokenizer.decode(batch.inputs["input_ids"][row], skip_special_tokens=True)
        assert (text, answer) in known
        assert targets[:length].tolist() == tokenizer(text_target=answer)["input_ids"]
        decoder_ids = batch.inputs["decoder_input_ids"][row]
        assert decoder_ids[:length].tolist() == shifted[row, :length].tolist()
    assert task.vocabulary_size <= module.config.vocab_size


def token_of_two(model: Path) -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("two"))


def test_the_prefix_is_read_before_every_source(tmp_path: Path, t5: Path) -> None:
    plain, prefixed = (read(tmp_path, t5, prefix=prefix).train.take(torch.arange(3)) for prefix in (None, "two "))
    word = prefixed.inputs["input_ids"][:, 1]  # after the first special token
    assert set(word.tolist()) == {token_of_two(t5)}
    assert torch.equal(prefixed.inputs["input_ids"][:, 2:6], plain.inputs["input_ids"][:, 1:5])
    assert torch.equal(prefixed.targets, plain.targets)


def test_long_texts_are_cut_with_a_warning_and_still_end(tmp_path: Path, t5: Path) -> None:
    with pytest.warns(UserWarning, match="are longer than") as told:
        task = read(tmp_path, t5, max_length=4, max_target_length=3)
    said = sorted(str(warning.message) for warning in told)
    assert "source texts" in said[0]
    assert said[0].endswith("raise data.max_length")
    assert "target texts" in said[1]
    assert said[1].endswith("raise data.max_target_length")
    batch = task.train.take(torch.arange(4))
    assert batch.inputs["input_ids"].shape[1] == 4
    assert set(batch.targets[:, -1].tolist()) <= {task.tokenizer.eos_token_id, -100}


def test_limit_draws_pairs(tmp_path: Path, t5: Path) -> None:
    assert len(read(tmp_path, t5, limit=4).train) == 4


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (None, {"target": "answer"}, "has no column 'answer'"),
        ([*ROWS[:5], {"source": "1", "target": " "}], {}, "row 5 of the train part .* has no text in 'target'"),
        (None, {"max_target_length": 1}, r"takes rows of 3 to \d+ tokens, not 1; set data.max_target_length"),
        (None, {"tokenizer": None}, "a text task needs a tokenizer"),
    ],
)
def test_wrong_data_is_refused(
    rows: list[dict[str, Any]] | None, options: dict[str, Any], message: str, tmp_path: Path, t5: Path
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, t5, rows, **options)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path / "encoder", ["1"], Key(0), layers=1, width=8)
    with pytest.raises(DataError, match="is not that of an encoder-decoder with decoder_start_token_id"):
        read(tmp_path, tmp_path / "encoder")


def test_a_tokenizer_that_does_not_end_texts_is_refused(tmp_path: Path) -> None:
    write_t5(tmp_path / "endless")
    file = tmp_path / "endless" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 7}))
    with pytest.raises(DataError, match=r"does not end a text with the token 7, .*use the model's own tokenizer"):
        read(tmp_path, tmp_path / "endless")
