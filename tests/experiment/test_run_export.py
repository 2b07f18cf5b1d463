"""Exported models compute the same logits in plain transformers: for every kind of task, and for clients' own."""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_fixtures
import datasets
import dual_encoder_fixtures
import numpy as np
import pytest
import seq2seq_fixtures
import torch
import transformers
from example_fixtures import WORDS, write_encoder
from helpers import max_difference
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from shell import Shell
from torch import Tensor

import partita
from partita.core.rng import Key
from partita.core.settings import RunError
from partita.experiment.config import Config, parse
from partita.experiment.export import export_clients, export_model, form_of
from partita.experiment.exported import ExportError, read_export
from partita.experiment.recorded_model import RecordedModel, load_recorded_model
from partita.experiment.runner import start
from partita.models.functional import without_logs
from partita.models.tiny_segformer import write_tiny_segformer
from partita.tasks import KINDS

COUNT = 24
TEXTS = [" ".join(WORDS[: 1 + place % len(WORDS)]) for place in range(COUNT)]
CLOSE = 1e-5
Raw = dict[str, Any]


def pictures(folder: Path) -> list[str]:
    draws = np.random.default_rng(0)
    for place in range(COUNT):
        for kind, pixels in ("image", draws.integers(0, 256, (16, 16, 3))), ("mask", draws.integers(0, 2, (16, 16))):
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{kind}{place}.png")
    return [f"image{place}.png" for place in range(COUNT)]


def text(folder: Path, name: str = "text", **columns: list[Any]) -> Raw:
    write_encoder(folder / "model")
    rows = [{"text": row, **{key: column[place] for key, column in columns.items()}} for place, row in enumerate(TEXTS)]
    path = chat_fixtures.write_rows(folder / "rows.jsonl", rows)
    return {
        "data": {"name": name, "path": str(path), "max_length": 16},
        "model": {"name": "pretrained", "path": str(folder / "model")},
    }


def images(folder: Path, name: str = "images", **columns: list[Any]) -> Raw:
    labels = columns.get("label", [])
    kinds: Raw = {"image": datasets.Image(), "mask": datasets.Image(), "target": datasets.Value("float64")}
    kinds |= {"site": datasets.Value("string"), "label": datasets.ClassLabel(names=sorted({*labels}) or ["none"])}
    columns = {"image": [str(folder / file) for file in pictures(folder)], **columns}
    rows = {key: column[:COUNT] for key, column in columns.items()}
    features = datasets.Features({key: kinds[key] for key in rows})
    path = folder / "rows.parquet"
    datasets.Dataset.from_dict(rows, features).to_parquet(path)
    return {
        "data": {"name": name, "path": str(path), "size": 8},
        "model": {"name": "vit", "layers": 1, "width": 8, "heads": 2, "patch": 4},
    }


def segmentation(folder: Path) -> Raw:
    write_tiny_segformer(folder / "model", Key(0), width=8)
    raw = images(folder, "segmentation", mask=[str(folder / f"mask{place}.png") for place in range(COUNT)])
    raw["data"] |= {"size": 16, "classes": ["ground", "ring"]}
    return {**raw, "model": {"name": "pretrained", "path": str(folder / "model")}}


def tokens(folder: Path) -> Raw:
    raw = text(folder, "tokens")
    rows = [{"tokens": row.split(), "tags": ["B-SIGN", *["O"] * (len(row.split()) - 1)]} for row in TEXTS]
    chat_fixtures.write_rows(folder / "rows.jsonl", rows)
    return raw


def decoder(folder: Path, kind: Any = "gpt2", **options: Any) -> Raw:
    chat_fixtures.write_decoder(folder / "model", kind)
    rows: list[Raw] = [{"text": "what comes after one ? two ."}] * COUNT
    if options["name"] == "chat":
        rows = [dict(row) for row in (chat_fixtures.QUESTIONS if "choices" in options else chat_fixtures.ROWS)]
    path = chat_fixtures.write_rows(folder / "rows.jsonl", rows)
    return {"data": {"path": str(path), **options}, "model": {"name": "pretrained", "path": str(folder / "model")}}


