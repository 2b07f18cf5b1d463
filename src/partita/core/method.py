"""The contract of a federated method.

A method combines four independent choices:

- the plan (`plan.py`): which parameters train, travel and stay, for each client and round;
- client rules (`ClientRule`): how a client trains;
- transforms (`UpdateTransform`): what happens to an update between client and server;
- the server rule (`ServerRule`): how the server aggregates updates and changes the global model.

The hooks run in this order in every round:

1. For each client of the cohort, the server calls `ServerRule.signal`, the plan, and `ServerRule.send`.
2. At the client: `ClientRule.memory`, `ClientRule.narrow`, `ClientRule.start` and `ClientRule.optimizer_state`, then in
   every step `ClientRule.step_gradient`, `ClientRule.penalty` in each gradient that it evaluates, `ClientRule.gradient`
   and `ClientRule.after_step`, then `ClientRule.finish` and `UpdateTransform.encode`.
3. At the server, as updates arrive: `UpdateTransform.decode_update`, then `ServerRule.reduce` over the stream.
4. Once for the round: `UpdateTransform.decode_aggregate`, then `ServerRule.apply`.

All hooks must be pure: the result depends on the arguments only, and arguments are not modified in place. Draw random
numbers from the `key` that a hook receives. `partita.check_method` tests these promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from torch import Tensor

from partita.core.averaging import average
from partita.core.data import Batch, Examples
from partita.core.dp_settings import DPSGDSettings
from partita.core.model import Model, Output
from partita.core.personal_copy import PlanWithCopy
from partita.core.plan import NO_NAMES, Phase, Plan, Planner, RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.tensors import Names, Slots, Tensors, add
from partita.core.update import Aggregate, Update
from partita.core.versions import ParameterVersions

T = TypeVar("T")
Extension = Callable[[Model, Key], Model]
GradientAt = Callable[[Tensors], Tensors]  # parameters that differ from the current ones -> the gradient there by name


RESERVED = frozenset({"params", "delta", "personal"})  # names that messages and files use for things other than slots


class MethodError(ValueError):
    """The method cannot be built, composed or run with these settings."""


@dataclass(frozen=True)
class Context:
    """What the hooks of a client rule can read.

    Attributes:
        model: The model as this client runs it.
        plan: The client's plan. In `narrow` it is the plan before any rule narrowed it; in all later hooks it is the
            narrowed plan.
        anchor: All parameters at the start of the client's round: those in `plan.down` from the server, those in
            `plan.keep` from the client, all others as the model was loaded.
        sent: The slots from `ServerRule.send`, restricted to the `plan.train` of the plan before narrowing.
        memory: The slots that the client stored in its last round, or those of `ClientRule.memory` before its first.
        lr: The learning rate of this round.
        notes: The notes of all rules, from `narrow` and `start`, for `finish`. Empty in `narrow`; in `start` only those
            of `narrow`. In the hooks of a step (`step_gradient`, `penalty`, `gradient`) any access raises MethodError.
        round_info: Round and client, for `narrow`, `start` and `finish`. In the hooks of a step any access raises
            MethodError.
        optimizer: The optimizer state by slot after training, for `finish`, if a rule overrides `optimizer_state`. It
            is empty in dry runs and in the server's check of updates, and can lack names.
        shared_key: A random key that all clients of the run have in all rounds, for `narrow` and `start`. It is no
            secret: anyone who knows the config can compute it. None in all other hooks.
    """

    model: Model
    plan: Plan
    anchor: Tensors
    sent: Slots
    memory: Slots
    lr: float
    # Not available in the hooks of a step: one step serves several clients, and a CUDA graph may replay it in later
    # rounds, so neither value would be right there.
    notes: Slots = field(default_factory=lambda: cast(Slots, UnavailableInSteps("notes")))
    round_info: RoundInfo = field(default_factory=lambda: cast(RoundInfo, UnavailableInSteps("round_info")))
    optimizer: Slots = field(default_factory=dict)
    shared_key: Key | None = None


class UnavailableInSteps:
    """Stands in for a field of the Context that hooks of a training step cannot read; any access raises MethodError."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle probe these
            raise AttributeError(name)
        raise MethodError(
            f"ctx.{self._field} cannot be read in step_gradient, penalty or gradient: one step serves several clients "
            "and may be replayed in later rounds; read it in narrow, start or finish, and store what you need in a "
            "memory slot"
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
    """The result of `ClientRule.narrow`.

    Attributes:
        names: The parameters to train and send. Names outside the plan have no effect.
        notes: Tensors for `finish` in the same round, found in `Context.notes`. They do not leave the client.
        metrics: Numbers for the server, sent in `Update.metrics`.
    """

    names: Names
    notes: Slots = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrivacyRelease:
    """A noisy quantity that depends on a client's examples and leaves the client, as the privacy accountant needs it.

    Attributes:
        what: A description for reports.
        noise: The standard deviation of the Gaussian noise, as a multiple of the sensitivity to one example.
        share: The probability with which each example is included, independently of the others.
        count: How many times it is released.
    """

    what: str
    noise: float
    share: float
    count: int = 1


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


class ClientRule:
    """How a client trains. The defaults give plain local training.

    Write the hooks for one client, without a client dimension. The engine applies them to several clients at once with
    `torch.vmap`, so `step_gradient`, `penalty` and `gradient` must not branch on tensor values or modify tensors in
    place.

    Attributes:
        slots: The slots that `finish` may return and `memory` fills. No other rule or transform of the method can have
            them.
        optimizers: The names of the local optimizers for which the rule is valid; None for any.
        uses_data: Whether `narrow` or `start` reads the client's examples, so that its result reveals something about
            them.
        release: The privacy of that result in each round; None if it has none. A method with example-level privacy
            needs it for every rule that sets `uses_data`.
        release_every: The rounds from one such result to the next: the rule has one in rounds 0, `release_every`,
            2 `release_every` and so on, whichever clients take part.
        per_example: Whether `penalty` is a mean over the batch's examples. If False, `penalty` must not read examples
            under example-level privacy.
        allows_clip: Whether the rule is valid if `training.clip` shortens steps.
    """

    slots: Names = NO_NAMES
    optimizers: Names | None = None
    uses_data: bool = False
    release: PrivacyRelease | None = None
    release_every: int = 1
    per_example: bool = False
    allows_clip: bool = True

    @property
    def proximal(self) -> bool:
        """Whether `penalty` pulls parameters back to the anchor, so that earlier steps of a round count less."""
        return False

    def memory(self, anchor: Tensors) -> Slots:
        """Return the client's memory before its first round.

        Called at the start of every client round. A slot that the client has stored replaces the slot returned here.

        Args:
            anchor: All parameters at the start of the client's round.

        Returns:
            Slots, normally with one tensor for each name in `anchor`. They are found in `Context.memory`.
        """
        return {}

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        """Choose a subset of the plan to train and send in this round.

        Called once per client round before training, in the order of `Method.client_rules`, and only if overridden.

        Args:
            plan: The plan as narrowed by the earlier rules.
            probe: The client's training examples. Under example-level privacy, a rule without `uses_data` gets an
                object that raises MethodError on access.
            ctx: The context; `ctx.plan` is the plan before any narrowing, and `ctx.notes` is empty.
            key: The random key of this rule, client and round.

        Returns:
            The selection. Its names are intersected with `plan.train` and `plan.up`; `plan.down` and `plan.keep` do not
            change. Narrowing can remove names but cannot add any.
        """
        return LayerSelection(plan.train)

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        """Choose where training starts.

        Called once per client round after all `narrow` hooks and before training, in the order of
        `Method.client_rules`, and only if overridden. Dry runs do not call it.

        Args:
            params: All parameters: `ctx.anchor` with the values that earlier rules returned.
            examples: The client's training examples. Under example-level privacy, a rule without `uses_data` gets an
                object that raises MethodError on access.
            ctx: The context, with the narrowed plan and the notes of `narrow`.
            key: The random key of this rule, client and round.

        Returns:
            `(values, notes)`. The values replace those from which training starts, for any of the names in
            `ctx.plan.train`, with the shapes and types of `params`; another name, shape or type is an error. The anchor
            does not change, so the delta is what training reached minus what the client received or kept. The notes are
            tensors for `finish` in the same round, found in `Context.notes`. They do not leave the client.
        """
        return {}, {}

    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        """Return the gradient of a step, evaluated at other points or combined from several.

        Called in every training step, and only if overridden; one rule of a method can override it. Runs without
        autograd and possibly inside `torch.vmap`. `gradient` of all rules and `training.clip` follow. A method with
        example-level privacy cannot have such a rule: every evaluation would be one more release.

        Args:
            gradient_at: Returns the gradient of the batch's loss with all penalties, for the names that train in the
                current phase and that the loss depends on. Its argument holds the parameters that differ from `params`;
                `{}` gives the plain gradient. It may be called several times, always with the same batch. Each call
                costs a forward and a backward pass. So that the loss before the step can be reported, a step without a
                call at `params` costs one more forward pass.
            params: All parameters at this step: those that train, and all others.
            ctx: The context, without `notes` and `round_info`.

        Returns:
            The gradient by name, restricted to the names that train in the current phase. The optimizer does not change
            a name that is left out.
        """
        return gradient_at({})

    def optimizer_state(self, ctx: Context) -> Slots:
        """Return the optimizer state from which training starts.

        Called once per client round before training, and only if overridden. A method with such a rule does not keep
        the clients' own optimizer state.

        Args:
            ctx: The context, with the narrowed plan and the notes of `narrow`.

        Returns:
            Slots of the optimizer, such as "first" and "second" of AdamW, and "age", the number of earlier steps as a
            scalar on the CPU. A slot or name that is missing starts as usual, from zero.
        """
        return {}

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> Tensor | None:
        """Return a term of the loss.

        Called in every training step, inside autograd and possibly inside `torch.vmap`. Under example-level privacy, a
        rule with `per_example` is called for batches of one example, and its gradient is clipped with the task's. Any
        other rule gets objects in place of `out` and `batch` that raise MethodError on access; its gradient is added
        without clipping or noise.

        Args:
            out: The model's output for the batch.
            params: All parameters at this step: those that train, and all others.
            batch: One client's batch. `batch.mask` is zero for padding.
            ctx: The context, without `notes` and `round_info`.

        Returns:
            A scalar that is added to the mean loss of the batch, or None.
        """
        return None

    def gradient(self, grads: Tensors, ctx: Context) -> Tensors:
        """Change the gradient before the optimizer step.

        Called in every training step, in the order of `Method.client_rules`, before `training.clip` is applied. Runs
        without autograd and possibly inside `torch.vmap`. Under example-level privacy, `grads` is already noisy.

        Args:
            grads: The gradient for the names that train in the current phase and that the loss depends on.
            ctx: The context, without `notes` and `round_info`.

        Returns:
            The gradient by name, restricted to the names in `grads`. The optimizer does not change a name that is left
            out.
        """
        return grads

    def after_step(self, params: Tensors, ctx: Context) -> Tensors:
        """Change the parameters after the optimizer step.

        Called in every training step, in the order of `Method.client_rules`, and only if overridden. Runs without
        autograd and possibly inside `torch.vmap`.

        Args:
            params: The parameters that the optimizer stepped.
            ctx: The context, without `notes` and `round_info`.

        Returns:
            The parameters by name, for all names in `params`.
        """
        return params

    def finish(self, params: Tensors, steps: Mapping[str, int], ctx: Context) -> tuple[Slots, Slots]:
        """Return what to send besides the delta, and what to remember.

        Called once per client round after the last phase, and only if overridden. Dry runs and the server's check of
        updates also call it, with unchanged parameters, one step per name, the memory before the first round, and (in
        the server's check) empty notes. So the slots and names that it returns should depend on the plan only.

        Args:
            params: All parameters after training.
            steps: For each name in `ctx.plan.train`, the number of optimizer steps over all phases.
            ctx: The context, with the narrowed plan and the notes of `narrow`.

        Returns:
            `(slots to send, slots to remember)`. Both may use only the slots in `self.slots`; any other slot is an
            error. Slots to send are restricted to `plan.up`. Slots to remember are restricted to `plan.train` and
            merged by name into the memory; names that are not returned keep their value.
        """
        return {}, {}


def overrides(rule: ClientRule, hook: str) -> bool:
    """Whether the rule has its own version of a hook of `ClientRule`."""
    return getattr(type(rule), hook) is not getattr(ClientRule, hook)


class ForbiddenData:
    """Stands in for examples that a rule must not read; any access raises MethodError."""

    def __init__(self, rule: ClientRule) -> None:
        self._rule = type(rule).__name__

    def __getattr__(self, what: str) -> Any:
        raise MethodError(
            f"{self._rule} reads a client's examples without declaring it, which privacy does not allow; set "
            "per_example if its penalty is a mean over examples; set uses_data and release if narrow or start reads "
            "examples"
        )

    def __len__(self) -> int:
        return int(self.__getattr__("len"))


class UpdateTransform:
    """What happens to an update between client and server.

    With several transforms, clients call `encode` in the order of `Method.transforms`; the server decodes in reverse.

    Attributes:
        slots: The slots that `encode` may remember. They stay with the client: no message contains them. No other
            transform or client rule of the method can have them.
        hides: Whether the transform protects whole clients. If True, no single client's update norm is recorded, and
            all clients of a round must send the same names.
    """

    slots: Names = NO_NAMES
    hides = False

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        """Encode an update at the client, after all `ClientRule.finish` hooks.

        The client stores what it remembers together with its other memory, before the server has seen the update. It
        does not learn whether the update was used: if it is lost or rejected, its content is lost and the memory stays.
        A client that does not reach `encode` in a round (not sampled, dropped out, failed) keeps its memory as it was.

        Dry runs also call it, with a delta of zeros and no memory. So names, shapes and types of what it sends should
        depend on those of the update only.

        Args:
            update: The update. `delta` and `slots` are restricted to the narrowed `plan.up`.
            memory: The slots that this transform remembers, with every name that it has returned for this client so
                far. A slot or name that it has never returned is missing, so it is empty in the client's first round.
            key: The random key of this transform, client and round.

        Returns:
            `(update to send, slots to remember)`. The delta and slots to send may have any tensor type that the wire
            format supports, and there may be additional slots. Slots to remember may use only `self.slots`; any other
            slot is an error. They are restricted to `plan.up` and merged by name into the memory; names that are not
            returned keep their value.
        """
        return update, {}

    def decode_update(self, update: Update) -> Update:
        """Decode one update at the server, as it arrives.

        The input comes from a client and can be malformed. Any exception makes the server reject the update.

        Returns:
            The decoded update. It may contain only names in `plan.up`, with the shapes, types and device of the
            server's parameters, and only the slots of the method's client rules. Anything else is rejected.
        """
        return update

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        """Decode the aggregate at the server, between `ServerRule.reduce` and `ServerRule.apply`.

        Args:
            aggregate: The result of `ServerRule.reduce`, as decoded by the later transforms.
            key: The random key of this transform and round.
        """
        return aggregate


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


@dataclass(frozen=True)
class Method:
    """A federated method: the four choices, and settings for how they run.

    Attributes:
        name: The name for messages and records.
        plan: Returns the plan of one client in one round; see `plan.Planner`.
        client_rules: How clients train. Hooks run in this order.
        transforms: What happens to updates on the way. Clients encode in this order; the server decodes in reverse.
        server_rule: How the server aggregates.
        adapt: The phases that each client trains on a copy of its model before a personalized evaluation.
        carry_optimizer: Whether each client keeps its optimizer state from round to round.
        pool: Whether the data of all clients is pooled in one place, as a centralized baseline.
        extend: Adds the method's own parameters to the model. Called once, before the run.
        shape: Returns the model as one client runs it in one round, if not all clients run the whole model.
        clients: The clients that the method's options name. They must exist in the population.
        privacy: Example-level differential privacy of local training; None for none.

    Raises:
        MethodError: If a slot has an invalid name or two owners, if two rules override `step_gradient`, if the method
            has both personal copies and `adapt`, if the server rule counts steps and a client rule is proximal, or if
            it has example-level privacy and a rule overrides `step_gradient` or reads examples without a `release`.
    """

    name: str
    plan: Planner = share_everything
    client_rules: tuple[ClientRule, ...] = ()
    transforms: tuple[UpdateTransform, ...] = ()
    server_rule: ServerRule = field(default_factory=ServerRule)
    adapt: Callable[[Model], tuple[Phase, ...]] | None = None
    carry_optimizer: bool = False
    pool: bool = False
    extend: Extension | None = None
    shape: Callable[[Model, RoundInfo], Model] | None = None
    clients: Names = NO_NAMES
    privacy: DPSGDSettings | None = None

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        parts: tuple[ClientRule | UpdateTransform, ...] = (*self.client_rules, *self.transforms)
        for part in parts:
            owner = type(part).__name__
            for slot in sorted(part.slots):
                if slot in RESERVED or not slot.isidentifier():
                    raise MethodError(f"{self.name}: a slot cannot be called '{slot}'; give it another name")
                if slot in owners:
                    raise MethodError(f"{self.name}: {owners[slot]} and {owner} use the slot '{slot}'; use one of them")
                owners[slot] = owner
        if self.adapt is not None and isinstance(self.plan, PlanWithCopy):
            raise MethodError(
                f"{self.name}: clients are tested with their personal copy, which an adaptation before the test does "
                "not train; set method.finetune = 0"
            )
        self._check_step_gradient()
        pulls = [type(rule).__name__ for rule in self.client_rules if rule.proximal]
        if pulls and self.server_rule.counts_steps:
            raise MethodError(
                f"{self.name}: {type(self.server_rule).__name__} divides an update by its number of steps, but the "
                f"proximal term of {pulls[0]} makes earlier steps count less; use one of the two methods"
            )
        if self.carry_optimizer and self.sets_optimizer_state:
            raise MethodError(
                f"{self.name}: its clients start from an optimizer state that the server sends, so they cannot keep "
                "their own; leave out training.keep_optimizer, or the method that keeps it"
            )
        for rule in self.client_rules:
            if self.privacy and rule.uses_data and rule.release is None:
                raise MethodError(
                    f"{self.name}: {type(rule).__name__} starts or selects by a client's examples and adds no noise; "
                    "with privacy, add noise, or start and select without reading examples"
                )
            if self.privacy and self.privacy.groups and rule.uses_data:
                raise MethodError(
                    f"{self.name}: the noise of {type(rule).__name__} hides single examples, not groups of them; with "
                    "privacy.unit = 'group', start and select without reading examples"
                )

    @property
    def step_rules(self) -> list[str]:
        """The rules that compute the gradient of a step themselves."""
        return [type(rule).__name__ for rule in self.client_rules if overrides(rule, "step_gradient")]

    def _check_step_gradient(self) -> None:
        owners = self.step_rules
        if len(owners) > 1:
            raise MethodError(
                f"{self.name}: {owners[0]} and {owners[1]} both compute the gradient of a step (step_gradient); use "
                "one of them"
            )
        if owners and self.privacy:
            raise MethodError(
                f"{self.name}: {owners[0]} evaluates gradients at points of its own (step_gradient), and each would be "
                "one more release; use another method with example-level privacy, or privacy.unit = 'client'"
            )

    @property
    def sets_optimizer_state(self) -> bool:
        """Whether a rule says from which optimizer state training starts."""
        return any(overrides(rule, "optimizer_state") for rule in self.client_rules)

    def supports_optimizer(self, optimizer: str) -> bool:
        """Whether all rules are valid for this local optimizer."""
        return all(optimizer in valid for _, valid in self._restricted_rules())

    def check_optimizer(self, optimizer: str) -> None:
        """Raise MethodError if a rule is not valid for this local optimizer."""
        for rule, valid in self._restricted_rules():
            if optimizer not in valid:
                known = sorted({name.partition(" with ")[0] for name in valid})
                only = "" if len(known) < len(valid) else ", without momentum, warmup_steps or layer_decay"
                raise MethodError(
                    f"{self.name}: {rule} is derived for {' or '.join(known)}, not for {optimizer}; set "
                    f"training.optimizer = '{known[0]}'{only}"
                )

    def check_clip(self, clip: float) -> None:
        """Raise MethodError if a rule is not valid with `training.clip`."""
        rules: tuple[ClientRule | ServerRule, ...] = (*self.client_rules, self.server_rule)
        for rule in rules:
            if not rule.allows_clip:
                raise MethodError(
                    f"{self.name}: training.clip is {clip}, but {type(rule).__name__} is derived for steps along the "
                    "whole gradient; leave training.clip out, or lower training.lr"
                )

    def _restricted_rules(self) -> list[tuple[str, Names]]:
        rules: tuple[ClientRule | ServerRule, ...] = (*self.client_rules, self.server_rule)
        return [(type(rule).__name__, rule.optimizers) for rule in rules if rule.optimizers is not None]


def compose(first: Method, *others: Method) -> Method:
    """Combine methods into one.

    Client rules and transforms are concatenated in order. `carry_optimizer` and `pool` are set if any method sets them.
    Extensions of the model follow each other in order. A plan that adds personal copies does so to the other's plan.

    Args:
        first: The first method.
        *others: Further methods, whose rules and transforms follow in this order.

    Raises:
        MethodError: If two methods set the same one of plan, server rule, adapt, shape and privacy, or if two rules or
            transforms have the same slot.
    """
    result = first
    for other in others:
        name = f"{result.name}+{other.name}"
        result = Method(
            name,
            plan=_pick_plan(name, result.plan, other.plan),
            client_rules=result.client_rules + other.client_rules,
            transforms=result.transforms + other.transforms,
            server_rule=_pick_server_rule(name, result.server_rule, other.server_rule),
            adapt=_pick_one(name, "adapt", result.adapt, other.adapt, None),
            carry_optimizer=result.carry_optimizer or other.carry_optimizer,
            pool=result.pool or other.pool,
            extend=_chain(result.extend, other.extend),
            clients=result.clients | other.clients,
            shape=_pick_one(name, "shape", result.shape, other.shape, None),
            privacy=_pick_one(name, "privacy", result.privacy, other.privacy, None),
        )
    return result


def _pick_one(name: str, choice: str, first: T, second: T, default: T) -> T:
    if first != default and second != default:
        raise MethodError(f"{name}: both set the {choice}; a method has one, so leave one of them out")
    return second if first == default else first


def _pick_plan(name: str, first: Planner, second: Planner) -> Planner:
    for inner, outer in ((first, second), (second, first)):
        if isinstance(outer, PlanWithCopy) and not isinstance(inner, PlanWithCopy):
            return PlanWithCopy(_pick_one(name, "plan", outer.shared, inner, share_everything))
    return _pick_one(name, "plan", first, second, share_everything)


def _chain(first: Extension | None, second: Extension | None) -> Extension | None:
    if first is None or second is None:
        return first or second
    return lambda model, key: second(first(model, key), key)


def _pick_server_rule(name: str, first: ServerRule, second: ServerRule) -> ServerRule:
    if type(first) is not ServerRule and type(second) is not ServerRule:
        raise MethodError(f"{name}: both set the server's rule; a method has one, so leave one of them out")
    return second if type(first) is ServerRule else first
