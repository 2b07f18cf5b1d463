"""A site's policy and log in a run with secure aggregation: the masked update counts, and keys are logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flower_fixtures import FakeGrid
from flower_fixtures import task_identity as task_identity
from flwr.app import Context, Message, RecordDict
from helpers import server_in
from secure_fixtures import write_ssh_keys
from site_fixtures import NOON, SiteKit, write_site

from partita.core import tensors
from partita.engines.flower.task_loop import ANSWERED, Task
from partita.experiment import flower_app, runner
from partita.experiment.config import load
from partita.site.answering import answer
from partita.site.program import consent_form

SECURE = "[secure_aggregation]\nmin_clients = 3\n"
NOISE = '[privacy]\nunit = "client"\nnoise = 1.0\n'
MASKED = '[leave]\nroles = ["*"]\n[secure_aggregation]\nrequired = true\n'


def write_group(folder: Path, more: str) -> dict[str, SiteKit]:
    """The folders of three sites of one experiment."""
    kits = {}
    for name in ("c0", "c1", "c2"):
        kit = write_site(folder / name, more=more)
        (kit.folder / "site.toml").write_text(f'name = "{name}"\n[server]\naddress = "127.0.0.1:8765"\n')
        kit.allow(MASKED)
        kits[name] = kit
    return kits


def grid_of(kits: dict[str, SiteKit]) -> FakeGrid:
    def site(kit: SiteKit) -> Any:
        def reply(message: Message) -> Message:
            return answer(kit.site, Task(ANSWERED, message, Context(1, 1, {}, RecordDict(), {}), "ab"), lambda: NOON)

        return reply

    return FakeGrid({number: site(kit) for number, kit in enumerate(kits.values())})


def serve(kits: dict[str, SiteKit], folder: Path) -> list[dict[str, Any]]:
    config = load(kits["c0"].site.experiment_file)
    settings = {"folder": str(folder), "deadline": 60.0, "clients": 3, "set": ""}
    return list(flower_app.serve(grid_of(kits), config, settings, "1"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [SECURE, SECURE + NOISE], ids=["masks", "masks and noise"])
def test_covered_secure_run_equals_a_local_one_and_is_logged(more: str, tmp_path: Path) -> None:
    kits = write_group(tmp_path, more)
    rows = serve(kits, tmp_path / "there")
    assert [row["lost"] for row in rows] == [{}] * 4
    for name, kit in kits.items():
        left = [line for line in kit.log.lines() if line["kind"] == "left"]
        assert [line["round"] for line in left] == [0, 1, 2, 3]
        terms = kit.terms
        assert {line["names"] if isinstance(line["names"], int) else len(line["names"]) for line in left} == {
            len(terms.plan(0).up)
        }
        assert all(0 < line["bytes"] <= (terms.update_bytes(0) or 0) for line in left), name
        assert [line["asked"] for line in kit.log.lines() if line["kind"] == "keys"][:5] == [
            "train.advertise", "train.share_keys", "train.check", "train.confirm", "train.unmask",
        ]  # fmt: skip
        epsilons = [line["epsilon"] for line in left]
        assert epsilons == [None] * 4 if more == SECURE else epsilons == sorted(epsilons) and epsilons[0] > 0
        assert kit.log.verify()
    if more == SECURE:
        for _ in runner.start(load(kits["c0"].site.experiment_file, ["engine.clients_per_block=1"]), tmp_path / "here"):
            pass
        assert tensors.equal(*(server_in(tmp_path / side).params for side in ("here", "there")))


@pytest.mark.slow
def test_policy_that_requires_masks_refuses_an_experiment_without_them(tmp_path: Path) -> None:
    kits = write_group(tmp_path, "")
    [reason] = consent_form(kits["c0"].site).refusals()
    assert "secure_aggregation.required is true" in reason


@pytest.mark.slow
def test_limit_on_bytes_is_that_of_the_masked_update(tmp_path: Path) -> None:
    kits = write_group(tmp_path, SECURE)
    size = kits["c1"].terms.update_bytes(0)
    assert size
    kits["c1"].allow(f"{MASKED}[limits]\nbytes_per_round = {size - 1}\n")
    assert "bytes_per_round" in consent_form(kits["c1"].site).refusals()[0]
    kits["c1"].allow(f"{MASKED}[limits]\nbytes_per_round = {size}\nbytes_total = {4 * size}\nrounds = 4\n")
    assert [row["lost"] for row in serve(kits, tmp_path / "run")] == [{}] * 4


@pytest.mark.slow
def test_consent_says_what_a_server_that_lies_can_open(tmp_path: Path) -> None:
    """Which depends on whether sites sign their keys."""
    keys = write_ssh_keys(tmp_path, ("c0", "c1", "c2"), "ed25519")
    signers = "[secure_aggregation.signers]\n" + "".join(f'{name} = "{line}"\n' for name, line in keys.items())
    for more, expected in (("", "not protected if it does not"), (signers, "and with up to 2 of 3 if it does not")):
        kit = write_group(tmp_path / expected[:3], SECURE + more)["c0"]
        [finding] = [each for each in consent_form(kit.site).findings() if each.what == "the server sees"]
        assert finding.value.startswith("sums of at least 3 updates, with up to 2 of 3 clients on its side")
        assert expected in finding.value
