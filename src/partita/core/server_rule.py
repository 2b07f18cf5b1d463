"""The server's state and its rule: how it aggregates updates and changes the global model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from partita.core.model import Model
from partita.core.tensors import Mean, Names, Slots, Tensors, add
from partita.core.update import Aggregate, Update
from partita.core.versions import ParameterVersions


@dataclass(frozen=True)
class Server:
    """The complete server state, as an immutable value.

    Attributes:
        params: The global model: all parameters of `Model.initial`.
        state: The server rule's slots, first set by `ServerRule.init`.
        versions: Which client holds which version of which parameter. The round loop maintains it.
    """

    params: Tensors
    state: Slots = field(default_factory=dict)
    versions: ParameterVersions = field(default_factory=ParameterVersions)


def average(
    updates: Iterable[Update],
    over: Literal["senders", "cohort"] | float = "senders",
    weigh: Callable[[Update], float] = lambda update: update.weight,
) -> Aggregate:
    """Return the weighted mean of deltas and slots, in memory that does not grow with the number of updates.

    Args:
        updates: The updates; consumed once.
        over: The divisor for each name: the total weight of the clients that sent the name ("senders"), the total
            weight of all clients ("cohort"), or a number.
        weigh: The weight of an update; by default its number of training examples.
    """
    delta, slots, count, total = Mean(), dict[str, Mean](), 0, 0.0
    for update in updates:
        weight = weigh(update)
        count, total = count + 1, total + weight
        delta.add(update.delta, weight)
        for slot, part in update.slots.items():
            slots.setdefault(slot, Mean()).add(part, weight)
    divisor = total if over == "cohort" else over

    def value(mean: Mean) -> Tensors:
        return mean.value if isinstance(divisor, str) else mean.over(divisor)

    return Aggregate(value(delta), {slot: value(mean) for slot, mean in slots.items()}, count)


class ServerRule:
    """How the server aggregates updates. The default is FedAvg: a weighted mean over the clients that sent a name.

    Attributes:
        optimizers: The names of the local optimizers for which the rule is valid; None for any.
        divisor: For a rule with a `reduce` of its own that divides the plain sum of the updates, all with weight 1, by
            a fixed number: that number. Such a rule can start from a secure sum. None for all other rules.
        allows_clip: Whether the rule is valid if `training.clip` shortens steps.
        counts_steps: Whether the rule needs that all steps of a client's round count alike in its update. It then
            refuses proximal terms.
    """

    optimizers: Names | None = None
    divisor: float | None = None
    allows_clip: bool = True
    counts_steps: bool = False

    @property
    def needs_sizes(self) -> bool:
        """Whether the weight of an update must be the client's number of examples.

        If so, a sampling rule with `equal_weights`, which replaces it by 1, is refused.
        """
        return False

    def init(self, model: Model) -> Slots:
        """Return the initial `Server.state`. Called once, before the first round."""
        return {}

    def signal(self, server: Server) -> Mapping[str, float]:
        """Return a small decision based on the server state.

        Called for each job. The result travels to the client and reaches the plan as `RoundInfo.signal`.
        """
        return {}

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        """Return the parameters and slots for one client.

        Called for each job. A parameter that is the server's own object travels only if the client does not hold its
        current version. Any other tensor always travels, and the client then no longer holds the server's version.

        Args:
            server: The server before the round.
            client: The client's name.
            names: The client's `plan.down`.

        Returns:
            `(parameters, slots)`. The parameters must cover exactly `names`. The slots are restricted to `plan.train`
            and always travel; the client finds them in `Context.sent`.
        """
        return {name: server.params[name] for name in sorted(names)}, {}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        """Combine the updates of a round in one pass, in memory that does not grow with the cohort.

        Args:
            server: The server before the round.
            updates: A stream of checked and decoded updates. Clients train while it is consumed. Names can differ
                between clients: each update has the names of its client's narrowed `plan.up`.
            population: The number of clients from which the cohort was drawn.

        Returns:
            The aggregate. Its `cohort` must be the number of updates; each update must be consumed exactly once.
        """
        return average(updates)

    def affected_names(self, model: Model, trained: Names) -> Names:
        """Return the names that `apply` may change in a round in which clients trained `trained`.

        Only `check_method` calls it: it requires that all other parameters remain the same objects.
        """
        return trained

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        """Return the server after the round.

        Called once per round, after `UpdateTransform.decode_aggregate`. Not called if fewer than
        `federation.min_updates` updates arrived.

        Returns:
            The new server. A parameter that did not change must be the same object as before: every new object counts
            as a new version and is sent to clients again. If a changed value is not finite, the round is an error; with
            `skip_failed_clients`, the server keeps its previous state instead.
        """
        dtypes = {name: server.params[name].dtype for name in aggregate.delta}
        delta = {n: value if value.dtype == dtypes[n] else value.to(dtypes[n]) for n, value in aggregate.delta.items()}
        return replace(server, params=add(server.params, delta))
