"""Client rules: how a client trains, and what the hooks can read and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from partita.core.data import Batch, Examples
from partita.core.method_error import MethodError
from partita.core.model import Model, Output
from partita.core.plan import NO_NAMES, Plan, RoundInfo
from partita.core.rng import Key
from partita.core.tensors import Names, Slots, Tensors

GradientAt = Callable[[Tensors], Tensors]  # parameters that differ from the current ones -> the gradient there by name


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

    def penalty(self, out: Output, params: Tensors, batch: Batch, ctx: Context) -> torch.Tensor | None:
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
