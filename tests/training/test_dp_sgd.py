"""Example-level privacy (DP-SGD): clipped gradients, noise, sampling, and refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run
from privacy_fixtures import micro_batch_sum
from torch import Tensor, nn
from torch.nn import functional

from partita.core.batch_schedule import poisson_batches
from partita.core.client import ClientState, adaptation_round, begin_round
from partita.core.client_rule import ClientRule, Context, GradientAt, LayerSelection, PrivacyRelease
from partita.core.compose import compose
from partita.core.data import ClientData, Examples
from partita.core.dp_settings import PrivacyError, PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, Output
from partita.core.noise import add_noise, gaussian_noise
from partita.core.optim import SGD, AdamW
from partita.core.options import OptionError
from partita.core.plan import Phase, Plan
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.settings import RunError, Training
from partita.core.tensors import Slots, Tensors, equal
from partita.methods import build
from partita.methods.fedavg import fedavg
from partita.methods.fedprox import fedprox
from partita.methods.moon import MoonClient
from partita.methods.scaffold import scaffold
from partita.privacy.spending import releases_of
from partita.testing.conformance import check_method
from partita.testing.toy import Float64Model, Float64Population, ToyExamples, ToyPopulation, ToyTransformer
from partita.training.batching import collate
from partita.training.client_axis import VmapError
from partita.training.dp_sgd import clipped_sum
from partita.training.local_training import train_clients

NOISY = PrivacySettings(clip=0.5, noise=0.8)
WITHOUT_CLIP_OR_NOISE = PrivacySettings(
    clip=float("inf"), noise=0.0, sampling="shuffle"
)  # no privacy, but through the private code path


def with_dp_sgd(method: Method, privacy: PrivacySettings = NOISY) -> Method:
    return replace(method, privacy=privacy)


def example_loss(model: Model):  # type: ignore[no-untyped-def]
    def loss(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        task = model.losses(model(trainable, inputs), targets).sum()
        return task, task

    return loss


@pytest.mark.parametrize("clip", [0.5, 1.5, float("inf")])
@pytest.mark.parametrize("chunk", [None, 5])
def test_clipped_sum_equals_a_micro_batch_loop(clip: float, chunk: int | None) -> None:
    model, batch = toy_model(), Clients(a=12)["a"].train.take(torch.arange(12))
    wanted = micro_batch_sum(model, model.initial, batch, clip)
    found, losses = clipped_sum(
        example_loss(model),
        model.initial,
        batch.inputs,
        batch.targets,
        None,
        PrivacySettings(clip=clip, noise=0.0, microbatch=chunk),
    )
    assert max_difference(found, wanted) < 1e-5
    assert torch.allclose(losses, model.losses(model(model.initial, batch.inputs), batch.targets), atol=1e-6)


class SmallTextTransformer(nn.Module):
    """A transformer layer built from modules that opacus supports."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.query, self.key, self.value, self.head = (nn.Linear(6, width) for width in (6, 6, 6, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.norm(self.embed(tokens))
        scores = self.query(state) @ self.key(state).transpose(-1, -2)
        return self.head((state + scores.softmax(-1) @ self.value(state)).mean(-2))


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing"
)  # opacus warns that the tokens of an embedding have no gradient
def test_clipped_sum_matches_opacus() -> None:
    from opacus import GradSampleModule

    torch.manual_seed(0)
    module = SmallTextTransformer()
    params = {name: value.detach().clone() for name, value in module.named_parameters()}
    tokens, targets = torch.randint(0, 11, (7, 5)), torch.randint(0, 3, (7,))
    lifted = GradSampleModule(module, loss_reduction="sum")
    functional.cross_entropy(lifted(tokens), targets, reduction="sum").backward()
    theirs = {name: value.grad_sample for name, value in module.named_parameters()}
    norms = torch.sqrt(sum((slope.flatten(1) ** 2).sum(1) for slope in theirs.values()))
    clip = float(norms.median())
    wanted = {name: torch.einsum("i,i...->...", (clip / norms).clamp(max=1.0), slope) for name, slope in theirs.items()}
    lifted.remove_hooks()

    def loss(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(module, trainable, (inputs["tokens"],))
        task = functional.cross_entropy(out, targets)
        return task, task

    found, _ = clipped_sum(loss, params, {"tokens": tokens}, targets, None, PrivacySettings(clip=clip, noise=0.0))
    assert max_difference(found, wanted) < 1e-5


def test_masked_examples_add_nothing_to_the_clipped_sum() -> None:
    model, data = toy_model(), Clients(a=8)["a"].train
    some, all_ = data.take(torch.arange(5)), data.take(torch.arange(8))
    all_.inputs["x"][6] = float("nan")  # not even if it is NaN
    mask = (torch.arange(8) < 5).float()
    found, _ = clipped_sum(example_loss(model), model.initial, all_.inputs, all_.targets, mask, NOISY)
    wanted, _ = clipped_sum(example_loss(model), model.initial, some.inputs, some.targets, None, NOISY)
    assert max_difference(found, wanted) < 1e-6


def test_example_with_infinite_input_is_left_out_of_the_clipped_sum() -> None:
    model, data = toy_model(), Clients(a=6)["a"].train
    batch, good = data.take(torch.arange(6)), data.take(torch.tensor([0, 1, 2, 4, 5]))
    batch.inputs["x"][3] = float("inf")
    found, _ = clipped_sum(example_loss(model), model.initial, batch.inputs, batch.targets, None, NOISY)
    wanted, _ = clipped_sum(example_loss(model), model.initial, good.inputs, good.targets, None, NOISY)
    assert max_difference(found, wanted) < 1e-6


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9, weight_decay=0.1), AdamW()], ids=["momentum", "adamw"])
def test_dp_sgd_without_clip_and_noise_equals_plain_training(optimizer: SGD | AdamW) -> None:
    """In float64, because AdamW amplifies rounding. Both runs use the same batches, and none is short."""
    model, clients = Float64Model(toy_model()), Float64Population(Clients(a=8, b=12))
    plain, ours = (
        toy_run(method, optimizer=optimizer) for method in (fedavg(), with_dp_sgd(fedavg(), WITHOUT_CLIP_OR_NOISE))
    )
    assert max_difference(final_params(play(plain, model, clients)), final_params(play(ours, model, clients))) < 1e-9
    assert max_difference(final_params(play(plain, model, clients)), model.initial) > 1e-2


