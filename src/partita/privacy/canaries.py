"""Canary attacks on a run: coin flips decide which canaries are trained on, and an eavesdropper guesses the flips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from partita.core.batch_schedule import count_steps
from partita.core.client import ClientState, Job, client_params
from partita.core.data import Batch, ClientData, Examples, Population, text_lengths
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.group_units import count_groups, groups_of, number_groups
from partita.core.model import Model
from partita.core.rng import Key
from partita.core.rounds import Listener, Reply
from partita.core.settings import Run
from partita.core.tensors import Tensors
from partita.core.update import Update
from partita.privacy.membership import Array

CHUNK = 32  # examples per batch of scoring
MAX_EXAMPLES = 2**31  # maximum number of gradient elements held at once: 8 GiB
TRUST = (1.0, 1e-2, 0.0)  # fractions of the claimed noise variance that the attacker assumes: the claim may be false
RIDGE = 1e-3  # relative to squared gradients of 1: many local steps are not exactly a sum of gradients


@dataclass(frozen=True)
class Canaries:
    """Training examples by client, each with a coin flip that decides whether the example is trained on.

    A canary may also be a whole group, such as a patient, whose examples share one coin. An excluded canary keeps its
    rows in the table and is masked, because the number of examples or groups is public.
    """

    places: dict[str, torch.Tensor]  # row indices of the canaries by client
    coins: dict[str, torch.Tensor]  # bool by client: whether each canary is included
    mislabeled: bool  # canaries have wrong targets, so that only the canary itself can teach them
    classes: int = 0
    owners: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # the canary of each row in `places`, if they are groups

    @property
    def included(self) -> NDArray[np.bool_]:
        """Coin flips of all canaries, in the order of the sorted clients, (canary,)."""
        return np.asarray(torch.cat([self.coins[client] for client in sorted(self.coins)]).numpy())

    def redraw(self, key: Key) -> Canaries:
        """Return the same canaries with new coin flips."""
        coins = {
            client: torch.rand(self.count(client), generator=(key / client).generator()) < 0.5 for client in self.places
        }
        return replace(self, coins=coins)

    def owners_of(self, client: str) -> torch.Tensor:
        """Return the canary of each row in `places`, (row,)."""
        return self.owners.get(client, torch.arange(len(self.places[client])))

    def count(self, client: str) -> int:
        """Return the client's number of canaries."""
        return len(torch.unique(self.owners_of(client)))


def choose_canaries(population: Population, count: int, key: Key, classes: int = 0, by_group: bool = False) -> Canaries:
    """Draw canaries from all clients' training examples, or from their groups.

    Args:
        population: The clients' data.
        count: Number of canaries.
        key: Key of the draw and of the coin flips.
        classes: Number of classes. If above 1, the canaries get a wrong target.
        by_group: Whether a canary is a whole group; the training examples must have groups.

    Raises:
        PrivacyError: If `count` is below 1 or above the number of training examples or groups.
    """
    sizes = {
        client: count_groups(population[client].train) if by_group else len(population[client].train)
        for client in population.clients
    }
    every = [(client, place) for client, size in sizes.items() for place in range(size)]
    if not 0 < count <= len(every):
        what = "groups with training examples" if by_group else "training examples"
        raise PrivacyError(f"{count} canaries are asked for, but there are {len(every)} {what}; ask for fewer")
    places: dict[str, list[int]] = {}
    for client, place in (key / "canaries").sample(every, count):
        places.setdefault(client, []).append(place)
    chosen = {client: torch.tensor(sorted(rows)) for client, rows in places.items()}
    if not by_group:
        return Canaries(chosen, {}, classes > 1, classes).redraw(key / "coins")
    rows, owners = {}, {}
    for client, groups in chosen.items():
        matches = _numbered(population[client].train).unsqueeze(0) == groups.unsqueeze(1)  # (canary, row)
        owners[client], rows[client] = matches.nonzero().unbind(1)
    return Canaries(rows, {}, classes > 1, classes, owners).redraw(key / "coins")


def _numbered(examples: Examples) -> torch.Tensor:
    """Return the group of each example, numbered from 0, (example,)."""
    return torch.from_numpy(number_groups(groups_of(examples).numpy()))


