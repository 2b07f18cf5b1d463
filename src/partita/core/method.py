"""A method is four independent choices: the plan, how a client learns, what the wire does, how the server learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from partita.core.data import Batch, Examples
from partita.core.dp_settings import DPSGDSettings
from partita.core.model import Model, Output
from partita.core.plan import NO_NAMES, Phase, Plan, Planner, RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.tensors import Mean, Names, Slots, Tensors, add
from partita.core.versions import ParameterVersions

T = TypeVar("T")


RESERVED = frozenset({"params", "delta", "personal"})  # what messages and files hold beside slots


class MethodError(ValueError):
    """A method that cannot be built, composed or run as asked."""


@dataclass(frozen=True)
class Context:
    """What a client's rule may look at: where training started, what the server sent beside it, what it remembers."""

    model: Model
    plan: Plan
    anchor: Tensors
    sent: Slots
    memory: Slots
    lr: float
    # The last two are for narrow and finish. In penalty and gradient they raise: steps are shared by clients, and a GPU
    # replays them in later rounds, so neither could be right there.
    notes: Slots = field(default_factory=lambda: cast(Slots, UnavailableInSteps("notes")))
    round_info: RoundInfo = field(default_factory=lambda: cast(RoundInfo, UnavailableInSteps("round_info")))


class UnavailableInSteps:
    """Stands in for a field of the Context that penalty and gradient cannot read. Any use raises a MethodError."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by copy and pickle
            raise AttributeError(name)
        raise MethodError(
            f"ctx.{self._field} cannot be read in penalty or gradient: one step serves several clients, and may be "
            f"replayed in later rounds; read it in narrow or finish, and keep what you need in a slot of the memory"
        )

    def __getitem__(self, key: object) -> Any:
        return self.get(key)

    def __contains__(self, key: object) -> bool:
        return bool(self.get(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.get(""))

    def __len__(self) -> int:
        return len(self.get(""))


@dataclass(frozen=True)
class LayerSelection:
    """What a client chose by looking at its data: the names to train and send, notes for the end of its round, and
    numbers that are told to the server.
    """

    names: Names
    notes: Slots = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrivacyRelease:
    """Something that leaves a client and was made from its examples, as an accountant must know it.

    `noise` is Gaussian, its deviation in multiples of what one example can change; `share` is the probability with
    which an example took part, each by itself.
    """

    what: str
    noise: float
    share: float
    count: int = 1


@dataclass(frozen=True)
class Update:
    """What one client sends. delta is after - before; weight is its number of training examples."""

    client: str
    delta: Mapping[str, Tensor]
    slots: Slots
    weight: float
    steps: Mapping[str, int]
    loss: float | None  # the task's mean training loss; None where nothing trained
    metrics: Mapping[str, float] = field(default_factory=dict)  # small numbers that its rules tell the server
    round: int | None = None  # that it answers; None: the engine does not say


@dataclass(frozen=True)
class Aggregate:
    delta: Tensors
    slots: Slots
    cohort: int


@dataclass(frozen=True)
class Server:
    """All that the server knows, as one value."""

    params: Tensors
    state: Slots = field(default_factory=dict)
    versions: ParameterVersions = field(default_factory=ParameterVersions)


class ClientRule:
    """How a client learns, written for one; the engine lifts it to many. Every hook defaults to plain training."""

    slots: Names = NO_NAMES  # the slots it sends up and remembers; no two rules of a method may share one
    optimizers: Names | None = None  # the local optimizers it is right for; None: any
    uses_data: bool = False  # narrow chooses by the client's examples, so what it chooses tells about them
    release: PrivacyRelease | None = None  # how private that choice is, for each round; None: not at all
    per_example: bool = False  # penalty is a mean over the batch's examples; if not, it looks at none of them

    def memory(self, anchor: Tensors) -> Slots:
        """What a client remembers before its first visit."""
        return {}

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        """What to train and send this round, chosen by looking at the client's data; the plan gates the names."""
        return LayerSelection(plan.train)

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor | None:
        """A scalar added to the mean loss of the batch."""
        return None

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        return grads

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        """(slots to send, memory to keep) after training; both are gated by the plan."""
        return {}, {}


class ForbiddenData:
    """What a rule that says it looks at no examples is given in their place."""

    def __init__(self, rule: ClientRule) -> None:
        self._rule = type(rule).__name__

    def __getattr__(self, what: str) -> Any:
        raise MethodError(
            f"{self._rule} looks at a client's examples without saying so, which privacy cannot allow; if its penalty "
            "is a mean over examples set per_example, and if it chooses by examples set looks and release"
        )

    def __len__(self) -> int:
        return int(self.__getattr__("len"))


class UpdateTransform:
    """What happens to an update on the wire. Several are encoded in order and undone in reverse."""

    hides = False  # it protects whole clients: what one of them sent is not recorded, and all must send the same names

    def encode(self, update: Update, key: Key) -> Update:
        """At the client, before sending."""
        return update

    def decode_update(self, update: Update) -> Update:
        """At the server, on each update as it arrives."""
        return update

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        """At the server, on the aggregate."""
        return aggregate


