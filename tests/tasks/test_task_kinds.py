"""Every kind of task fits the rooms that look it up: models, reports, transformers."""

from __future__ import annotations

import pickle

import pytest
import transformers

from partita.models.architectures import ARCHITECTURES
from partita.models.architectures.general import GENERAL
from partita.report.load import metric_of
from partita.tasks import KINDS, TaskKind

CLASSES = ("O", "B-Drug", "I-Drug")
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
def test_transformers_has_the_class_and_an_architecture_has_the_head(kind: TaskKind) -> None:
    assert hasattr(getattr(transformers, kind.auto_class), "from_pretrained")
    assert any(kind.head in architecture.heads for architecture in (*ARCHITECTURES.values(), GENERAL))


@kinds
def test_a_report_knows_the_direction_and_the_unit_of_every_metric(kind: TaskKind) -> None:
    """A report imports nothing of the package, so it has a table of its own."""
    evaluator = kind.evaluator(CLASSES)
    assert evaluator.primary in evaluator.metrics
    for metric in evaluator.metrics:
        shown = metric_of([], metric.name)
        assert shown.higher_is_better == metric.higher_is_better, metric
        assert (shown.scale == 100) == metric.fraction, metric


@kinds
def test_a_kind_can_be_sent_to_another_process(kind: TaskKind) -> None:
    assert pickle.loads(pickle.dumps(kind)) == kind
