"""Which runs can aggregate securely: all clients of a round send the same names, and the server needs their mean only.

Everything else is refused by name, with the reason, before the first round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.core.client_rule import overrides
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.server_rule import ServerRule
from partita.core.settings import Run, RunError
from partita.core.update_transform import UpdateTransform
from partita.secure_aggregation.fixed_point import FixedPoint
from partita.secure_aggregation.neighbors import check_size
from partita.secure_aggregation.signatures import ssh_verifier


def why_not(method: Method) -> str | None:
    """Return why a method cannot aggregate securely whatever its plan is, or None if it can."""
    rule = method.server_rule
    if method.pool:
        return "its data is pooled at one client, and a sum of one update is that update"
    if type(rule).reduce is not ServerRule.reduce and rule.divisor is None:
        return f"{type(rule).__name__} computes more than a weighted mean, and needs single updates for it"
    for client_rule in method.client_rules:
        if overrides(client_rule, "narrow"):
            return (
                f"with {type(client_rule).__name__} each client chooses what it sends, and a sum needs the same names "
                "from all (with safl, method.agree = true lets clients agree on them)"
            )
    for transform in method.transforms:
        if type(transform).decode_update is not UpdateTransform.decode_update and not transform.hides:
            return f"{type(transform).__name__} encodes each update so that the sum of encoded updates means nothing"
    return None


def check_method(method: Method) -> None:
    """Raise a MethodError if a method cannot aggregate securely whatever its plan is."""
    if reason := why_not(method):
        raise MethodError(f"{method.name} cannot aggregate securely: {reason}; leave out [secure_aggregation]")


def check_eligible(run: Run, model: Model, clients: Sequence[str]) -> None:
    """Check that a run can aggregate securely, before its first round.

    Plans are checked for all clients in the first and in the last round, and for the cohort in every round.

    Args:
        run: The run, with its privacy.
        model: The model.
        clients: All clients.

    Raises:
        MethodError: If the method cannot.
        RunError: If a client has no key to sign with.
        ProtocolError: If the cohort is too small, or if its sum does not fit the fixed-point format.
    """
    settings = run.secure_aggregation
    if settings is None:
        return
    check_method(run.method)
    if settings.signers is not None:
        ssh_verifier(settings.signers)
        if lacking := sorted(set(clients) - settings.signers.keys()):
            raise RunError(
                f"secure_aggregation.signers has no key of '{lacking[0]}'; list the public key of every client"
            )
    size = run.cohort_size(len(clients))
    check_size(settings, size)
    fixed_point_of(run, size)
    signal: dict[str, float] = {}
    for number in {0, run.rounds - 1}:
        plans = (
            (name, plan_for(run.method.plan, model, RoundInfo(number, run.rounds, name, signal))) for name in clients
        )
        check_plans(run, number, plans)


def check_plans(run: Run, number: int, plans: Iterable[tuple[str, Plan]]) -> None:
    """Check that these clients send the same names in a round, and at least one.

    Args:
        run: The run.
        number: The round.
        plans: Clients and their plans.

    Raises:
        MethodError: If they do not.
    """
    first: tuple[str, Plan] | None = None
    for client, plan in plans:
        first = first or (client, plan)
        if not plan.up:
            raise MethodError(
                f"{run.method.name} cannot aggregate securely: {client} sends nothing in round {number}, so there is "
                "no sum; leave out [secure_aggregation]"
            )
        if plan.up != first[1].up:
            differing = min(plan.up ^ first[1].up)
            does, other = (client, first[0]) if differing in plan.up else (first[0], client)
            raise MethodError(
                f"{run.method.name} cannot aggregate securely: in round {number} {does} sends '{differing}' and "
                f"{other} does not, and a sum needs the same names from all; leave out [secure_aggregation]"
            )


def counts_alike(run: Run) -> bool:
    """Whether all updates have the weight 1."""
    return run.sampling.equal_weights or run.hides_clients


def fixed_point_of(run: Run, clients: int) -> FixedPoint:
    """Return the fixed-point format of a round, which follows from settings that all parties share.

    Args:
        run: The run.
        clients: The size of the round's cohort.

    Raises:
        ProtocolError: If the sum of so many clients does not fit.
    """
    settings = run.secure_aggregation
    assert settings is not None
    max_weight = 1.0 if counts_alike(run) else float(run.federation.max_examples)
    return FixedPoint(settings.bits, clients, max_weight, settings.max_value)