@dataclass(frozen=True)
class _CanaryExamples:
    """A client's examples with the excluded canaries masked out."""

    examples: Examples
    places: torch.Tensor
    coins: torch.Tensor
    canaries: Canaries
    owners: torch.Tensor | None = None  # the canary of each place; None if each place is a canary

    @property
    def groups(self) -> torch.Tensor | None:
        """The group of each example, (example,); None if there are none."""
        return getattr(self.examples, "groups", None)

    def __len__(self) -> int:
        return len(self.examples)

    def lengths(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the number of tokens of each example, (example,); None if the examples are not texts."""
        return text_lengths(self.examples, indices)

    def take(self, indices: torch.Tensor) -> Batch:
        batch = self.examples.take(indices)
        here = (indices.unsqueeze(1) == self.places).nonzero()  # (match, 2): index in the batch, index of the canary
        mask = torch.ones(len(indices)) if batch.mask is None else batch.mask.clone()
        owners = here[:, 1] if self.owners is None else self.owners[here[:, 1]]
        mask[here[:, 0]] *= self.coins[owners].float()
        return Batch(batch.inputs, self._targets(batch.targets, here[:, 0]), mask)

    def all_examples(self) -> Batch:
        """Return all examples, including the excluded canaries."""
        batch = self.examples.take(torch.arange(len(self)))
        return Batch(batch.inputs, self._targets(batch.targets, self.places))

    def canaries_alone(self) -> Batch:
        batch = self.examples.take(self.places)
        return Batch(batch.inputs, self._targets(batch.targets, torch.arange(len(self.places))))

    def _targets(self, targets: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        if not self.canaries.mislabeled:
            return targets
        mislabeled = targets.clone()
        mislabeled[here] = (targets[here] + 1) % self.canaries.classes
        return mislabeled


class CanaryPopulation:
    """A population with canaries among its training examples."""

    def __init__(self, population: Population, canaries: Canaries) -> None:
        self.population, self.canaries = population, canaries

    @property
    def clients(self) -> Sequence[str]:
        return self.population.clients

    def __getitem__(self, client: str) -> ClientData:
        data = self.population[client]
        return data if client not in self.canaries.places else replace(data, train=self.table(client))

    def table(self, client: str) -> _CanaryExamples:
        """Return the training examples of a client that holds canaries."""
        own = self.canaries
        return _CanaryExamples(
            self.population[client].train, own.places[client], own.coins[client], own, own.owners.get(client)
        )


@dataclass
class Eavesdropper(Listener):
    """Scores each canary from the updates of the client that may have trained on it."""

    run: Run
    model: Model
    canary_population: CanaryPopulation
    scores_by_client: dict[str, torch.Tensor] = field(default_factory=dict)  # each (trust, canary)
    jobs: dict[str, Job] = field(default_factory=dict)  # the last one of each client

    def asks(self, job: Job) -> None:
        self.jobs[job.client] = job

    def receives(self, reply: Reply) -> None:
        if isinstance(reply, Update) and reply.client in self.canary_population.canaries.places:
            self._observe(self.jobs[reply.client], reply)

    def _observe(self, job: Job, update: Update) -> None:
        # The eavesdropper does not know the parameters that stay on a client and assumes their initial values.
        _, params = client_params(self.run, self.model, job, ClientState())
        table = self.canary_population.table(job.client)
        private = self.run.method.privacy
        units = count_groups(table) if private is not None and private.group else len(table)
        scores = canary_scores(self.model, params, update.delta, table, self._strength(units), private)
        self.scores_by_client[job.client] = self.scores_by_client.get(job.client, torch.zeros(scores.shape)) + scores

    def _strength(self, units: int) -> float:
        """Return the squared ratio of the noise in an update to the contribution of one included example or group."""
        private, training = self.run.method.privacy, self.run.training
        if private is None:
            return 0.0
        steps = count_steps(units, training, None)
        share = min(1.0, training.batch_size / units)
        return 4 * private.known_noise**2 / (share**2 * steps)

    def scores(self) -> Array:
        """Return the scores, (trust, canary), in the order of `Canaries.included`.

        Canaries of clients that were never sampled score zero.
        """
        canaries = self.canary_population.canaries
        zeros = {client: torch.zeros(len(TRUST), canaries.count(client)) for client in canaries.places}
        parts = [self.scores_by_client.get(client, zeros[client]) for client in sorted(zeros)]
        return np.asarray(torch.cat(parts, 1).numpy(), float)


def canary_scores(
    model: Model,
    params: Tensors,
    delta: Mapping[str, torch.Tensor],
    table: _CanaryExamples,
    noise: float,
    private: PrivacySettings | None,
) -> torch.Tensor:
    """Score how much of a client's step each canary explains, by ridge regression on all units' gradients.

    The attacker knows all examples but not the coin flips. Units are examples, or groups if canaries are groups. The
    contribution of a group is what training makes of it: its clipped mean gradient under privacy by group, the sum of
    its examples' clipped gradients otherwise.

    Args:
        model: The model.
        params: Parameters that the client started from.
        delta: The client's update.
        table: The client's examples.
        noise: Squared ratio of the noise to the contribution of one example.
        private: DP-SGD settings of the run, if any.

    Returns:
        Scores, (trust, canary), one row for each value of `TRUST`.

    Raises:
        PrivacyError: If the gradients of all examples would not fit into memory.
    """
    numbers = len(table) * sum(value.numel() for value in delta.values())
    if numbers > MAX_EXAMPLES:
        raise PrivacyError(
            f"the gradients of {len(table)} examples of {model.name} take {numbers / 2**28:.0f} GiB; audit a run of a "
            "smaller model, or one that trains less of it, or with fewer examples per client"
        )
    gradients = torch.cat(list(gradients_of(model, params, sorted(delta), table.all_examples())))  # (example, number)
    by_group = table.owners is not None
    mean_of_group = by_group and private is not None and private.group
    if mean_of_group:
        gradients = _by_group(table, gradients, mean=True)
    norms = gradients.norm(dim=1, keepdim=True)
    if private is not None:
        gradients = gradients * (private.clip / norms.clamp(min=1e-30)).clamp(max=1.0)
    gradients = gradients / (float(norms.mean()) if private is None else private.clip)
    if by_group and not mean_of_group:
        gradients = _by_group(table, gradients, mean=False)
    step = -torch.cat([delta[name].flatten() for name in sorted(delta)]).to(gradients)
    inner, along = gradients @ gradients.T, gradients @ (step / step.norm().clamp(min=1e-30))
    unit = torch.eye(len(gradients), device=gradients.device)
    shares = torch.stack([torch.linalg.solve(inner + (trust * noise + RIDGE) * unit, along) for trust in TRUST])
    canary_shares: torch.Tensor = shares[:, _places_of_canaries(table).to(shares.device)]
    return canary_shares.cpu()


def _by_group(table: _CanaryExamples, gradients: torch.Tensor, mean: bool) -> torch.Tensor:
    """Return the sum or mean of the gradients of each group, (group, number)."""
    groups = _numbered(table).to(gradients.device)
    total = gradients.new_zeros(int(groups.max()) + 1, gradients.shape[1]).index_add_(0, groups, gradients)
    return total / torch.bincount(groups).unsqueeze(1) if mean else total


def _places_of_canaries(table: _CanaryExamples) -> torch.Tensor:
    """Return the place of each canary among the client's units, (canary,)."""
    if table.owners is None:
        return table.places
    first = torch.searchsorted(table.owners, torch.arange(int(table.owners.max()) + 1))
    return _numbered(table)[table.places[first]]


def gradients_of(model: Model, params: Tensors, names: Sequence[str], batch: Batch) -> Iterator[torch.Tensor]:
    """Yield per-example gradients over all the names, (example, element), one chunk of examples at a time.

    Args:
        model: The model.
        params: All parameters.
        names: The parameters to differentiate with respect to.
        batch: The examples.
    """
    live = {name: params[name] for name in names}
    rest = {name: value for name, value in params.items() if name not in live}
    device = next(iter(live.values())).device

    def of_one(live: Tensors, inputs: Tensors, target: torch.Tensor) -> torch.Tensor:
        out = model({**rest, **live}, {name: value.unsqueeze(0) for name, value in inputs.items()})
        return model.losses(out, target.unsqueeze(0)).sum()

    per_example_grad = torch.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))
    for here in torch.split(torch.arange(len(batch.targets)), CHUNK):
        inputs = {name: value[here].to(device) for name, value in batch.inputs.items()}
        grads = per_example_grad(live, inputs, batch.targets[here].to(device))
        yield torch.nan_to_num(torch.cat([grads[name].flatten(1) for name in names], dim=1))