def noisy_zeros(like: Tensors, key: Key, std: float) -> Tensors:
    """The release of a zero sum."""
    noise = gaussian_noise(like, key, std)
    return {name: add_noise(torch.zeros_like(value), noise[name], std) for name, value in like.items()}


def test_noise_follows_the_key_of_client_round_step_and_name() -> None:
    """With gradients clipped to almost zero, an update is the sum of the noise draws."""
    privacy = PrivacySettings(clip=1e-9, noise=3e8)
    run, model, clients = toy_run(with_dp_sgd(fedavg(), privacy), lr=1.0, steps=2), toy_model(), Clients(a=8)
    [first, *_] = play(run, model, clients)
    key = run.key / "round" / 0 / "client" / "a" / "noise" / 0
    drawn = [noisy_zeros(model.initial, key / step, 3e8 * 1e-9) for step in range(2)]
    wanted = {name: value - (drawn[0][name] + drawn[1][name]) / 4 for name, value in model.initial.items()}
    assert max_difference(first.server.params, wanted) < 1e-6
    everything = torch.cat([value.flatten() for draw in drawn for value in draw.values()])
    assert 0.25 < float(everything.std()) < 0.35


def test_empty_batch_gives_a_step_of_noise_only() -> None:
    run, model, clients = (
        toy_run(with_dp_sgd(fedavg()), count=1, lr=1.0, batch_size=1, steps=1),
        toy_model(),
        Clients(a=4),
    )
    empty = next(
        seed
        for seed in range(100)
        if not poisson_batches(4, run.training, None, Key(seed) / "round" / 0 / "client" / "a" / "batches" / 0).sizes[0]
    )
    run = replace(run, key=Key(empty))
    noise = noisy_zeros(model.initial, run.key / "round" / 0 / "client" / "a" / "noise" / 0 / 0, 0.8 * 0.5)
    wanted = {name: value - noise[name] for name, value in model.initial.items()}
    assert max_difference(final_params(play(run, model, clients)), wanted) < 1e-6


def test_collate_keeps_an_empty_batch_masked() -> None:
    data = Clients(a=6)["a"].train
    nothing = replace(data.take(torch.tensor([0])), mask=torch.zeros(1))
    joined = collate([data.take(torch.arange(3)), nothing])
    assert joined.mask is not None
    assert joined.mask.tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedfrozen", "scaffold", "fedrep"])
