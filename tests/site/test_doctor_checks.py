"""The doctor finds every fault of the site's folder, machine and data, and goes on with the other checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doctor_fixtures import EXPERIMENT, examined_site, is_root, make_key, make_site

from partita.core.rng import Key
from partita.site.doctor.checks import Check, Examined, Finding, Outcome, ok, run_checks
from partita.site.doctor.examination import examine
from partita.site.doctor.experiment import check_versions, pinned
from partita.site.doctor.files import check_key, check_state
from partita.site.doctor.rehearsal import fake_weights
from partita.site.site_log import FILE, SiteLog


def findings(folder: Path) -> dict[str, Outcome]:
    return {finding.check: finding.outcome for finding in examine(folder, offline=True)}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "north")


# ---- all checks


def test_sound_site_passes_and_is_left_as_it_was(site: Path) -> None:
    before = sorted(site.rglob("*"))
    found = findings(site)
    assert {outcome.status for outcome in found.values()} == {"ok"}, found
    assert sorted(site.rglob("*")) == before
    assert "bytes would leave" in found["rehearsal"].sentence


def test_rehearsal_reports_the_bytes_of_the_plan(site: Path) -> None:
    from partita.experiment.config import load
    from partita.experiment.preview import preview

    config = load(site / "experiment.toml", ['split.client="north"'])
    assert f"{preview(config, 0, 'north').bytes_up:,} bytes would leave" in findings(site)["rehearsal"].sentence


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "method", ['name = "fedper"', 'name = "scaffold"', 'name = "safl"', 'name = "fedavg+quantize"']
)
def test_rehearsal_plays_any_method(tmp_path: Path, method: str) -> None:
    experiment = EXPERIMENT.replace('name = "fedavg"', method)
    found = findings(make_site(tmp_path / "north", f'{experiment}\n[training]\noptimizer = "sgd"\nlr = 0.1\n'))
    assert found["rehearsal"].status == "ok", found


@pytest.mark.slow
def test_rehearsal_of_a_private_run_does_not_touch_its_secret(tmp_path: Path) -> None:
    private = '\n[privacy]\nunit = "example"\nnoise = 1.0\nclip = 1.0\ndelta = 1e-3\n'
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    settings = f'[set]\n"engine.secret_file" = "{secret}"\n'
    site = make_site(tmp_path / "north", EXPERIMENT + private, settings=settings)
    found = findings(site)
    assert found["rehearsal"].status == "ok", found
    assert not list((site / "state").iterdir())


@pytest.mark.slow
def test_rehearsal_draws_its_noise_from_a_throwaway_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two answers of round 0 would share their noise: the rehearsal's and the real one."""
    from partita.experiment import builder

    def read(path: Path) -> Key:
        raise AssertionError("the secret of real rounds was read")

    monkeypatch.setattr(builder, "from_file", read)
    private = '\n[privacy]\nunit = "example"\nnoise = 1.0\nclip = 1.0\ndelta = 1e-3\n'
    settings = '[set]\n"engine.secret_file" = "secret"\n'
    assert findings(make_site(tmp_path / "north", EXPERIMENT + private, settings=settings))["data"].status == "ok"


def test_fake_weights_have_the_type_and_scale_of_the_real_ones_but_not_their_values() -> None:
    real = {"matrix": torch.randn(30, 20), "count": torch.arange(5), "empty": torch.zeros(0), "number": torch.ones(())}
    fakes = fake_weights(real, Key(0))
    for name, value in real.items():
        assert fakes[name].shape == value.shape
        assert fakes[name].dtype == value.dtype
    assert not torch.equal(fakes["matrix"], real["matrix"])
    assert 0.8 < fakes["matrix"].std() / real["matrix"].std() < 1.2


