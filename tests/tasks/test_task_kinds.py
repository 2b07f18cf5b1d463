"""Every kind of task fits the rooms that look it up: models, reports, transformers."""

from __future__ import annotations

import math
import pickle

import pytest
import transformers

from partita.engines.flower.message_checks import check_scores, valid_scores
from partita.engines.flower.messages import MessageError
from partita.evaluation import METRICS
from partita.models.architectures import ARCHITECTURES
from partita.models.architectures.general import GENERAL
from partita.tasks import KINDS, TaskKind

CLASSES = ("O", "B-Drug", "I-Drug")
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
def test_transformers_has_the_class_and_an_architecture_has_the_head(kind: TaskKind) -> None:
    assert hasattr(getattr(transformers, kind.auto_class), "from_pretrained")
    assert any(kind.head in architecture.heads for architecture in (*ARCHITECTURES.values(), GENERAL))


@kinds
def test_first_metric_of_a_kind_judges_its_runs(kind: TaskKind) -> None:
    evaluator = kind.evaluator(CLASSES)
    assert evaluator.primary == evaluator.metrics[0]
    assert set(evaluator.metrics) <= set(METRICS), "a command knows their names"


@kinds
def test_a_kind_can_be_sent_to_another_process(kind: TaskKind) -> None:
    assert pickle.loads(pickle.dumps(kind)) == kind


@kinds
def test_a_server_takes_the_scores_of_every_kind_and_refuses_what_cannot_be(kind: TaskKind) -> None:
    evaluator = kind.evaluator(CLASSES)
    honest = {metric.name: 0.5 for metric in evaluator.metrics}
    check_scores(honest, evaluator)
    assert valid_scores(honest, evaluator) == honest
    for metric in evaluator.metrics:
        too_much = 1.5 if metric.fraction else math.inf
        with pytest.raises(MessageError, match=f"sent {too_much} for {metric.name}; it must be"):
            check_scores({metric.name: too_much}, evaluator)
    with pytest.raises(MessageError, match="unknown metric"):
        check_scores({"bleu": 0.5}, evaluator)