class ServerRule:
    """How the server learns from updates. The default is FedAvg's: a weighted mean over those who sent a name."""

    optimizers: Names | None = None  # the local optimizers it is right for; None: any

    def init(self, model: Model) -> Slots:
        return {}

    def signal(self, server: Server) -> Mapping[str, float]:
        """A small decision from what the server saw; it travels with the job and is an argument of the plan."""
        return {}

    def send(self, server: Server, client: str, names: Names) -> tuple[Tensors, Slots]:
        """The parameters and slots for one client. A tensor that is not the server's own object is always sent."""
        return {name: server.params[name] for name in sorted(names)}, {}

    def reduce(self, server: Server, updates: Iterable[Update], population: int) -> Aggregate:
        """One pass over a stream of updates, in memory that does not grow with the cohort."""
        return average(updates)

    def affected_names(self, model: Model, trained: Names) -> Names:
        """What apply may move where these names were trained; conformance holds it to that."""
        return trained

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        """A name that is not in the aggregate must be handed on as the same object."""
        kinds = {name: server.params[name].dtype for name in aggregate.delta}
        delta = {n: value if value.dtype == kinds[n] else value.to(kinds[n]) for n, value in aggregate.delta.items()}
        return replace(server, params=add(server.params, delta))


def average(
    updates: Iterable[Update],
    over: Literal["senders", "cohort"] = "senders",
    weigh: Callable[[Update], float] = lambda update: update.weight,
) -> Aggregate:
    """The weighted mean of deltas and slots, over those who sent a name or over the whole cohort."""
    delta, slots, cohort, total = Mean(), dict[str, Mean](), 0, 0.0
    for update in updates:
        weight = weigh(update)
        cohort, total = cohort + 1, total + weight
        delta.add(update.delta, weight)
        for slot, tensors in update.slots.items():
            slots.setdefault(slot, Mean()).add(tensors, weight)
    return Aggregate(
        _mean_value(delta, over, total), {slot: _mean_value(mean, over, total) for slot, mean in slots.items()}, cohort
    )


def _mean_value(mean: Mean, over: str, total: float) -> Tensors:
    return mean.value if over == "senders" else mean.over(total)


@dataclass(frozen=True)
class Method:
    """The four choices, and seven facts about how they are run."""

    name: str
    plan: Planner = share_everything
    client_rules: tuple[ClientRule, ...] = ()
    transforms: tuple[UpdateTransform, ...] = ()
    server_rule: ServerRule = field(default_factory=ServerRule)
    adapt: Callable[[Model], tuple[Phase, ...]] | None = None  # trained on a copy before a personal evaluation
    carry_optimizer: bool = False  # a client's optimizer state lives on from round to round
    pool: bool = False  # all clients' data in one place
    extend: Callable[[Model, Key], Model] | None = None  # parameters of the method's own, added to the model
    shape: Callable[[Model, RoundInfo], Model] | None = None  # the model as this client runs it, where not all run all
    clients: Names = NO_NAMES  # whom its options name; they must be among those there are
    privacy: DPSGDSettings | None = None  # of each training example

    def __post_init__(self) -> None:
        taken: set[str] = set()
        for rule in self.client_rules:
            if wrong := {slot for slot in rule.slots if slot in RESERVED or not slot.isidentifier()}:
                raise MethodError(f"{self.name}: a slot cannot be called '{sorted(wrong)[0]}'; give it another name")
            if clash := taken & rule.slots:
                raise MethodError(f"{self.name}: two local rules use the slot '{sorted(clash)[0]}'; use one of them")
            taken |= rule.slots
            if self.privacy and rule.uses_data and rule.release is None:
                raise MethodError(
                    f"{self.name}: {type(rule).__name__} chooses by looking at a client's examples, and adds no noise "
                    "to what it sees; under privacy give it noise, or choose without looking"
                )

    def takes(self, optimizer: str) -> bool:
        return all(optimizer in right for _, right in self._picky())

    def check_optimizer(self, optimizer: str) -> None:
        for rule, right in self._picky():
            if optimizer not in right:
                raise MethodError(
                    f"{self.name}: {rule} is derived for {' or '.join(sorted(right))}, not for {optimizer}; set "
                    f"training.optimizer = '{min(right)}', without momentum"
                )

    def _picky(self) -> list[tuple[str, Names]]:
        rules: tuple[ClientRule | ServerRule, ...] = (*self.client_rules, self.server_rule)
        return [(type(rule).__name__, rule.optimizers) for rule in rules if rule.optimizers is not None]


def compose(first: Method, *others: Method) -> Method:
    """One method with the choices of all. Local rules and transforms queue up; two plans or two servers are refused."""
    result = first
    for other in others:
        name = f"{result.name}+{other.name}"
        result = Method(
            name,
            plan=_pick_one(name, "plan", result.plan, other.plan, share_everything),
            client_rules=result.client_rules + other.client_rules,
            transforms=result.transforms + other.transforms,
            server_rule=_pick_server_rule(name, result.server_rule, other.server_rule),
            adapt=_pick_one(name, "adapt", result.adapt, other.adapt, None),
            carry_optimizer=result.carry_optimizer or other.carry_optimizer,
            pool=result.pool or other.pool,
            extend=_pick_one(name, "extend", result.extend, other.extend, None),
            clients=result.clients | other.clients,
            shape=_pick_one(name, "shape", result.shape, other.shape, None),
            privacy=_pick_one(name, "privacy", result.privacy, other.privacy, None),
        )
    return result


def _pick_one(name: str, choice: str, first: T, second: T, default: T) -> T:
    if first != default and second != default:
        raise MethodError(f"{name}: both set the {choice}; a method has one, so leave one of them out")
    return second if first == default else first


def _pick_server_rule(name: str, first: ServerRule, second: ServerRule) -> ServerRule:
    if type(first) is not ServerRule and type(second) is not ServerRule:
        raise MethodError(f"{name}: both set the server's rule; a method has one, so leave one of them out")
    return second if type(first) is ServerRule else first