def test_methods_with_dp_sgd_conform(name: str) -> None:
    method = build(name, {"head_epochs": 2} if name == "fedrep" else {})
    check_method(with_dp_sgd(method), ToyTransformer(width=3, layers=1), ThreeClients())


class ThreeClients(ToyPopulation):
    clients = ("c0", "c1", "c2")


def test_dp_sgd_leaves_frozen_names_without_noise() -> None:
    kernel = toy_model().names("query", "key")

    def plan(model: Model, round_info: object) -> Plan:
        names = model.all_names() - kernel
        return Plan((Phase(names),), up=names, down=model.all_names())

    run = toy_run(replace(with_dp_sgd(fedavg()), plan=plan), count=1)
    [played] = play(run, toy_model(), Clients(a=8))
    moved = {name for name, value in played.server.params.items() if not torch.equal(value, toy_model().initial[name])}
    assert moved == toy_model().all_names() - kernel


def test_penalty_without_data_is_not_clipped() -> None:
    """Away from the anchor the penalty acts at full strength, however small the clip of the examples is."""
    privacy = PrivacySettings(clip=1e-12, noise=0.0, sampling="shuffle")
    run = toy_run(with_dp_sgd(fedprox(mu=0.5), privacy), lr=0.1)
    away = {name: value + 1.0 for name, value in toy_model().initial.items()}
    [learned] = train_clients(
        run,
        [replace(begin_client_round(run), ctx=replace(begin_client_round(run).ctx, anchor=toy_model().initial))],
    )
    assert max_difference(learned.params, toy_model().initial) < 1e-6  # at the anchor the penalty has no gradient
    slopes = {name: 0.5 * torch.ones_like(value) for name, value in away.items()}
    assert max_difference(gradient_step_at(run, away), slopes) < 1e-5


def gradient_step_at(run, at: Tensors) -> Tensors:  # type: ignore[no-untyped-def]
    from partita.training.dp_sgd import NoiseSource
    from partita.training.phase_trainer import PhaseTrainer
    from partita.training.phase_work import PhaseWork

    each = begin_client_round(run)
    sources = [NoiseSource(Key(0), 4)]
    block = PhaseTrainer(PhaseWork(run, each.plan.phases[0], [each.ctx], [at], [{}], run.method.privacy, sources))
    block.step(each.examples.take(torch.arange(4)))
    return {name: (at[name] - value) / run.training.lr for name, value in block.params()[0].items()}


def begin_client_round(run, client: str = "a", size: int = 8):  # type: ignore[no-untyped-def]
    model = toy_model()
    job, _ = make_job(run, model, initial_server(run, model), 0, client)
    return begin_round(run, model, job, ClientState(), Clients(a=size)["a"].train)


def test_per_example_penalty_is_clipped() -> None:
    rule = MoonClient(1.0, 0.5)
    plain, ours = (
        toy_run(Method("moon", client_rules=(rule,), privacy=privacy)) for privacy in (None, WITHOUT_CLIP_OR_NOISE)
    )
    model, clients = toy_model(), Clients(a=8, b=4)
    assert max_difference(final_params(play(plain, model, clients)), final_params(play(ours, model, clients))) < 1e-6
    tight = toy_run(Method("moon", client_rules=(rule,), privacy=PrivacySettings(clip=1e-9, noise=0.0)))
    assert max_difference(final_params(play(tight, model, clients)), model.initial) < 1e-6


@dataclass(frozen=True)
class UndeclaredMoon(MoonClient):
    per_example = False


def test_rule_that_reads_examples_without_declaring_it_is_refused() -> None:
    run = toy_run(with_dp_sgd(Method("moon", client_rules=(UndeclaredMoon(1.0, 0.5),))))
    with pytest.raises(MethodError, match="UndeclaredMoon reads a client's examples"):
        play(run, toy_model(), Clients(a=8))


class UndeclaredSelection(ClientRule):
    def narrow(self, plan: Plan, probe: Examples, ctx: Context, key: Key) -> LayerSelection:
        return LayerSelection(plan.train if len(probe) > 3 else frozenset())


class DeclaredSelection(UndeclaredSelection):
    uses_data = True


