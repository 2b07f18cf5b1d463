"""`engine.compile = "auto"` compiles long runs on a GPU, and says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Clients, small_config, toy_model, toy_run

from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.optim import Schedule
from partita.core.settings import RunError
from partita.engines import compile_choice
from partita.engines.compile_choice import COMPILE_SECONDS, GAINS, MARGIN, RATES, SECONDS_PER_STEP, CompileChoice
from partita.engines.program_cache import VARIABLE
from partita.experiment import builder, pace
from partita.experiment.config import Config
from partita.experiment.run_folder import read_rows
from partita.experiment.runner import describe_compute, resume, start
from partita.methods.fedavg import fedavg
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedprox import fedprox
from partita.methods.safl import safl

OPERATIONS = 1e9  # of a batch
GPU = torch.device("cuda")


def choose(
    method: Method | None = None,
    count: int = 1000,
    device: torch.device = GPU,
    workers: int = 1,
    half: bool = False,
    **training: Any,
) -> CompileChoice:
    """For two clients, one after the other, of 8 and 12 examples: 2 batches of 4 on average."""
    run = toy_run(method or fedavg(), count, **training)
    return compile_choice.choose_compile(run, toy_model(), Clients(a=8, b=12), device, 1, workers, half)


def rounds_that_pay(steps: int, half: bool = False, plans: int = 1, clients: int = 2) -> int:
    """The number of rounds from which compiling pays."""
    step = SECONDS_PER_STEP + OPERATIONS / RATES[half]
    return -int(-MARGIN * COMPILE_SECONDS * plans // (GAINS[half] * steps * clients * step))


@pytest.fixture
def _known_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "batch_operations", lambda run, model, examples: OPERATIONS)


@pytest.mark.usefixtures("_known_work")
@pytest.mark.parametrize(
    ("options", "steps", "plans"),
    [
        ({"steps": 5}, 5, 1),
        ({"steps": 5, "accumulate": 3}, 15, 1),
        ({}, 2, 1),  # one epoch
        ({"epochs": 3}, 6, 1),
        ({"batch_size": 64}, 1, 1),  # fewer examples than a batch
        ({"steps": 5, "method": fedfrozen(warmup=0.3)}, 5, 2),
        ({"steps": 5, "half": True}, 5, 1),
        ({"steps": 5, "workers": 2}, 5, 1),
    ],
)
def test_a_run_is_compiled_from_the_length_at_which_the_gain_outweighs_the_cost(
    options: dict[str, Any], steps: int, plans: int
) -> None:
    first = rounds_that_pay(steps, options.get("half", False), plans, 2 // options.get("workers", 1))
    assert choose(count=first, **options).compile
    before = choose(count=first - 1, **options)
    assert not before.compile
    assert f"would take about {30 * plans} s and save about {60 * plans} s" in before.reason


@pytest.mark.usefixtures("_known_work")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": torch.device("cpu")}, "on a CPU"),
        ({"method": replace(fedavg(), privacy=PrivacySettings(clip=0.5, noise=1.0))}, "private steps"),
        ({"method": safl(select="random")}, "each client chooses"),
        ({"method": fedprox(), "schedule": Schedule("cosine")}, "for each learning rate"),
    ],
)
def test_some_runs_are_never_compiled(options: dict[str, Any], reason: str) -> None:
    found = choose(count=10**6, **options)
    assert not found.compile
    assert reason in found.reason


@pytest.mark.usefixtures("_known_work")
def test_a_schedule_matters_to_rules_only() -> None:
    assert choose(count=10**5, schedule=Schedule("cosine")).compile
    assert choose(fedprox(), count=10**5).compile


def test_work_is_counted_from_an_example() -> None:
    assert choose(count=10**5).compile
    assert not choose(count=10).compile


def auto_says(monkeypatch: pytest.MonkeyPatch, choice: CompileChoice) -> None:
    monkeypatch.setattr(pace, "choose_compile", lambda *_: choice)


def auto(rounds: int = 2, **engine: Any) -> Config:
    return small_config("fedavg", rounds, device="cpu", clients_per_block=1, **engine)


def test_the_run_says_why_it_is_not_compiled_and_stays_so(tmp_path: Path) -> None:
    config = auto()
    assert config.engine.compile == "auto"
    list(start(config, tmp_path / "run"))
    said = describe_compute(config, tmp_path / "run")
    assert "steps taken plainly; not compiled, because on a CPU, compiled steps are not always faster" in said
    assert said.endswith("compile)")
    assert "compile = false" in (tmp_path / "run/config.toml").read_text()


@pytest.mark.slow
def test_the_run_says_why_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto_says(monkeypatch, CompileChoice(True, "it saves 7 s"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda made, **told: whole(made, backend="eager", fullgraph=True))
    list(start(auto(), tmp_path / "run"))
    said = describe_compute(auto(), tmp_path / "run")
    assert "steps compiled; compiled, because it saves 7 s" in said
    assert 'compile = "auto"' in (tmp_path / "run/config.toml").read_text()


def test_a_run_that_auto_compiles_goes_on_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is resumed, and with the results of a run that is not compiled."""
    list(start(auto(compile=False), tmp_path / "plain"))
    auto_says(monkeypatch, CompileChoice(True, "it saves 7 s"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))

    def refused(made: object, **told: object) -> Any:
        def call(*parts: object) -> None:
            raise RuntimeError("no compiler here\nand more")

        return call

    monkeypatch.setattr(torch, "compile", refused)
    rows = start(auto(), tmp_path / "run")
    with pytest.warns(UserWarning, match=r"cannot be compiled: no compiler here.*; steps are not compiled"):
        next(rows)
    rows.close()
    with pytest.warns(UserWarning, match="no compiler here"):
        list(resume(auto(), tmp_path / "run"))
    losses = [[row["train_loss"] for row in read_rows(tmp_path / name)] for name in ("plain", "run")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_programs_that_others_could_replace_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "open"))
    auto_says(monkeypatch, CompileChoice(True, "it saves 7 s"))
    experiment = builder.build(auto())
    assert experiment.pace.graphs is None
    assert "other users can write to it" in experiment.pace.compiling.reason
    with pytest.raises(RunError, match="other users can write to it"):
        builder.build(auto(compile=True))