def gradient_cosines(model: Model, params: Tensors, delta: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return the cosine between each example's gradient and the negative update, (example,)."""
    names = sorted(delta)
    step = -torch.cat([delta[name].flatten() for name in names])
    chunks = gradients_of(model, params, names, batch)
    return torch.cat([functional.cosine_similarity(chunk, step.unsqueeze(0)).cpu() for chunk in chunks])


def losses_of(model: Model, params: Tensors, examples: Examples, most: int) -> Array:
    """Return the loss of each of the first `most` examples, (example,)."""
    device = next(iter(params.values())).device
    losses = []
    with torch.no_grad():
        for here in torch.split(torch.arange(min(len(examples), most)), CHUNK):
            losses.append(_losses(model, params, examples.take(here), device))
    return np.asarray(torch.cat(losses).numpy(), float)


def first(examples: Examples, most: int) -> Batch:
    """Return the first `most` examples as one batch."""
    return examples.take(torch.arange(min(len(examples), most)))


def canary_losses(model: Model, params: Tensors, canary_population: CanaryPopulation) -> Array:
    """Return the loss of each canary, (canary,), in the order of `Canaries.included`; of a group, the mean loss."""
    device, canaries = next(iter(params.values())).device, canary_population.canaries
    losses = []
    with torch.no_grad():
        for client in sorted(canaries.places):
            own = _losses(model, params, canary_population.table(client).canaries_alone(), device)
            owners = canaries.owners_of(client)
            losses.append(own.new_zeros(canaries.count(client)).index_add_(0, owners, own) / torch.bincount(owners))
    return np.asarray(torch.cat(losses).numpy(), float)


def _losses(model: Model, params: Tensors, batch: Batch, device: torch.device) -> torch.Tensor:
    out = model(params, {name: value.to(device) for name, value in batch.inputs.items()})
    return model.losses(out, batch.targets.to(device)).float().cpu()
