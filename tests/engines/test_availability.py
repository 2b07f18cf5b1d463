"""Simulated dropouts and stragglers, by rate and by trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import Clients, play, toy_model, toy_run

from partita.core import tensors
from partita.core.options import OptionError
from partita.core.rng import Key
from partita.engines.availability import Availability, TraceError, available, read_trace
from partita.methods.fedavg import fedavg

ROUND_CLIENT_PAIRS = [(number, f"c{client}") for number in range(40) for client in range(100)]


def completed_fractions(availability: Availability, seed: int = 0) -> np.ndarray:
    return np.array(
        [availability.completed_fraction(Key(seed), number, client) for number, client in ROUND_CLIENT_PAIRS]
    )


def test_default_availability_completes_all_work() -> None:
    assert set(completed_fractions(Availability())) == {1.0}


@pytest.mark.parametrize(("dropout", "straggle"), [(0.1, 0.0), (0.0, 0.4), (0.3, 0.5), (1.0, 0.5)])
def test_dropout_and_straggler_rates_are_met(dropout: float, straggle: float) -> None:
    work = completed_fractions(Availability(dropout, straggle))
    lost, slow = work == 0, (work > 0) & (work < 1)
    for rate, seen in ((dropout, lost.mean()), ((1 - dropout) * straggle, slow.mean())):
        assert abs(seen - rate) <= 4 * np.sqrt(rate * (1 - rate) / len(ROUND_CLIENT_PAIRS))
    if slow.sum() > 100:
        shares = np.sort(work[slow])
        assert np.abs(shares - np.linspace(0, 1, len(shares))).max() < 1.95 / np.sqrt(len(shares))


def test_availability_is_keyed_by_round_and_client() -> None:
    availability = Availability(0.5, 0.5)
    work = completed_fractions(availability).reshape(40, 100)
    assert np.array_equal(work.ravel(), completed_fractions(availability))
    assert not np.array_equal(work.ravel(), completed_fractions(availability, seed=1))
    assert len({tuple(row) for row in work}) == 40
    assert len({tuple(column) for column in work.T}) == 100
    # Dropping out and straggling are independent: among present clients the straggler rate is as requested.
    assert abs((work[work > 0] < 1).mean() - 0.5) < 0.05


def test_trace_overrides_the_rates() -> None:
    availability = Availability(client_dropout=1.0, trace={(3, "c7"): 0.25, (4, "c7"): 1.0})
    assert [availability.completed_fraction(Key(0), number, "c7") for number in (2, 3, 4)] == [0.0, 0.25, 1.0]
    assert availability.completed_fraction(Key(0), 3, "c8") == 0.0


@pytest.mark.parametrize(
    ("rate", "value"),
    [("client_dropout", -0.1), ("client_dropout", 1.1), ("straggler_rate", 2.0), ("straggler_rate", float("nan"))],
)
def test_rate_outside_zero_to_one_is_refused(rate: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"federation.{rate} is {value}; it must be a probability from 0 to 1"):
        Availability(**{rate: value})


def test_engine_follows_a_trace() -> None:
    model, population = toy_model(), Clients(a=8, b=8)
    run = toy_run(fedavg(), 2, epochs=2)
    plain = play(run, model, population)
    traced = play(run, model, population, availability=Availability(trace={(0, "a"): 0.0, (1, "b"): 0.5}))
    assert [[(lost.client, lost.reason) for lost in each.lost] for each in traced] == [
        [("a", "dropped out (simulated)")],
        [],
    ]
    assert not tensors.equal(plain[1].server.params, traced[1].server.params)
    full = play(run, model, population, availability=Availability(trace={(0, "a"): 0.0}))
    assert tensors.equal(full[0].server.params, traced[0].server.params)
    assert not tensors.equal(full[1].server.params, traced[1].server.params)


def write_trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_trace_file_is_read(tmp_path: Path) -> None:
    text = "round,client,work\n3,c7,0.5\n0,ü b,0\n12,c7,1\n"
    assert read_trace(write_trace(tmp_path, text)) == {(3, "c7"): 0.5, (0, "ü b"): 0.0, (12, "c7"): 1.0}
    assert read_trace(write_trace(tmp_path, "work,round,client\n0.5,3,c7\n")) == {(3, "c7"): 0.5}
    assert read_trace(write_trace(tmp_path, "round,client,work\n")) == {}


NO_COLUMN = r" has no column '(work|round)'; its first line must be 'round,cl"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("round,client,work\n3,c7,0.5\n3.5,c8,0.5\n", ", line 3: needs round, client, work"),
        ("round,client,work\n3,c7,half\n", ", line 2: needs round, client, work"),
        ("round,client,work\n3,c7\n", ", line 2: needs round, client, work"),
        ("round,client,work\n3,c7,1.5\n", r", line 2: work is 1.5; it must be a fraction from 0 \(drops out\) to 1"),
        ("round,client,work\n3,c7,nan\n", ", line 2: work is nan; it must be a fraction"),
        ("round,client\n3,c7\n", NO_COLUMN),
        ("3,c7,0.5\n4,c7,0.5\n", NO_COLUMN),
        ("", NO_COLUMN),
    ],
)
def test_invalid_trace_is_refused_with_file_and_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(TraceError, match=f"trace.csv{what}"):
        read_trace(write_trace(tmp_path, text))


def test_missing_or_binary_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*absent.csv: No such file"):
        read_trace(tmp_path / "absent.csv")
    (tmp_path / "trace.csv").write_bytes(b"round,client,work\n\xff\xfe,\x00,1\n")
    with pytest.raises(TraceError, match=r"trace.csv"):
        read_trace(tmp_path / "trace.csv")


# ---- client sampling by trace


def trace_of(folder: Path, rows: list[tuple[int, str, float]]) -> str:
    lines = "".join(f"{number},{client},{work}\n" for number, client, work in rows)
    return str(write_trace(folder, f"round,client,work\n{lines}"))


def test_available_rule_asks_only_clients_that_the_trace_has(tmp_path: Path) -> None:
    clients = [f"c{number}" for number in range(6)]
    rows = [(0, f"c{number}", 1.0) for number in range(4)] + [(0, "c4", 0.0), (1, "c5", 0.5)]
    rule = available(trace_of(tmp_path, rows))
    run = toy_run(fedavg(), 2, cohort=2, sampling=rule)
    seen = {client for seed in range(60) for client in replace(run, key=Key(seed)).draw_cohort(0, clients)}
    assert seen == {"c0", "c1", "c2", "c3"}, "work 0 and a missing row mean that the client is away"
    assert run.draw_cohort(0, clients) == (run.key / "round" / 0 / "cohort").sample(clients[:4], 2)
    assert run.draw_cohort(1, clients) == ["c5"], "fewer than asked for: all of them"
    assert available(rule.path, equal_weights=True).equal_weights
    with pytest.raises(OptionError, match=r"trace\.csv has none of the 2 connected clients as available in round 1"):
        run.draw_cohort(1, clients[:2])


def test_available_rule_is_refused_if_a_round_has_too_few_clients(tmp_path: Path) -> None:
    rows = [(0, "c0", 1.0), (0, "c1", 1.0), (1, "c0", 1.0), (1, "stranger", 1.0), (1, "c1", 0.0)]
    rule = available(trace_of(tmp_path, rows))
    clients = ["c0", "c1", "c2"]
    toy_run(fedavg(), 2, cohort=2, sampling=rule, min_updates=0).check_sampling(clients)
    with pytest.raises(
        OptionError, match=r"trace\.csv has 1 available clients in round 1, and a round needs 2; add rows"
    ):
        toy_run(fedavg(), 2, cohort=2, sampling=rule, min_updates=2).check_sampling(clients)
    with pytest.raises(OptionError, match=r"has 0 available clients in round 2, and a round needs 1"):
        toy_run(fedavg(), 3, cohort=2, sampling=rule, min_updates=0).check_sampling(clients)
    with pytest.raises(TraceError, match="cannot read the trace"):
        available(str(tmp_path / "missing.csv"))
