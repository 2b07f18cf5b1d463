"""Model cards and pushes: what a card says, what it leaves out, and that names stay text."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL_TASK, SMALL_VIT
from huggingface_hub import ModelCard
from shell import Shell

from partita.core import hub
from partita.experiment.builder import build
from partita.experiment.config import load
from partita.experiment.export import check_publishable, export_clients, export_model
from partita.experiment.exported import ExportError
from partita.experiment.model_card import escaped, portable_command
from partita.experiment.recorded_model import RecordedModel, load_recorded_model
from partita.experiment.runner import start

HOSTILE = "</script><script>alert(1)</script>\n---\n# title `x` [a](http://b)"
PRIVATE = ["privacy.noise=1.0", "privacy.clip=1.0", "privacy.delta=1e-5"]


def recorded_run(folder: Path, *changes: str, method: str = "fedavg") -> RecordedModel:
    folder.mkdir(exist_ok=True)
    file = folder / "experiment.toml"
    file.write_text(f'rounds = 2\n[method]\nname = "{method}"\n{SMALL_VIT}{SMALL_TASK}test_examples = 20\n')
    changes = ("evaluate.personal_every=1", "split.test=0.2", *changes)
    list(start(load(file, changes), folder / "run"))
    return load_recorded_model(folder / "run")


def card_of(recorded: RecordedModel, folder: Path, client: str | None = None) -> ModelCard:
    export_model(recorded, folder, client)
    return ModelCard.load(folder / "README.md")


def test_card_tells_method_scores_bytes_and_how_to_repeat(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    card = card_of(recorded, tmp_path / "exported")
    data = card.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "image-classification")
    assert {"federated-learning", "partita", "fedavg"} <= {*data["tags"]}
    assert "base_model" not in data
    assert "datasets" not in data
    found = {result.metric_type: result.metric_value for result in card.data.eval_results or []}
    assert found == rows[-1]["test"]
    for way in ("up", "down"):
        assert f"{sum(row['bytes'][way] for row in rows):,} bytes" in card.text
    own = list(rows[-1]["personal"]["accuracy"].values())
    assert f"| {sum(own) / len(own):.4g} |" in card.text
    assert f"| {min(own):.4g} |" in card.text, "the worst tenth of three clients is the worst"
    assert "**fedavg.** " in card.text
    assert json.loads((tmp_path / "run" / "result.json").read_text())["digest"] in card.text
    assert "partita run --config config.toml" in card.text
    assert str(tmp_path) not in card.content


@pytest.mark.slow
def test_card_of_a_client_has_its_own_scores(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, method="fedper")
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    card = card_of(recorded, tmp_path / "exported", "c1")
    found = {result.metric_type: result.metric_value for result in card.data.eval_results or []}
    assert found["accuracy"] == rows[-1]["personal"]["accuracy"]["c1"]
    assert "the own model of client c1" in card.text


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["example", "client"])
def test_card_of_a_private_run_has_nothing_that_the_guarantee_does_not_cover(unit: str, tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, *PRIVATE, f"privacy.unit={unit}")
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    bound = {"epsilon": 0.1234, "guesses": 2, "right": 2, "canaries": 4, "delta": 1e-5, "confidence": 0.95}
    attacks = {"canaries": {"auc": 0.98765}}
    (tmp_path / "run" / "audit.json").write_text(json.dumps({"bound": bound, "attacks": attacks}))
    text = card_of(recorded, tmp_path / "exported").text
    assert f"| unit | {unit} |" in text
    assert f"| epsilon | {rows[-1]['privacy']['epsilon']:.4g} |" in text
    assert "| delta | 1e-05 |" in text
    assert "0.1234 (confidence 95%)" in text
    assert "so epsilon does not cover it" in text
    assert "over clients" not in text, "scores on clients' own test sets are not covered"
    assert "0.98765" not in text
    digest = json.loads((tmp_path / "run" / "result.json").read_text())["digest"]
    assert (digest in text) == (unit == "example")
    assert ("| clients |" in text) == (unit == "example")


@pytest.mark.slow
def test_card_names_the_column_of_groups_and_leaves_out_a_bound_of_other_units(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, *PRIVATE)
    about = json.loads((tmp_path / "run" / "privacy.json").read_text())
    (tmp_path / "run" / "privacy.json").write_text(json.dumps({**about, "unit": "group", "group": "patient|id"}))
    bound = {"epsilon": 0.1234, "guesses": 2, "right": 2, "canaries": 4, "delta": 1e-5, "confidence": 0.95}
    for audited, shown in (("patient|id", True), ("visit", False)):
        (tmp_path / "run" / "audit.json").write_text(json.dumps({"bound": bound, "group": audited}))
        text = card_of(recorded, tmp_path / f"exported {shown}").text
        assert ("0.1234 (confidence 95%)" in text) == shown
    assert "| unit | example (" in text  # the config of this run has another unit
    assert "patient" in text.partition("| unit |")[2].partition("\n")[0]


@pytest.mark.slow
def test_own_models_of_a_client_level_private_run_are_not_pushed(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, *PRIVATE, "privacy.unit=client", method="fedper")
    with pytest.raises(ExportError, match="does not cover clients' own parameters; push the shared model"):
        check_publishable(recorded, False, own_models=True)
    check_publishable(recorded, False, own_models=False)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    code = (
        "import dataclasses, torch\nfrom partita.core.rng import Key\nfrom partita import data\n"
        f"def mine(key):\n    task = data.load('synthetic', key, examples=120, size=4, classes=2)\n"
        f"    return dataclasses.replace(task, classes=({HOSTILE!r}, 'b'))\n"
    )
    (tmp_path / "mine.py").write_text(code)
    table = SMALL_VIT + SMALL_TASK.partition("[data]")[0] + '[data]\nname = "mine.py:mine"\n'
    (tmp_path / "experiment.toml").write_text(f'rounds = 1\n[method]\nname = "fedavg"\n{table}')
    list(start(load(tmp_path / "experiment.toml"), tmp_path / "run"))
    card = card_of(load_recorded_model(tmp_path / "run"), tmp_path / "exported")
    assert "<" not in card.text
    assert "\n# title" not in card.text
    assert "[a](http" not in card.text
    assert "&lt;" in card.text
    assert card.data.pipeline_tag == "image-classification"
    assert card.content.count("\n---\n") == 1
    assert str(tmp_path) not in card.content


def test_escaped_text_has_no_markup() -> None:
    assert escaped("a_b*c") == r"a\_b\*c"
    assert escaped("x\n---\n") == r"x\\n\-\-\-\\n".replace(r"\\n", r"\\x0a")
    assert escaped("<b>&") == "&lt;b&gt;&amp;"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("partita run -c /home/ann/x.toml --out=/data/runs/a/", "partita run -c x.toml --out=a"),
        ("partita run -c x.toml --set model.path=org/bert", "partita run -c x.toml --set model.path=org/bert"),
        ('partita run --set data.path="/secret/rows.csv"', 'partita run --set data.path="rows.csv"'),
        ("/home/ann/script.py --all", "partita run --config config.toml"),
        ("", "partita run --config config.toml"),
    ],
)
def test_commands_name_files_not_folders(command: str, shown: str) -> None:
    assert portable_command(command, {"org/bert"}) == shown


# ---- push


class Stub(BaseHTTPRequestHandler):
    """Answers like the Hub, and notes what it is asked."""

    asked: list[tuple[str, Any]]
    known = True

    def do_GET(self) -> None:
        self._answer(200 if self.known else 401, {"name": "ann", "type": "user", "auth": {}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.asked.append((self.path, lines))
            self._answer(
                200,
                {
                    "commitUrl": f"http://{self.headers['Host']}/ann/model/commit/0",
                    "commitOid": "0" * 40,
                    "pullRequestUrl": None,
                },
            )
            return
        given = json.loads(body)
        self.asked.append((self.path, given))
        if self.path.endswith("/preupload/main"):
            found = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in given["files"]]
            self._answer(200, {"files": found})
        else:
            self._answer(200, {"url": f"http://{self.headers['Host']}/ann/model", "id": "ann/model"})

    def _answer(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stub]]:
    handler = type("Handler", (Stub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub._reachable.cache_clear()
    yield handler
    server.shutdown()
    server.server_close()
    hub._reachable.cache_clear()


@pytest.mark.slow
def test_push_uploads_the_folder_to_a_private_repository(stub: type[Stub], tmp_path: Path, run_partita: Shell) -> None:
    recorded_run(tmp_path)
    code, out, told = run_partita("export", tmp_path / "run", "--push", "ann/model")
    assert (code, told) == (0, "")
    assert "pushed to " in out
    [created] = [given for path, given in stub.asked if path == "/api/repos/create"]
    assert (created["name"], created["visibility"]) == ("model", "private")
    [commit] = [given for path, given in stub.asked if "/commit/" in path]
    files = {line["value"]["path"]: line["value"]["content"] for line in commit if line["key"] == "file"}
    assert {"README.md", "config.json", "model.safetensors", "partita.json"} <= files.keys()
    assert base64.b64decode(files["README.md"]) == (tmp_path / "run" / "export" / "README.md").read_bytes()
    assert "from_pretrained('ann/model')" in base64.b64decode(files["README.md"]).decode()


@pytest.mark.slow
def test_push_can_be_public(stub: type[Stub], tmp_path: Path, run_partita: Shell) -> None:
    recorded_run(tmp_path)
    assert run_partita("export", tmp_path / "run", "--push", "ann/model", "--public")[0] == 0
    assert [given["visibility"] for path, given in stub.asked if path == "/api/repos/create"] == ["public"]


@pytest.mark.slow
def test_push_is_refused_before_any_work(
    stub: type[Stub], tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(repository: str = "ann/model") -> str:
        code, _, told = run_partita("export", tmp_path, "--push", repository)
        assert code == 1
        assert told.count("\n") == 1, "one line"
        return told

    (tmp_path / "config.toml").touch()  # of a run that never started
    assert "--push is 'model'; give a repository on the Hub as user/name" in refusal("model")
    stub.known = False
    assert "the Hub refuses the token: " in refusal()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("partita.experiment.hub_push.get_token", lambda: None)
    assert "without a token; log in with 'hf auth login', or set the environment variable HF_TOKEN" in refusal()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "cannot push to the Hub: HF_HUB_OFFLINE is set; export without --push" in refusal()
    assert not stub.asked


@pytest.mark.slow
def test_folder_that_needs_a_local_model_is_not_pushed(tmp_path: Path) -> None:
    base = recorded_run(tmp_path)
    export_model(base, tmp_path / "base")
    model = f'model={{name="pretrained", path="{tmp_path / "base"}", adapter={{rank=2}}}}'
    (tmp_path / "adapted").mkdir()
    recorded = recorded_run(tmp_path / "adapted", model)
    with pytest.raises(ExportError, match=r"the adapter would need a model in a local folder.*with --merge"):
        check_publishable(recorded, False, own_models=False)
    check_publishable(recorded, True, own_models=False)
    card = card_of(recorded, tmp_path / "exported")
    assert (card.data.library_name, card.data.to_dict().get("base_model")) == ("peft", None)
    assert "| base model | base (a local folder), frozen weights with SHA-256 " in card.text
    assert build(recorded.experiment.config).base_digest in card.text


@pytest.mark.slow
def test_card_beside_all_clients_says_how_to_load_one(tmp_path: Path) -> None:
    export_clients(recorded_run(tmp_path, method="fedper"), tmp_path / "exported")
    text = ModelCard.load(tmp_path / "exported" / "README.md").text
    assert "`python load_client.py NAME FOLDER` writes the whole model of a client" in text
    own = ModelCard.load(tmp_path / "exported" / "clients" / "c0" / "README.md").text
    assert "the own model of client c0" in own