def seq2seq(folder: Path) -> Raw:
    seq2seq_fixtures.write_t5(folder / "model")
    path = chat_fixtures.write_rows(folder / "rows.jsonl", seq2seq_fixtures.ROWS)
    return {
        "data": {"name": "seq2seq", "path": str(path), "max_length": 16, "max_target_length": 8},
        "model": {"name": "pretrained", "path": str(folder / "model")},
    }


OWN_READER = """
import torch
from partita.data import Table, Task
from partita.tasks import MULTI_LABEL_IMAGE

def findings():
    draws = torch.Generator().manual_seed(0)
    pixels, targets = torch.randn(24, 3, 8, 8, generator=draws), (torch.arange(48) % 3 > 0).view(24, 2).float()
    table = Table({"pixel_values": pixels}, targets)
    return Task(
        "findings", table, table, ("calm", "ill"), channels=3, size=8, kind=MULTI_LABEL_IMAGE,
        normalization=((0.5,), (0.5,)),
    )
"""


def own_reader(folder: Path) -> Raw:
    (folder / "mine.py").write_text(OWN_READER)
    return {**images(folder), "data": {"name": f"{folder / 'mine.py'}:findings"}}


TWO = ["calm", "ill"] * COUNT
SETS = [["calm"], ["calm", "ill"], ["ill"]] * COUNT
NUMBERS = [place / 7 for place in range(COUNT)]
RUNS: dict[str, Callable[[Path], Raw]] = {
    "image": lambda folder: images(folder, label=TWO),
    "multi-label image": own_reader,
    "image regression": lambda folder: images(folder, "image_regression", target=NUMBERS),
    "segmentation": segmentation,
    "text": lambda folder: text(folder, label=TWO),
    "multi-label text": lambda folder: text(folder, label=SETS),
    "text regression": lambda folder: text(folder, "text_regression", target=NUMBERS),
    "tokens": tokens,
    "lm": lambda folder: decoder(folder, name="lm", block_size=8),
    "chat": lambda folder: decoder(folder, "llama", name="chat", max_length=64),
    "choice": lambda folder: decoder(folder, "llama", name="chat", max_length=64, choices="choices"),
    "seq2seq": seq2seq,
}


def pairs(folder: Path) -> Raw:
    raw = text(folder, label=TWO, other=TEXTS[::-1])
    raw["data"]["pair"] = "other"
    return raw


def recorded_run(folder: Path, raw: Raw, method: str = "fedavg", **tables: Any) -> RecordedModel:
    options = {key: tables.pop(key) for key in [*tables] if key not in Config.__dataclass_fields__}
    own = {
        "method": {"name": method, **options},
        "rounds": 2,
        "training": {"lr": 0.05, "batch_size": 4, "steps": 2},
        "split": {"name": "iid", "clients": 2},
        **tables,
    }
    list(start(parse({**raw, **own}), folder))
    return load_recorded_model(folder)


def plain(folder: Path, kind: str, base: Path | None = None) -> Any:
    """The model, loaded without partita."""
    auto_class = getattr(transformers, KINDS[kind].auto_class)
    with without_logs():
        if base is None:
            return auto_class.from_pretrained(folder).eval()
        labels = read_export(folder).labels
        whole = auto_class.from_pretrained(base, **({"num_labels": len(labels)} if labels else {}))
        return PeftModel.from_pretrained(whole, folder).eval()


def inputs_of(recorded: RecordedModel) -> dict[str, Tensor]:
    examples = recorded.experiment.federation.test
    return dict(examples.take(torch.arange(min(4, len(examples)))).inputs)


