"""The outcomes of a model on each example, by kind of task: which numbers to keep, and how scores follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse

from partita.core.data import IGNORE_INDEX
from partita.evaluation.answers import Answers, Choices, exact_answers
from partita.evaluation.bootstrap import Floats
from partita.evaluation.calibration import BINS, Reliability, bins_of
from partita.evaluation.entities import TagScheme
from partita.evaluation.generation import ROUGE, WORDS, GeneratedText, ModelPredictions, match, rouge_rows
from partita.evaluation.metrics import (
    TYPE_SCORES,
    Accuracy,
    Entities,
    Evaluator,
    MultiLabel,
    NextToken,
    Predictions,
    Regression,
    SingleLabel,
    type_score,
)
from partita.evaluation.outcomes import (
    Confusion,
    Formula,
    Outcomes,
    Ranked,
    Recomputed,
    Totals,
    by_class,
    class_mean,
    ratio,
)
from partita.evaluation.own_metrics import OwnMetrics, join_batches
from partita.evaluation.segmentation import Segmentation


def outcomes(evaluator: Evaluator, batches: Iterator[Predictions], classes: Sequence[str]) -> Outcomes:
    """Keep what a model does on each example.

    Args:
        evaluator: The task's evaluator, which says which scores there are.
        batches: The predictions.
        classes: The names of the task's outputs.
    """
    names = tuple(classes)
    if isinstance(evaluator, OwnMetrics):
        seen: list[Predictions] = []
        inner = outcomes(evaluator.evaluator, _watched(batches, seen), names)
        return Outcomes(
            inner.columns,
            inner.formulas,
            (*inner.others, _recomputed(evaluator.own_scores, seen)),
            inner.classes,
            inner.confusion,
        )
    if isinstance(evaluator, Accuracy | SingleLabel):
        return _single_label(batches, names)
    if isinstance(evaluator, MultiLabel):
        return _multi_label(batches, names)
    if isinstance(evaluator, Entities):
        return _entities(batches, evaluator)
    if isinstance(evaluator, Regression):
        return _regression(batches, names)
    if isinstance(evaluator, Segmentation):
        return _segmentation(batches, names)
    for kind, extra in _TOKEN_SCORES.items():
        if isinstance(evaluator, kind):
            return _per_token(batches, evaluator, extra)
    seen = list(batches)
    made = _recomputed(lambda batch: evaluator(iter([batch])), seen)
    return Outcomes({"count": _dense(np.ones((len(made), 1)))}, (), (made,), names)


def _watched(batches: Iterator[Predictions], seen: list[Predictions]) -> Iterator[Predictions]:
    for batch in batches:
        seen.append(Predictions(batch.logits.cpu(), batch.targets.cpu(), batch.losses.cpu()))
        yield batch


def _recomputed(function: Callable[[Predictions], Mapping[str, float]], seen: Sequence[Predictions]) -> Recomputed:
    parts = ([getattr(batch, name).cpu() for batch in seen] for name in ("logits", "targets", "losses"))
    return Recomputed(function, *map(join_batches, parts))


# --- classification -------------------------------------------------------------------------------------------------


def _single_label(batches: Iterator[Predictions], classes: tuple[str, ...]) -> Outcomes:
    parts = [(batch.logits.cpu().double(), batch.targets.cpu(), batch.losses.cpu().double()) for batch in batches]
    logits, targets, losses = (torch.cat(each) for each in zip(*parts, strict=True))
    probabilities, guesses = logits.softmax(1), logits.argmax(1)
    count, size = len(targets), len(classes)
    squared = (probabilities - torch.nn.functional.one_hot(targets, size)).square().sum(1)
    sure = probabilities.gather(1, guesses.unsqueeze(1)).squeeze(1)
    rows = torch.arange(count)
    right = guesses == targets
    columns = {
        "mean": _dense(torch.stack([torch.ones(count, dtype=torch.double), right.double(), losses, squared], 1)),
        "true": _places(rows, targets, count, size),
        "predicted": _places(rows, guesses, count, size),
        "hits": _places(rows[right], targets[right], count, size),
        **_bins(rows, sure, right, count),
    }
    truth = torch.nn.functional.one_hot(targets, size).bool().numpy()
    ranked = Ranked(truth, probabilities.numpy(), classes, precision=False)
    counts = torch.bincount(targets * size + guesses, minlength=size * size).view(size, size).numpy()
    return Outcomes(
        columns,
        (_means("accuracy", "loss", "brier"), _class_formula(classes), _calibration_error),
        (ranked,),
        classes,
        Confusion(classes, counts, "examples"),
    )


def _multi_label(batches: Iterator[Predictions], classes: tuple[str, ...]) -> Outcomes:
    parts = [(batch.logits.cpu().double(), batch.targets.cpu(), batch.losses.cpu().double()) for batch in batches]
    logits, targets, losses = (torch.cat(each) for each in zip(*parts, strict=True))
    truth, told = targets.bool(), logits > 0  # (example, class)
    probabilities = logits.sigmoid()
    count = len(targets)
    ones = torch.ones(count, dtype=torch.double)
    squared = (probabilities - truth.double()).square().mean(1)
    rows = torch.arange(count).unsqueeze(1).expand_as(truth)
    columns = {
        "mean": _dense(torch.stack([ones, losses, squared], 1)),
        "true": _sparse(truth),
        "predicted": _sparse(told),
        "hits": _sparse(truth & told),
        **_bins(rows.reshape(-1), probabilities.reshape(-1), truth.reshape(-1), count),
    }
    return Outcomes(
        columns,
        (_means("loss", "brier"), _class_formula(classes), _calibration_error),
        (Ranked(truth.numpy(), logits.numpy(), classes, precision=True),),
        classes,
    )


def _class_formula(classes: tuple[str, ...]) -> Formula:
    def scores(totals: Totals) -> dict[str, Floats]:
        hits, true, predicted = totals["hits"], totals["true"], totals["predicted"]  # (weighting, class)
        both = true + predicted
        f1 = ratio(2 * hits, both)
        precision, recall = (np.where(both > 0, ratio(hits, of, 0.0), np.nan) for of in (predicted, true))
        return {
            "macro_f1": class_mean(f1),
            "micro_f1": ratio(2 * hits.sum(1), both.sum(1)),
            **by_class("examples", classes, true),
            **by_class("precision", classes, precision),
            **by_class("recall", classes, recall),
            **by_class("f1", classes, f1),
        }

    return scores


def _entities(batches: Iterator[Predictions], evaluator: Entities) -> Outcomes:
    scheme = TagScheme(evaluator.tags)
    types, kinds = len(scheme.types), torch.from_numpy(scheme.type_of) + 1  # 0 is no entity
    counts: list[list[int]] = []  # of each sentence: true, predicted, exact and overlapping entities of each type
    tokens: list[list[float]] = []
    places, sure, right = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    confusion = torch.zeros(types + 1, types + 1, dtype=torch.long)
    for batch in batches:
        logits, targets, losses = batch.logits.cpu().double(), batch.targets.cpu(), batch.losses.cpu().double()
        guesses, valid = logits.argmax(-1), targets != IGNORE_INDEX
        top = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        truth = torch.nn.functional.one_hot(targets.clamp(min=0), logits.shape[-1])
        squared = (logits.softmax(-1) - truth).square().sum(-1)
        number = valid.sum(1)
        hits = (guesses == targets) & valid
        rows = torch.arange(len(targets)).unsqueeze(1).expand_as(targets) + len(counts)
        places.append(rows[valid])
        sure.append(top[valid])
        right.append(hits[valid])
        pairs = kinds[targets[valid]] * (types + 1) + kinds[guesses[valid]]
        confusion += torch.bincount(pairs, minlength=(types + 1) ** 2).view_as(confusion)
        sums = (number, hits.sum(1), losses * number, (squared * valid).sum(1))
        tokens += torch.stack([each.double() for each in sums], 1).tolist()
        for own, true, told in zip(valid, targets, guesses, strict=True):
            first = np.zeros(int(own.sum()), dtype=bool)
            first[:1] = True
            found = scheme.count(*(scheme.spans(tags[own].numpy(), first) for tags in (true, told)))
            counts.append([value for each in found for value in vars(each).values()])
    total = len(counts)
    columns = {
        "mean": _dense(np.array(tokens)),
        "entities": _dense(np.array(counts, np.float64).reshape(total, -1)),
        **_bins(torch.cat(places), torch.cat(sure), torch.cat(right), total),
    }
    return Outcomes(
        columns,
        (_means("accuracy", "loss", "brier"), _entity_formula(scheme.types), _calibration_error),
        classes=scheme.types,
        confusion=Confusion(("O", *scheme.types), confusion.numpy(), "words"),
    )


def _entity_formula(types: tuple[str, ...]) -> Formula:
    def scores(totals: Totals) -> dict[str, Floats]:
        sums = totals["entities"]
        by_type = sums.reshape(len(sums), len(types), 4)  # (weighting, type, count)
        found = _rates(by_type.sum(1))
        for place, name in enumerate(types):
            own = _rates(by_type[:, place])
            found[type_score("entities", name)] = by_type[:, place, 0]
            found |= {type_score(metric, name): own[metric] for metric in TYPE_SCORES}
        return found

    return scores


def _rates(counts: Floats) -> dict[str, Floats]:
    """Return the scores of entities from their counts, (weighting, 4), as `Counts.scores` does."""
    true, predicted, *right = counts.T
    defined = true + predicted > 0
    scores = {}
    for prefix, hits in zip(("", "relaxed_"), right, strict=True):
        found = (ratio(hits, predicted, 0.0), ratio(hits, true, 0.0), ratio(2 * hits, true + predicted, 0.0))
        for metric, values in zip(("precision", "recall", "f1"), found, strict=True):
            scores[prefix + metric] = np.where(defined, values, np.nan)
    return scores


def _segmentation(batches: Iterator[Predictions], classes: tuple[str, ...]) -> Outcomes:
    size = len(classes)
    matrices, means, bins = list[torch.Tensor](), list[list[float]](), list[torch.Tensor]()
    for batch in batches:
        targets = batch.targets.long()
        labeled = targets != IGNORE_INDEX
        guesses = batch.logits.argmax(1)
        top = (batch.logits.amax(1) - batch.logits.logsumexp(1)).exp()
        for own, true, told, sure, loss in zip(labeled, targets, guesses, top, batch.losses.tolist(), strict=True):
            pairs = true[own] * size + told[own]
            matrices.append(torch.bincount(pairs, minlength=size * size).cpu())
            right, place = (true == told)[own].double(), bins_of(sure[own])
            weights = (torch.ones_like(right), sure[own].double(), right)
            # On the CPU: a weighted count has no deterministic CUDA kernel.
            bins.append(torch.cat([torch.bincount(place.cpu(), each.cpu(), BINS) for each in weights]))
            means.append([1.0, loss])
    counts = torch.stack(matrices)  # (image, true class x predicted class)
    confusion = counts.sum(0).view(size, size).numpy()
    columns = {
        "mean": _dense(np.array(means)),
        "pixels": _dense(counts),
        "bins": _dense(torch.stack(bins)),
    }

    def scores(totals: Totals) -> dict[str, Floats]:
        matrix = totals["pixels"].reshape(-1, size, size)
        hits, both = matrix.diagonal(axis1=1, axis2=2), matrix.sum(1) + matrix.sum(2)  # (weighting, class)
        overlap, dice = ratio(hits, both - hits), ratio(2 * hits, both)
        return {
            "mean_iou": class_mean(overlap),
            "dice": class_mean(dice),
            "accuracy": ratio(hits.sum(1), matrix.sum((1, 2))),
            **by_class("pixels", classes, matrix.sum(2)),
            **by_class("iou", classes, overlap),
            **by_class("dice", classes, dice),
        }

    return Outcomes(
        columns,
        (_means("loss"), scores, _calibration_error),
        classes=classes,
        confusion=Confusion(classes, confusion, "pixels"),
    )


# --- numbers and texts ----------------------------------------------------------------------------------------------


def _regression(batches: Iterator[Predictions], names: tuple[str, ...]) -> Outcomes:
    parts = [(batch.logits.cpu().double(), batch.targets.cpu().double(), batch.losses.cpu()) for batch in batches]
    predictions, targets, losses = (torch.cat(each) for each in zip(*parts, strict=True))
    errors, centered = predictions - targets, targets - targets.mean(0)  # (example, target); centered for precision
    columns = {
        "mean": _dense(torch.stack([torch.ones(len(errors), dtype=torch.double), losses.double()], 1)),
        "squared": _dense(errors.square()),
        "absolute": _dense(errors.abs()),
        "targets": _dense(centered),
        "targets_squared": _dense(centered.square()),
    }

    def scores(totals: Totals) -> dict[str, Floats]:
        count = totals["mean"][:, :1]
        mse, mae = totals["squared"] / count, totals["absolute"] / count
        spread = totals["targets_squared"] - totals["targets"] ** 2 / count
        varies = spread > 1e-12 * totals["targets_squared"].clip(min=1e-300)
        r2 = np.where(varies, 1 - ratio(totals["squared"], np.where(varies, spread, np.nan)), np.nan)
        found = {"mse": mse.mean(1), "mae": mae.mean(1), "r2": class_mean(r2)}
        if len(names) == 1:
            return found
        return {
            **found,
            **{name: value for metric, each in (("mse", mse), ("mae", mae), ("r2", r2))
               for name, value in by_class(metric, names, each).items()},
        }  # fmt: skip

    return Outcomes(columns, (_means("loss"), scores), classes=names if len(names) > 1 else ())


def _per_token(batches: Iterator[Predictions], evaluator: Evaluator, extra: Callable[..., dict[str, Any]]) -> Outcomes:
    """Keep losses of tokens, and what `extra` says about each example: scores of which the mean is taken."""
    tokens, others = list[list[float]](), dict[str, list[float]]()
    for batch in batches:
        count = (batch.targets != IGNORE_INDEX).sum(1)
        told = extra(evaluator, batch, len(tokens))
        tokens += torch.stack([count.double(), batch.losses.double() * count], 1).tolist()
        for name, values in told.items():
            others.setdefault(name, []).extend(values)
    columns = {"mean": _dense(np.array(tokens))}
    for name, values in others.items():
        given = np.array(values)
        columns[name] = _dense(np.stack([~np.isnan(given), np.nan_to_num(given)], 1))

    def scores(totals: Totals) -> dict[str, Floats]:
        loss = ratio(totals["mean"][:, 1], totals["mean"][:, 0])
        with np.errstate(over="ignore"):
            found = {
                "loss": loss,
                "perplexity": np.where(loss < 700, np.exp(loss), np.where(loss >= 700, np.inf, loss)),
            }
        means = {name: ratio(totals[name][:, 1], totals[name][:, 0]) for name in others}
        words = means.pop(WORDS, None)  # without a word in a target, ROUGE is undefined
        if words is not None:
            means |= {name: np.where(words > 0, means[name], np.nan) for name in ROUGE}
        return {**means, **found}

    return Outcomes(columns, (scores,))


def _nothing(evaluator: Evaluator, batch: Predictions, before: int) -> dict[str, Any]:
    return {}


def _exact(evaluator: Evaluator, batch: Predictions, before: int) -> dict[str, Any]:
    return {"exact_match": exact_answers(batch).double().tolist()}


def _choices(evaluator: Evaluator, batch: Predictions, before: int) -> dict[str, Any]:
    assert isinstance(batch, ModelPredictions)
    chosen = batch.score_choices()
    right = chosen.likelihoods.argmax(1) == chosen.right
    normalized = (chosen.likelihoods / chosen.tokens).argmax(1) == chosen.right
    return {"accuracy": right.double().tolist(), "normalized_accuracy": normalized.double().tolist()}


def _texts(evaluator: GeneratedText, batch: Predictions, before: int) -> dict[str, Any]:
    assert isinstance(batch, ModelPredictions)
    count = len(batch.targets)
    wanted = count if evaluator.examples is None else max(0, min(count, evaluator.examples - before))
    rows: list[dict[str, float]] = []
    if wanted:
        texts, truths = batch.generate(wanted, evaluator.max_new_tokens)
        rows = [
            {**scored, "exact_match": float(match(text, truth))}
            for scored, text, truth in zip(rouge_rows(texts, truths), texts, truths, strict=True)
        ]
    missing = [np.nan] * (count - wanted)
    return {name: [row[name] for row in rows] + missing for name in (*ROUGE, WORDS, "exact_match")}


_TOKEN_SCORES: dict[type, Callable[..., dict[str, Any]]] = {
    NextToken: _nothing,
    Answers: _exact,
    Choices: _choices,
    GeneratedText: _texts,
}


# --- small parts ----------------------------------------------------------------------------------------------------


def _means(*names: str) -> Formula:
    """Return the formula of means: column 0 of the block "mean" counts, the others are summed."""

    def scores(totals: Totals) -> dict[str, Floats]:
        sums = totals["mean"]
        return {name: ratio(sums[:, place], sums[:, 0]) for place, name in enumerate(names, 1)}

    return scores


def _calibration_error(totals: Totals) -> dict[str, Floats]:
    if "bins" not in totals:
        return {}
    counts, sure, right = np.moveaxis(totals["bins"].reshape(-1, 3, BINS), 1, 0)
    return {"ece": Reliability(counts, sure, right).error()}


def _bins(rows: torch.Tensor, sure: torch.Tensor, right: torch.Tensor, count: int) -> dict[str, Any]:
    """Return the block "bins" of predictions: for each bin their number, probabilities and hits."""
    if not bool(sure.isfinite().all()):
        return {}
    place = bins_of(sure)
    values = torch.cat([torch.ones_like(sure), sure, right.to(sure.dtype)])
    where = (torch.cat([rows] * 3), torch.cat([place, place + BINS, place + 2 * BINS]))
    return {"bins": _coo(values, *where, (count, 3 * BINS))}


def _places(rows: torch.Tensor, columns: torch.Tensor, count: int, size: int) -> Any:
    return _coo(torch.ones(len(rows)), rows, columns, (count, size))


def _coo(values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, shape: tuple[int, int]) -> Any:
    made = sparse.coo_array((values.double().numpy(), (rows.numpy(), columns.numpy())), shape)
    return made.tocsr()  # sums what has the same place


def _sparse(block: torch.Tensor) -> Any:
    return sparse.csr_array(block.numpy().astype(np.float64))


def _dense(block: Any) -> Any:
    return sparse.csr_array(np.asarray(block, np.float64))
