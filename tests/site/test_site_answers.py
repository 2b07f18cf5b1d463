"""Attacks on a site by a server, and jobs beyond its policy: the reason stays at the site, and nothing else leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fixtures import ANY_SIZE
from flower_fixtures import task_identity as task_identity
from flwr.app import ConfigRecord, RecordDict
from helpers import files_in
from site_fixtures import NOON, SiteKit, refused, write_site

from partita.core import tensors
from partita.core.client import Job
from partita.engines.flower import client, messages
from partita.engines.flower.messages import MessageError
from partita.engines.flower.outgoing import read_reply
from partita.site import answering
from partita.site.answering import REASON
from partita.site.consent import History, JobConsent, Refusal
from partita.site.policy import load_policy
from partita.site.program import consent_form
from partita.site.site_log import LogError, SiteLog
from partita.site.terms import Terms
from partita.storage.atomic_files import DiskError

HEAD = torch.zeros(3, 4)
PRIVATE = "[privacy]\nnoise = 1.0\nclip = 1.0\n"


@pytest.fixture
def kit(tmp_path: Path) -> SiteKit:
    return write_site(tmp_path / "c1")


def sent(**changes: torch.Tensor) -> Callable[[Job], Job]:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda job: replace(job, params={**job.params, **named}, stale=job.stale | named.keys())


def expect_refusal(kit: SiteKit, reply: RecordDict, reason: str, kind: str = "refused") -> None:
    """The server learns nothing but that there is no answer, and the log has the reason."""
    assert refused(reply) == REASON
    assert set(reply) <= {"refusal", "job_id"}
    last = kit.log.lines()[-1]
    assert last["kind"] == kind
    assert reason in last["reason"]
    assert not {"left", "scores"} & set(kit.kinds())


def shifted(kit: SiteKit, by: float) -> tensors.Tensors:
    """Another model of the server's."""
    return {name: value + by for name, value in kit.terms.experiment.model.initial.items()}


# ---- what a covered job leaves in the log


def test_covered_job_is_answered_and_logged(kit: SiteKit) -> None:
    reply = kit.send(kit.order())
    outgoing, terms = read_reply(reply), kit.terms
    [line] = kit.log.lines()
    assert line["kind"] == "left"
    assert line["names"] == sorted(terms.plan(0).up) == sorted(outgoing.names)
    assert line["bytes"] == terms.update_bytes(0) == outgoing.bytes > 0
    assert line["digest"] == reply.object_id
    assert (line["round"], line["session"], line["experiment"]) == (0, "1", terms.digest)
    assert sum(line["roles"].values()) == len(line["names"])
    assert (line["unit"], line["epsilon"], line["releases"]) == ("none", None, [])


@pytest.mark.slow
def test_digest_in_the_log_changes_with_every_part_of_the_reply(kit: SiteKit) -> None:
    reply = kit.send(kit.order())
    update = messages.decode_update(reply, messages.decode_job_id(reply), ANY_SIZE)
    for change in ({"loss": 0.25}, {"weight": 3.0}, {"steps": {}}, {"metrics": {"a": 1.0}}, {"delta": {}}):
        other = messages.encode_update(replace(update, **change))  # type: ignore[arg-type]
        other["job_id"] = reply["job_id"]
        assert other.object_id != reply.object_id
    assert RecordDict({**reply}).object_id == reply.object_id


def test_name_is_answered_and_logged_without_building_anything(kit: SiteKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "open_own_site", lambda *given: pytest.fail("builds the experiment"))
    assert messages.decode_name(kit.send(RecordDict(), "query")) == "c1"
    assert kit.kinds() == ["name"]