def test_check_after_a_failed_one_says_which_failed() -> None:
    def fail(examined: Examined) -> Outcome:
        raise ValueError("secret value 17")

    checks = (
        Check("first", (), fail),
        Check("second", ("first",), lambda examined: ok("")),
        Check("third", ("second",), lambda examined: ok("")),
        Check("other", (), lambda examined: ok("fine")),
    )
    first, second, third, other = run_checks(checks, Examined(Path()))
    assert first.outcome.status == "failed"
    assert "secret value" not in first.outcome.sentence
    assert "'first' failed" in second.outcome.sentence
    assert "'first' failed" in third.outcome.sentence
    assert other.outcome.status == "ok"


def test_json_never_quotes_data() -> None:
    finding = Finding("data", Outcome("failed", "row 3 has the label 'HIV'", quotes_data=True))
    assert "HIV" not in json.dumps(finding.to_json())


# ---- the folder


def test_missing_settings_skip_all_other_checks(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert found.pop("settings").status == "failed"
    assert {outcome.status for outcome in found.values()} == {"skipped"}


def test_own_code_that_the_policy_does_not_approve_is_not_run(tmp_path: Path) -> None:
    experiment = EXPERIMENT.replace('name = "fedavg"', 'name = "evil.py:method"')
    site = make_site(tmp_path / "north", experiment)
    (site / "evil.py").write_text("from pathlib import Path\nPath('pwned').touch()\n")
    found = findings(site)
    assert found["experiment"].status == "failed"
    assert "code in the policy does not list its digest" in found["experiment"].sentence
    assert not (site / "pwned").exists()


def test_key_that_others_can_read_is_named(site: Path) -> None:
    (site / "keys" / "north").chmod(0o640)
    outcome = check_key(examined_site(site))
    assert outcome.status == "failed"
    assert "chmod 600" in outcome.remedy


def test_missing_key_is_named(site: Path) -> None:
    (site / "keys" / "north").unlink()
    assert "make-keys.sh" in check_key(examined_site(site)).remedy


def test_public_half_of_another_key_is_named(site: Path, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    (site / "keys" / "north.pub").write_bytes(other.with_name("north.pub").read_bytes())
    outcome = check_key(examined_site(site))
    assert outcome.status == "failed"
    assert "not the public half" in outcome.sentence


@pytest.mark.parametrize("content", [b"", b"-----BEGIN OPENSSH PRIVATE KEY-----\nxx\n", b"\xff" * 100])
def test_broken_key_is_named(site: Path, content: bytes) -> None:
    (site / "keys" / "north").write_bytes(content)
    outcome = check_key(examined_site(site))
    assert outcome.status == "failed"
    assert "no private SSH key of the kind ECDSA" in outcome.sentence


def test_key_that_flower_cannot_use_is_named(site: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (site / "keys" / "north").write_bytes(key)
    assert "no private SSH key of the kind ECDSA" in check_key(examined_site(site)).sentence


@pytest.mark.parametrize(("mode", "status"), [(0o700, "ok"), (0o750, "failed"), (0o705, "failed"), (0o702, "failed")])
def test_state_that_others_can_open_is_named(site: Path, mode: int, status: str) -> None:
    (site / "state").chmod(mode)
    outcome = check_state(examined_site(site))
    assert outcome.status == status
    assert status == "ok" or "chmod 700" in outcome.remedy


@pytest.mark.skipif(is_root(), reason="root can write to every folder")
def test_state_that_cannot_be_written_is_named(site: Path) -> None:
    (site / "state").chmod(0o500)
    assert "no folder that can be written" in check_state(examined_site(site)).sentence


@pytest.mark.slow
def test_policy_that_does_not_cover_the_experiment_is_named(site: Path) -> None:
    policy = (site / "policy.toml").read_text()

    def outcome(text: str) -> Outcome:
        (site / "policy.toml").write_text(text)
        return findings(site)["policy"]

    assert outcome(policy).status == "ok"
    for bad in (
        policy.replace('["', '["0'),
        policy.replace('"*"', '"head"'),
        f"{policy}[limits]\nrounds = 1\n",
    ):
        assert outcome(bad).status == "failed", bad
    (site / "policy.toml").write_text(f"{policy}[limts]\n")
    assert "limts" in findings(site)["experiment"].sentence, "without a policy, no experiment is read"


def test_log_that_was_changed_is_named(site: Path) -> None:
    log = SiteLog(site / "state" / FILE)
    log.append("stopped", bytes=100)
    log.append("stopped", bytes=200)
    assert findings(site)["policy"].status == "ok"
    log.path.write_text(log.path.read_text().replace("100", "10"))
    assert findings(site)["policy"].status == "failed"


# ---- the machine


def test_other_versions_than_the_groups_are_named(site: Path) -> None:
    assert "no image/requirements.lock" in check_versions(examined_site(site)).sentence
    (site / "image").mkdir()
    lock = site / "image" / "requirements.lock"
    here = torch.__version__.partition("+")[0]
    lock.write_text(f"torch=={here} --hash=sha256:00\n")
    assert "as in image/requirements.lock" in check_versions(examined_site(site)).sentence
    lock.write_text("numpy==1.0\ntorch==1.0 --hash=sha256:00\n")
    outcome = check_versions(examined_site(site))
    assert outcome.status == "failed"
    assert "group agreed on 1.0" in outcome.sentence


def test_pins_are_read_by_normalized_name() -> None:
    lock = "# a comment\nDP_Accounting==0.6 \\\n    --hash=sha256:1\nflwr[rest]==1.41.0 ; os_name == 'posix'\nx>=2\n"
    assert pinned(lock) == {"dp-accounting": "0.6", "flwr": "1.41.0"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_named(tmp_path: Path) -> None:
    found = findings(make_site(tmp_path / "north", settings='[set]\n"engine.device" = "cuda"\n'))
    assert found["data"].status == "failed"
    assert "sees no GPU" in found["data"].sentence
    assert "'data' failed" in found["rehearsal"].sentence


# ---- the data


def test_client_that_the_experiment_lacks_is_named(tmp_path: Path) -> None:
    site = make_site(tmp_path / "north", EXPERIMENT.replace('"north", ', '"nord", '))
    found = findings(site)
    assert found["data"].status == "failed"
    assert "'north'" in found["data"].sentence


@pytest.mark.slow
def test_other_classes_than_the_groups_are_named(site: Path) -> None:
    def classes(*agreed: str) -> Outcome:
        (site / "classes.json").write_text(json.dumps(agreed))
        return findings(site)["data"]

    assert "as in classes.json" in classes("class0", "class1", "class2").sentence
    for other in (("class1", "class0", "class2"), ("class0", "class1", "class2", "class3"), ("class0", "class1")):
        shown = ", ".join(f"'{name}'" for name in other)
        assert f"those of classes.json are {shown}" in classes(*other).sentence
    assert classes("\x1b[2J").status == "failed"


def text_site(folder: Path, rows: list[str]) -> Path:
    """A site with a CSV of texts, and the smallest tokenizer."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fever"]
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(words)}, model_max_length=64)
    tokenizer.save_pretrained(folder / "tokenizer")
    start, rest = EXPERIMENT.split("[data]")
    data = '[data]\nname = "text"\npath = "notes.csv"\ntokenizer = "../tokenizer"\nmax_length = 16\n'
    site = make_site(folder / "north", start + data + "[split]" + rest.split("[split]")[1])
    (site / "notes.csv").write_text("\n".join(rows) + "\n")
    return site


def test_missing_column_is_named_and_stays_at_the_site(tmp_path: Path) -> None:
    """Paths in the experiment are relative to the site's folder."""
    site = text_site(tmp_path, ["text,diagnosis", *(f"fever,{row % 2}" for row in range(40))])
    found = {finding.check: finding for finding in examine(site, offline=True)}
    assert "has no column 'label'" in found["data"].outcome.sentence
    assert "no column" not in found["data"].to_json()["sentence"]
    assert found["policy"].outcome.status == "skipped"
