"""Encoder-decoders: loss, generation and runs, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_fixtures import perturbed
from seq2seq_fixtures import ROWS, write_bart, write_t5

from partita.core.optim import SGD
from partita.core.personal_copy import add_personal_copy
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.settings import Run, Training
from partita.data import Task, load, split
from partita.engines.simulation import SimulationEngine
from partita.evaluation import evaluate
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.methods.fedavg import fedavg
from partita.models import ModelError, build
from partita.models.functional import FunctionalModel, without_logs
from partita.report.load import load_run

pytest.importorskip("datasets")
WRITERS = {"t5": write_t5, "bart": write_bart}
SCORES = {"rouge1", "rouge2", "rougeL", "exact_match", "loss", "perplexity"}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](path / "model")
    (path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read(folder: Path) -> Task:
    options = {"max_length": 24, "max_target_length": 24, "tokenizer": str(folder / "model")}
    return load("seq2seq", Key(0), path=str(folder / "texts.jsonl"), **options)


def model_of(folder: Path, **options: Any) -> tuple[Task, FunctionalModel]:
    task = read(folder)
    model = build("pretrained", task, Key(0), path=str(folder / "model"), **options)
    assert isinstance(model, FunctionalModel)
    return task, model


def plain_module(model: FunctionalModel, params: dict[str, torch.Tensor], folder: Path) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    model.save_pretrained(params, folder)
    with without_logs():
        return AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.fast_cases(1)
def test_losses_are_those_of_transformers_for_each_example(folder: Path, tmp_path: Path) -> None:
    task, model = model_of(folder)
    params = perturbed(model.initial)
    plain = plain_module(model, params, tmp_path / "saved")
    batch = task.train.take(torch.arange(8))
    losses = model.losses(model(params, batch.inputs), batch.targets)
    assert (batch.targets == -100).any()
    for number, loss in enumerate(losses):
        one = {name: batch.inputs[name][[number]] for name in ("input_ids", "attention_mask")}
        expected = plain(**one, labels=batch.targets[[number]]).loss  # it shifts the labels itself
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.fast_cases(1)
def test_greedy_texts_are_those_of_a_loop_without_cache_and_of_transformers(folder: Path, tmp_path: Path) -> None:
    task, model = model_of(folder)
    params = perturbed(model.initial)
    batch = task.train.take(torch.arange(6))
    texts = model.generate(params, batch.inputs, 7)
    plain = plain_module(model, params, tmp_path / "saved")
    given = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        tokens = plain.generate(**given, max_new_tokens=7, do_sample=False, num_beams=1)
    assert texts == task.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert len(set(texts)) > 1
    if plain.config.model_type == "t5":  # BART forces the last token
        assert texts == task.tokenizer.batch_decode(greedy(model, params, batch.inputs, 7), skip_special_tokens=True)


def greedy(model: FunctionalModel, params: Any, inputs: Any, steps: int) -> list[list[int]]:
    """The most probable token, again and again, through the forward pass that trains."""
    ids, end = inputs["decoder_input_ids"][:, :1], model.module.config.eos_token_id
    for _ in range(steps):
        logits = model(params, {**inputs, "decoder_input_ids": ids}).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    rows = [row[1:] for row in ids.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def test_the_answer_is_not_used_to_generate(folder: Path) -> None:
    task, model = model_of(folder)
    params, inputs = perturbed(model.initial), task.train.take(torch.arange(4)).inputs
    other = {**inputs, "decoder_input_ids": torch.full_like(inputs["decoder_input_ids"], 7)}
    assert model.generate(params, inputs, 5) == model.generate(params, other, 5)


@pytest.mark.fast_cases(1)
def test_a_personal_copy_and_low_rank_factors_generate_too(folder: Path) -> None:
    task, model = model_of(folder)
    inputs = task.train.take(torch.arange(4)).inputs
    texts = model.generate(model.initial, inputs, 5)
    copied = add_personal_copy(model)
    assert copied.generate(copied.initial, inputs, 5) == texts
    assert copied.decode(torch.tensor([[5, 6, -100]])) == model.decode(torch.tensor([[5, 6]]))
    adapted = model.low_rank(2, 4.0, ("query", "value"), Key(1))
    assert adapted.generate(adapted.initial, inputs, 5) == texts


def test_bfloat16_generates(folder: Path) -> None:
    task, model = model_of(folder, dtype="bfloat16")
    assert len(model.generate(model.initial, task.train.take(torch.arange(4)).inputs, 5)) == 4


def test_a_model_of_another_kind_refuses(tmp_path: Path) -> None:
    from partita.models.tiny_encoder import write_tiny_encoder

    write_tiny_encoder(tmp_path / "encoder", ["1", "one"], Key(0), layers=1, width=8)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({**row, "label": row["site"]}) + "\n" for row in ROWS))
    options = {"path": str(tmp_path / "texts.jsonl"), "text": "source", "tokenizer": str(tmp_path / "encoder")}
    task = load("text", Key(0), **options, max_length=16)
    model = build("pretrained", task, Key(0), path=str(tmp_path / "encoder"))
    with pytest.raises(ModelError, match="has a head for 'text' and generates no text"):
        model.generate(model.initial, task.train.take(torch.arange(2)).inputs, 5)


@pytest.mark.fast_cases(1)
def test_clients_with_texts_of_different_lengths_train_in_a_block_as_alone(folder: Path) -> None:
    task, model = model_of(folder)
    federation = split(task, "by_column", key=Key(0), column="site")
    run = Run(fedavg(), Training(0.1, SGD(), batch_size=3), 1, Key(0))
    assert model.why_one_by_one(task.train.take(torch.arange(2)).inputs) == ""
    results = []
    for block in 1, len(federation.clients):
        (played,) = rounds(run, model, SimulationEngine(run, model, federation, block))
        results.append(played.server.params)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-5, rtol=0)
    assert any(not torch.equal(value, model.initial[name]) for name, value in results[0].items())


def config_of(folder: Path, **evaluate: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "data": {
            "name": "seq2seq",
            "path": str(folder / "texts.jsonl"),
            "max_length": 24,
            "max_target_length": 24,
        },
        "split": {"name": "by_column", "column": "site", "test": 0.3},
        "model": {"name": "pretrained", "path": str(folder / "model")},
        "method": {"name": "fedfrozen", "warmup": 1},
        "training": {"optimizer": "adamw", "lr": 1e-2, "batch_size": 8, "epochs": 2},
        "evaluate": {"personal_every": 3, "max_new_tokens": 6, **evaluate},
    }


@pytest.mark.slow
def test_a_run_learns_resumes_and_reports(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    config = parse(config_of(folder))
    rows = list(start(config, tmp_path / "whole"))
    assert rows[-1]["test"].keys() == rows[-1]["personal"].keys() == SCORES
    assert rows[-1]["test"]["loss"] < rows[0]["test"]["loss"]
    assert load_run(tmp_path / "whole").metric.name == "rougeL"
    assert next(iter(start(config, tmp_path / "part")))["test"] == rows[0]["test"]
    resumed = list(resume(config, tmp_path / "part"))
    assert resumed[-1]["test"] == rows[-1]["test"], "bit for bit"


def test_fewer_examples_change_only_the_scores_of_texts(folder: Path) -> None:
    pytest.importorskip("rouge_score")
    from partita.evaluation.generation import GeneratedText

    task, model = model_of(folder)
    params = perturbed(model.initial)
    asked = []

    plain = model.generate
    object.__setattr__(model, "generate", lambda *given: asked.append(len(given[1]["input_ids"])) or plain(*given))
    few = evaluate(model, params, task.train, GeneratedText(5, 4)).scores
    every = evaluate(model, params, task.train, GeneratedText(5)).scores
    assert asked == [4, 16, len(task.train) - 16]
    assert few["loss"] == every["loss"]
