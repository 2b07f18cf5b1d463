"""A file with a Trainer at a site: the consent form, the log, and what a changed file or a changed row does."""

from __future__ import annotations

import sys
from contextlib import chdir
from pathlib import Path

import pytest
from flower_fixtures import ANY_SIZE, task_identity
from flwr.app import RecordDict
from site_fixtures import SiteKit, refused
from site_kit_fixtures import GROUP
from site_kit_fixtures import write_kit as write_group
from trainer_file_fixtures import PATCH, write_party
from trainer_fixtures import values_of

from partita.core import tensors
from partita.core.own_code import Reference, load_module
from partita.engines.flower import messages
from partita.experiment.config import load
from partita.site.form import ConsentForm
from partita.site.program import consent_form, prepare_forks

pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
__all__ = ["task_identity"]
TEXT = PATCH.replace('"north"', '"c1"')


def write_kit(folder: Path, text: str = TEXT, rows: str = "north") -> SiteKit:
    """Write the folder of site c1, which allows what the plan sends."""
    file = write_party(folder, text, rows)
    with chdir(folder):
        experiment = load(file, ["federation.skip_failed_clients=true", "evaluate.personal_every=0"]).to_toml(folder)
    (folder / "experiment.toml").write_text(experiment)
    (folder / "site.toml").write_text('name = "c1"\n[server]\naddress = "127.0.0.1:8765"\n')
    kit = SiteKit(folder)
    with chdir(folder):
        kit.allow()
    return kit


def order(kit: SiteKit) -> RecordDict:
    with chdir(kit.folder):
        return kit.order()


def test_the_site_trains_and_logs_what_leaves(tmp_path: Path) -> None:
    kit = write_kit(tmp_path)
    initial = kit.terms.experiment.model.initial
    update = messages.decode_update(kit.send(order(kit)), messages.decode_job_id(order(kit), "job"), ANY_SIZE)
    assert update.weight == 6
    assert update.delta.keys() == initial.keys()
    assert kit.kinds() == ["left"]
    trainer = load_module(Reference(str(tmp_path / "federation.py"), "trainer")).trainer
    assert tensors.equal(values_of(trainer), initial), "the next message finds the Trainer as it was made"


@pytest.mark.slow
def test_the_form_says_what_leaves_and_what_stays(tmp_path: Path) -> None:
    kit = write_kit(tmp_path, TEXT.replace('"fedavg"', '{"name": "fedper", "finetune": 0}'))
    form: ConsentForm = consent_form(kit.site)
    assert not form.refusals()
    text = form.to_text()
    assert "This site holds 6 training examples." in text
    assert "rounds 0 to 1 send: embedding (bert.embeddings.position_embeddings.weight" in text
    assert "head (bert.pooler.dense.bias" in text.partition("Never leave")[2]
    kit.site.policy_file.write_text('[leave]\nroles = ["attention"]\n')
    with pytest.raises(ValueError, match=r"custom code 'federation\.py': code in the policy does not list its digest"):
        consent_form(kit.site)


def test_a_changed_file_at_the_server_is_refused(tmp_path: Path) -> None:
    kit = write_kit(tmp_path / "c1")
    server = write_kit(tmp_path / "server", f"{TEXT}# another version\n")
    refused(kit.send(order(server)))
    assert "the server's config has the digest" in kit.log.lines()[-1]["reason"]


@pytest.mark.slow
def test_a_changed_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = write_kit(tmp_path)
    assert messages.decode_error(kit.send(order(kit))) is None
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"labels": 1', '"labels": 0', 1))
    for name in [name for name in sys.modules if name.startswith("partita_code_")]:
        monkeypatch.delitem(sys.modules, name)  # as in another process
    refused(kit.send(order(kit)))
    assert "its training data has changed" in kit.log.lines()[-1]["reason"]


@pytest.mark.slow
def test_an_error_of_the_trainer_says_nothing_of_its_rows(tmp_path: Path) -> None:
    kit = write_kit(
        tmp_path,
        TEXT.replace(
            "trainer = make()",
            """class Fails(Trainer):
    def training_step(self, *args, **more):
        raise KeyError("patient 7")


trainer = make()
trainer.__class__ = Fails""",
        ),
    )
    assert "patient" not in refused(kit.send(order(kit)))
    assert "patient" not in str(kit.log.lines()[-1])


@pytest.mark.slow
def test_forks_find_the_libraries_and_the_file_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = write_kit(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    loaded: list[str] = []
    monkeypatch.setattr("partita.site.program.import_module", loaded.append)
    prepare_forks(kit.site)
    assert {"transformers.trainer", "transformers.models.bert.modeling_bert", "partita.trainers.at_sites"} <= {*loaded}


@pytest.mark.slow
def test_the_kit_of_a_group_has_the_file(tmp_path: Path) -> None:
    text = PATCH.replace(', "west"', "")
    file = write_party(tmp_path, text)
    with chdir(tmp_path):
        experiment = load(file, ["federation.max_examples=100"]).to_toml(tmp_path)
    parties = write_group(tmp_path, GROUP.replace('data = "/srv/data/north"\n', ""), experiment=experiment)
    for party in ("north", "south", "server"):
        assert (parties / party / "code" / "federation.py").read_text() == text
    assert "/srv/data/south" in (parties / "south" / "compose.yaml").read_text()
