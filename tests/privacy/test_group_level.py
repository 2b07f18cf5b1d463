"""Privacy by group in a config: data, splits, accounting and records."""

from __future__ import annotations

import json
import math
import tomllib
import warnings
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from group_fixtures import SCANS, scans_config, write_scans

from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.rng import Key
from partita.data import DataError, Federation
from partita.data.loading import hold_out_groups, load_dataset
from partita.experiment.builder import build, build_data, build_method
from partita.experiment.config import Config, parse
from partita.experiment.runner import resume, start
from partita.privacy.budget import Client, forecast_client, forecast_run

COUNTS = [3, 1, 8, 2, 1, 1, 4, 2, 5, 1] * 3  # records of each patient


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scans(tmp_path_factory.mktemp("data") / "scans", COUNTS)


def federation_of(config: Config) -> Federation:
    return build_data(config, build_method(config.method), Key(config.seed))


# ---- data


@pytest.mark.parametrize("split", ["groups", "iid"])
def test_no_patient_is_in_two_parts_of_a_client_or_in_the_central_test_set(scans: Path, split: str) -> None:
    column = "patient_id" if split == "groups" else None
    federation = federation_of(
        scans_config(scans, split__name=split, split__column=column, split__validation=0.2, split__test=0.3)
    )
    task = federation.task
    names = task.columns["patient_id"]
    assert federation.groups is not None
    assert not set(names) & set(task.test_columns["patient_id"])
    assert len(set(task.test_columns["patient_id"])) == 6  # a fifth of the patients
    for client in federation.clients:
        data = federation[client]
        parts = [set(part.groups.tolist()) for part in (data.train, data.validation, data.test)]  # type: ignore[attr-defined]
        count = len(set.union(*parts))
        assert sum(map(len, parts)) == count, "a patient is in one part"
        assert [len(part) for part in parts[1:]] == [count // 5, 3 * count // 10]
        for group in parts[0]:
            rows = data.train.indices[data.train.groups == group]  # type: ignore[attr-defined]
            assert len(set(names[rows.numpy()])) == 1


def test_with_one_record_each_the_parts_and_the_held_out_rows_are_those_of_rows(tmp_path: Path) -> None:
    path = write_scans(tmp_path / "single", [1] * 40)
    by_group, by_row = (
        federation_of(
            scans_config(path, split__name="iid", split__column=None, privacy__unit=unit, privacy__group=group)
        )
        for unit, group in (("group", "patient_id"), ("example", None))
    )
    assert np.array_equal(by_group.task.columns["patient_id"], by_row.task.columns["patient_id"])
    for client in by_row.clients:
        for part in ("train", "validation", "test"):
            one, two = (getattr(federation[client], part).indices for federation in (by_group, by_row))
            assert torch.equal(one, two)


def test_a_held_out_part_keeps_values_together(scans: Path) -> None:
    with hold_out_groups("patient_id"):
        source = load_dataset(scans, Key(0), test=0.5)
    inside, outside = (set(part.values("patient_id")) for part in (source.train, source.test))
    assert len(inside) == len(outside) == 15
    assert not inside & outside
    plain = load_dataset(scans, Key(0), test=0.5)
    assert set(plain.train.values("patient_id")) & set(plain.test.values("patient_id")), "only within the context"
    with hold_out_groups("patient_id"), pytest.raises(DataError, match="0 of the 30 different values of 'patient_id'"):
        load_dataset(scans, Key(0), test=0.01)


def test_rows_without_a_patient_are_counted(tmp_path: Path) -> None:
    path = write_scans(tmp_path / "scans", [2] * 20, missing=7)
    with pytest.raises(
        DataError, match=r"7 of 47 rows of the train part of .* have no value in column 'patient_id'.*fill them"
    ):
        federation_of(scans_config(path))


def test_rows_without_a_patient_in_a_given_train_part_are_counted(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {name: write_scans(tmp_path / name, [2] * 9, missing) for name, missing in (("train", 4), ("test", 0))}
    whole = {name: datasets.load_from_disk(path) for name, path in parts.items()}
    datasets.DatasetDict(train=whole["train"], test=whole["test"].remove_columns("patient_id")).save_to_disk(
        tmp_path / "two"
    )
    with pytest.raises(DataError, match="4 of 22 train rows of two have no value in column 'patient_id'"):
        federation_of(scans_config(tmp_path / "two"))


def test_a_column_that_does_not_exist_is_refused(scans: Path) -> None:
    with pytest.raises(DataError, match=r"privacy\.group is 'patient', but .* have no such column; .*patient_id"):
        federation_of(scans_config(scans, privacy__group="patient", split__name="iid", split__column=None))
    config = parse({**tomllib.loads(SCANS), "data": {"name": "digits"}, "split": {"name": "iid", "clients": 2}})
    with pytest.raises(DataError, match="the data has no columns"):
        federation_of(config)


def test_patients_in_a_given_test_part_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.load_from_disk(write_scans(tmp_path / "scans", [4] * 10))
    datasets.DatasetDict(train=whole.select(range(30)), test=whole.select(range(30, 40))).save_to_disk(tmp_path / "two")
    with pytest.raises(
        DataError, match=r"\d+ values of column 'patient_id' of two are in the train rows and in the central"
    ):
        federation_of(scans_config(tmp_path / "two"))


@pytest.mark.slow
def test_patients_at_several_clients_are_warned_about(scans: Path) -> None:
    with pytest.warns(UserWarning, match=r"of 2\d values of column 'patient_id' have examples at several clients"):
        build(scans_config(scans, split__name="iid", split__column=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(scans_config(scans))


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PrivacyError, match=r"privacy\.group is not set; name the column"):
        PrivacySettings("group", noise=1.0)
    with pytest.raises(PrivacyError, match=r"privacy\.group is 'p', but privacy\.unit is 'example'"):
        PrivacySettings("example", group="p", noise=1.0)
    with pytest.raises(PrivacyError, match="max_per_group is about groups"):
        PrivacySettings("example", max_per_group=3, noise=1.0)


# ---- accounting


def epsilon_by_hand(noise: float, share: float, steps: int, delta: float) -> tuple[float, float]:
    """Epsilon of that many Poisson-sampled Gaussian releases: by privacy loss distributions, and by Rényi's bound."""
    event = dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(noise))
    exact = pld.PLDAccountant(value_discretization_interval=1e-4).compose(event, steps)
    loose = rdp.RdpAccountant([1 + x / 10 for x in range(1, 100)] + list(range(11, 500))).compose(event, steps)
    return float(exact.get_epsilon(delta)), float(loose.get_epsilon(delta))


@pytest.mark.slow
def test_epsilon_is_that_of_dp_accounting_by_hand(scans: Path) -> None:
    """Each client has 9 patients in its train part. A batch expects 4 of them, and an epoch has 3 steps."""
    experiment = build(scans_config(scans, privacy__delta=1e-5))
    guard = experiment.guard
    assert guard is not None
    assert dict(guard.sizes) == {"c0": 9, "c1": 9}
    assert sum(len(experiment.federation[client].train) for client in guard.sizes) > 18, "patients have several records"
    exact, loose = epsilon_by_hand(noise=1.1, share=4 / 9, steps=2 * 3, delta=1e-5)
    assert guard.planned == pytest.approx(exact, rel=2e-3)
    assert guard.planned is not None
    assert exact <= guard.planned < loose
    assert guard.account.delta == 1e-5


def test_delta_follows_from_the_number_of_groups(scans: Path) -> None:
    guard = build(scans_config(scans)).guard
    assert guard is not None
    assert guard.privacy.delta == min(1e-5, 0.1 / 9)
    with pytest.raises(PrivacyError, match="with 9 groups it must be well below"):
        build(scans_config(scans, privacy__delta=0.12))


@pytest.mark.slow
def test_forecast_of_groups_is_that_of_as_many_examples() -> None:
    one, other = (forecast_client(Client(200, 20, 5, 1, unit), 2.0, None, None) for unit in ("group", "example"))
    assert (one.noise, one.epsilon, one.unit) == (other.noise, other.epsilon, "group")
    assert "twice the groups" in one.instead
    with pytest.raises(PrivacyError, match="--groups is 0"):
        forecast_client(Client(0, 20, 5, 1, "group"), 2.0, None, None)


@pytest.mark.slow
def test_forecast_of_a_run_by_group(scans: Path) -> None:
    guard = build(scans_config(scans)).guard
    assert guard is not None
    found = forecast_run(guard)
    assert (found.unit, found.epsilon) == ("group", guard.planned)
    assert "half the batch" in found.instead


# ---- runs and records


@pytest.mark.slow
@pytest.mark.parametrize("augment", [(), ("flip", "crop")])
def test_a_run_with_one_record_for_each_patient_is_the_run_by_example(tmp_path: Path, augment: tuple[str, ...]) -> None:
    """From the split to the weights of the average, bit for bit; augmentations draw from the seeds of examples."""
    path = write_scans(tmp_path / "single", [1] * 40)
    for unit, group in (("group", "patient_id"), ("example", None)):
        config = scans_config(
            path,
            split__name="iid",
            split__column=None,
            training__augment=list(augment),
            privacy__unit=unit,
            privacy__group=group,
            privacy__repeatable=True,
        )
        list(start(config, tmp_path / unit))
    results = [json.loads((tmp_path / unit / "result.json").read_text()) for unit in ("group", "example")]
    assert results[0]["digest"] == results[1]["digest"]
    epsilons = [json.loads((tmp_path / unit / "privacy.json").read_text())["planned"] for unit in ("group", "example")]
    assert epsilons[0] == epsilons[1]


@pytest.mark.slow
def test_run_records_the_unit_and_resumes_bit_for_bit(scans: Path, tmp_path: Path) -> None:
    config = scans_config(scans, privacy__repeatable=True, privacy__max_per_group=3)
    rows = list(start(config, tmp_path / "whole"))
    about = json.loads((tmp_path / "whole" / "privacy.json").read_text())
    assert (about["unit"], about["group"], about["sampling"]) == ("group", "patient_id", "poisson")
    assert rows[-1]["privacy"]["epsilon"] == pytest.approx(about["planned"])
    assert math.isfinite(about["planned"])
    assert not (tmp_path / "whole" / "split.json").exists()
    stopped = start(config, tmp_path / "cut")
    next(stopped)
    stopped.close()
    list(resume(config, tmp_path / "cut"))
    digests = [json.loads((tmp_path / name / "result.json").read_text())["digest"] for name in ("whole", "cut")]
    assert digests[0] == digests[1]