def difference(recorded: RecordedModel, module: Any, client: str | None = None) -> float:
    """The largest difference of logits between the model of a run and a module of transformers."""
    inputs = inputs_of(recorded)
    model = recorded.experiment.model
    with torch.no_grad():
        ours, theirs = model(recorded.params(client), inputs).logits, module(**inputs).logits
    if ours.shape[-2:] != theirs.shape[-2:] and theirs.ndim == 4:  # partita's are as large as the image
        theirs = torch.nn.functional.interpolate(theirs, ours.shape[-2:], mode="bilinear", align_corners=False)
    if "attention_mask" in inputs and ours.ndim == 3 and "decoder_input_ids" not in inputs:
        seen = inputs["attention_mask"].bool()  # padding has no logits that count
        ours, theirs = ours[seen], theirs[seen]
    assert ours.shape == theirs.shape
    assert ours.abs().max() > 0
    return float((ours - theirs).abs().max())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", [*RUNS, "pairs"])
def test_plain_transformers_computes_the_same_logits(kind: str, tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path / "run", (RUNS | {"pairs": pairs})[kind](tmp_path))
    export = export_model(recorded, tmp_path / "exported")
    task = recorded.experiment.federation.task
    assert export == read_export(tmp_path / "exported")
    assert export.kind == ("text" if kind == "pairs" else kind)
    assert export.labels == task.classes
    module = plain(tmp_path / "exported", export.kind)
    assert difference(recorded, module) <= CLOSE
    if export.labels:
        assert tuple(module.config.id2label.values()) == task.classes
    with without_logs():
        if task.kind.inputs == "text":
            read = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
            assert read("pain in the arm") == task.tokenizer("pain in the arm")
        else:
            assert transformers.AutoImageProcessor.from_pretrained(tmp_path / "exported").size["height"] == task.size
    assert str(tmp_path) not in (tmp_path / "exported" / "partita.json").read_text()
    assert str(tmp_path) not in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.slow
def test_adapter_on_gpt2_loads_in_peft_and_merged_in_transformers(tmp_path: Path) -> None:
    raw = RUNS["lm"](tmp_path)
    raw["model"]["adapter"] = {"rank": 2}
    recorded = recorded_run(tmp_path / "run", raw)
    assert export_model(recorded, tmp_path / "adapter").form == "adapter"
    assert export_model(recorded, tmp_path / "merged", merge=True).form == "model"
    assert difference(recorded, plain(tmp_path / "adapter", "lm", tmp_path / "model")) <= CLOSE
    assert difference(recorded, plain(tmp_path / "merged", "lm")) <= CLOSE
    assert read_export(tmp_path / "adapter").base.digest == recorded.experiment.base_digest != ""


def test_whole_folder_of_a_client_has_its_own_parameters(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path / "run", RUNS["image"](tmp_path), "fedper")
    for client in ("c0", "c1"):
        export_model(recorded, tmp_path / client, client)
        assert read_export(tmp_path / client).client == client
        assert difference(recorded, plain(tmp_path / client, "image"), client) <= CLOSE
    heads = [load_file(tmp_path / client / "model.safetensors")["classifier.weight"] for client in ("c0", "c1")]
    assert not torch.equal(*heads)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_personal_copies_are_exported_in_place_of_the_shared_values(method: str, tmp_path: Path) -> None:
    training = {"optimizer": "sgd", "lr": 0.1, "steps": 2}
    recorded = recorded_run(tmp_path / "run", RUNS["image"](tmp_path), method, training=training)
    export_model(recorded, tmp_path / "shared")
    export_model(recorded, tmp_path / "own", "c1")
    assert difference(recorded, plain(tmp_path / "shared", "image")) <= CLOSE
    assert difference(recorded, plain(tmp_path / "own", "image"), "c1") <= CLOSE
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("shared", "own")]
    assert max_difference(*files) > 0


NAMES = ["../../evil", "</script>", "a b"]


def named_clients(folder: Path) -> Raw:
    raw = images(folder, label=TWO, site=[NAMES[place % 3] for place in range(COUNT)])
    return {**raw, "split": {"name": "by_column", "column": "site"}}


