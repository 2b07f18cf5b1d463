"""The contract of a federated method.

A method combines four independent choices:

- the plan (`plan.py`): which parameters train, travel and stay, for each client and round;
- client rules (`ClientRule` in `client_rule.py`): how a client trains;
- transforms (`UpdateTransform` in `update_transform.py`): what happens to an update between client and server;
- the server rule (`ServerRule` in `server_rule.py`): how the server aggregates updates and changes the global model.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from partita.core.client_rule import ClientRule, overrides
from partita.core.dp_settings import PrivacySettings
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.personal_copy import PlanWithCopy
from partita.core.plan import NO_NAMES, Phase, Planner, RoundInfo, share_everything
from partita.core.rng import Key
from partita.core.server_rule import ServerRule
from partita.core.tensors import Names
from partita.core.update_transform import UpdateTransform

Extension = Callable[[Model, Key], Model]

RESERVED = frozenset({"params", "delta", "personal"})  # names that messages and files use for things other than slots


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
        privacy: Differential privacy of local training, by example or by group, with its noise; None for none.
        recipe: The table `[method]` that builds it again; None if no name is known for it.

    Raises:
        MethodError: If a slot has an invalid name or two owners, if two rules override `step_gradient`, if the method
            has both personal copies and `adapt`, if the server rule counts steps and a client rule is proximal, or if
            it has example-level privacy and a rule overrides `step_gradient` or reads examples without a `release`, or
            if `privacy` hides clients or has a budget, which only `make_private` can keep.
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
    privacy: PrivacySettings | None = None
    recipe: Mapping[str, object] | None = field(default=None, compare=False, repr=False)

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
        if self.privacy and (self.privacy.unit == "client" or self.privacy.epsilon is not None):
            raise MethodError(
                f"{self.name}: a method only adds noise to the gradients of examples or groups; to set privacy.unit = "
                "'client' or privacy.epsilon, use make_private"
            )
        for rule in self.client_rules:
            if self.privacy and rule.uses_data and rule.release is None:
                raise MethodError(
                    f"{self.name}: {type(rule).__name__} starts or selects by a client's examples and adds no noise; "
                    "with privacy, add noise, or start and select without reading examples"
                )
            if self.privacy and self.privacy.group and rule.uses_data:
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
