"""Evaluate and predict with a run and with its exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from example_fixtures import WORDS, write_encoder, write_notes
from PIL import Image
from transformers import AutoModelForTokenClassification, pipeline
from typer.testing import CliRunner

import partita
from partita.cli.main import app
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.data.errors import DataError
from partita.data.synthetic_files import write_pictures
from partita.experiment.evaluate import NOT_COVERED, Options, evaluate_folder
from partita.experiment.predict import Cut, predict_file
from partita.experiment.predict import Options as PredictOptions
from partita.models import ModelError
from partita.models.functional import without_logs
from partita.report.evaluation_page import render

CLASSES = ("ill", "well")


def row(place: int) -> dict[str, Any]:
    words = [WORDS[(place * step + step) % len(WORDS)] for step in range(1, 2 + place % 4)]
    return {
        "text": " ".join(words),
        "label": CLASSES[place * 7 % 5 % 2],
        "hospital": ("north", "south")[place % 2],
        "patient": f"p{place // 2}",
        "sex": "f" if place % 10 else "m",
    }


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[partita.Fitted, Path, Path]:
    """A run on texts, its exported folder, and its data."""
    folder = tmp_path_factory.mktemp("texts")
    encoder = write_encoder(folder / "encoder")
    write_rows(folder / "data" / "train.jsonl", [row(place) for place in range(40)])
    write_rows(folder / "data" / "test.jsonl", [row(place) for place in range(40, 70)])
    config = {
        "rounds": 1,
        "method": {"name": "fedper", "finetune": 0},
        "data": {"name": "text", "path": str(folder / "data"), "max_length": 16},
        "split": {"name": "by_column", "column": "hospital", "test": 0.3},
        "model": {"name": "pretrained", "path": str(encoder)},
        "training": {"lr": 0.01, "batch_size": 8},
    }
    run = partita.run(config, folder / "run")
    with without_logs():
        run.export(folder / "exported")
    return run, folder / "exported", folder / "data"


Trained = tuple[partita.Fitted, Path, Path]


def values(scores: dict[str, Any]) -> dict[str, float]:
    return {name: score["value"] for name, score in scores.items()}


@pytest.mark.slow
def test_scores_are_those_that_the_run_recorded(trained: Trained) -> None:
    run, _, data = trained
    found = [run.evaluate(data, client=client, bootstrap=50)["scores"] for client in ("north", "south")]
    for name, value in run.scores.items():  # clients have models of their own, so it recorded the mean of theirs
        assert sum(scores[name]["value"] for scores in found) / 2 == pytest.approx(value)
    for score in found[0].values():
        assert score["low"] <= score["high"]
    own = run.evaluate(all_clients=True, bootstrap=0)
    recorded = run.personal_scores["accuracy"]
    assert {name: each["scores"]["accuracy"]["value"] for name, each in own["by"]["client"].items()} == {
        name: pytest.approx(value) for name, value in recorded.items()
    }
    assert own["worst_tenth"]["value"] == pytest.approx(min(recorded.values()))
    assert own["worst_tenth"]["clients"] == 1


@pytest.mark.slow
def test_the_exported_folder_has_the_scores_of_the_run(trained: Trained) -> None:
    run, folder, data = trained
    recorded = run.evaluate(by=["class", "sex"], bootstrap=30)
    other = evaluate_folder(folder, Options(str(data), by=("class", "sex"), bootstrap=30, device="cpu"))
    for key in ("scores", "by", "confusion"):
        assert json.loads(json.dumps(other[key]), parse_float=lambda text: round(float(text), 5)) == json.loads(
            json.dumps(recorded[key]), parse_float=lambda text: round(float(text), 5)
        )
    again = run.evaluate(data, bootstrap=30)
    assert again["scores"] == recorded["scores"]
    assert again["data"]["part"] == "test"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["adapter", "prompts"])
def test_exported_adapters_and_prompts_have_the_scores_of_the_run(what: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    config: dict[str, Any] = {"rounds": 1, "training": {"lr": 0.01, "batch_size": 8}, "method": {"name": "fedavg"}}
    if what == "adapter":
        write_rows(data / "train.jsonl", [row(place) for place in range(24)])
        write_rows(data / "test.jsonl", [row(place) for place in range(24, 40)])
        config["data"] = {"name": "text", "path": str(data), "max_length": 16}
        config["split"] = {"name": "by_column", "column": "hospital"}
        adapter = {"kind": "lora", "rank": 2}
        config["model"] = {"name": "pretrained", "path": str(write_encoder(tmp_path / "encoder")), "adapter": adapter}
    else:
        write_pictures(data, Key(0))
        config["data"] = {"name": "images", "path": str(data), "size": 16}
        config["split"] = {"name": "iid", "clients": 2}
        config["model"] = {"name": "clip", "shape": "tiny"}
        config["method"] = {"name": "pfeddc"}
    run = partita.run(config, tmp_path / "run")
    with without_logs():
        run.export(tmp_path / "exported")
    of_run = run.evaluate(data, split="train", bootstrap=0)
    of_export = evaluate_folder(tmp_path / "exported", Options(str(data), split="train", bootstrap=0, device="cpu"))
    assert values(of_export["scores"]) == pytest.approx(values(of_run["scores"]), abs=1e-5)
    assert of_export["confusion"] == of_run["confusion"]
    if what == "adapter":
        weights = tmp_path / "exported" / "adapter_model.safetensors"
        weights.rename(weights.with_suffix(".bin"))  # PEFT would read it as a pickle
        with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors; export the run again"):
            evaluate_folder(tmp_path / "exported", Options(str(data), split="train", bootstrap=0, device="cpu"))


@pytest.mark.slow
def test_groups_have_the_scores_of_their_rows(trained: Trained, tmp_path: Path) -> None:
    _, folder, data = trained
    found = evaluate_folder(folder, Options(str(data), by=("sex",), bootstrap=20, device="cpu"))
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
    for sex in ("f", "m"):
        file = write_rows(tmp_path / f"{sex}.jsonl", [each for each in rows if each["sex"] == sex])
        alone = evaluate_folder(folder, Options(str(file), bootstrap=0, device="cpu"))
        group = found["by"]["sex"][sex]
        assert values(group["scores"]) == pytest.approx(values(alone["scores"]))
        assert (group["examples"], group["small"]) == (27 if sex == "f" else 3, sex == "m")
    counts = {name: each["examples"] for name, each in found["by"]["sex"].items()}
    assert sum(counts.values()) == found["data"]["rows"] == 30


@pytest.mark.slow
def test_patients_are_drawn_together_and_clients_come_from_their_column(trained: Trained) -> None:
    run, folder, data = trained
    alone = evaluate_folder(folder, Options(str(data), bootstrap=40, device="cpu"))
    together = evaluate_folder(folder, Options(str(data), groups="patient", bootstrap=40, device="cpu"))
    assert (alone["bootstrap"]["unit"], together["bootstrap"]["unit"]) == ("example", "patient")
    assert alone["scores"]["accuracy"] != together["scores"]["accuracy"]
    assert set(run.evaluate(data, by="client", bootstrap=0)["by"]["client"]) == {"north", "south"}
    assert set(run.evaluate(by="client", bootstrap=0)["by"]["client"]) == {"north", "south"}


def test_what_does_not_fit_is_refused_before_the_model_is_loaded(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, folder, data = trained

    def fail(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("partita.experiment.evaluate.load_exported", fail)
    file = write_rows(tmp_path / "more.jsonl", [row(0) | {"label": "dead"}, row(1)])
    with pytest.raises(DataError, match=r"does not know: 'dead' \(1\); its labels are ill, well"):
        evaluate_folder(folder, Options(str(file)))
    for options, message in (
        (Options(str(data), by=("age",)), "the column 'age', which the data does not have"),
        (Options(str(data), by=("client",)), "were not made by a column"),
        (Options(None), "has no test set; name the data with --data"),
        (Options(str(data), client="north"), "--client needs a run folder"),
        (Options(str(data), all_clients=True), "--all-clients needs a run folder"),
        (Options(str(data), client="a", all_clients=True), "choose one"),
    ):
        with pytest.raises(OptionError, match=message):
            evaluate_folder(folder, options)


def test_rows_left_out_are_counted(trained: Trained, tmp_path: Path) -> None:
    _, folder, _ = trained
    rows = [row(place) for place in range(6)]
    file = write_rows(tmp_path / "more.jsonl", [*rows, rows[0] | {"label": "dead"}])
    found = evaluate_folder(folder, Options(str(file), unknown_labels="drop", bootstrap=0, device="cpu"))
    assert found["data"]["left_out"] == {"with an unknown label": 1}
    assert found["data"]["rows"] == 6


def test_a_private_model_says_that_its_epsilon_does_not_cover_the_scores(trained: Trained, tmp_path: Path) -> None:
    _, folder, data = trained
    private = tmp_path / "private"
    private.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (private / file.name).write_bytes(file.read_bytes())
    about = json.loads((private / "partita.json").read_text()) | {"privacy_unit": "example"}
    (private / "partita.json").write_text(json.dumps(about))
    options = Options(str(data), bootstrap=0, device="cpu")
    assert NOT_COVERED in evaluate_folder(private, options)["notes"]
    assert NOT_COVERED not in evaluate_folder(folder, options)["notes"]


def test_labels_in_the_config_must_be_those_of_the_description(trained: Trained, tmp_path: Path) -> None:
    _, folder, data = trained
    turned = tmp_path / "turned"
    turned.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (turned / file.name).write_bytes(file.read_bytes())
    about = json.loads((turned / "partita.json").read_text()) | {"labels": ["well", "ill"]}
    (turned / "partita.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"are not those in its partita\.json"):
        evaluate_folder(turned, Options(str(data), device="cpu"))


def test_the_command_prints_tables_and_writes_a_page(trained: Trained, tmp_path: Path) -> None:
    _, folder, data = trained
    command = ["evaluate", str(folder), "--data", str(data), "--bootstrap", "20", "--device", "cpu"]
    shown = CliRunner().invoke(app, [*command, "--by", "class", "--by", "sex", "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    for text in ("accuracy", "true \\ predicted (examples)", "3*", "few examples", "calibration: expected error"):
        assert text in shown.output
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    printed = CliRunner().invoke(app, [*command, "--by", "class", "--by", "sex", "--json"])
    assert json.loads(printed.stdout) == written
    page = (tmp_path / "out" / "evaluation.html").read_text()
    assert "<script" not in page
    assert 'class="confusion"' in page
    assert "<svg" in page


def test_hostile_names_stay_text_on_the_page(trained: Trained) -> None:
    _, folder, data = trained
    result = evaluate_folder(folder, Options(str(data), by=("class", "sex"), bootstrap=0, device="cpu"))
    hostile = "</script><script>alert(1)</script>"
    result["by"][hostile] = {hostile: result["by"]["sex"]["f"]}
    result["confusion"]["classes"][0] = hostile
    result["model"] |= {"method": hostile, "client": hostile}
    result["notes"] = [hostile]
    page = render(result)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def predictions(folder: Path, file: Path, **options: Any) -> list[dict[str, Any]]:
    return list(predict_file(folder, file, PredictOptions(device="cpu", **options)))


@pytest.mark.slow
def test_predictions_equal_the_text_pipeline(trained: Trained, tmp_path: Path) -> None:
    run, folder, _ = trained
    texts = [row(place)["text"] for place in range(7)]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts))
    found = predictions(folder, file, batch_size=3)
    with without_logs():
        expected = pipeline("text-classification", str(folder), device="cpu")(texts, top_k=None)
    for place, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own["row"] == place
        assert own["label"] == other[0]["label"]
        assert own["probabilities"] == {each["label"]: pytest.approx(each["score"], abs=1e-5) for each in other}
    same = predictions(run.folder, file)
    assert [each["label"] for each in same] == [each["label"] for each in found]


@pytest.mark.slow
def test_predictions_need_no_labels_and_carry_columns(trained: Trained, tmp_path: Path) -> None:
    _, folder, _ = trained
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "pain", "sex": "f", "id": "x1"}, {"text": "arm", "sex": "m"}])
    first, second = predictions(folder, file, columns=("sex",))
    assert (first["id"], first["sex"], second["row"], second["sex"]) == ("x1", "f", 1, "m")
    command = ["predict", str(folder), str(file), "--device", "cpu", "--columns", "sex"]
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert [json.loads(line)["label"] for line in lines] == [first["label"], second["label"]]
    (tmp_path / "rows.csv").write_text("sex,text\nf,pain\nm,arm\n")
    command[2] = str(tmp_path / "rows.csv")
    header, *rest = CliRunner().invoke(app, [*command, "--format", "csv"]).stdout.splitlines()
    assert header == "row,sex,label,probabilities.ill,probabilities.well"
    assert len(rest) == 2
    for name, message in (("age", "--columns names 'age'"),):
        with pytest.raises(OptionError, match=message):
            predictions(folder, file, columns=(name,))
    blank = write_rows(tmp_path / "blank.jsonl", [{"text": "arm"}, {"text": " "}])
    with pytest.raises(DataError, match="row 1 of .* has no text in 'text'"):  # noqa: RUF043
        predictions(folder, blank)


def test_predictions_come_as_a_stream(trained: Trained, tmp_path: Path) -> None:
    _, folder, _ = trained
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "arm"}\n{"text": "pain"}\nbroken\n')
    cut = Cut()
    stream = predict_file(folder, file, PredictOptions(device="cpu", batch_size=1), cut)
    assert [next(stream)["row"], next(stream)["row"]] == [0, 1]
    with pytest.raises(DataError, match="line 3"):
        next(stream)
    long = tmp_path / "long.txt"
    long.write_text("arm " * 40)
    assert len(list(predict_file(folder, long, PredictOptions(device="cpu"), cut))) == 1
    assert cut.texts == 1


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notes")
    config = {
        "rounds": 1,
        "method": {"name": "fedavg"},
        "data": {"name": "tokens", "path": str(write_notes(folder / "notes")), "max_length": 32},
        "split": {"name": "by_column", "column": "hospital"},
        "model": {"name": "pretrained", "path": str(write_encoder(folder / "encoder"))},
        "training": {"lr": 0.1, "epochs": 4},
    }
    run = partita.run(config, folder / "run")
    with without_logs():
        run.export(folder / "exported")
        module = AutoModelForTokenClassification.from_pretrained(folder / "exported")
        # One round teaches too little; a wide random head predicts several tags.
        module.classifier.weight.data = 5 * torch.randn(module.classifier.weight.shape, generator=torch.Generator())
        module.classifier.bias.data.zero_()
        module.save_pretrained(folder / "exported")
    return folder / "exported"


@pytest.mark.slow
def test_predictions_equal_the_token_pipeline(tagger: Path, tmp_path: Path) -> None:
    texts = ["pain in the left arm .", "the left arm pain", "arm in pain"]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts))
    with without_logs():
        expected = pipeline("token-classification", str(tagger), device="cpu", aggregation_strategy="first")(texts)
    found = predictions(tagger, file)
    assert any(own["entities"] for own in found)
    for own, other in zip(found, expected, strict=True):
        assert [(each["type"], each["start"], each["end"]) for each in own["entities"]] == [
            (each["entity_group"], each["start"], each["end"]) for each in other
        ]
        assert [each["score"] for each in own["entities"]] == [pytest.approx(each["score"], abs=1e-5) for each in other]
    words = write_rows(tmp_path / "words.jsonl", [{"tokens": text.split()} for text in texts])
    for own, other in zip(predictions(tagger, words), found, strict=True):
        assert [(each["type"], each["text"]) for each in own["entities"]] == [
            (each["type"], each["text"]) for each in other["entities"]
        ]


@pytest.mark.slow
def test_predictions_equal_the_image_pipeline(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(4):
                pixels = torch.randint(0, 256, (8, 8, 3), generator=draw, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / "data" / part / name / f"{number}.png")
    config = {
        "rounds": 1,
        "method": {"name": "fedavg"},
        "data": {"name": "images", "path": str(tmp_path / "data")},
        "split": {"name": "iid", "clients": 2},
        "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 4},
    }
    run = partita.run(config, tmp_path / "run")
    with without_logs():
        run.export(tmp_path / "exported")
    files = sorted((tmp_path / "data" / "test").rglob("*.png"))
    found = predictions(tmp_path / "exported", tmp_path / "data" / "test")
    with without_logs():
        expected = pipeline("image-classification", str(tmp_path / "exported"), device="cpu")(list(map(str, files)))
    assert [own["id"] for own in found] == [str(file.relative_to(tmp_path / "data" / "test")) for file in files]
    for own, other in zip(found, expected, strict=True):
        assert own["probabilities"] == {each["label"]: pytest.approx(each["score"], abs=1e-5) for each in other}
    scored = evaluate_folder(tmp_path / "exported", Options(str(tmp_path / "data" / "test"), bootstrap=0, device="cpu"))
    right = [own["label"] == file.parent.name for own, file in zip(found, files, strict=True)]
    assert scored["scores"]["accuracy"]["value"] == pytest.approx(sum(right) / len(right))