@pytest.mark.slow
def test_all_clients_as_what_differs_from_the_shared_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = named_clients(tmp_path)
    recorded = recorded_run(tmp_path / "run", raw, "fedper", split=raw["split"])
    folder = tmp_path / "exported"
    export_clients(recorded, folder)
    assert difference(recorded, plain(folder / "shared", "image")) <= CLOSE
    index = json.loads((folder / "clients.json").read_text())["clients"]
    assert set(index) == {*recorded.experiment.federation.clients}
    assert len(index) == len(NAMES)
    assert {path.parent for path in folder.rglob("difference.safetensors")} == {folder / own for own in index.values()}
    for number, client in enumerate(index):
        changed = load_file(folder / index[client] / "difference.safetensors")
        assert set(changed) == {"classifier.weight", "classifier.bias"}, "the rest is shared"
        whole = tmp_path / f"whole{number}"
        if number == 0:  # in a process that does not know partita
            command = [sys.executable, "-W", "error", "-S", str(folder / "load_client.py"), client, str(whole)]
            packages = ":".join(path for path in sys.path if "site-" in path)
            subprocess.run(command, check=True, env={"PYTHONPATH": packages})
        else:
            monkeypatch.setattr(sys, "argv", ["load_client.py", client, str(whole)])
            runpy.run_path(str(folder / "load_client.py"), run_name="__main__")
        assert difference(recorded, plain(whole, "image"), client) <= CLOSE
        assert read_export(whole).client == client


PROMPTS: dict[str, Raw] = {
    "pfeddc": {"text_tokens": 2, "vision_tokens": 2, "depth": 2, "fusion": "both"},
    "promptfl": {"text_tokens": 3},
    "vpfl": {},
    "coop": {"text_tokens": 3},
    "fedotp": {"text_tokens": 3},
    "fedpgp": {"text_tokens": 4, "rank": 2},
    "fedclip": {},
    "pfedprompt": {"text_tokens": 3, "shots": 2, "alpha": 2.0},
    "zero-shot": {},
    "promptfl+ditto": {"text_tokens": 3},
}


