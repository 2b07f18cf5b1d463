"""Batches of texts of similar lengths: less padding, the same result on every engine, and what refuses them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fixtures import flower_engine, make_grid
from flower_fixtures import task_identity as task_identity
from graph_fixtures import ReplayingRecorder
from helpers import SMALL_TASK, SMALL_VIT, Clients, final_params, max_difference, play, toy_model, toy_run
from seq2seq_fixtures import ROWS, write_t5
from text_fixtures import TextClients, long_bert
from torch import Tensor

from partita.core import tensors
from partita.core.client import ClientError, ClientState, adaptation_round, begin_round
from partita.core.dp_settings import PrivacySettings
from partita.core.optim import SGD
from partita.core.plan import Phase
from partita.core.rounds import initial_server, make_job, rounds
from partita.core.settings import Run, RunError
from partita.engines.dry_run import dry_run
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.experiment.runner import resume, start
from partita.methods.fedavg import fedavg
from partita.privacy.guard import make_private
from partita.training.cuda_graphs import GraphCache

TEXTS = TextClients()
NEEDS_TEXTS = r"training\.group_by_length needs texts.*leave it out"


def grouped_run(**more: Any) -> Run:
    return toy_run(fedavg(), **{"count": 3, "optimizer": SGD(0.9), "batch_size": 2, "group_by_length": True, **more})


def longest_first(order: Tensor, client: str) -> bool:
    lengths = TEXTS.parts[client].lengths(order)
    assert lengths is not None
    return lengths.tolist() == sorted(lengths.tolist(), reverse=True)


# ---- batches


def test_rounds_and_adaptation_sort_the_texts_of_each_epoch() -> None:
    run, model = grouped_run(epochs=2), long_bert()
    job, _ = make_job(run, model, initial_server(run, model), 0, "a")
    given = run, model, job, ClientState(), TEXTS["a"].train
    phases = Phase(frozenset(model.initial), epochs=1), Phase(frozenset(model.initial), epochs=2)
    [of_round], of_adaptation = begin_round(*given).schedules, adaptation_round(*given, phases).schedules
    assert [len(schedule.order) for schedule in (of_round, *of_adaptation)] == [18, 9, 18]
    for schedule in (of_round, *of_adaptation):
        for epoch in torch.split(schedule.order, 9):
            assert sorted(epoch.tolist()) == list(range(9))
            assert longest_first(epoch, "a")


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_a_block_has_less_padding(graphs: bool) -> None:
    """All clients are wide in their first steps and narrow in their last ones."""
    real = []
    for grouped in (False, True):
        run, cache = grouped_run(count=1, group_by_length=grouped), GraphCache(ReplayingRecorder()) if graphs else None
        [played] = play(run, long_bert(), TextClients((24,) * 4), block=4, graphs=cache)
        assert played.padding is not None
        real.append(1 - played.padding)
    assert real[1] > 1.3 * real[0]


@pytest.mark.slow
def test_blocks_train_as_single_clients() -> None:
    alone = final_params(play(grouped_run(), long_bert(), TEXTS))
    for block, graphs in ((6, None), (4, GraphCache(ReplayingRecorder()))):
        assert (
            max_difference(alone, final_params(play(grouped_run(), long_bert(), TEXTS, block=block, graphs=graphs)))
            < 1e-5
        )
    assert max_difference(alone, final_params(play(grouped_run(group_by_length=False), long_bert(), TEXTS))) > 1e-3


# ---- engines


@pytest.mark.slow
def test_resumed_run_is_the_same_bit_for_bit() -> None:
    whole = play(grouped_run(), long_bert(), TEXTS)
    rest = play(grouped_run(), long_bert(), TEXTS, server=whole[0].server, start=1)
    assert tensors.equal(final_params(whole), final_params(rest))
    ungrouped = play(grouped_run(group_by_length=False), long_bert(), TEXTS, server=whole[0].server, start=1)
    assert not tensors.equal(final_params(whole), final_params(ungrouped))


@pytest.mark.slow
def test_messages_and_flower_give_the_result_of_a_simulation(tmp_path: Path) -> None:
    run, model = grouped_run(count=2), long_bert()
    plain = final_params(play(run, model, TEXTS))
    assert tensors.equal(plain, final_params(play(run, model, TEXTS, wire=True)))
    engine = flower_engine(run, model, make_grid(run, model, TEXTS, tmp_path), TEXTS.clients, deadline=60.0)
    assert tensors.equal(plain, list(rounds(run, model, engine))[-1].server.params)


@pytest.mark.slow
def test_recorded_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    write_t5(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = {"path": str(tmp_path / "texts.jsonl")}
    config = parse(
        {
            "rounds": 3,
            "data": {"name": "seq2seq", "max_length": 24, "max_target_length": 24, **path},
            "split": {"name": "iid", "clients": 2, "test": 0.3},
            "model": {"name": "pretrained", "path": str(tmp_path / "model")},
            "method": {"name": "fedavg"},
            "training": {"lr": 1e-2, "batch_size": 2, "group_by_length": True},
            "evaluate": {"max_new_tokens": 2},
        }
    )
    rows = list(start(config, tmp_path / "whole"))
    next(iter(start(config, tmp_path / "part")))
    resumed = list(resume(config, tmp_path / "part"))
    assert resumed[-1]["test"] == rows[-1]["test"]
    plain = replace(config, training=replace(config.training, group_by_length=False))
    assert list(start(plain, tmp_path / "plain"))[-1]["test"] != rows[-1]["test"]


def test_dry_run_needs_no_texts() -> None:
    run, model = grouped_run(), long_bert()
    assert (
        dry_run(run, model, TEXTS.clients, 2).versions
        == dry_run(
            replace(run, training=replace(run.training, group_by_length=False)), model, TEXTS.clients, 2
        ).versions
    )


# ---- what refuses them


@pytest.mark.parametrize("skip", [False, True])
def test_examples_without_lengths_are_refused(skip: bool, tmp_path: Path) -> None:
    """By the simulation before any training, and by a site in its answer."""
    run, model, population = grouped_run(skip_failed_clients=skip), toy_model(), Clients(a=4, b=6)
    with pytest.raises(RunError, match=NEEDS_TEXTS):
        play(run, model, population)
    if not skip:
        engine = flower_engine(run, model, make_grid(run, model, population, tmp_path), population.clients)
        with pytest.raises(ClientError, match=NEEDS_TEXTS):
            list(rounds(run, model, engine))


def image_config(**tables: Any) -> dict[str, Any]:
    raw = tomllib.loads(SMALL_VIT + SMALL_TASK)
    training = {**raw["training"], "group_by_length": True}
    return {**raw, "method": {"name": "fedavg"}, "rounds": 2, "training": training, **tables}


def test_task_without_texts_is_refused_when_it_is_built() -> None:
    with pytest.raises(RunError, match=NEEDS_TEXTS):
        build(parse(image_config()))


@pytest.mark.parametrize(
    "privacy",
    [
        PrivacySettings(noise=1.0),
        PrivacySettings(noise=1.0, sampling="shuffle"),
        PrivacySettings("group", "p", noise=1.0),
    ],
    ids=["example", "shuffled", "group"],
)
def test_dp_sgd_is_refused(privacy: PrivacySettings) -> None:
    """The accounting is for batches that do not depend on the examples."""
    sizes = {client: len(TEXTS[client].train) for client in TEXTS.clients}
    with pytest.raises(RunError, match=r"training\.group_by_length is true and privacy\.unit is"):
        make_private(grouped_run(), long_bert(), sizes, privacy)


@pytest.mark.slow
def test_client_level_privacy_is_accepted() -> None:
    """It hides a whole client, whatever this does with its examples."""
    sizes = {client: len(TEXTS[client].train) for client in TEXTS.clients}
    guard = make_private(
        grouped_run(count=1), long_bert(), sizes, PrivacySettings("client", noise=1.0, accountant="rdp")
    )
    assert guard.run.training.group_by_length
    [played] = play(guard.run, long_bert(), TEXTS)
    assert set(played.cohort) == set(TEXTS.clients)