def test_reply_leaves_only_after_it_is_in_the_log(kit: SiteKit, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise DiskError("the disk is full")

    order = kit.order()
    monkeypatch.setattr(SiteLog, "append", full)
    with pytest.raises(DiskError):
        kit.send(order)


def test_nothing_is_answered_over_a_damaged_log(kit: SiteKit) -> None:
    kit.send(RecordDict(), "query")
    kit.log.path.write_bytes(kit.log.path.read_bytes().replace(b"name", b"nome"))
    for kind in ("query", "train"):
        with pytest.raises(LogError):
            kit.send(kit.order(), kind)


# ---- forged jobs, changed apps, replayed rounds


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "another experiment": ({"config": "beef" * 8}, "the server's config has the digest 'beef"),
    "another client": ({"change": lambda job: replace(job, client="c0")}, "this site is 'c1'"),
    "a parameter of its own": ({"change": sent(mine=HEAD)}, "and here it does not exist"),
    "a round behind the last": ({"number": 9}, "was asked for round 9"),
    "another base": ({"base": "beef" * 9}, "the frozen weights"),
    "a part of the data": ({"part": "train"}, "it asks for the part 'train'"),
    "a session of control characters": ({"session": "\x1b[2J"}, "was sent an invalid session"),
}  # fmt: skip


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", FORGED)
def test_forged_job_is_refused_without_detail(kit: SiteKit, kind: str) -> None:
    changes, reason = FORGED[kind]
    before = set(files_in(kit.folder))
    reply = kit.send(kit.order(**changes))
    expect_refusal(kit, reply, reason)
    assert {Path(file).name for file in set(files_in(kit.folder)) - before} <= {"log.jsonl", "log.lock"}


def test_message_that_is_no_job_is_refused(kit: SiteKit) -> None:
    expect_refusal(kit, kit.send(RecordDict({"job": ConfigRecord({"round": 0})})), "")
    expect_refusal(kit, kit.send(RecordDict(), "train.mine"), "failed with ValueError", "failed")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("task", ["flwr-agentapp", "flwr-serverapp", "flwr-simulation", "flwr-model", "flwr-connector"])
def test_other_types_of_tasks_are_refused(kit: SiteKit, task: str) -> None:
    """The server chooses the type of a task, and Flower would start a program for it."""
    expect_refusal(kit, kit.send(kit.order(), task=task), f"asks for a task of type '{task}'")


def test_app_and_run_config_of_the_server_change_nothing(kit: SiteKit, tmp_path: Path) -> None:
    other = write_site(tmp_path / "other")
    honest = read_reply(kit.send(kit.order(), app="11" * 32))
    odd = {"set": "training.lr=9.0 rounds=2 method.name=fedprox", "sites": str(tmp_path / "sites"), "folder": "/"}
    hostile = read_reply(other.send(other.order(), app="66" * 32, run_config=odd))
    assert hostile.tensors == honest.tensors
    assert other.log.lines()[0]["app"] == "66" * 32
    assert not (tmp_path / "sites").exists()


@pytest.mark.slow
def test_replayed_round_is_refused(kit: SiteKit) -> None:
    old = kit.order(0)
    kit.send(old)
    kit.send(kit.order(2))
    assert kit.kinds() == ["left", "left"]
    assert refused(kit.send(old)) == REASON
    assert "after round 2; this is an old message" in kit.log.lines()[-1]["reason"]
    kit.send(kit.order(0, session="2"))
    assert refused(kit.send(kit.order(3))) == REASON
    assert "session '1' has ended here" in kit.log.lines()[-1]["reason"]
    assert kit.kinds() == ["left", "left", "refused", "left", "refused"]


# ---- the policy


def test_experiment_that_is_not_approved_is_refused(kit: SiteKit) -> None:
    kit.allow(approve=False)
    expect_refusal(kit, kit.send(kit.order()), "experiments does not list it")
    assert any("experiments does not list it" in reason for reason in consent_form(kit.site).refusals())


@pytest.mark.slow
def test_changed_experiment_needs_a_new_approval(kit: SiteKit) -> None:
    file = kit.site.experiment_file
    file.write_text(file.read_text().replace("rounds = 4", "rounds = 5"))
    expect_refusal(kit, kit.send(kit.order()), "experiments does not list it")


