"""`partita check`: every promise with its outcome, and the broken ones by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import Clients, toy_model
from shell import Shell

from partita.testing import conformance, federations
from partita.testing.conformance import PROMISES
from partita.testing.federations import SmallFederation, federation_for

BROKEN = Path(__file__).resolve().parent.parent / "broken_methods"


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check on one layer and four small clients: the same promises in a quarter of the time."""
    federation = SmallFederation("a smaller toy", toy_model(), Clients(c0=3, c1=9, c2=12, c3=6))
    monkeypatch.setattr(federations, "_toy", lambda: federation)


@pytest.mark.slow
@pytest.mark.usefixtures("smaller")
def test_a_correct_method_keeps_all_promises(run_partita: Shell) -> None:
    code, out, err = run_partita("check", "fedprox", "--set", "method.mu=0.5")
    assert (code, err) == (0, "")
    first, *lines, last = out.splitlines()
    assert first == "fedprox, on a smaller toy"
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")].count("yes") == len(PROMISES) - 6
    for promise in PROMISES:
        assert any(f"  {promise.name}: {promise.text}" in line for line in lines)
    assert "because it has no transform" in out
    assert last.startswith("fedprox keeps all promises (")


@pytest.mark.fast_cases(2)
@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize(
    ("file", "broken", "reason"),
    [
        ("in_place", ["server state unchanged"], "it modifies the server's tensors in place in round 0"),
        ("global_noise", ["no global random state", "repeatable"], "it draws from torch's global random state"),
        (
            "sends_frozen",
            ["only planned names travel", "a run finishes"],
            "'head.weight' is in an update, but the plan does not send it up",
        ),
        ("state_in_self", ["resume from disk", "resume from memory"], "resumed after round 0 with state in disk"),
        ("counting_plan", ["pure plan"], " in round 0 differs from one call to the next"),
        ("fails", ["a run finishes"], "KeyError: 'no such name' (fails.py, line 13)"),
    ],
)
def test_broken_promises_are_named(file: str, broken: list[str], reason: str, run_partita: Shell) -> None:
    code, out, err = run_partita("check", f"{BROKEN / file}.py:broken", "--json")
    assert (code, err) == (1, "")
    outcomes = json.loads(out)["promises"]
    found = [outcome["name"] for outcome in outcomes if outcome["verdict"] == "no"]
    assert found[: len(broken)] == broken
    assert reason in next(outcome["reason"] for outcome in outcomes if outcome["verdict"] == "no")
    assert all(outcome["reason"] for outcome in outcomes if outcome["verdict"] != "yes")


@pytest.mark.usefixtures("smaller")
def test_broken_promise_does_not_stop_the_check(run_partita: Shell) -> None:
    code, out, _ = run_partita("check", f"{BROKEN / 'in_place'}.py:broken")
    assert code == 1
    assert "no              server state unchanged: " in out
    assert "yes             only planned names travel: " in out, "the run goes on after the broken promise"
    assert "not tested      repeatable: " in out
    assert "because this needs 'server state unchanged'" in out
    assert "breaks 1 of 21 promises: server state unchanged (" in out


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["fedproxx"], "unknown method 'fedproxx'; did you mean 'fedprox'?"),
        (["fedprox", "--set", "method.mu=-1"], "method.mu is -1; it must be a number from 0 to 1e9"),
        (["fedprox", "--set", "mu=1"], "--set sets 'mu', which this check does not read; write method.KEY=VALUE"),
        (["syntetic", "--kind", "data"], "unknown data 'syntetic'; did you mean 'synthetic'?"),
        (["vit", "--kind", "model", "--set", "model.layers=0"], "model.layers is 0; it must be a whole number from 1"),
        (["--set", "method.mu=1"], "--kind and --set are for one NAME"),
    ],
)
def test_wrong_names_and_options_are_errors(words: list[str], error: str, run_partita: Shell) -> None:
    code, out, err = run_partita("check", *words)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert error in err


@pytest.mark.slow
def test_without_a_name_all_methods_have_one_line(run_partita: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from partita import methods

    few = {name: methods.INDEX[name] for name in ("zero-shot", "centralized")}
    monkeypatch.setattr(methods, "INDEX", few)
    monkeypatch.setattr(conformance, "ROUNDS", 2)
    code, out, _ = run_partita("check")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(few)
    assert all("kept" in line and "on a toy Transformer and six clients" in line for line in out.splitlines())


def test_methods_are_checked_on_a_model_that_they_accept() -> None:
    from partita.methods import build

    assert federation_for(build("fedavg")).about.startswith("a toy Transformer")
    assert federation_for(build("lora")).about.startswith("a small ViT")
    assert federation_for(build("promptfl")).about.startswith("a small random CLIP")


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    "words",
    [
        ["synthetic", "--kind", "data", "--set", "data.examples=30"],
        ["by_column", "--kind", "split", "--set", "split.column=domain"],
        ["iid", "--kind", "split"],
        ["vit", "--kind", "model", "--set", "model.layers=1", "--set", "model.width=8", "--set", "data.size=4"],
    ],
)
def test_other_kinds_are_checked(words: list[str], run_partita: Shell) -> None:
    code, out, err = run_partita("check", *words)
    assert (code, err) == (0, "")
    assert f"{words[0]} keeps all promises" in out
