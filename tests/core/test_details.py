"""Details of core and privacy found by mutation testing. Each test kills at least one mutant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import ScriptedEngine, toy_model, toy_run

from partita.core.client import ClientState, Job
from partita.core.client_rule import ClientRule
from partita.core.compose import compose
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.model import Model
from partita.core.plan import NO_NAMES, Phase, Plan, PlanError, RoundInfo, plan_for
from partita.core.rounds import rounds
from partita.core.server_rule import Server, ServerRule, average
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform
from partita.methods.fedavg import fedavg
from partita.privacy.guard import make_private
from partita.storage.atomic_files import write
from partita.storage.client_store import DiskStore, MemoryStore

MODEL = toy_model()
HEAD = frozenset({"head.weight"})


# ---- plans


def test_kept_name_missing_from_the_model_is_refused() -> None:
    train = HEAD | {"nowhere"}
    plan = Plan((Phase(train),), up=HEAD, down=HEAD, keep=frozenset({"nowhere"}))
    with pytest.raises(PlanError, match=r"^nowhere: these names are in the plan but not in tiny attention"):
        plan_for(lambda model, round_info: plan, MODEL, RoundInfo(0, 1, "a"))


@pytest.mark.parametrize(("count", "said"), [(1, "n0:"), (3, "n0, n1, n2:"), (4, "n0, n1, n2 and 1 more:")])
def test_plan_error_shows_at_most_three_names(count: int, said: str) -> None:
    wrong = frozenset(f"n{number}" for number in range(count))
    with pytest.raises(PlanError, match=f"^{said} these names are kept by the client and also sent down"):
        Plan((Phase(HEAD),), up=HEAD, down=HEAD | wrong, keep=wrong)


# ---- methods


class OtherServerRule(ServerRule): ...


@pytest.mark.parametrize("swapped", [False, True])
def test_composition_has_the_settings_of_either_part(swapped: bool) -> None:
    one = Method("one", carry_optimizer=True, clients=frozenset({"a"}), server_rule=OtherServerRule())
    two = Method("two", pool=True, clients=frozenset({"b"}))
    both = compose(two, one) if swapped else compose(one, two)
    assert both.carry_optimizer
    assert both.pool
    assert both.clients == {"a", "b"}
    assert isinstance(both.server_rule, OtherServerRule)
    neither = compose(Method("one"), Method("two"))
    assert (neither.carry_optimizer, neither.pool, neither.clients) == (False, False, NO_NAMES)


# ---- rounds


def full_update(job: Job, size: float = 1.0) -> Update:
    delta = {name: torch.full_like(value, size) for name, value in MODEL.initial.items()}
    return Update(job.client, delta, {}, 1.0, dict.fromkeys(delta, 1), None)


def test_parameter_version_is_the_number_of_completed_rounds() -> None:
    for each in rounds(toy_run(fedavg(), 3), MODEL, ScriptedEngine(full_update)):
        assert set(each.server.versions.current.values()) == {each.number + 1}


# ---- files and states


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux to count open files")
def test_write_closes_its_files(tmp_path: Path) -> None:
    write(tmp_path / "first", b"first")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        write(tmp_path / str(number), b"data")
    assert len(os.listdir("/proc/self/fd")) == before


def make_state(number: float) -> ClientState:
    return ClientState({"w": torch.tensor([number])})


def test_states_no_checkpoint_needs_are_deleted(tmp_path: Path) -> None:
    """The older of the last two checkpoints needs the newest state before it."""
    disk = DiskStore(tmp_path)
    for number in range(6):
        disk.save("a", number, make_state(number))
        disk.commit(number + 1)
    assert sorted(int(path.name[:6]) for path in tmp_path.rglob("*.safetensors")) == [3, 4, 5]
    for done in (5, 6):
        assert torch.equal(disk.load("a", done).personal["w"], torch.tensor([done - 1.0]))


def test_unchanged_states_are_not_written_again(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path)
    memory = MemoryStore(disk)
    memory.save("a", 0, make_state(0.0))
    memory.commit(1)
    [written] = tmp_path.rglob("*.safetensors")
    written.unlink()
    memory.save("b", 1, make_state(1.0))
    memory.commit(2)
    assert disk.known() == ["b"]


# ---- client-level privacy


def test_client_level_cost_ignores_the_number_of_examples() -> None:
    """The privacy unit is a client, so its number of examples does not count."""
    privacy = PrivacySettings(unit="client", noise=4.0, accountant="rdp")
    known, unknown = (
        make_private(toy_run(fedavg(), 2, cohort=2), MODEL, sizes, privacy)
        for sizes in ({"a": 4, "b": 5, "c": 6}, {"a": 0, "b": 5, "c": 0})
    )
    assert known.planned == unknown.planned is not None
    for guard in (known, unknown):
        guard.charge(0, ["a", "b"], {})
    assert known.spent() == unknown.spent() is not None


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_server_keeps_parameter_dtypes(kind: torch.dtype) -> None:
    server = Server({"a": torch.ones(2, dtype=kind), "b": torch.zeros(1)})
    after = ServerRule().apply(server, Aggregate({"a": torch.full((2,), 0.5)}, {}, 1))
    assert after.params["a"].dtype == kind
    assert after.params["a"].tolist() == [1.5, 1.5]
    assert after.params["b"] is server.params["b"], "a name nobody sent stays the same object"


def test_transform_does_not_hide_cohorts_by_default() -> None:
    assert not UpdateTransform.hides


class ForSgd(ClientRule):
    optimizers = frozenset({"sgd"})


class ForAny(ServerRule):
    optimizers = frozenset({"sgd", "adamw"})


def test_method_accepts_an_optimizer_only_if_all_its_rules_do() -> None:
    assert Method("plain", client_rules=(ClientRule(),)).supports_optimizer("anything")
    both = Method("both", client_rules=(ClientRule(), ForSgd()), server_rule=ForAny())
    assert [both.supports_optimizer(name) for name in ("sgd", "adamw", "other")] == [True, False, False]
    assert [Method("one", server_rule=ForAny()).supports_optimizer(name) for name in ("adamw", "other")] == [
        True,
        False,
    ]


def test_composition_concatenates_rules_and_takes_whichever_field_is_set() -> None:
    def head(model: Model, round_info: RoundInfo) -> Plan:
        return Plan((Phase(HEAD),), up=HEAD, down=model.all_names())

    rules, transforms, server = (ForSgd(), ClientRule()), (UpdateTransform(), UpdateTransform()), ForAny()
    privacy = PrivacySettings(clip=1.0, noise=2.0)
    adapt, extend, shape = (lambda *given: given[0] for _ in range(3))
    first = Method("first", head, client_rules=rules[:1], transforms=transforms[:1], adapt=adapt, shape=shape)
    second = Method(
        "second",
        client_rules=rules[1:],
        transforms=transforms[1:],
        server_rule=server,
        extend=extend,
        privacy=privacy,
    )
    for one, two, order in ((first, second, 1), (second, first, -1)):
        both = compose(one, two)
        assert (both.name, both.plan, both.server_rule) == (f"{one.name}+{two.name}", head, server)
        assert both.client_rules == rules[::order]
        assert both.transforms == transforms[::order]
        assert (both.adapt, both.extend, both.shape, both.privacy) == (adapt, extend, shape, privacy)


def test_cohort_mean_counts_clients_that_did_not_send_a_name() -> None:
    def update(client: str, weight: float, **values: float) -> Update:
        delta = {name: torch.tensor([value]) for name, value in values.items()}
        return Update(client, delta, {"seen": delta}, weight, dict.fromkeys(delta, 1), None)

    updates = [update("a", 1.0, x=4.0, y=8.0), update("b", 3.0, x=8.0)]
    senders, cohort = average(updates), average(updates, over="cohort")
    for part in (senders.delta, senders.slots["seen"]):
        assert {name: value.item() for name, value in part.items()} == {"x": 7.0, "y": 8.0}
    for part in (cohort.delta, cohort.slots["seen"]):
        assert {name: value.item() for name, value in part.items()} == {"x": 7.0, "y": 2.0}
    assert (senders.cohort, cohort.cohort) == (2, 2)
