"""Runs with the same label and seed but other settings are told apart in a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_fixtures import write_run

from partita.report import ReportError, compare, load_runs


def write(root: Path, folder: str, seed: int = 0, finished: bool = True, **changes: tuple[str, str]) -> Path:
    path = write_run(root / folder, "fedavg", seed, rounds=2, finished=finished)
    text = (path / "config.toml").read_text()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    (path / "config.toml").write_text(text)
    return path


LR = ("lr = 0.001", "lr = 0.1")


def test_equal_labels_get_the_settings_that_differ(tmp_path: Path) -> None:
    write(tmp_path, "a", 0)
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 0, lr=LR)
    write_run(tmp_path, "fedprox", 0, rounds=2)
    lines = compare(load_runs([tmp_path])).lines
    assert [(line.label, line.seeds) for line in lines] == [
        ("fedavg, training.lr=0.001", (0, 1)),
        ("fedavg, training.lr=0.1", (0,)),
        ("fedprox", (0,)),
    ]


def test_labels_stay_if_seeds_tell_runs_apart(tmp_path: Path) -> None:
    write(tmp_path, "a", 0)
    write(tmp_path, "b", 1, lr=LR)
    assert {record.label for record in load_runs([tmp_path])} == {"fedavg"}


def test_a_name_stands_for_the_options_that_come_with_it(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", data=('"cifar10"', '"text"\ntokens = 7'))
    assert [record.label for record in load_runs([tmp_path])] == ["fedavg, data.name=cifar10", "fedavg, data.name=text"]
    write(tmp_path, "c", data=('"cifar10"', '"text"\ntokens = 8'))
    assert [record.label for record in load_runs([tmp_path])] == [
        "fedavg, data.name=cifar10",
        "fedavg, data.name=text, data.tokens=7",
        "fedavg, data.name=text, data.tokens=8",
    ]


def test_engine_settings_tell_runs_apart_only_if_nothing_else_does(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path, folder, engine=('name = "embedded"', f'device = "{folder}"'))
    assert [record.label for record in load_runs([tmp_path])] == ["fedavg, engine.device=a", "fedavg, engine.device=b"]
    path = tmp_path / "b" / "fedavg-0" / "config.toml"
    path.write_text(path.read_text().replace(*LR))
    assert [record.label for record in load_runs([tmp_path])] == [
        "fedavg, training.lr=0.001",
        "fedavg, training.lr=0.1",
    ]


def test_a_run_found_twice_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    assert len(load_runs([tmp_path, path, tmp_path / "a" / ".." / "a"])) == 1


def test_the_same_run_in_two_folders_is_an_error_that_names_both(tmp_path: Path) -> None:
    one, two = write(tmp_path, "a"), write(tmp_path, "b")
    with pytest.raises(ReportError, match="leave one of them out") as raised:
        compare(load_runs([tmp_path]))
    assert str(one) in str(raised.value)
    assert str(two) in str(raised.value)


def test_an_unfinished_copy_of_a_finished_run_is_left_out_with_a_warning(tmp_path: Path) -> None:
    done, part = write(tmp_path, "a"), write(tmp_path, "b", finished=False)
    with pytest.warns(UserWarning, match="is the same run, finished") as told:
        [record] = load_runs([tmp_path])
    assert record.folder == done
    assert str(part) in str(told[0].message)
    assert record.label == "fedavg"
    write(tmp_path, "c", lr=LR, finished=False)
    with pytest.warns(UserWarning, match="is the same run, finished"):
        labels = [record.label for record in load_runs([tmp_path])]
    assert labels == ["fedavg, training.lr=0.001", "fedavg, training.lr=0.1"], "another setting is not a copy"
