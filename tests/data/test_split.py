"""Splits: properties of every kind, distributions against scipy and flwr-datasets, and errors."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from partita.core.options import OptionError
from partita.core.rng import Key
from partita.data import SPLITS, DataError, Federation, Table, Task, split
from partita.data.partition import ClientSplit, Partition

needs_flwr = pytest.mark.skipif(
    importlib.util.find_spec("flwr_datasets") is None, reason="the reference, flwr-datasets, is not installed"
)
quick = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**32)
label_lists = st.lists(st.integers(0, 5), min_size=40, max_size=120)
KINDS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "iid": (4, {}),
    "dirichlet": (4, {"alpha": 0.7, "min_examples": 1}),
    "quantity": (4, {"alpha": 0.7, "min_examples": 1}),
    "pathological": (12, {"classes_per_client": 1}),
    "disjoint": (2, {}),
    "by_column": (None, {"column": "domain", "per_value": 2}),
    "groups": (2, {"column": "domain"}),
}


def make_task(labels: Any, **columns: Any) -> Task:
    targets = torch.as_tensor(np.asarray(labels, np.int64))
    table = Table({"x": torch.arange(len(targets)).unsqueeze(1)}, targets)
    names = tuple(str(label) for label in range(int(targets.max()) + 1))
    return Task("toy", table, table, names, {name: np.asarray(values) for name, values in columns.items()})


def partition_of(federation: Federation) -> Partition:
    assert isinstance(federation.parts, ClientSplit)
    return federation.parts.partition


def rows_by_client(task: Task, kind: str, clients: int | None, seed: int = 0, **options: Any) -> list[np.ndarray]:
    """The rows of each client."""
    partition = partition_of(split(task, kind, clients, key=Key(seed), **options))
    return np.split(partition.rows, partition.offsets[1:-1])


def class_counts(task: Task, dealt: list[np.ndarray]) -> np.ndarray:
    """(client, class) counts."""
    labels = task.train.targets.numpy()
    return np.stack([np.bincount(labels[rows], minlength=len(task.classes)) for rows in dealt])


def domain_column(count: int) -> np.ndarray:
    return np.array(["photo", "sketch", "art"])[np.arange(count) % 3]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("kind", KINDS)
@given(labels=label_lists, seed=seeds)
@quick
def test_every_row_has_one_client_and_every_client_a_row(kind: str, labels: list[int], seed: int) -> None:
    clients, options = KINDS[kind]
    if kind == "disjoint":
        labels = [*labels, 0, 1]  # it needs a class per client
    dealt = rows_by_client(make_task(labels, domain=domain_column(len(labels))), kind, clients, seed, **options)
    assert len(dealt) == (clients or 6)
    assert all(len(rows) for rows in dealt)
    assert sorted(np.concatenate(dealt)) == list(range(len(labels)))


@pytest.mark.parametrize("kind", KINDS)
def test_split_depends_only_on_the_key(kind: str) -> None:
    labels = np.arange(120) % 6
    task, (clients, options) = make_task(labels, domain=domain_column(120)), KINDS[kind]

    def draw(seed: int) -> list[list[int]]:
        return [rows.tolist() for rows in rows_by_client(task, kind, clients, seed, **options)]

    first = draw(1)
    states = repr(np.random.get_state()), torch.get_rng_state().tolist(), random.getstate()
    again = draw(1)
    assert states == (repr(np.random.get_state()), torch.get_rng_state().tolist(), random.getstate())
    draw(2)
    assert first == again == draw(1)
    assert first != draw(2)


@pytest.mark.parametrize(
    ("kind", "clients", "options"),
    [
        ("iid", 2, {}),
        ("dirichlet", 2, {"alpha": 1e6}),
        ("quantity", 2, {"alpha": 1e6}),
        ("pathological", 2, {"classes_per_client": 2}),
        ("by_column", None, {"column": "all", "per_value": 2}),
    ],
)
def test_split_ignores_the_order_of_rows(kind: str, clients: int | None, options: dict[str, Any]) -> None:
    task = make_task(np.arange(4000) % 2, all=np.full(4000, "x"))
    first = rows_by_client(task, kind, clients, **options)[0]
    runs = 1 + np.count_nonzero(np.diff(np.isin(np.arange(0, 4000, 2), first)))  # as in tossing a coin for each row
    assert abs(runs - 1000) < 100


@given(labels=label_lists, clients=st.integers(1, 40), seed=seeds)
@quick
def test_iid_sizes_differ_by_at_most_one(labels: list[int], clients: int, seed: int) -> None:
    sizes = [len(rows) for rows in rows_by_client(make_task(labels), "iid", clients, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_dirichlet_with_huge_alpha_gives_equal_class_mixes() -> None:
    task = make_task(np.arange(6000) % 5)
    assert abs(class_counts(task, rows_by_client(task, "dirichlet", 10, alpha=1e6)) - 120).max() <= 2


def test_dirichlet_with_tiny_alpha_gives_each_class_to_one_client() -> None:
    task = make_task(np.arange(3000) % 30)
    counts = class_counts(task, rows_by_client(task, "dirichlet", 4, alpha=1e-3, min_examples=1))
    assert (counts.max(axis=0) >= 95).mean() > 0.9


def test_dirichlet_rounding_is_fair_with_fewer_rows_than_clients() -> None:
    task = make_task(np.arange(200) % 10)
    sizes = [len(rows) for rows in rows_by_client(task, "dirichlet", 100, alpha=1e6, min_examples=1)]
    assert max(sizes) <= 6  # cutting every class at whole numbers gives 10 to a fifth of the clients, and 0 to the rest


@given(seed=seeds, min_examples=st.integers(8, 15), kind=st.sampled_from(["dirichlet", "quantity"]))
@quick
def test_every_client_gets_min_examples(seed: int, min_examples: int, kind: str) -> None:
    task = make_task(np.arange(300) % 3)
    assert min(map(len, rows_by_client(task, kind, 5, seed, alpha=1.0, min_examples=min_examples))) >= min_examples


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("kind", "classes"), [("dirichlet", 2), ("quantity", 1)])
def test_shares_follow_a_dirichlet_distribution(kind: str, classes: int) -> None:
    alpha, clients, rows = 0.8, 4, 3000
    task = make_task(np.arange(rows) % classes)
    shares = [
        class_counts(task, rows_by_client(task, kind, clients, seed, alpha=alpha, min_examples=1))[1, 0]
        * classes
        / rows
        for seed in range(300)
    ]
    assert stats.kstest(shares, stats.beta(alpha, alpha * (clients - 1)).cdf).pvalue > 0.01


def test_quantity_split_skews_sizes_but_not_labels() -> None:
    task = make_task(np.arange(20_000) % 4)
    counts = class_counts(task, rows_by_client(task, "quantity", 10, seed=3, alpha=0.5, min_examples=1))
    sizes = counts.sum(axis=1)
    assert sizes.max() > 5 * sizes.min()
    assert stats.chi2_contingency(counts[sizes > 40]).pvalue > 0.01


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    clients=st.integers(1, 20),
    each=st.integers(1, 4),
    seed=seeds,
)
@settings(max_examples=100, deadline=None)
def test_pathological_gives_the_exact_number_of_classes_or_is_refused(
    counts: list[int], clients: int, each: int, seed: int
) -> None:
    rows = np.array(counts)
    task = make_task(np.repeat(np.arange(len(rows)), rows))
    possible = each <= len(rows) <= clients * each <= np.minimum(rows, clients).sum()
    if not possible:
        with pytest.raises(DataError):
            rows_by_client(task, "pathological", clients, seed, classes_per_client=each)
        return
    dealt = class_counts(task, rows_by_client(task, "pathological", clients, seed, classes_per_client=each))
    assert ((dealt > 0).sum(axis=1) == each).all()
    assert (dealt.sum(axis=0) == rows).all()
    for share in dealt.T:
        assert share.max() - share[share > 0].min() <= 1


def test_pathological_pairs_classes_uniformly() -> None:
    task = make_task(np.arange(4000) % 4)
    counts = sum(
        (
            held := (
                class_counts(task, rows_by_client(task, "pathological", 40, seed, classes_per_client=2)) > 0
            ).astype(int)
        ).T
        @ held
        for seed in range(20)
    )
    pairs = counts[np.triu_indices(4, 1)]  # 6 pairs, 800 clients
    assert stats.chisquare(pairs).pvalue > 0.01


@given(
    values=st.lists(st.text(alphabet="aA _-.é/\\0'", max_size=4), min_size=1, max_size=12, unique=True),
    per_value=st.integers(1, 3),
    seed=seeds,
)
@quick
def test_by_column_gives_each_value_its_own_clients(values: list[str], per_value: int, seed: int) -> None:
    column = np.array(values)[np.arange(7 * len(values)) % len(values)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing values and of values with the same name
        task = make_task(np.zeros(len(column)), site=column)
        federation = split(task, "by_column", key=Key(seed), column="site", per_value=per_value)
    partition = partition_of(federation)
    owned = [set(column[rows]) for rows in np.split(partition.rows, partition.offsets[1:-1])]
    assert all(len(values) == 1 for values in owned)
    assert len(set(federation.clients)) == len(federation.clients) == per_value * len(set(column))
    assert all(re.fullmatch(r"[\w-][\w.-]*", client) for client in federation.clients)
    assert set(partition.sizes()) <= {7 // per_value, -(-7 // per_value)}


@given(values=st.lists(st.integers(0, 30), min_size=20, max_size=80), clients=st.integers(1, 3), seed=seeds)
@quick
def test_groups_are_kept_whole_and_distributed_evenly(values: list[int], clients: int, seed: int) -> None:
    column = np.array(["a", "b", "c", *map(str, values)])
    task = make_task(np.zeros(len(column)), patient=column)
    partition = partition_of(split(task, "groups", clients, key=Key(seed), column="patient"))
    owned = [set(column[rows]) for rows in np.split(partition.rows, partition.offsets[1:-1])]
    assert sum(map(len, owned)) == len(set(column))  # no value has two owners
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_by_column_names_clients_after_the_values() -> None:
    column = ["art painting", "photo", "photo", "art/painting"]
    task = make_task([0, 0, 0, 0], domain=column)
    told = "the values 'art painting' and 'art/painting' of column 'domain' become the clients 'art_painting' and 'art_"
    with pytest.warns(UserWarning, match=told):
        federation = split(task, "by_column", key=Key(0), column="domain")
    assert list(federation.clients) == ["art_painting", "art_painting_2", "photo"]
    task = make_task([0, 0, 0, 0], writer=[7, 7, 3, 3])
    assert list(split(task, "by_column", key=Key(0), column="writer", per_value=2).clients) == [
        "3-0",
        "3-1",
        "7-0",
        "7-1",
    ]


def test_rows_without_a_value_are_counted_in_a_warning() -> None:
    task = make_task([0] * 6, site=["north", "", "north", "", "", "south"])
    told = "3 of 6 train rows of toy have no value in column 'site'; they become the client 'unnamed'; fill them in"
    with pytest.warns(UserWarning, match=told):
        federation = split(task, "by_column", key=Key(0), column="site")
    assert list(federation.clients) == ["unnamed", "north", "south"]
    with pytest.warns(UserWarning, match="3 of 6 train rows .*; they stay together as one group"):
        split(task, "groups", 2, key=Key(0), column="site")


@pytest.mark.parametrize(
    ("kind", "clients", "options", "message"),
    [
        (
            "iid",
            3,
            {"tset": 0.1},
            "unknown key 'split.tset'; did you mean 'test'. It can be: test, shots, unseen, clients, reorder_size, "
            "orders, reorder, validation;",
        ),
        ("dirichlt", 3, {}, "unknown split 'dirichlt'; did you mean 'dirichlet'"),
        ("dirichlet", 3, {"alpa": 1.0}, "'split.alpa'; did you mean 'alpha'"),
        ("dirichlet", 3, {}, "'split.alpha' is missing"),
        ("quantity", 3, {"alpha": "1"}, "split.alpha is '1'; it must be a number"),
        ("iid", None, {}, "'split.clients' is missing"),
        ("iid", 3, {"alpha": 1.0}, "unknown key 'split.alpha'"),
        ("by_column", 3, {"column": "domain"}, "unknown key 'split.clients'"),
    ],
)
def test_unknown_split_and_options_are_refused(
    kind: str, clients: int | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        split(make_task(np.arange(60) % 3, domain=domain_column(60)), kind, clients, key=Key(0), **options)


@pytest.mark.parametrize(
    ("kind", "clients", "options", "message"),
    [
        ("dirichlet", 3, {"alpha": 0}, "alpha is 0; .*above 0"),
        ("dirichlet", 3, {"alpha": float("nan")}, "alpha is nan"),
        ("quantity", 3, {"alpha": -1.0}, "alpha is -1.0; .*above 0"),
        ("dirichlet", 7, {"alpha": 1.0}, "7 clients with at least 10 .*toy has 60; use at most 6 clients"),
        (
            "dirichlet",
            9,
            {"alpha": 0.01, "min_examples": 4},
            r"at least 4 examples, .* 'c\d' got [0-3]; use fewer",
        ),
        ("iid", 61, {}, "61 clients .*toy has 60; use at most 60 clients"),
        ("iid", 0, {}, "clients is 0"),
        ("pathological", 3, {"classes_per_client": 4}, "classes_per_client = 4.* 3 classes; use at most 3"),
        (
            "disjoint",
            4,
            {},
            "have 3 classes, too few for 4 clients .* use at most 3 clients, or the split 'pathological'",
        ),
        ("pathological", 2, {"classes_per_client": 1}, "do not cover all .* classes; use at least 3 clients"),
        ("pathological", 50, {"classes_per_client": 2}, "100 class shares, .* for 60; use fewer"),
        ("by_column", None, {"column": "domian"}, "toy has no column 'domian'; did you mean 'domain'"),
        ("groups", 4, {"column": "domain"}, "column 'domain' has 3 values, too few for 4 clients"),
        ("groups", 2, {"column": "domian"}, "toy has no column 'domian'; did you mean 'domain'"),
        (
            "by_column",
            None,
            {"column": "domain", "per_value": 21},
            "per_value = 21, but the value 'art' .* 20 examples",
        ),
    ],
)
def test_impossible_splits_are_refused_with_a_remedy(
    kind: str, clients: int | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((DataError, OptionError), match=message):
        split(make_task(np.arange(60) % 3, domain=domain_column(60)), kind, clients, key=Key(0), **options)


def test_label_splits_need_one_class_per_example() -> None:
    tags = Table({"x": torch.zeros(20, 1)}, torch.zeros(20, 4, dtype=torch.int64))
    task = Task("tags", tags, tags, ("O",))
    assert len(split(task, "iid", 2, key=Key(0)).clients) == 2
    with pytest.raises(DataError, match=r"shape \(20, 4\).*one class per example"):
        split(task, "dirichlet", 2, key=Key(0), alpha=1.0)


def test_flwr_split_names_the_extra_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flwr_datasets.partitioner", raising=False)
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(DataError, match=r"pip install 'partita\[flwr-datasets\]'"):
        split(make_task([0, 1]), "flwr", 2, key=Key(0), partitioner="IidPartitioner")


@needs_flwr
def test_flwr_split_equals_the_flwr_partitioner() -> None:
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = np.arange(300) % 3
    theirs = DirichletPartitioner(3, "label", 1.0, seed=(Key(5) / "flwr").seed() % 2**32)
    theirs.dataset = Dataset.from_dict({"label": labels, "row": np.arange(300)})
    expected = [sorted(theirs.load_partition(i)["row"]) for i in range(3)]
    dealt = rows_by_client(
        make_task(labels), "flwr", 3, seed=5, partitioner="DirichletPartitioner", options={"alpha": 1.0}
    )
    assert [rows.tolist() for rows in dealt] == expected


@needs_flwr
def test_flwr_split_supports_columns_and_partial_rows() -> None:
    task = make_task(np.arange(60) % 3, domain=domain_column(60))
    natural = rows_by_client(task, "flwr", None, partitioner="NaturalIdPartitioner", options={"partition_by": "domain"})
    assert sorted(len(rows) for rows in natural) == [20, 20, 20]
    with pytest.warns(UserWarning, match="sum of partition sizes"):
        some = rows_by_client(task, "flwr", None, partitioner="SizePartitioner", options={"partition_sizes": [5, 7]})
    assert [len(rows) for rows in some] == [5, 7]
    assert len(set(np.concatenate(some))) == 12


@needs_flwr
@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        (3, {"partitioner": "ShardPartitoner"}, "did you mean 'ShardPartitioner'"),
        (3, {"partitioner": "VerticalEvenPartitioner"}, "no row partitioner 'VerticalEvenPartitioner'"),
        (3, {"partitioner": "IidPartitioner", "options": {"num_partition": 1}}, "did you mean 'num_partitions'"),
        (3, {"partitioner": "DirichletPartitioner"}, "needs 'alpha'; set split.options.alpha"),
        (None, {"partitioner": "IidPartitioner"}, "needs 'num_partitions'; set split.clients"),
        (3, {"partitioner": "NaturalIdPartitioner"}, "remove clients = 3"),
        (None, {"partitioner": "NaturalIdPartitioner", "options": {"partition_by": "domian"}}, "did you mean 'domain'"),
    ],
)
def test_flwr_split_refuses_invalid_options(clients: int | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, OptionError), match=message):
        split(make_task(np.arange(60) % 3, domain=domain_column(60)), "flwr", clients, key=Key(0), **options)


def entropy_and_spread(task: Task, dealt: list[np.ndarray]) -> tuple[float, float]:
    """The mean entropy of a client's labels, and the spread of sizes as a part of the mean size."""
    counts = class_counts(task, dealt)
    sizes = counts.sum(axis=1)
    return float(stats.entropy(counts, axis=1).mean()), float(sizes.std() / sizes.mean())


