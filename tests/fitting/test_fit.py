"""`partita.fit`: objects in place of the paths of a config."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

import partita as pt
from partita.experiment.handing_over import hand_over_model_of
from partita.models.functional import without_logs

WORDS = ["good", "bad", "great", "awful", "fine", "poor", "film", "was", "it", "and"]
VOCABULARY = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
SMALL: dict[str, Any] = {"rounds": 2, "lr": 0.05, "optimizer": "sgd", "batch_size": 8, "progress": False}
OFF: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def rows(count: int = 48) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    texts = [[WORDS[place] for place in torch.randint(len(WORDS), (6,), generator=draw)] for _ in range(count)]
    return [
        {"review": " ".join(text), "stars": 1 + place % 3, "hospital": "ABC"[place // 3 % 3]}
        for place, text in enumerate(texts)
    ]


def tokenizer() -> BertTokenizer:
    return BertTokenizer(vocab=VOCABULARY, model_max_length=16)


def bert(labels: int = 3, **more: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(**shape, **OFF, **more, vocab_size=15, num_labels=labels)).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drops = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=15, n_positions=16, n_embd=8, n_layer=1, n_head=2, **drops)).eval()


def reviews(**more: Any) -> pt.data.objects.DataSource:  # type: ignore[name-defined]
    return pt.from_dataset(rows(), text="review", label="stars", tokenizer=tokenizer(), **more).by("hospital")


def digest(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["digest"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    with without_logs():
        bert().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    return pt.fit(bert(), reviews(), "fedavg", folder=tmp_path_factory.mktemp("runs") / "run", **SMALL)


def test_the_eleven_lines_of_the_readme(saved: Path, tmp_path: Path) -> None:
    table = tmp_path / "reviews.csv"
    pandas.DataFrame(rows()).to_csv(table, index=False)
    reviews = datasets.Dataset.from_pandas(pandas.read_csv(table))  # load_dataset("csv", ...) leaves the file open
    reviews = reviews.train_test_split(0.2, seed=0)
    task = pt.from_dataset(reviews, text="review", label="stars", tokenizer=AutoTokenizer.from_pretrained(saved))
    model = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=3)

    run = pt.fit(
        model, task.by("hospital"), pt.method("fedfrozen", warmup=1), rounds=2, lr=2e-5, folder=tmp_path / "run"
    )
    assert repr(run).startswith("Fitted(fedfrozen")
    assert "2 rounds" in repr(run)
    assert "\n" not in repr(run)
    assert list(run.frame["round"]) == [0, 1]
    assert run.frame["bytes.up"][1] < run.frame["bytes.up"][0]
    run.export(tmp_path / "reviews-model")
    with without_logs():
        answer = pipeline("text-classification", str(tmp_path / "reviews-model"))("good film")
    assert answer[0]["label"] in ("1", "2", "3")


def test_a_run_of_objects_is_that_of_the_config_bit_for_bit(saved: Path, run: Any, tmp_path: Path) -> None:
    table = tmp_path / "reviews.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    training = {key: SMALL[key] for key in ("lr", "optimizer", "batch_size")}
    by_config = pt.run(
        {
            "method": {"name": "fedavg"},
            "data": {"name": "text", "path": str(table), "text": "review", "label": "stars", "max_length": 16},
            "split": {"name": "by_column", "column": "hospital"},
            "model": {"name": "pretrained", "path": str(saved)},
            "training": training,
            "rounds": 2,
        },
        tmp_path / "run",
    )
    assert digest(by_config.folder) == digest(run.folder)
    same = ("round", "test", "personal", "bytes", "train_loss")
    assert [[row[key] for key in same] for row in by_config.rows] == [[row[key] for key in same] for row in run.rows]


def test_the_model_in_hand_does_not_change_and_a_trained_copy_comes_back(run: Any, tmp_path: Path) -> None:
    model = bert()
    before = copy.deepcopy(model.state_dict())
    again = pt.fit(model, reviews(), folder=tmp_path / "run", **SMALL)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trained = again.model()
    assert type(trained) is BertForSequenceClassification
    assert trained.config.id2label == {0: "1", 1: "2", 2: "3"}
    assert not torch.equal(trained.classifier.weight, model.classifier.weight)
    assert digest(again.folder) == digest(run.folder)


def test_what_a_run_offers(run: Any) -> None:
    assert list(run.by_client.index) == ["A", "B", "C"]
    assert "accuracy" in run.by_client
    assert run._repr_html_().count("<tr>") == 3
    predicted = run.predict(["good film", "bad film"])
    assert [row["label"] in ("1", "2", "3") for row in predicted] == [True, True]
    scores = run.evaluate(rows(12))["scores"]
    assert 0 <= scores["accuracy"]["value"] <= 1
    assert run.plan
    assert run.scores
    with pytest.warns(DeprecationWarning, match=r"Fitted\.to_frame\(\) is Fitted\.frame since 0\.2"):
        assert run.to_frame() is run.frame
    assert run.finished


MISTAKES: dict[str, tuple[Any, str]] = {
    "an option of evaluate": (lambda run: run.evaluate(bootstap=1), "no option 'bootstap'; did you mean 'bootstrap'"),
    "an option of predict": (lambda run: run.predict(["good"], batchsize=1), "did you mean 'batch_size'"),
    "rows that are none": (lambda run: run.predict(3), "data is of type int; give a file, .* or a list of texts"),
    "rows without a label": (
        lambda run: run.evaluate([{"review": "good"}]),
        "part of 'the data handed over' has no column 'stars'",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_a_run_cannot_do_is_said_in_one_line(case: str, run: Any) -> None:
    call, message = MISTAKES[case]
    with pytest.raises(ValueError, match=message) as error:
        call(run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("count", "said"), [(0, "0 rounds"), (1, "1 round,"), (2, "2 rounds")])
def test_rounds_are_counted_in_words(count: int, said: str, run: Any) -> None:
    shown = repr(replace(run, record=replace(run.record, rows=run.rows[:count])))
    assert shown.startswith(f"Fitted(fedavg, {said}")
    assert ("accuracy" in shown) == (count > 0)


@pytest.mark.parametrize(
    "data",
    [
        pandas.DataFrame(rows()),
        datasets.Dataset.from_list(rows()).with_format("torch"),
        {name: [row[name] for row in rows()] for name in ("review", "stars", "hospital")},
        {"train": rows()},
    ],
    ids=["pandas", "dataset", "columns", "parts"],
)
def test_the_same_rows_are_the_same_data(data: Any) -> None:
    names = {"text": "review", "label": "stars", "tokenizer": tokenizer()}
    one, other = (pt.from_dataset(each, **names).task() for each in (rows(), data))
    assert torch.equal(one.train.ids, other.train.ids)
    assert torch.equal(one.train.targets, other.train.targets)
    assert one.classes == other.classes == ("1", "2", "3")


def test_a_dict_of_clients_is_a_split(tmp_path: Path) -> None:
    by_client = {name: [row for row in rows() if row["hospital"] == name] for name in "ABC"}
    data = pt.from_dataset(by_client, text="review", label="stars", tokenizer=tokenizer())
    run = pt.fit(bert(), data, folder=tmp_path / "run", **SMALL)
    assert list(run.by_client.index) == ["A", "B", "C"]


def test_tokens_are_the_texts_they_come_from() -> None:
    texts = pt.from_dataset(rows(), text="review", label="stars", tokenizer=tokenizer(), max_length=16).task()
    used = tokenizer()
    encoded = used([row["review"] for row in rows()], padding="max_length", max_length=16)
    tokens = [
        {"input_ids": ids, "attention_mask": mask, "labels": row["stars"]}
        for row, ids, mask in zip(rows(), encoded["input_ids"], encoded["attention_mask"], strict=True)
    ]
    given = pt.from_dataset(tokens).task()
    for part in ("train", "test"):
        one, other = getattr(texts, part), getattr(given, part)
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.targets, other.targets)


def test_labels_of_language_modeling_are_shifted_as_in_transformers(tmp_path: Path) -> None:
    ids = [[3, 5, 6, 7, 8], [4, 6, 8]]
    labels = [[-100, -100, 6, 7, 8], [-100, 6, 8]]
    data = pt.from_dataset([{"input_ids": row, "labels": of} for row, of in zip(ids, labels, strict=True)] * 4)
    task = data.task()
    model = gpt2()
    with torch.no_grad():
        wanted = [
            float(model(torch.tensor([row]), labels=torch.tensor([of])).loss)
            for row, of in zip(ids, labels, strict=True)
        ]
    [_held], table = hand_over_model_of(model)
    ours = pt.models.build("pretrained", task, pt.Key(0), path=table["path"])
    found = ours.losses(
        ours(ours.initial, (batch := task.train.take(torch.arange(len(task.train)))).inputs), batch.targets
    )
    assert sorted({round(float(loss), 5) for loss in found}) == pytest.approx(
        sorted({round(loss, 5) for loss in wanted}), abs=1e-5
    )


def numbers(count: int = 40) -> list[tuple[torch.Tensor, int]]:
    draw = torch.Generator().manual_seed(1)
    return [(value, int(value[0] > 0)) for value in torch.randn(count, 4, generator=draw)]


def test_any_module_trains_by_its_own_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    data = pt.from_dataset(torch.utils.data.DataLoader(numbers())).split("iid", clients=1, validation=0.0, test=0.0)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    run = pt.fit(
        module, data, folder=tmp_path / "run", loss=loss, **{**SMALL, "rounds": 1, "steps": 1, "batch_size": 32}
    )
    task = data.task()
    reference = copy.deepcopy(module)
    inputs, targets = task.train.inputs["inputs"], task.train.targets
    loss(reference(inputs), targets).mean().backward()
    trained = run.model()
    for name, value in reference.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(trained.get_parameter(name), value - 0.05 * value.grad)
    run.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def _same_logits(run: Any, before: Any, examples: Any) -> None:
    """Compare the model of a run with the module that was handed over, and its trained model with the trained one."""
    built, params = run.functional()
    inputs = examples.take(torch.arange(2)).inputs
    there = {name: value.to(next(iter(params.values())).device) for name, value in inputs.items()}
    with torch.no_grad():
        for values, module in ((built.initial, before), (params, run.model())):
            found = built(values, there).logits.cpu()
            torch.testing.assert_close(found, module.eval()(**inputs).logits, atol=1e-4, rtol=1e-4)


def test_an_adapter_of_peft_is_what_trains_and_travels(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(bert(), peft.LoraConfig("SEQ_CLS", r=2, target_modules=["query", "value"]))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.add_(0.1)
    texts = pt.from_dataset(rows(), text="review", label="stars", tokenizer=tokenizer()).by("hospital")
    run = pt.fit(model, texts, folder=tmp_path / "run", **SMALL)
    built, _ = run.functional()
    trains = sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert sum(value.numel() for value in built.initial.values()) == trains
    assert all("lora" in name or name.startswith("classifier") for name in built.initial)
    assert isinstance(run.model(), peft.PeftModel)
    _same_logits(run, model, texts.task().test)


@pytest.mark.slow
def test_an_adapter_at_a_fused_projection_computes_the_same(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        gpt2(), peft.LoraConfig("CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_()
    data = pt.from_dataset([{"input_ids": [3, 5, 6, 7, 8]}, {"input_ids": [4, 6, 8, 9]}] * 12)
    run = pt.fit(model, data.split("iid", clients=2), folder=tmp_path / "run", **SMALL)
    _same_logits(run, model, data.task().test)


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_objects_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from partita.experiment import run_folder

    append = run_folder.RowLog.append

    def die(log: Any, row: Any) -> None:
        if row["round"] == 1:
            raise Killed
        append(log, row)

    def of_its_own() -> Any:  # the objects of other runs are still in hand
        return pt.from_dataset(rows(42), text="review", label="stars", tokenizer=tokenizer()).by("hospital")

    whole = digest(pt.fit(bert(), of_its_own(), folder=tmp_path / "whole", **SMALL).folder)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder.RowLog, "append", die)
        with pytest.raises(Killed) as killed:
            pt.fit(bert(), of_its_own(), folder=tmp_path / "run", **{**SMALL, "progress": True})
    assert killed.value.__notes__[0].endswith("continue with: partita.fit(..., resume=True)")
    del killed  # its traceback holds the objects
    gc.collect()
    with pytest.raises(ValueError, match="an object that this program has not handed over"):
        pt.load_run(tmp_path / "run").resume(progress=False)
    with pytest.raises(ValueError, match=r"the model is not the one with which the run began.*set_seed first"):
        pt.load_run(tmp_path / "run", model=bert(initializer_range=0.1), data=of_its_own())
    other = pt.from_dataset(rows(60), text="review", label="stars", tokenizer=tokenizer()).by("hospital")
    with pytest.raises(ValueError, match=r"holds another run: data\.path"):
        pt.fit(bert(), other, folder=tmp_path / "run", resume=True, **SMALL)
    done = pt.load_run(tmp_path / "run", model=bert(), data=of_its_own()).resume(progress=False)
    assert digest(done.folder) == whole


def norm() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


def linear(out: int = 2) -> torch.nn.Module:
    return torch.nn.Linear(4, out)


def split(data: Any, **names: Any) -> Any:
    return pt.from_dataset(data, **names).split("iid", clients=2)


TEXTS: dict[str, Any] = {"text": "review", "label": "stars", "tokenizer": tokenizer()}
BAD: dict[str, tuple[Any, str]] = {
    "batch norm": (
        lambda: pt.fit(norm(), split(numbers()), **SMALL),
        "'1' is a BatchNorm1d, .* replace it with GroupNorm",
    ),
    "no labels": (
        lambda: pt.fit(bert(), split([{"review": "good"}] * 20, **TEXTS), **SMALL),
        "the data has no column 'stars'",
    ),
    "no columns": (lambda: pt.fit(bert(), split(rows()), **SMALL), "no column is named; the data has review, stars"),
    "an empty label": (
        lambda: pt.fit(bert(), split([*rows(), {**rows()[0], "stars": None}], **TEXTS), **SMALL),
        "row 48 of the train part of 'the data handed over' has no label in 'stars'",
    ),
    "no tokenizer": (lambda: pt.fit(bert(), split(rows(), text="review", label="stars"), **SMALL), "needs a tokenizer"),
    "the name of a tokenizer": (
        lambda: pt.from_dataset(rows(), text="review", label="stars", tokenizer="bert"),
        r"the tokenizer is of type str; give one of transformers: AutoTokenizer\.from_pretrained",
    ),
    "different lengths": (
        lambda: pt.fit(linear(), split([(torch.ones(4), 0), (torch.ones(5), 1)]), **SMALL),
        r"inputs have different shapes, such as \(4,\) and \(5,\); .*input_ids",
    ),
    "another head": (
        lambda: pt.fit(bert(2), split(rows(), **TEXTS), **SMALL),
        "head has 2 outputs, but the task has 3",
    ),
    "another class": (
        lambda: pt.fit(gpt2(), split(rows(), **TEXTS), **SMALL),
        "is a GPT2LMHeadModel, but the task needs a GPT2ForSeq",
    ),
    "no split": (
        lambda: pt.fit(bert(), pt.from_dataset(rows(), **TEXTS), **SMALL),
        "nothing says which rows a client has",
    ),
    "few logits": (
        lambda: pt.fit(linear(1), split(numbers()), **SMALL),
        "returns 1 logits, but the data has 2 classes",
    ),
    "a mean loss": (
        lambda: pt.fit(linear(), split(numbers()), loss=torch.nn.functional.cross_entropy, **SMALL),
        "one loss for each, as with reduction='none'",
    ),
    "inputs that do not fit": (
        lambda: pt.fit(torch.nn.Linear(5, 2), split(numbers()), **SMALL),
        "cannot run on inputs",
    ),
    "a misspelled setting": (
        lambda: pt.fit(bert(), reviews(), learning_rte=1, **SMALL),
        "fit has no setting 'learning_rte'",
    ),
    "a composed method": (
        lambda: pt.fit(bert(), reviews(), pt.compose(pt.methods.build("fedavg"), pt.methods.build("fedprox")), **SMALL),
        "cannot be recorded; give partita.method",
    ),
    "a stream": (
        lambda: pt.from_dataset(datasets.Dataset.from_list(rows()).to_iterable_dataset(), **TEXTS),
        "has no length",
    ),
    "no reader": (
        lambda: pt.from_dataset(rows(), text="review", mask="stars"),
        "the columns mask, text do not tell a task",
    ),
    "no model": (lambda: pt.fit(3, reviews(), **SMALL), "the model is of type int; give a module"),
    "no weights": (
        lambda: pt.fit(linear().requires_grad_(False), split(numbers()), **SMALL),
        "no parameter of the model requires",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_objects_that_do_not_fit_are_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("rows.jsonl"))


def test_quantized_weights_are_refused() -> None:
    model = bert()
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="the model's weights are quantized"):
        pt.fit(model, reviews(), **SMALL)


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(inputs))  # type: ignore[no-any-return]

    run = pt.fit(Tied(), split(numbers()), folder=tmp_path / "run", **SMALL)
    trained = run.model()
    assert trained.first.weight is trained.second.weight
    assert set(run.functional()[0].initial) == {"first.weight", "first.bias", "second.bias"}


def test_workers_on_a_gpu_cannot_have_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from partita.experiment import builder

    monkeypatch.setattr(builder, "_configure_torch", lambda engine: torch.device("cuda"))
    with pytest.raises(ValueError, match="each worker loads the data itself, which was handed over as an object"):
        pt.fit(bert(), reviews(), folder=tmp_path / "run", engine={"workers": 2}, **SMALL)


@pytest.mark.slow
def test_a_run_survives_kill_9(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from fitting.test_fit import *
pt.fit(bert(), reviews(), folder={str(tmp_path / "run")!r}, **{{**SMALL, "rounds": 20}})
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment)
    rows_file = tmp_path / "run" / "rows.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if rows_file.exists() and rows_file.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL  # and not finished before
    whole = pt.fit(bert(), reviews(), folder=tmp_path / "whole", **{**SMALL, "rounds": 20})
    done = pt.load_run(tmp_path / "run", model=bert(), data=reviews()).resume(progress=False)
    assert len(done.rows) == 20
    assert digest(done.folder) == digest(whole.folder)
