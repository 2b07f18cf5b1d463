"""Client-level privacy: clipped updates, equal weights, a fixed cohort size, and noise on the server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run

from partita.core import tensors
from partita.core.client_rule import ClientRule, Context, LayerSelection
from partita.core.data import Examples
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.noise import add_noise, gaussian_noise
from partita.core.plan import Plan, RoundInfo, share
from partita.core.rng import Key
from partita.core.server_rule import Server, ServerRule
from partita.core.tensors import Slots, Tensors
from partita.core.update import Aggregate, Update
from partita.core.update_transform import UpdateTransform
from partita.engines.availability import Availability
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.fedopt import fedadam
from partita.privacy.client_level import ClippedUpdates, OverCohort, protect_clients
from partita.privacy.guard import make_private
from partita.testing.conformance import check_method
from partita.testing.toy import ToyPopulation, ToyTransformer


def random_update(seed: int, size: float, client: str = "a") -> Update:
    draw = torch.Generator().manual_seed(seed)
    delta, slot = ({"w": size * torch.randn(5, generator=draw)} for _ in range(2))
    return Update(client, delta, {"control": slot}, weight=float(seed), steps={"w": 1}, loss=1.0)


def update_norm(each: Update) -> float:
    return math.sqrt(float((each.delta["w"] ** 2).sum() + (each.slots["control"]["w"] ** 2).sum()))


@pytest.mark.parametrize("size", [1e-3, 10.0])
def test_delta_and_slots_are_clipped_together_and_metrics_removed(size: float) -> None:
    before = replace(random_update(3, size), metrics={"score": 1.0})
    after, remembered = ClippedUpdates(1.0, 0.0, 2).encode(before, {}, Key(0))
    assert remembered == {}
    assert update_norm(after) == pytest.approx(min(1.0, update_norm(before)), rel=1e-5)
    ratio = after.delta["w"] / before.delta["w"]
    assert torch.allclose(ratio, after.slots["control"]["w"] / before.slots["control"]["w"])
    assert (after.weight, after.loss, after.metrics) == (1.0, None, {})
    again = ClippedUpdates(1.0, 0.0, 2).decode_update(replace(after, delta=tensors.scale(after.delta, 9.0)))
    assert update_norm(again) <= 1 + 1e-6


def test_replacing_a_client_moves_the_mean_by_at_most_twice_the_clip() -> None:
    transform, rule, server = ClippedUpdates(1.0, 0.0, 4), OverCohort(fedavg().server_rule, 4), Server({})
    opposite = {"w": torch.tensor([1e6, 0, 0, 0, 0])}
    one, other = (Update("x", tensors.scale(opposite, sign), {}, 100.0, {"w": 1}, None) for sign in (1.0, -1.0))
    rest = [replace(random_update(seed, 1.0, f"c{seed}"), slots={}) for seed in range(3)]
    means = [
        rule.reduce(server, [transform.decode_update(each) for each in (*rest, last)], 9).delta["w"]
        for last in (one, other)
    ]
    assert float((means[0] - means[1]).norm()) == pytest.approx(2.0 / 4, rel=1e-5)


def test_aggregate_noise_is_keyed_and_scales_with_clip_and_cohort() -> None:
    transform = ClippedUpdates(clip=0.5, noise=2.0, cohort=4)
    zero = Aggregate({"w": torch.zeros(10_000)}, {"control": {"w": torch.zeros(10_000)}}, 4)
    noisy = transform.decode_aggregate(zero, Key(1))
    assert float(noisy.delta["w"].std()) == pytest.approx(2.0 * 0.5 / 4, rel=0.03)
    assert not torch.equal(noisy.delta["w"], noisy.slots["control"]["w"])
    noise = gaussian_noise(zero.delta, Key(1) / "delta", 0.25)["w"]
    assert torch.equal(noisy.delta["w"], add_noise(zero.delta["w"], noise, 0.25))
    assert not torch.equal(noisy.delta["w"], transform.decode_aggregate(zero, Key(2)).delta["w"])


def test_secret_noise_differs_between_rounds() -> None:
    transform = ClippedUpdates(clip=0.5, noise=2.0, cohort=4)
    zero = Aggregate({"w": torch.zeros(100)}, {}, 4)
    first, second = (transform.decode_aggregate(zero, Key(9) / "round" / number).delta["w"] for number in range(2))
    assert not torch.equal(first, second)
    noise = gaussian_noise(zero.delta, Key(9) / "round" / 0 / "delta", 0.25)["w"]
    assert torch.equal(first, add_noise(zero.delta["w"], noise, 0.25))


def test_noise_follows_from_the_secret_of_the_run_and_not_from_its_seed() -> None:
    """Every site knows the seed."""
    run, model, clients = toy_run(protect_clients(fedavg(), 1.0, 0.5, 2), 1), toy_model(), Clients(a=8, b=8)
    plain = replace(run, method=protect_clients(fedavg(), 1.0, 0.0, 2))

    def noise_of(secret: int | None) -> tensors.Tensors:
        key = None if secret is None else Key(secret)
        noisy, exact = (final_params(play(replace(each, secret=key), model, clients)) for each in (run, plain))
        return tensors.subtract(noisy, exact)

    assert max_difference(noise_of(5), noise_of(5)) == 0
    assert max_difference(noise_of(5), noise_of(6)) > 0.1
    assert max_difference(noise_of(5), noise_of(None)) > 0.1


def test_client_level_rounds_report_no_norms_and_no_loss() -> None:
    """Round results leave out quantities of single clients."""
    method = protect_clients(fedavg(), 1.0, 0.1, 2)
    assert [transform.hides for transform in method.transforms] == [True]
    [played] = play(toy_run(method, 1, cohort=2), toy_model(), Clients(a=4, b=5))
    assert played.norms == {}
    assert played.loss is None


def test_client_level_privacy_without_clip_and_noise_equals_fedavg() -> None:
    run, model, clients = toy_run(fedavg()), toy_model(), Clients(a=8, b=8)
    ours = replace(run, method=protect_clients(fedavg(), math.inf, 0.0, 2))
    assert max_difference(final_params(play(run, model, clients)), final_params(play(ours, model, clients))) < 1e-6


def test_absent_client_does_not_change_the_weights_of_others() -> None:
    run = toy_run(protect_clients(fedavg(), math.inf, 0.0, 2), count=1)
    model, clients = toy_model(), Clients(a=8, b=8)
    [whole] = play(run, model, clients)
    [half] = play(run, model, clients, availability=Availability(trace={(0, "b"): 0.0}))
    [rest] = play(run, model, clients, availability=Availability(trace={(0, "a"): 0.0}))
    deltas = [tensors.subtract(each.server.params, model.initial) for each in (half, rest)]
    assert max_difference(tensors.add(*deltas), tensors.subtract(whole.server.params, model.initial)) < 1e-6


class FourClients(ToyPopulation):
    clients = ("c0", "c1", "c2", "c3")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", [fedavg, fedadam])
def test_method_with_client_level_privacy_conforms(method: Callable[[], Method]) -> None:
    check_method(protect_clients(method(), 0.1, 0.5, 2), ToyTransformer(width=3, layers=1), FourClients())


@dataclass(frozen=True)
class DoubleAggregate(UpdateTransform):
    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        return replace(aggregate, delta=tensors.scale(aggregate.delta, 2.0))


class DataDependentRule(ClientRule):
    uses_data = True

    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        return LayerSelection(plan.train)


class DataDependentStart(ClientRule):
    uses_data = True

    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        return {}, {}


def test_start_from_data_is_allowed_under_client_level_privacy() -> None:
    """It changes the update, which is clipped, and not the names that the client sends."""
    protect_clients(Method("starting", client_rules=(DataDependentStart(),)), 1.0, 1.0, 2)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        *((build(name), "computes its own mean") for name in ("scaffold", "fednova", "feddyn", "fedtp", "flora")),
        (build("fedfrozen", {"warmup": "auto"}), "AutoWarmup computes its own mean"),
        (build("centralized"), "has one client"),
        (Method("looking", client_rules=(DataDependentRule(),)), "with DataDependentRule each client chooses"),
        (build("safl", {"select": "random", "every": 3}), "with TopLayers each client remembers .* method.every = 1"),
        (Method("doubling", transforms=(DoubleAggregate(),)), "DoubleAggregate changes the sum"),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_methods_incompatible_with_client_level_privacy_are_refused(method: Method, said: str) -> None:
    with pytest.raises(MethodError, match=said):
        protect_clients(method, 1.0, 1.0, 2)


def test_plans_that_differ_between_clients_are_refused() -> None:
    def plan(model: Model, round_info: RoundInfo) -> Plan:
        return share(model.all_names() if round_info.client == "a" else model.names("head"), down=model.all_names())

    run = toy_run(protect_clients(Method("own", plan=plan), 1.0, 1.0, 2))
    with pytest.raises(MethodError, match="sends other names than the client before it"):
        play(run, toy_model(), Clients(a=8, b=8))


@pytest.mark.parametrize(("clip", "noise"), [(0.0, 1.0), (math.inf, 1.0), (1.0, -1.0)])
def test_invalid_client_level_clip_or_noise_is_refused(clip: float, noise: float) -> None:
    with pytest.raises(PrivacyError, match=r"privacy\.(clip|noise) is"):
        ClippedUpdates(clip, noise, 2)


def client_sizes(*sizes: int) -> dict[str, int]:
    return {f"c{place}": size for place, size in enumerate(sizes)}


def test_every_client_is_charged_for_every_round() -> None:
    """A cohort of fixed size is drawn without replacement and kept secret."""
    sizes = client_sizes(8, 8, 8, 8)
    some = make_private(toy_run(fedavg(), cohort=2), toy_model(), sizes, PrivacySettings("client", noise=8.0))
    everyone = make_private(toy_run(fedavg()), toy_model(), sizes, PrivacySettings("client", noise=8.0))
    assert (some.account.by, everyone.account.by) == ("rdp", "pld")
    assert some.planned is not None
    assert everyone.planned is not None
    assert some.planned < everyone.planned
    assert isinstance(some.run.method.server_rule, OverCohort)
    some.charge(0, ["c1", "c2"], {})
    assert some.spent() == some.forecast(1).epsilon() < some.planned
    before = some.spent()
    some.charge(1, ["c1", "c2"], {}, population=2)  # the others were absent, so these two were certain to be drawn
    assert before is not None
    assert (some.spent() or 0) - before > some.forecast(2).epsilon() - before
    with pytest.raises(PrivacyError, match=r"privacy\.accountant = 'rdp'"):
        make_private(
            toy_run(fedavg(), cohort=2), toy_model(), sizes, PrivacySettings("client", noise=8.0, accountant="pld")
        )


@pytest.mark.parametrize("drift", [True, False])
def test_client_level_privacy_hides_cohorts_and_disables_drift(drift: bool) -> None:
    """Drift uses updates before the noise, and sampling gives no amplification if cohorts can be guessed."""
    run = toy_run(fedavg(), 1, cohort=2, drift=drift)
    sizes = {"a": 4, "b": 5, "c": 6}
    by_client = make_private(run, toy_model(), sizes, PrivacySettings(unit="client", noise=3.0, accountant="rdp")).run
    assert (by_client.hidden_cohorts, by_client.drift) == (True, False)
    by_example = make_private(run, toy_model(), sizes, PrivacySettings(noise=3.0, accountant="rdp")).run
    assert (by_example.hidden_cohorts, by_example.drift) == (False, drift)


@pytest.mark.slow
def test_client_level_budget_is_met() -> None:
    guard = make_private(
        toy_run(fedavg(), cohort=2), toy_model(), client_sizes(*[8] * 20), PrivacySettings("client", epsilon=1.0)
    )
    assert guard.planned is not None
    assert 0.99 < guard.planned <= 1.0
    moved: Tensors = final_params(play(guard.run, toy_model(), Clients(**client_sizes(*[8] * 20))))
    assert max_difference(moved, toy_model().initial) > 0


# ---- found by mutation testing


def test_slots_get_independent_noise_of_the_same_scale() -> None:
    zeros = {"w": torch.zeros(40_000)}
    guarded = ClippedUpdates(clip=0.5, noise=3.0, cohort=4)
    found = guarded.decode_aggregate(Aggregate(zeros, {"one": zeros, "two": zeros}, 4), Key(1))
    parts = [found.delta, found.slots["one"], found.slots["two"]]
    for part in parts:
        assert float(part["w"].std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.03)
    for place, part in enumerate(parts):
        for other in parts[place + 1 :]:
            assert abs(float((part["w"] * other["w"]).mean())) < 0.05 * (3.0 * 0.5 / 4) ** 2
    assert guarded.decode_aggregate(Aggregate(zeros, {}, 4), Key(1)).slots == {}


def test_slots_are_averaged_over_the_fixed_cohort_like_the_delta() -> None:
    """Two of four clients reply. All count equally, whatever weight they claim."""

    def sized(client: str, size: float) -> Update:
        part = {"w": torch.full((2,), size)}
        return Update(client, part, {"way": {"w": 10 * part["w"]}}, 100 * size, {"w": 1}, None)

    rule = OverCohort(ServerRule(), 4)
    found = rule.reduce(Server({}), [sized("a", 1.0), sized("b", 3.0)], 9)
    assert torch.allclose(found.delta["w"], torch.full((2,), 1.0))
    assert torch.allclose(found.slots["way"]["w"], torch.full((2,), 10.0))
    assert found.cohort == 2
