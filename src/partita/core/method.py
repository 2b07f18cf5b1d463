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
    recipe: Mapping[str, object] | None = field(default=None, compare=False, repr=False)
