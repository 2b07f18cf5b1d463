"""No private draw follows from the seed: two runs of one config share none, and two repeatable runs share all."""

from __future__ import annotations

from typing import Any

import pytest

from partita.core import chacha
from partita.core.rng import Key
from partita.core.rounds import Engine, rounds
from partita.engines.secure import SecureEngine
from partita.experiment.builder import build, build_engine
from partita.experiment.config import parse
from partita.storage.client_store import MemoryStore

CONFIG: dict[str, Any] = {
    "rounds": 1,
    "method": {"name": "fedavg"},
    "data": {"name": "synthetic", "size": 4, "examples": 60, "test_examples": 20},
    "split": {"name": "iid", "clients": 6},
    "model": {"name": "vit", "width": 8, "layers": 2, "heads": 1, "patch": 2},
    "training": {"optimizer": "sgd", "lr": 0.1, "batch_size": 4, "steps": 2},
}
# Kind of draw -> what turns it on, and the functions of `chacha` from which it takes its numbers.
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "noise of DP-SGD": ({"privacy": {"noise": 1.0, "sampling": "shuffle", "accountant": "rdp"}}, {"normal"}),
    "Poisson batches": ({"privacy": {"noise": 1.0, "accountant": "rdp"}}, {"normal", "bernoulli", "integers"}),
    "noise at the server": ({"privacy": {"unit": "client", "noise": 1.0, "accountant": "rdp"}}, {"normal"}),
    "noisy choice of layers": (
        {
            "privacy": {"noise": 1.0, "accountant": "rdp"},
            "method": {"name": "safl", "k": 1, "noise": 1.0, "probe": 0.5},
        },
        {"normal", "bernoulli", "integers"},
    ),
    "noise at the clients": (
        {"privacy": {"unit": "client", "noise": 1.0, "accountant": "rdp"}, "secure_aggregation": {}},
        {"integers"},
    ),
    "noisy votes on layers": (
        {
            "privacy": {"noise": 1.0, "accountant": "rdp"},
            "method": {"name": "safl", "k": 1, "noise": 1.0, "probe": 0.5, "agree": True},
        },
        {"normal", "bernoulli", "integers"},
    ),
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bytes]]:
    """The function and the key of every draw from the cipher."""
    keys: set[tuple[str, bytes]] = set()

    def record(name: str) -> None:
        function = getattr(chacha, name)

        def recorded(key: Any, *args: Any) -> Any:
            keys.update((name, each) for each in ([key] if isinstance(key, bytes) else key))
            return function(key, *args)

        monkeypatch.setattr(chacha, name, recorded)

    for name in ("normal", "bernoulli", "integers"):
        record(name)
    return keys


def keys_of_run(config: dict[str, Any], drawn: set[tuple[str, bytes]], secret: Key | None) -> set[tuple[str, bytes]]:
    drawn.clear()
    experiment = build(parse(config), secret)
    engine: Engine = build_engine(experiment, MemoryStore())
    if experiment.run.secure_aggregation:
        engine = SecureEngine(engine, experiment.run, experiment.model)
    for _ in rounds(experiment.run, experiment.model, engine):
        pass
    return set(drawn)


def repeatable(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "privacy": {**config["privacy"], "repeatable": True}}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_two_private_runs_of_one_seed_share_no_draw(kind: str, drawn: set[tuple[str, bytes]]) -> None:
    changed, functions = KINDS[kind]
    config = {**CONFIG, **changed}
    first, second = (keys_of_run(config, drawn, None) for _ in range(2))
    # How many keys a run takes is itself random: rejected candidates and hidden cohorts draw again.
    for keys in (first, second):
        assert {name for name, _ in keys} == functions
    assert not first & second


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_repeatable_runs_share_all_draws_and_so_do_runs_with_one_secret(
    kind: str, drawn: set[tuple[str, bytes]]
) -> None:
    config = {**CONFIG, **KINDS[kind][0]}
    first, second = (keys_of_run(repeatable(config), drawn, None) for _ in range(2))
    assert first == second
    one, two = (keys_of_run(config, drawn, Key(77)) for _ in range(2))
    assert one == two, "a resumed run draws the same noise"
    assert not one & first


def test_hidden_cohorts_follow_from_the_secret_alone() -> None:
    config = {**CONFIG, "privacy": {"unit": "client", "noise": 1.0, "accountant": "rdp"}, "federation": {"cohort": 2}}
    clients = [f"c{number}" for number in range(100)]

    def cohorts(settings: dict[str, Any], secret: Key | None = None) -> list[list[str]]:
        run = build(parse(settings), secret).run
        return [run.draw_cohort(number, clients) for number in range(10)]

    assert cohorts(config) != cohorts(config)
    assert cohorts(config, Key(5)) == cohorts(config, Key(5))
    assert cohorts(repeatable(config)) == cohorts(repeatable(config))