def test_unapproved_code_is_not_run(kit: SiteKit) -> None:
    order, file = kit.order(), kit.folder / "plain_model.py"
    file.write_text(file.read_text() + f"\nfrom pathlib import Path\nPath({str(kit.folder / 'pwned')!r}).touch()\n")
    expect_refusal(kit, kit.send(order), "code in the policy does not list its digest")
    with pytest.raises(ValueError, match="code in the policy does not list its digest"):
        consent_form(kit.site)
    assert not (kit.folder / "pwned").exists()
    kit.allow()
    kit.send(order)
    assert (kit.folder / "pwned").exists(), "approved code runs, so the test above can fail"


POLICIES: dict[str, tuple[str, str]] = {
    "another role": ('[leave]\nroles = ["query"]\n', "[leave] does not allow"),
    "never": ('[leave]\nroles = ["*"]\nnever = ["head.*"]\n', "head.weight: [leave] does not allow 'head'"),
    "bytes of a round": ('[leave]\nroles = ["*"]\n[limits]\nbytes_per_round = 100\n', "limits.bytes_per_round is 100"),
    "bytes in all": ('[leave]\nroles = ["*"]\n[limits]\nbytes_total = 100\n', "limits.bytes_total is 100"),
    "rounds": ('[leave]\nroles = ["*"]\n[limits]\nrounds = 3\n', "limits.rounds is 3"),
    "hours": ('[leave]\nroles = ["*"]\n[hours]\nfrom = "20:00"\nto = "06:00"\n', "it is Mon 12:00, and [hours] allows"),
    "unit": ('[leave]\nroles = ["*"]\n[privacy]\nunit = "example"\n', "requires noise that hides at least one example"),
    "epsilon": ('[leave]\nroles = ["*"]\n[privacy]\nmax_epsilon = 8.0\n', "requires noise"),
    "noise": ('[leave]\nroles = ["*"]\n[privacy]\nmin_noise = 0.5\n', "requires noise"),
    "sums": ('[leave]\nroles = ["*"]\n[secure_aggregation]\nrequired = true\n', "secure_aggregation.required is true"),
}  # fmt: skip


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", POLICIES)
def test_job_beyond_the_policy_is_refused(kit: SiteKit, kind: str) -> None:
    policy, reason = POLICIES[kind]
    order = kit.order()
    kit.allow(policy)
    expect_refusal(kit, kit.send(order), reason)
    # The form says the same before any job comes, except that hours are not a matter of the experiment.
    assert any(reason in each for each in consent_form(kit.site).refusals()) == (kind != "hours")
    kit.allow()
    kit.send(order)
    assert kit.kinds()[-1] == "left"


def test_policy_that_cannot_be_read_refuses_everything(kit: SiteKit) -> None:
    order = kit.order()
    kit.site.policy_file.write_text('[leave]\nroles = ["*"]\nscore = true\n')
    expect_refusal(kit, kit.send(order), "unknown key 'leave.score'; did you mean 'scores'?", "failed")
    kit.site.policy_file.unlink()
    expect_refusal(kit, kit.send(order), "failed with FileNotFoundError", "failed")


@pytest.mark.slow
def test_bytes_and_rounds_are_counted_from_the_log(kit: SiteKit) -> None:
    size = kit.terms.update_bytes(0)
    kit.allow(f'[leave]\nroles = ["*"]\n[limits]\nbytes_total = {2 * size + 1}\nrounds = 9\n')
    for number in range(3):
        kit.send(kit.order(number))
    assert kit.kinds() == ["left", "left", "refused"]
    assert f"with this update, {3 * size:,} bytes have left" in kit.log.lines()[-1]["reason"]


@pytest.mark.slow
def test_site_that_restarts_in_mid_run_is_covered_by_limits_of_the_run(kit: SiteKit) -> None:
    """A round that was answered counts once: in the form, and if a server that starts again asks for it."""
    size = kit.terms.update_bytes(0)
    assert size
    kit.allow(f'[leave]\nroles = ["*"]\n[limits]\nbytes_total = {4 * size}\nrounds = 4\n')
    for number in range(4):
        assert "refusal" not in kit.send(kit.order(number))
        assert consent_form(kit.site).refusals() == []
    assert "refusal" not in kit.send(kit.order(3, session="2")), "the same update again"
    reply = kit.send(kit.order(3, params=shifted(kit, 0.3), session="3"))
    assert refused(reply) == REASON, "another update of that round counts"
    assert "bytes have left; limits.bytes_total is" in kit.log.lines()[-1]["reason"]


