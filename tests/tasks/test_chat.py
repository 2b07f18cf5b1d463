"""Chat: losses against transformers, runs, sample answers, and models for other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from architecture_fixtures import perturbed
from chat_fixtures import QUESTIONS, ROWS, write_decoder, write_rows
from shell import Shell

from partita.core.data import IGNORE_INDEX
from partita.core.optim import SGD
from partita.core.rng import Key
from partita.core.rounds import rounds
from partita.core.settings import Run, Training
from partita.data import Task, load, split
from partita.engines.simulation import SimulationEngine
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.methods.fedavg import fedavg
from partita.models import build
from partita.models.functional import FunctionalModel, without_logs
from partita.report.load import load_run
from partita.report.page import page

pytest.importorskip("datasets")
CHAT_SCORES = {"loss", "perplexity", "exact_match"}


def written(path: Path, kind: Literal["llama", "gpt2"]) -> Path:
    write_decoder(path / "model", kind)
    write_rows(path / "chat.jsonl", ROWS)
    write_rows(path / "choices.jsonl", QUESTIONS)
    return path


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("llama"), "llama")


def model_of(folder: Path, **options: Any) -> tuple[Task, FunctionalModel]:
    tokenizer = str(folder / "model")
    task = load("chat", Key(0), path=str(folder / "chat.jsonl"), max_length=64, tokenizer=tokenizer, **options)
    model = build("pretrained", task, Key(0), path=str(folder / "model"))
    assert isinstance(model, FunctionalModel)
    return task, model


def plain_module(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with without_logs():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.fast_cases(1)
def test_losses_are_those_of_transformers_for_each_example(folder: Path, tmp_path: Path) -> None:
    task, model = model_of(folder)
    params = perturbed(model.initial)
    model.save_pretrained(params, tmp_path / "saved")
    plain = plain_module(tmp_path / "saved")
    batch = task.train.take(torch.arange(8))
    losses = model.losses(model(params, batch.inputs), batch.targets)
    for number, loss in enumerate(losses):
        real = batch.inputs["attention_mask"][number].bool()
        ids, targets = batch.inputs["input_ids"][number][real], batch.targets[number][real]
        # transformers shifts the labels itself, so the last target is a token more.
        end = torch.cat([ids, targets[-1:]])
        labels = torch.cat([torch.tensor([IGNORE_INDEX]), targets])
        expected = plain(input_ids=end[None], labels=labels[None]).loss
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("pack", [False, True])
def test_clients_train_in_a_block_as_alone(folder: Path, pack: bool) -> None:
    task, model = model_of(folder, pack=pack)
    federation = split(task, "by_column", key=Key(0), column="site")
    run = Run(fedavg(), Training(0.1, SGD(), batch_size=2, loss_average="tokens"), 1, Key(0))
    results = []
    for block in 1, len(federation.clients):
        (played,) = rounds(run, model, SimulationEngine(run, model, federation, block))
        results.append(played.server.params)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-5, rtol=0)


@pytest.mark.fast_cases(1)
def test_one_step_on_packed_rows_is_the_step_on_their_examples(folder: Path) -> None:
    """With the loss as a mean over tokens, packing changes nothing but the speed."""
    results = []
    for pack in (False, True):
        task, model = model_of(folder, pack=pack)
        federation = split(task, "by_column", key=Key(0), column="site")
        whole = Training(0.1, SGD(), batch_size=100, loss_average="tokens", dropout=False)
        run = Run(fedavg(), whole, 1, Key(0))
        client = federation.clients[0]
        (played,) = rounds(run, model, SimulationEngine(run, model, _Only(federation, client), 1))
        results.append(played.server.params)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-6, rtol=0)


class _Only:
    """A population of one client."""

    def __init__(self, federation: Any, client: str) -> None:
        self.federation, self.clients = federation, [client]

    def __getitem__(self, client: str) -> Any:
        return self.federation[client]


def config_of(folder: Path, **tables: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "rounds": 3,
        "data": {"name": "chat", "path": str(folder / "chat.jsonl"), "max_length": 64, "pack": True},
        "split": {"name": "by_column", "column": "site", "test": 0.3},
        "model": {"name": "pretrained", "path": str(folder / "model")},
        "method": {"name": "fedfrozen", "warmup": 1},
        "training": {"optimizer": "adamw", "lr": 1e-2, "batch_size": 4, "epochs": 2},
        "evaluate": {"personal_every": 3, "max_new_tokens": 6, "samples": 2},
    }
    return {**raw, **{name: {**raw.get(name, {}), **table} for name, table in tables.items()}}


@pytest.mark.slow
def test_a_run_learns_resumes_and_records_samples(folder: Path, tmp_path: Path) -> None:
    config = parse(config_of(folder))
    rows = list(start(config, tmp_path / "whole"))
    assert rows[-1]["test"].keys() == rows[-1]["personal"].keys() == CHAT_SCORES
    assert rows[-1]["test"]["loss"] < rows[0]["test"]["loss"]
    record = load_run(tmp_path / "whole")
    assert (record.metric.name, record.metric.higher_is_better) == ("perplexity", False)
    next(iter(start(config, tmp_path / "part")))
    assert not (tmp_path / "part" / "samples.json").exists()
    assert list(resume(config, tmp_path / "part"))[-1]["test"] == rows[-1]["test"], "bit for bit"
    assert (tmp_path / "part" / "samples.json").read_text() == (tmp_path / "whole" / "samples.json").read_text()
    assert len(record.samples) == 2
    for sample in record.samples:
        assert sample["prompt"].endswith("?")
        assert sample["reference"].endswith(".")
        assert sample["before"] != sample["after"]
    # The numbers of the split are those of conversations, not of packed rows.
    held = json.loads((tmp_path / "whole" / "split.json").read_text())
    assert sum(client["train"] for client in held["clients"]) > 10


@pytest.mark.slow
def test_a_run_on_choices(llama: Path, tmp_path: Path) -> None:
    data = {"path": str(llama / "choices.jsonl"), "choices": "choices"}
    raw = config_of(llama, data=data, training={"epochs": 8})
    del raw["evaluate"]["max_new_tokens"]
    rows = list(start(parse(raw), tmp_path / "run"))
    assert rows[-1]["test"].keys() == {"accuracy", "normalized_accuracy", "loss", "perplexity"}
    assert rows[-1]["personal"].keys() == rows[-1]["test"].keys()
    assert rows[-1]["test"]["loss"] < rows[0]["test"]["loss"]
    assert load_run(tmp_path / "run").metric.name == "accuracy"


@pytest.mark.slow
def test_samples_in_the_report_are_escaped_and_shortened(llama: Path, tmp_path: Path) -> None:
    list(start(parse(config_of(llama)), tmp_path / "run"))
    file = tmp_path / "run" / "samples.json"
    found = json.loads(file.read_text())
    found["samples"][0] |= {"after": "<script>alert(1)</script>", "prompt": "long " * 1000}
    file.write_text(json.dumps(found))
    text = page([load_run(tmp_path / "run")], tmp_path / "report.html").read_text()
    assert 'id="samples"' in text
    assert "&lt;script&gt;" in text
    assert "<script>alert" not in text
    assert text.count("long ") < 300
    file.unlink()
    assert 'id="samples"' not in page([load_run(tmp_path / "run")], tmp_path / "report.html").read_text()


def test_samples_are_off_by_default() -> None:
    assert parse({"method": {"name": "fedavg"}}).evaluate.samples == 0


# For other programs


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


@pytest.fixture
def exported(llama: Path, tmp_path: Path, shell: Shell) -> Callable[..., Path]:
    def export(**tables: Any) -> Path:
        raw = config_of(llama, **tables)
        raw["method"] = tables.get("method", {"name": "fedavg"})
        raw["rounds"] = 1
        list(start(parse(raw), tmp_path / "run"))
        code, out, _ = shell("export", tmp_path / "run", "--to", tmp_path / "exported")
        assert code == 0
        assert "lm_eval --model hf --model_args pretrained=" in out
        return tmp_path / "exported"

    return export


@pytest.mark.slow
def test_an_exported_model_chats_in_transformers(exported: Callable[..., Path], tmp_path: Path, shell: Shell) -> None:
    from transformers import AutoTokenizer

    from partita import load_run as recorded

    folder = exported()
    model, params = recorded(tmp_path / "run").functional()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what comes after one ?"}], add_generation_prompt=True, return_tensors="pt"
    )
    with torch.inference_mode():
        torch.testing.assert_close(
            plain_module(folder)(given["input_ids"]).logits,
            model(params, {"input_ids": given["input_ids"]}).logits,
            atol=1e-5,
            rtol=1e-5,
        )
    code, _, told = shell("export", tmp_path / "run", "--to", folder)
    assert code == 1
    assert "exists already" in told


@pytest.mark.slow
def test_an_exported_adapter_names_its_model(exported: Callable[..., Path], llama: Path) -> None:
    from peft import PeftModel

    from partita.cli.export import model_arguments

    adapter = exported(method={"name": "lora", "rank": 2})
    model = str(llama / "model")
    assert model_arguments(adapter) == f"pretrained={model},peft={adapter},tokenizer={adapter}"
    PeftModel.from_pretrained(plain_module(llama / "model"), adapter)


def test_lm_evaluation_harness_reads_an_exported_model(exported: Callable[..., Path], tmp_path: Path) -> None:
    harness = pytest.importorskip("lm_eval.models.huggingface")
    instances = pytest.importorskip("lm_eval.api.instance")
    from partita import load_run as recorded

    model = harness.HFLM(pretrained=str(exported()), device="cpu", batch_size=1)
    asked = instances.Instance("loglikelihood", {}, ("what comes after one ?", " two ."), 0)
    [(likelihood, _)] = model.loglikelihood([asked])
    own, params = recorded(tmp_path / "run").functional()
    context, continuation = model._encode_pair(*asked.args)
    shares = own(params, {"input_ids": torch.tensor([context + continuation])}).logits[0].log_softmax(-1)
    expected = sum(float(shares[place - 1, token]) for place, token in enumerate(continuation, len(context)))
    assert likelihood == pytest.approx(expected, abs=1e-3)