class ReleasedSelection(DeclaredSelection):
    release = PrivacyRelease("layers", noise=2.0, share=1.0)


def test_selection_by_data_needs_a_privacy_release() -> None:
    with pytest.raises(MethodError, match="DeclaredSelection starts or selects by a client's examples"):
        with_dp_sgd(Method("peek", client_rules=(DeclaredSelection(),)))
    with pytest.raises(MethodError, match="UndeclaredSelection reads a client's examples without declaring it"):
        play(toy_run(with_dp_sgd(Method("peek", client_rules=(UndeclaredSelection(),)))), toy_model(), Clients(a=8))
    play(toy_run(with_dp_sgd(Method("peek", client_rules=(ReleasedSelection(),)))), toy_model(), Clients(a=8))
    play(toy_run(Method("peek", client_rules=(UndeclaredSelection(),))), toy_model(), Clients(a=8))


class TwoGradients(ClientRule):
    def step_gradient(self, gradient_at: GradientAt, params: Tensors, ctx: Context) -> Tensors:
        return gradient_at(gradient_at({}))


class MoreGradients(TwoGradients):
    pass


def test_rule_that_evaluates_gradients_itself_is_refused_under_privacy() -> None:
    """And two such rules at all times: a step has one gradient."""
    rule = TwoGradients()
    with pytest.raises(MethodError, match=r"m: TwoGradients evaluates .* \(step_gradient\).*privacy.unit = 'client'"):
        with_dp_sgd(Method("m", client_rules=(ClientRule(), rule)))
    with pytest.raises(MethodError, match=r"a\+b: TwoGradients and MoreGradients both compute.*use one of them"):
        compose(Method("a", client_rules=(rule,)), Method("b", client_rules=(MoreGradients(),)))


class StartsByData(ClientRule):
    def start(self, params: Tensors, examples: Examples, ctx: Context, key: Key) -> tuple[Tensors, Slots]:
        return {"head.weight": params["head.weight"] / len(examples)}, {}


def test_start_that_reads_examples_needs_a_privacy_release() -> None:
    class Declared(StartsByData):
        uses_data = True

    with pytest.raises(
        MethodError, match=r"StartsByData reads a client's examples without declaring it.*narrow or start"
    ):
        play(toy_run(with_dp_sgd(Method("peek", client_rules=(StartsByData(),)))), toy_model(), Clients(a=8))
    with pytest.raises(MethodError, match="Declared starts or selects by a client's examples and adds no noise"):
        with_dp_sgd(Method("peek", client_rules=(Declared(),)))


def test_private_rounds_report_no_loss() -> None:
    [first, *_] = play(toy_run(with_dp_sgd(fedavg())), toy_model(), Clients(a=8, b=4))
    assert first.loss is None
    assert play(toy_run(fedavg()), toy_model(), Clients(a=8, b=4))[0].loss is not None


def test_nan_examples_do_not_make_a_private_round_non_finite() -> None:
    class Broken(Clients):
        def __getitem__(self, client: str) -> ClientData:
            part = super().__getitem__(client).train
            assert isinstance(part, ToyExamples)
            x = part.x.clone()
            x[0] = float("nan")
            broken = ToyExamples(x, part.y)
            return ClientData(broken, broken, broken)

    [played] = play(toy_run(with_dp_sgd(fedavg()), count=1), toy_model(), Broken(a=8))
    assert all(bool(torch.isfinite(value).all()) for value in played.server.params.values())


def test_adaptation_for_evaluation_adds_no_noise() -> None:
    loud = PrivacySettings(clip=1.0, noise=1e6)
    runs = [toy_run(fedavg()), toy_run(with_dp_sgd(fedavg(), loud))]
    model = toy_model()
    results = []
    for run in runs:
        job, _ = make_job(run, model, initial_server(run, model), 0, "a")
        phases = (Phase(model.names("head")),)
        [learned] = train_clients(
            run, [adaptation_round(run, model, job, ClientState(), Clients(a=8)["a"].train, phases)]
        )
        results.append(learned.params)
    assert equal(*results)


