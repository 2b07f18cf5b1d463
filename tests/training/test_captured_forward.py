"""Evaluations that replay captured passes give the scores of eager ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from graph_fixtures import ReplayingRecorder, small_vit_run
from torch import Tensor

from partita import SimulationEngine, rounds
from partita.core import tensors
from partita.core.data import Batch
from partita.core.model import Forward, Model, Output
from partita.core.optim import AdamW
from partita.core.rounds import make_job
from partita.core.tensors import Tensors
from partita.evaluation import Evaluation, evaluate
from partita.training import captured_forward
from partita.training.captured_forward import CapturedForward
from partita.training.cuda_graphs import GraphCache, GraphError


@dataclass
class Recorder:
    """As a graph: each replay computes again from the same tensors into the same tensors."""

    replayed: list[str] = field(default_factory=list)
    recorded: int = 0

    def __call__(self, work: Callable[[], Any], what: str) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        results = tuple(torch.full_like(each, torch.nan) for each in work())

        def replay() -> None:
            self.replayed.append(what)
            for result, found in zip(results, work(), strict=True):
                result.copy_(found)

        return replay, results


class Linear(Model):
    """Logits that depend on parameters and inputs. Its losses read the features."""

    name = "linear"
    tags = {"w": frozenset({"head"})}  # noqa: RUF012

    def __init__(self) -> None:
        self.initial = {"w": torch.linspace(-1, 1, 6).view(2, 3)}
        self.calls = 0

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        self.calls += 1
        return Output(inputs["x"] @ params["w"].T, inputs["x"].square())

    def losses(self, out: Output, targets: Tensor) -> Tensor:
        assert out.features is not None
        return out.features.sum(1) + targets + out.logits[:, 0]


def batch(number: int, size: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(number)
    return Batch({"x": torch.randn(size, 3, generator=draw)}, torch.arange(size) % 2)


def exact(model: Model, params: Tensors, given: Batch) -> tuple[Tensor, Tensor]:
    out = model(params, given.inputs)
    return out.logits, model.losses(out, given.targets)


def check(forward: Forward, model: Model, params: Tensors, given: Batch) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        found = forward(model, params, given.inputs, given.targets)
        expected = exact(model, params, given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return found


def test_replays_read_new_parameters_and_new_batches() -> None:
    recorder, model = Recorder(), Linear()
    forward = CapturedForward(recorder)
    results = [
        check(forward, model, {"w": model.initial["w"] + number}, batch(number, size))
        for number in range(6)
        for size in (4, 3)
    ]
    assert recorder.recorded == 2  # one for each size of batch
    assert recorder.replayed == ["the evaluation of linear"] * 8  # all but two of each size
    assert len({tensors.digest({"": logits}) for logits, _ in results}) == len(results)  # none is overwritten


def test_parameters_that_change_in_place_are_read_again() -> None:
    recorder, model = Recorder(), Linear()
    forward, params = CapturedForward(recorder), dict(model.initial)
    for number in range(5):
        check(forward, model, params, batch(0))
        params["w"].add_(number)
    assert len(recorder.replayed) == 3


def test_other_models_and_other_shapes_of_parameters_run_eagerly() -> None:
    recorder, model, other = Recorder(), Linear(), Linear()
    forward = CapturedForward(recorder)
    for number in range(4):
        check(forward, model, model.initial, batch(number))
        check(forward, other, other.initial, batch(number))
        check(forward, model, {"w": torch.ones(5, 3)}, batch(number))
    assert recorder.recorded == 1
    assert len(recorder.replayed) == 2


def test_batches_of_many_shapes_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_forward, "MAX_SHAPES", 2)
    recorder, model = Recorder(), Linear()
    forward = CapturedForward(recorder)
    for number in range(4):
        for size in (5, 4, 3):
            check(forward, model, model.initial, batch(number, size))
    assert recorder.recorded == 2
    assert len(recorder.replayed) == 4


def test_large_outputs_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_forward, "MAX_LOGITS", 2 * 8)
    recorder, model = Recorder(), Linear()
    forward = CapturedForward(recorder)
    for number in range(4):
        check(forward, model, model.initial, batch(number, 9))
    assert recorder.recorded == 0
    for number in range(4):
        check(forward, model, model.initial, batch(number, 8))
    assert recorder.recorded == 1


def scores_of(graphs: GraphCache | None) -> list[Any]:
    """The scores on the central test set after each round, and those of the clients' own tests."""
    run, model, federation = small_vit_run("fedper", AdamW(), 4)
    engine = SimulationEngine(run, model, federation, 4, graphs=graphs)
    found: list[Any] = []
    for result in rounds(run, model, engine):
        forward = {"forward": graphs.forward} if graphs else {}
        tested: Evaluation = evaluate(model, result.server.params, federation.test, **forward)
        jobs = [make_job(run, model, result.server, result.number, client)[0] for client in federation.clients]
        found.append((tested.scores, dict(engine.evaluate(jobs))))
    return found


@pytest.mark.slow
def test_the_scores_of_a_run_are_those_of_eager_passes() -> None:
    class Both(ReplayingRecorder):
        """Records steps, which return a tensor, and evaluations, which return two."""

        replayed = 0

        def __call__(self, work: Callable[[], Any]) -> Any:
            if not torch.is_inference_mode_enabled():
                return super().__call__(work)
            recorder = Recorder()
            replay, results = recorder(work, "")

            def count() -> None:
                self.replayed += 1
                replay()

            return count, results

    recorder = Both()
    recorded = scores_of(GraphCache(recorder))
    assert recorder.replayed > 5
    for (test, personal), (eager_test, eager_personal) in zip(recorded, scores_of(None), strict=True):
        assert test == pytest.approx(eager_test, rel=1e-4)
        for client, scores in eager_personal.items():
            assert personal[client] == pytest.approx(scores, rel=1e-4)


def test_a_failed_capture_names_the_evaluation() -> None:
    def refuse(work: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted")

    model = Linear()
    lenient, strict = GraphCache(refuse, strict=False).forward, GraphCache(refuse).forward
    for number in range(2):
        check(lenient, model, model.initial, batch(number))
        check(strict, model, model.initial, batch(number))
    with pytest.warns(UserWarning, match="the evaluation of linear cannot be captured"):
        check(lenient, model, model.initial, batch(2))
    check(lenient, model, model.initial, batch(3))
    with pytest.raises(GraphError, match=r"evaluation of linear.*not permitted; set engine.cuda_graphs = false"):
        check(strict, model, model.initial, batch(2))