@pytest.mark.slow
def test_rounds_are_counted_over_sessions(kit: SiteKit) -> None:
    kit.allow('[leave]\nroles = ["*"]\n[limits]\nrounds = 4\n')
    for session in range(5):
        kit.send(kit.order(0, params=shifted(kit, 0.1 * session), session=str(session)))
    assert kit.kinds() == ["left"] * 4 + ["refused"]
    assert "4 updates of this experiment have left" in kit.log.lines()[-1]["reason"]


def test_update_that_is_ready_after_hours_does_not_leave(kit: SiteKit) -> None:
    kit.allow('[leave]\nroles = ["*"]\n[hours]\nfrom = "06:00"\nto = "12:01"\n')
    times = iter([NOON, NOON + timedelta(hours=1)])
    late = replace(kit, clock=lambda: next(times))
    expect_refusal(kit, late.send(kit.order()), "it is Mon 13:00")


@pytest.mark.slow
def test_scores_that_are_ready_after_hours_do_not_leave(kit: SiteKit) -> None:
    kit.allow('[leave]\nroles = []\nscores = true\n[hours]\nfrom = "06:00"\nto = "12:01"\n')
    times = iter([NOON, NOON + timedelta(hours=1)])
    late = replace(kit, clock=lambda: next(times))
    expect_refusal(kit, late.send(kit.order(), "evaluate"), "it is Mon 13:00")