def load_prompts(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("load_prompts", folder / "load_prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with without_logs():
        return module.load_prompts(folder)


def prompt_run(folder: Path, method: str, pair: str = "", **options: Any) -> RecordedModel:
    raw = images(folder, label=["cat", "dog", "golden_eagle"] * COUNT)
    raw["data"]["channels"] = 1
    raw["model"] = {"name": "clip", "path": dual_encoder_fixtures.folder(pair)} if pair else {}
    raw["model"] = raw["model"] or {"name": "clip", "shape": "tiny"}
    return recorded_run(folder / "run", raw, method, **options)


def prompt_difference(recorded: RecordedModel, folder: Path, client: str | None = None) -> float:
    inputs = inputs_of(recorded)
    with torch.no_grad():
        ours = recorded.experiment.model(recorded.params(client), inputs).logits
        return float((ours - load_prompts(folder)(inputs["pixel_values"])).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("method", PROMPTS)
def test_prompts_load_with_transformers_alone(method: str, tmp_path: Path) -> None:
    recorded = prompt_run(tmp_path, method, "clip", **PROMPTS[method])
    assert export_model(recorded, tmp_path / "own", "c1").form == "prompts"
    assert prompt_difference(recorded, tmp_path / "own", "c1") <= CLOSE
    if method in ("pfeddc", "fedotp", "fedpgp"):
        assert prompt_difference(recorded, tmp_path / "own") > CLOSE, "the client has prompts of its own"
    if method == "coop":
        with pytest.raises(RunError, match="nothing travels"):
            export_model(recorded, tmp_path / "shared")
    else:
        export_model(recorded, tmp_path / "shared")
        assert prompt_difference(recorded, tmp_path / "shared") <= CLOSE
    assert (
        "partita"
        not in (tmp_path / "own" / "load_prompts.py")
        .read_text()
        .partition('"""\n')[2]
        .replace("partita export", "")
        .partition("def load_prompts")[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["siglip", "registers+bert", "dinov2+bert"])
def test_prompts_of_other_dual_encoders_load_too(pair: str, tmp_path: Path) -> None:
    recorded = prompt_run(tmp_path, "pfeddc", pair, **PROMPTS["pfeddc"])
    export_model(recorded, tmp_path / "own", "c0")
    assert prompt_difference(recorded, tmp_path / "own", "c0") <= CLOSE


@pytest.mark.slow
def test_prompts_of_random_or_merged_towers_bring_them_along(tmp_path: Path) -> None:
    recorded = prompt_run(tmp_path, "pfeddc", **PROMPTS["pfeddc"])
    export_model(recorded, tmp_path / "random")
    assert prompt_difference(recorded, tmp_path / "random") <= CLOSE
    (tmp_path / "other").mkdir()
    recorded = prompt_run(tmp_path / "other", "promptfl", "clip", text_tokens=2)
    export_model(recorded, tmp_path / "merged", merge=True)
    about = json.loads((tmp_path / "merged" / "prompts.json").read_text())
    assert about["towers"] == "towers"
    assert about["classes"] == ["cat", "dog", "golden_eagle"]
    assert prompt_difference(recorded, tmp_path / "merged") <= CLOSE


@pytest.mark.slow
def test_clip_that_reads_class_texts_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    raw = images(tmp_path, label=["cat", "dog"] * COUNT)
    raw["data"]["channels"] = 1
    path = dual_encoder_fixtures.folder("clip")
    raw["model"] = {"name": "pretrained", "path": path, "prompt": "a photo of a {}"}
    recorded = recorded_run(tmp_path / "run", raw)
    export = export_model(recorded, tmp_path / "exported")
    with without_logs():
        module = transformers.AutoModel.from_pretrained(tmp_path / "exported").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    texts = tokenizer([export.model["prompt"].format(label) for label in export.labels], return_tensors="pt")
    inputs = inputs_of(recorded)
    with torch.no_grad():
        ours = recorded.experiment.model(recorded.params(), inputs).logits
        assert torch.allclose(ours, module(**inputs, **texts).logits_per_image, atol=CLOSE)


@pytest.mark.slow
def test_cached_frozen_layers_are_exported_too(tmp_path: Path) -> None:
    raw = RUNS["text"](tmp_path)
    raw["model"]["frozen"] = ["base"]
    recorded = recorded_run(
        tmp_path / "run", raw, engine={"cache_frozen": True}, training={"steps": 2, "dropout": False}
    )
    export_model(recorded, tmp_path / "exported")
    assert difference(recorded, plain(tmp_path / "exported", "text")) <= CLOSE


# ---- rounds


@pytest.mark.slow
def test_rounds_best_last_and_by_number(tmp_path: Path) -> None:
    raw = {**RUNS["image"](tmp_path), "rounds": 5}
    split = {"name": "iid", "clients": 2, "validation": 0.3}
    recorded_run(tmp_path / "run", raw, split=split, rounds=5, evaluate={"validation_every": 1})
    run = partita.load_run(tmp_path / "run")
    best = load_recorded_model(tmp_path / "run", "best").saved.done
    scores = {row["round"] + 1: row["validation"]["accuracy"] for row in run.rows}
    assert scores[best] == max(scores.values())
    assert load_recorded_model(tmp_path / "run", 4).saved.done == 4
    last, newest = run.functional(round=5)[1], run.functional()[1]
    assert max_difference(last, newest) == 0
    assert max_difference(run.functional(round=4)[1], newest) > 0
    with pytest.raises(RunError, match=r"no checkpoint after 9 rounds, only after .*4, 5: .*--rounds 9 --out FOLDER"):
        run.functional(round=9)
    run.export(tmp_path / "best", round="best")
    assert read_export(tmp_path / "best").round == best


@pytest.mark.slow
def test_best_needs_validation(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run", RUNS["image"](tmp_path))
    with pytest.raises(RunError, match=r"has no best round.* set evaluate\.validation_every"):
        load_recorded_model(tmp_path / "run", "best")


# ---- refusals


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    raw = RUNS["image"](tmp_path)
    recorded = recorded_run(tmp_path / "run", raw)
    with pytest.raises(ExportError, match="nothing to merge; leave --merge out"):
        form_of(recorded, merge=True)
    with pytest.raises(RunError, match="has no client 'c9'"):
        export_model(recorded, tmp_path / "exported", "c9")
    assert not (tmp_path / "exported").exists()
    raw["model"]["adapter"] = {"rank": 2}
    adapted = recorded_run(tmp_path / "adapted", raw)
    with pytest.raises(ExportError, match="random weights, which are in no file; write a whole model with --merge"):
        export_model(adapted, tmp_path / "exported")
    export_model(adapted, tmp_path / "exported", merge=True)
    assert difference(adapted, plain(tmp_path / "exported", "image")) <= CLOSE
    with pytest.raises(ExportError, match="exists already; move it away, or name another folder with --to"):
        export_model(adapted, tmp_path / "exported", merge=True)
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"


@pytest.mark.slow
def test_quantized_bases_are_not_merged(tmp_path: Path) -> None:
    raw = decoder(tmp_path, "llama", name="lm", block_size=8)
    raw["model"] |= {"quantize": "8bit", "frozen": ["all"], "adapter": {"rank": 2}}
    recorded = recorded_run(tmp_path / "run", raw)
    with pytest.raises(ExportError, match=r"model\.quantize is '8bit'.*leave --merge out"):
        export_model(recorded, tmp_path / "exported", merge=True)
    assert export_model(recorded, tmp_path / "exported").form == "adapter"


@pytest.mark.slow
def test_mean_pooling_trains_on_cached_layers_and_is_not_exported(tmp_path: Path) -> None:
    raw = RUNS["text"](tmp_path)
    raw["model"] |= {"frozen": ["base"], "pooling": "mean"}
    options: Raw = {"training": {"steps": 2, "dropout": False}}
    recorded = recorded_run(tmp_path / "run", raw, engine={"cache_frozen": True}, **options)
    assert recorded.params().keys() == {"classifier.weight", "classifier.bias"}
    plainly = recorded_run(tmp_path / "plain", raw, **options)
    assert max_difference(recorded.params(), plainly.params()) < CLOSE
    with pytest.raises(ExportError, match=r"reads a mean of all tokens \(model\.pooling\).*'partita predict'"):
        export_model(recorded, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


# ---- the command


@pytest.mark.slow
def test_command_writes_into_the_run_folder_by_default(tmp_path: Path, run_partita: Shell) -> None:
    recorded_run(tmp_path / "run", RUNS["image"](tmp_path), "fedper")
    code, out, _ = run_partita("export", tmp_path / "run")
    assert code == 0
    assert f"wrote {tmp_path / 'run' / 'export'}: a folder of transformers after 2 rounds" in out
    code, out, _ = run_partita("export", tmp_path / "run", "--client", "c1", "--json")
    assert code == 0
    assert json.loads(out) == {
        "folder": str(tmp_path / "run" / "export-c1"),
        "form": "model",
        "kind": "image",
        "round": 2,
        "client": "c1",
        "pushed": None,
    }
    assert run_partita("export", tmp_path / "run", "--all-clients")[0] == 0
    assert (tmp_path / "run" / "export-clients" / "clients" / "c0" / "difference.safetensors").is_file()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--client", "c0", "--all-clients"], "choose one"),
        (["--public"], "--public is for a repository on the Hub; name it with --push user/name"),
        (["--round", "first"], "--round is 'first'; give 'best', 'last' or a number of finished rounds from 1 up"),
        (["--round", "0"], "--round is '0'"),
    ],
)
def test_command_refuses_options_that_contradict(
    words: list[str], fault: str, tmp_path: Path, run_partita: Shell
) -> None:
    code, _, told = run_partita("export", tmp_path, *words)
    assert code == 1
    assert fault in told