def test_secret_changes_noise_but_not_cohorts() -> None:
    model, clients = toy_model(), Clients(a=8, b=8, c=8)
    open_, hidden, again = (
        play(replace(toy_run(with_dp_sgd(fedavg()), cohort=2), secret=secret), model, clients)
        for secret in (None, Key(5), Key(5))
    )
    assert [each.cohort for each in open_] == [each.cohort for each in hidden]
    assert max_difference(final_params(open_), final_params(hidden)) > 1e-3
    assert equal(final_params(hidden), final_params(again))


def test_scaffold_control_variates_come_from_noisy_parameters() -> None:
    run = toy_run(with_dp_sgd(scaffold()), lr=0.1)
    [first, *_] = play(run, toy_model(), Clients(a=8))
    mean_gradient = {
        name: (toy_model().initial[name] - first.server.params[name]) / (2 * 0.1) for name in first.server.params
    }
    assert max_difference(first.server.state["control"], mean_gradient) < 1e-4


class LinearModel(ToyTransformer):
    """Has no layer norm, whose backward pass vmap cannot lift on a CPU in mixed precision."""

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        return Output(functional.linear((inputs["x"] @ params["embed.weight"]).mean(1), params["head.weight"]))


def test_dp_sgd_in_mixed_precision_is_close_to_float32() -> None:
    """Norms, sums and noise stay in float32: only the examples' gradients use bfloat16."""
    full, half = (
        final_params(
            play(
                toy_run(with_dp_sgd(fedavg(), WITHOUT_CLIP_OR_NOISE), precision=precision),
                LinearModel(4, 1),
                Clients(a=8),
            )
        )
        for precision in ("float32", "bfloat16")
    )
    assert 0 < max_difference(full, half) < 0.02
    assert all(value.dtype == torch.float32 for value in half.values())


def test_vmap_error_over_examples_names_the_precision_setting() -> None:
    with pytest.raises(VmapError, match=r"over examples: .*set training\.precision = 'float32'"):
        play(toy_run(with_dp_sgd(fedavg()), precision="bfloat16"), toy_model(), Clients(a=8))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip": 0.0}, "privacy.clip is 0"),
        ({"noise": -1.0}, "privacy.noise is -1"),
        ({"clip": float("inf")}, "no noise is enough"),
        ({"clip": float("inf"), "noise": None, "epsilon": 2.0}, "no noise is enough"),
        ({"clip": float("nan")}, "privacy.clip is nan"),
        ({"noise": float("inf")}, "privacy.noise is inf"),
        ({"clipping": "ghosts"}, "privacy.clipping is 'ghosts'"),
        ({"microbatch": 0}, "privacy.microbatch is 0"),
    ],
)
def test_invalid_dp_sgd_settings_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises((OptionError, PrivacyError), match=said):
        PrivacySettings(**{"clip": 1.0, "noise": 1.0, **wrong})  # type: ignore[arg-type]


def test_gradient_clip_together_with_dp_sgd_is_refused() -> None:
    with pytest.raises(RunError, match=r"training\.clip is 1\.0 and privacy\.unit is"):
        toy_run(with_dp_sgd(fedavg()), clip=1.0)


# ---- the sampling drawn is the sampling charged