def test_bytes_that_the_plan_does_not_tell_are_checked_before_they_leave(
    kit: SiteKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = kit.order()
    monkeypatch.setattr(Terms, "update_bytes", lambda *given: None)  # as for methods that choose from the data
    kit.allow('[leave]\nroles = ["*"]\n[limits]\nbytes_per_round = 100\n')
    expect_refusal(kit, kit.send(order), "limits.bytes_per_round is 100")


def test_scores_leave_only_if_the_policy_says_so(kit: SiteKit) -> None:
    order = kit.order()
    expect_refusal(kit, kit.send(order, "evaluate"), "leave.scores is false")
    assert not list(kit.folder.rglob("session.json")), "it is refused before the work"
    kit.allow("[leave]\nroles = []\nscores = true\n")
    assert messages.decode_scores(kit.send(order, "evaluate"))
    assert kit.kinds() == ["refused", "scores"]
    assert "accuracy" in kit.log.lines()[-1]["numbers"]


# ---- personal parameters


LEAKY = """
from partita.core.method import Method
from partita.core.plan import share


def plan(model, info):
    head = model.names("head")
    everything = model.all_names()
    if info.round == 0:
        return share(everything, down=everything - head, keep=head)
    return share(everything, down=everything)


def leaky():
    return Method("leaky", plan)
"""


@pytest.mark.slow
def test_plan_that_asks_for_a_personal_parameter_later_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "c1"
    folder.mkdir()
    (folder / "mine.py").write_text(LEAKY)
    kit = write_site(folder, "mine.py:leaky")
    kit.send(kit.order(0))
    assert kit.kinds() == ["left"]
    assert not any(name.startswith("head") for name in kit.log.lines()[0]["names"])
    assert refused(kit.send(kit.order(1))) == REASON
    assert "head.weight: personal parameters never leave" in kit.log.lines()[-1]["reason"]
    assert any("personal parameters never leave" in reason for reason in consent_form(kit.site).refusals())


def test_personal_parameter_in_a_finished_reply_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = write_site(tmp_path / "c1", "fedper")
    honest = client.train

    def leaking(site: client.Site, content: RecordDict) -> RecordDict:
        update = messages.decode_update(
            messages.with_job_id(honest(site, content), content),
            messages.decode_job_id(content, "job"),
            ANY_SIZE,
        )
        return messages.encode_update(replace(update, delta={**update.delta, "head.weight": HEAD}))

    monkeypatch.setattr(client, "train", leaking)
    expect_refusal(kit, kit.send(kit.order()), "head.weight: personal parameters never leave")


def test_reply_beyond_the_plan_or_with_other_records_does_not_leave(kit: SiteKit) -> None:
    reply = kit.send(kit.order())
    consent = JobConsent(load_policy(kit.site.policy_file), kit.terms, History(()), lambda: NOON)
    plan = kit.terms.plan(0)
    narrow = plan.narrow(plan.up - {"head.weight"})
    consent.check_update(read_reply(reply), plan)
    with pytest.raises(Refusal, match=r"head.weight: the plan of the round does not send this up"):
        consent.check_update(read_reply(reply), narrow)
    for content in (
        RecordDict({**reply, "more": ConfigRecord({"a": b"data"})}),
        RecordDict({}),
        RecordDict({"scores": ConfigRecord({})}),
    ):
        with pytest.raises(MessageError, match="which is no reply of a site"):
            read_reply(content)


# ---- privacy


@pytest.fixture
def private(tmp_path: Path) -> SiteKit:
    return write_site(tmp_path / "private", more=PRIVATE)


def epsilon_of(kit: SiteKit, rounds: int) -> float:
    terms = kit.terms
    [release] = terms.releases(terms.plan(0))
    return terms.epsilon({replace(release, count=1): rounds * release.count})


@pytest.mark.slow
def test_epsilon_is_counted_from_the_log_and_bounds_the_rounds(private: SiteKit) -> None:
    most = (epsilon_of(private, 2) + epsilon_of(private, 3)) / 2
    private.allow(f'[leave]\nroles = ["*"]\n[privacy]\nunit = "example"\nmin_noise = 1.0\nmax_epsilon = {most}\n')
    assert any("privacy.max_epsilon" in reason for reason in consent_form(private.site).refusals())
    file = private.site.experiment_file
    file.write_text(file.read_text().replace("[federation]", "[federation]\ncohort = 1"))
    for number in (0, 1, 2):
        private.allow(private.site.policy_file.read_text().split("\n", 2)[2])
        private.send(private.order(number))
    lines = private.log.lines()
    assert [line["kind"] for line in lines] == ["left", "left", "refused"]
    assert [line["epsilon"] for line in lines[:2]] == pytest.approx([epsilon_of(private, 1), epsilon_of(private, 2)])
    assert f"epsilon is {epsilon_of(private, 3):.4g}; privacy.max_epsilon" in lines[2]["reason"]


@pytest.mark.slow
def test_same_tensors_twice_cost_nothing_more(private: SiteKit) -> None:
    for session in ("1", "2"):
        private.send(private.order(0, session=session))
    one, two = private.log.lines()
    assert one["tensors"] == two["tensors"]
    assert one["epsilon"] == two["epsilon"] == pytest.approx(epsilon_of(private, 1))


@pytest.mark.slow
def test_noise_is_not_reused_for_another_model(private: SiteKit) -> None:
    private.send(private.order(0))
    params = {name: value + 1 for name, value in private.terms.experiment.model.initial.items()}
    assert refused(private.send(private.order(0, params=params))) == REASON
    assert "would reuse its noise" in private.log.lines()[-1]["reason"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("noise = 0.4\nclip = 1.0\n", "privacy.min_noise is 0.5"),
        ("noise = 1.0\nclip = 1.0\nrepeatable = true\n", "anyone can compute the noise and subtract it"),
        ('unit = "client"\nnoise = 1.0\nclip = 1.0\n', "the server adds the noise, after it has seen the update"),
    ],
)
def test_weak_protection_is_refused(tmp_path: Path, settings: str, reason: str) -> None:
    kit = write_site(tmp_path / "weak", more=f"[privacy]\n{settings}")
    order = kit.order()
    kit.allow('[leave]\nroles = ["*"]\n[privacy]\nunit = "example"\nmin_noise = 0.5\n')
    expect_refusal(kit, kit.send(order), reason)
