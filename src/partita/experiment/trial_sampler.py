"""Which settings the next trial tries, and whether a trial is stopped, decided by Optuna from the trials so far.

Both follow from the recorded trials and the seed alone: the study is rebuilt in memory for every decision. So a
tuning that is killed and started again makes the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from partita.core.options import OptionError
from partita.core.rng import Key
from partita.experiment.search_space import Interval, Space

Search = Literal["tpe", "random", "grid"]
Settings = Mapping[str, str]  # texts by key of the config
TRIES = 10  # draws by the sampler before a setting that is not tried yet is drawn at random
DRAWS = 1000  # random draws for that
optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Outcome:
    """A finished trial as the sampler sees it.

    Attributes:
        settings: What it tried.
        scores: (step, score) of each validation; empty for a failed trial, which counts as worse than all others.
        score: The final score; None if the trial failed or was stopped.
    """

    settings: Settings
    scores: tuple[tuple[int, float], ...] = ()
    score: float | None = None


@dataclass(frozen=True)
class Sampler:
    """Chooses settings.

    Attributes:
        spaces: What may be chosen.
        search: How.
        default: The settings of the first trial. A key that the config leaves out is missing.
        budget: The number of trials.
        higher_is_better: Direction of the score.
        key: Random key. It does not depend on the method, so the methods' first draws of a shared space are alike.
    """

    spaces: tuple[Space, ...]
    search: Search
    default: Settings
    budget: int
    higher_is_better: bool
    key: Key

    def propose(self, earlier: Sequence[Outcome]) -> dict[str, str] | None:
        """Return the settings of the next trial; None if there is nothing left to try.

        Args:
            earlier: All trials so far, in order.
        """
        if not earlier:
            return dict(self.default)
        tried = [dict(outcome.settings) for outcome in earlier]
        if self.search == "grid":
            points = self.grid()
            return points[len(tried) - 1] if len(tried) <= len(points) else None
        if (size := self._size()) is not None and sum(self._inside(settings) for settings in tried) >= size:
            return None
        for attempt in range(DRAWS):
            seed = int.from_bytes((self.key / len(tried) / attempt).digest(4), "big")
            search = self.search if attempt < TRIES else "random"
            drawn = self._draw(RandomSampler(seed) if search == "random" else self._tpe(seed), earlier)
            if drawn not in tried:
                return drawn
        return None

    def grid(self) -> list[dict[str, str]]:
        """Return the points of the grid that are not the default, at most one less than the budget.

        Raises:
            OptionError: If the choices alone need more trials.
        """
        fixed = [space.values for space in self.spaces if not isinstance(space.values, Interval)]
        rest = (self.budget - 1) // math.prod(len(values.values) for values in fixed)
        if rest < 1:
            raise OptionError(
                f"--budget is {self.budget}, but a grid of all choices and the default need "
                f"{1 + math.prod(len(values.values) for values in fixed)} trials; raise it, or use --search random"
            )
        sides = len(self.spaces) - len(fixed)
        count = next(count for count in range(rest, 0, -1) if count**sides <= rest) if sides else 1
        axes = [
            space.values.grid(count) if isinstance(space.values, Interval) else space.values.values
            for space in self.spaces
        ]
        points = [{space.key: text for space, text in zip(self.spaces, point, strict=True)} for point in product(*axes)]
        return [point for point in points if point != self.default]

    def _size(self) -> int | None:
        """Return the number of settings; None if it is not finite."""
        sizes = [space.values.size() for space in self.spaces]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def _inside(self, settings: Settings) -> bool:
        return len(_parameters(self.spaces, settings)) == len(self.spaces)

    def _tpe(self, seed: int) -> BaseSampler:
        return TPESampler(seed=seed, n_startup_trials=max(2, min(10, self.budget // 3)))

    def _draw(self, sampler: BaseSampler, earlier: Sequence[Outcome]) -> dict[str, str]:
        study = _study(self.spaces, earlier, self.higher_is_better, sampler=sampler)
        drawn = study.ask({space.key: _distribution(space) for space in self.spaces}).params
        return {
            space.key: space.values.text(drawn[space.key]) if isinstance(space.values, Interval) else drawn[space.key]
            for space in self.spaces
        }


class Pruner:
    """Stops a trial whose best score so far is worse than the median of the finished trials after the same round.

    Args:
        spaces: The spaces of the method.
        earlier: All trials of the method so far.
        budget: The number of trials.
        rounds: The rounds of a run. No trial is stopped in their first quarter: scores of early rounds are noisy.
        higher_is_better: Direction of the score.
    """

    def __init__(
        self, spaces: Sequence[Space], earlier: Sequence[Outcome], budget: int, rounds: int, higher_is_better: bool
    ) -> None:
        pruner = optuna.pruners.MedianPruner(max(2, min(5, budget // 3)), n_warmup_steps=rounds // 4)
        self.trial = _study(spaces, earlier, higher_is_better, pruner=pruner).ask()

    def stops(self, step: int, score: float) -> bool:
        """Add a score and return whether the trial is stopped."""
        if not math.isfinite(score):
            return False
        self.trial.report(score, step)
        return self.trial.should_prune()


def _study(
    spaces: Sequence[Space], earlier: Sequence[Outcome], higher_is_better: bool, **parts: Any
) -> optuna.study.Study:
    study = optuna.create_study(direction="maximize" if higher_is_better else "minimize", **parts)
    study.add_trials([_frozen(spaces, outcome) for outcome in earlier])
    return study


def _frozen(spaces: Sequence[Space], outcome: Outcome) -> FrozenTrial:
    parameters = _parameters(spaces, outcome.settings)
    return create_trial(
        # Optuna's samplers ignore failed trials; a pruned one without scores counts as the worst.
        state=TrialState.PRUNED if outcome.score is None else TrialState.COMPLETE,
        value=outcome.score,
        params=parameters,
        distributions={space.key: _distribution(space) for space in spaces if space.key in parameters},
        intermediate_values={step: score for step, score in outcome.scores if math.isfinite(score)},
    )


def _parameters(spaces: Sequence[Space], settings: Settings) -> dict[str, Any]:
    """Return the settings that lie in their space; the config's own may not."""

    def values() -> Iterator[tuple[str, Any]]:
        for space in spaces:
            text = settings.get(space.key)
            if isinstance(space.values, Interval):
                if (number := space.values.number(text)) is not None:
                    yield space.key, number
            elif text in space.values.values:
                yield space.key, text

    return dict(values())


def _distribution(space: Space) -> BaseDistribution:
    values = space.values
    if not isinstance(values, Interval):
        return CategoricalDistribution(values.values)
    if values.whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)