def drawn_rate(count: int, batch: int, draws: int) -> float:
    """The mean fraction of examples that take part in a step."""
    training = Training(lr=1.0, batch_size=batch, steps=-(-draws // count))
    taken = poisson_batches(count, training, None, Key(1) / count)
    return len(taken.order) / (len(taken) * count)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("count", "batch", "draws"), [(80, 64, 200_000), (10, 9, 100_000), (2000, 800, 1_000_000)])
def test_sampling_rate_is_batch_size_over_examples(count: int, batch: int, draws: int) -> None:
    """Within half a percent, which is at least four standard deviations of the mean."""
    rate = batch / count
    assert 4 * ((1 - rate) / (rate * draws)) ** 0.5 < 0.005
    assert drawn_rate(count, batch, draws) == pytest.approx(rate, rel=0.005)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("size", [2, 4, 5, 7, 60])
def test_charged_rate_and_steps_equal_those_drawn(size: int) -> None:
    """For clients smaller and larger than a batch of four, through a client round."""
    run = toy_run(with_dp_sgd(fedavg()), steps=-(-40_000 // size))
    each = begin_client_round(run, size=size)
    [charged] = releases_of(run, each.plan, size)
    [dealt] = each.schedules
    assert len(dealt) == charged.count
    assert charged.share == min(1.0, 4 / size)
    assert len(dealt.order) / (len(dealt) * size) == pytest.approx(charged.share, rel=0.05)


@pytest.mark.parametrize("size", [3, 4, 12])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a block"])
def test_clipped_sum_is_divided_by_the_expected_batch_size(size: int, together: bool) -> None:
    """Not by the drawn batch size, which would need noise too. A client smaller than a batch expects all its examples.

    The noise is divided by the same number, so a wrong divisor would change the step size.
    """
    run = toy_run(with_dp_sgd(fedavg(), PrivacySettings(clip=0.5, noise=0.0)), lr=1.0, steps=1)
    each = begin_client_round(run, size=size)
    learned, *_ = train_clients(run, [each, begin_client_round(run, size=9)] if together else [each])
    batch = each.examples.take(each.schedules[0].order)
    model = toy_model()
    total = micro_batch_sum(model, model.initial, batch, 0.5)
    expected = min(4, size)
    wanted = {name: -value / expected for name, value in total.items()}
    assert max_difference(learned.delta, wanted) < 1e-6
    assert max_difference(wanted, {name: torch.zeros_like(value) for name, value in wanted.items()}) > 1e-2
    assert size <= 4 or len(batch.targets) != expected, "otherwise the drawn batch size would pass too"


# ---- infinite gradients and microbatches


def linear_loss(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A loss whose gradient is the input."""
    loss = functional.linear(inputs["x"], trainable["w"]).sum()
    return loss, loss


@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("chunk", [None, 2])
def test_infinite_and_nan_gradients_are_left_out_of_the_clipped_sum(wrong: float, chunk: int | None) -> None:
    trainable, x = {"w": torch.ones(1, 3)}, torch.arange(12.0).reshape(4, 3)
    privacy = PrivacySettings(clip=0.5, noise=0.0, microbatch=chunk)
    wanted, _ = clipped_sum(linear_loss, trainable, {"x": x[[0, 1, 3]]}, torch.zeros(3), None, privacy)
    x[2, 1] = wrong
    for mask in (None, torch.ones(4)):
        found, _ = clipped_sum(linear_loss, trainable, {"x": x}, torch.zeros(4), mask, privacy)
        assert max_difference(found, wanted) < 1e-6


def test_microbatch_bounds_the_gradients_held_at_once() -> None:
    """The loss is traced once per microbatch, which holds one gradient per example."""
    calls = 0

    def counted(trainable: Tensors, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return linear_loss(trainable, inputs, targets)

    trainable, x = {"w": torch.ones(1, 3)}, torch.arange(15.0).reshape(5, 3)
    for chunk, wanted in ((None, 1), (5, 1), (4, 2), (2, 3), (1, 5)):
        calls = 0
        clipped_sum(
            counted, trainable, {"x": x}, torch.zeros(5), None, PrivacySettings(clip=0.5, noise=0.0, microbatch=chunk)
        )
        assert calls == wanted, chunk


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_released_sum_keeps_its_dtype(kind: torch.dtype) -> None:
    total = {"w": torch.zeros(3, dtype=kind)}
    noise = gaussian_noise(total, Key(0), 1.0)["w"]
    assert noise.dtype == torch.float64
    assert add_noise(total["w"], noise, 1.0).dtype == kind


def test_mask_is_split_with_its_microbatches() -> None:
    trainable, x = {"w": torch.ones(1, 3)}, torch.arange(15.0).reshape(5, 3)
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    privacy = PrivacySettings(clip=0.5, noise=0.0)
    wanted, _ = clipped_sum(linear_loss, trainable, {"x": x[mask.bool()]}, torch.zeros(3), None, privacy)
    found, _ = clipped_sum(linear_loss, trainable, {"x": x}, torch.zeros(5), mask, replace(privacy, microbatch=2))
    assert max_difference(found, wanted) < 1e-6


class Branching(ToyTransformer):
    """Branches on its data, which vmap cannot lift over examples."""

    def __call__(self, params: Tensors, inputs: Tensors) -> Output:
        out = super().__call__(params, inputs)
        return out if out.logits.sum() > 0 else Output(-out.logits)


def test_vmap_error_in_float32_suggests_another_model() -> None:
    with pytest.raises(VmapError, match="use another model, or no privacy"):
        play(toy_run(with_dp_sgd(fedavg())), Branching(width=4, layers=1), Clients(a=8))