@needs_flwr
@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_dirichlet_agrees_with_flwr_datasets(alpha: float) -> None:
    task = make_task(np.arange(2000) % 5)
    bridge = {"partitioner": "DirichletPartitioner", "options": {"alpha": alpha, "min_partition_size": 1}}
    ours = np.array(
        [
            entropy_and_spread(task, rows_by_client(task, "dirichlet", 8, s, alpha=alpha, min_examples=1))
            for s in range(100)
        ]
    )
    theirs = np.array([entropy_and_spread(task, rows_by_client(task, "flwr", 8, s, **bridge)) for s in range(12)])
    error = np.sqrt(ours.var(axis=0) / len(ours) + theirs.var(axis=0) / len(theirs))
    assert (abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 3 * error).all()


@needs_flwr
def test_pathological_agrees_with_flwr_datasets_with_more_even_classes() -> None:
    task, clients, repeats = make_task(np.arange(1000) % 5), 20, 10

    def pairs(kind: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        held = (
            np.concatenate(
                [class_counts(task, rows_by_client(task, kind, clients, s, **options)) > 0 for s in range(repeats)]
            )
            * 1
        )
        sharers = held.reshape(repeats, clients, 5).sum(axis=1)  # (repeat, class)
        return (held.T @ held)[np.triu_indices(5, 1)], sharers

    ours, even = pairs("pathological", classes_per_client=2)
    theirs, uneven = pairs("flwr", partitioner="PathologicalPartitioner", options={"num_classes_per_partition": 2})
    assert ours.sum() == theirs.sum() == clients * repeats  # two classes each, so one pair a client
    assert stats.chi2_contingency([ours, theirs]).pvalue > 0.01
    assert even.std() == 0 < uneven.std()  # ours: a class is shared by equally many; theirs: each client draws alone


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("iid", {}),
        ("dirichlet", {"alpha": 1.0, "min_examples": 1}),
        ("quantity", {"alpha": 10.0, "min_examples": 1}),
        ("pathological", {"classes_per_client": 2}),
    ],
)
def test_split_into_ten_thousand_clients_is_fast(kind: str, options: dict[str, Any]) -> None:
    task = make_task(np.arange(200_000) % 10)
    start = time.process_time()
    assert len(split(task, kind, 10_000, key=Key(0), **options).clients) == 10_000
    assert time.process_time() - start < 2  # a loop over clients and rows takes ten times as long


def test_split_cases_cover_every_split() -> None:
    assert set(SPLITS) == {*KINDS, "flwr", "site"}


@quick
@given(seed=seeds, clients=st.integers(1, 9), more=st.integers(0, 9), rows=st.integers(1, 4))
def test_disjoint_gives_each_class_to_one_client_and_each_client_as_many(
    seed: int, clients: int, more: int, rows: int
) -> None:
    task = make_task(np.repeat(np.arange(clients + more), rows))
    counts = class_counts(task, rows_by_client(task, "disjoint", clients, seed))  # (client, class)
    assert (counts.sum(0) == rows).all()
    assert ((counts > 0).sum(0) == 1).all()
    held = (counts > 0).sum(1)
    assert held.max() - held.min() <= 1
