"""A personal copy beside the shared parameters: names, tags, plans, evaluation and compositions."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from image_fixtures import small_vit

from partita.core import tensors
from partita.core.client import ClientState
from partita.core.compose import compose
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.model import Model, TagError, layer_tag, role_tag
from partita.core.personal_copy import PlanWithCopy, add_personal_copy, copy_name, personal_values
from partita.core.plan import Phase, Plan, PlanError, RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.tensors import Names
from partita.engines.simulation import SimulationEngine
from partita.evaluation import score
from partita.methods.fedavg import fedavg
from partita.methods.fedbabu import fedbabu
from partita.methods.fedfrozen import fedfrozen
from partita.methods.fedper import fedper
from partita.methods.lora import lora
from partita.storage.client_store import MemoryStore
from partita.testing.toy import Float64Model, ToyTransformer

BASE = ToyTransformer(width=4, layers=2)
MODEL = add_personal_copy(BASE)
CLIENTS = Clients(a=5, b=9, c=6)
KEPT = Method("kept", plan=PlanWithCopy(), extend=lambda model, key: add_personal_copy(model))


def copies_of(names: Names) -> Names:
    return frozenset(map(copy_name, names))


def plan_of(method: Method, model: Model, number: int = 0, rounds: int = 3) -> Plan:
    return plan_for(method.plan, model, RoundInfo(number, rounds, "a"))


# ---- the model


def test_each_parameter_gets_a_copy_with_its_initial_value_and_no_new_memory() -> None:
    assert MODEL.all_names() == BASE.all_names() | copies_of(BASE.all_names())
    assert all(MODEL.initial[copy_name(name)] is value for name, value in BASE.initial.items())
    assert list(MODEL.initial)[: len(BASE.initial)] == list(BASE.initial)
    assert MODEL.name == "tiny attention with a personal copy"


def test_names_of_a_role_are_the_shared_ones_only() -> None:
    for role in ("head", "query", "embedding", "norm"):
        assert MODEL.names(role) == BASE.names(role)
    assert MODEL.names("personal") == copies_of(BASE.all_names())


def test_a_copy_has_the_layer_of_its_original_and_the_role_personal() -> None:
    for name, tags in BASE.tags.items():
        assert layer_tag(MODEL.tags[copy_name(name)]) == layer_tag(tags)
        assert role_tag(MODEL.tags[copy_name(name)]) == "personal"
    assert "vision" in add_personal_copy(_Towers()).tags["personal.w"]


class _Towers(Model):
    name = "towers"
    initial = {"w": torch.zeros(2)}  # noqa: RUF012
    tags = {"w": frozenset({"vision", "mlp"})}  # noqa: RUF012


def test_only_parameters_of_the_given_tags_are_copied() -> None:
    model = add_personal_copy(BASE, ("head", "norm"))
    assert model.names("personal") == copies_of(BASE.names("head", "norm"))
    assert personal_values(model.initial) == {name: BASE.initial[name] for name in BASE.names("head", "norm")}
    with pytest.raises(TagError, match="no parameter of tiny attention is tagged 'hed'"):
        add_personal_copy(BASE, ("hed",))


def test_forward_pass_reads_shared_values_and_personal_evaluation_the_copy() -> None:
    batch = CLIENTS["a"].train.take(torch.arange(3))
    moved = {name: value + 1 if name.startswith("personal.") else value for name, value in MODEL.initial.items()}
    own = {name: value + 1 for name, value in BASE.initial.items()}
    assert torch.equal(MODEL(moved, batch.inputs).logits, BASE(BASE.initial, batch.inputs).logits)
    assert torch.equal(MODEL(MODEL.personal(moved), batch.inputs).logits, BASE(own, batch.inputs).logits)
    assert tensors.equal(personal_values(moved), own)
    assert MODEL.personal(moved).keys() == moved.keys()
    assert tensors.equal(MODEL.shared(MODEL.personal(moved)), own)
    assert tensors.equal(Float64Model(MODEL).personal(moved), MODEL.personal(moved))
    assert BASE.personal(own) is own


def test_parameters_without_a_copy_are_shared_by_both() -> None:
    model = add_personal_copy(BASE, ("head",))
    params = {**model.initial, "personal.head.weight": torch.ones(3, 4)}
    assert tensors.equal(model.shared(model.personal(params)), {**BASE.initial, "head.weight": torch.ones(3, 4)})


def test_everything_else_is_the_base_model() -> None:
    batch = CLIENTS["a"].train.take(torch.arange(3))
    out = MODEL(MODEL.initial, batch.inputs)
    assert torch.equal(MODEL.losses(out, batch.targets), BASE.losses(out, batch.targets))
    assert tensors.equal(MODEL.attention(MODEL.initial, batch, "first"), BASE.attention(BASE.initial, batch, "first"))
    assert MODEL.head_dimensions() == BASE.head_dimensions()
    shorter = MODEL.skip_layers(frozenset({"layer.1"}))
    expected = BASE.skip_layers(frozenset({"layer.1"}))(BASE.initial, batch.inputs).logits
    assert torch.equal(shorter(MODEL.initial, batch.inputs).logits, expected)
    assert shorter.all_names() == MODEL.all_names()
    frozen = small_vit(frozen=["embedding"])
    assert frozen.frozen_weights()
    assert tensors.equal(add_personal_copy(frozen).frozen_weights(), frozen.frozen_weights())


def test_copies_move_to_a_device_with_their_original() -> None:
    model = add_personal_copy(ToyTransformer(width=4, layers=1), ("head",))
    model.initial["personal.own"] = torch.zeros(1)
    model.to(torch.device("meta"))
    assert {value.device.type for value in model.initial.values()} == {"meta"}
    assert model.initial["personal.head.weight"] is model.base.initial["head.weight"]
    assert model.initial["head.weight"] is model.base.initial["head.weight"]


def test_a_second_copy_and_later_additions_are_refused() -> None:
    with pytest.raises(TagError, match="with a personal copy has personal parameters already"):
        add_personal_copy(MODEL)
    with pytest.raises(TagError, match=r"name the factors first, as in 'lora\+ditto'"):
        MODEL.low_rank(2, 1.0, ("query",), Key(0))
    with pytest.raises(TagError, match=r"name the prompts first, as in 'promptfl\+ditto'"):
        MODEL.prompted("text", Key(0))


# ---- the plan


def test_plan_trains_and_keeps_all_copies_and_sends_none() -> None:
    plan = plan_of(KEPT, MODEL)
    assert plan.up == plan.down == BASE.all_names()
    assert plan.keep == copies_of(BASE.all_names())
    assert plan.train == MODEL.all_names()
    assert plan_of(KEPT, MODEL) is plan, "clients with equal plans share one object"


def test_copies_train_in_the_phases_of_their_originals() -> None:
    head, body = BASE.names("head"), BASE.all_names() - BASE.names("head")

    def shared(model: Model, round_info: RoundInfo) -> Plan:
        assert model.all_names() == BASE.all_names(), "the planner does not see the copies"
        return Plan((Phase(head, 2), Phase(body)), up=body, down=body, keep=head)

    plan = PlanWithCopy(shared)(add_personal_copy(BASE, ("head",)), RoundInfo(0, 3, "a"))
    assert plan.phases == (Phase(head | copies_of(head), 2), Phase(body))
    assert (plan.up, plan.down, plan.keep) == (body, body, head | copies_of(head))


def test_personal_parameters_without_an_original_train_in_all_phases() -> None:
    model = add_personal_copy(BASE, ("head",))
    model.initial["personal.own"] = torch.zeros(1)
    own = {**model.tags, "personal.own": frozenset({"personal"})}
    object.__setattr__(model, "tags", own)
    plan = PlanWithCopy(fedfrozen(0).plan)(model, RoundInfo(0, 3, "a"))
    assert plan.train & model.names("personal") == {"personal.own", "personal.head.weight"}


def test_plan_needs_a_model_with_a_copy() -> None:
    with pytest.raises(PlanError, match=r"tiny attention has no personal copy; call method.extend\(model, key\)"):
        plan_of(KEPT, BASE)


# ---- compositions


@pytest.mark.parametrize("order", [1, -1])
def test_plan_of_another_method_says_which_copies_train(order: int) -> None:
    method = compose(*(fedfrozen(1), KEPT)[::order])
    frozen = BASE.names("query", "key")
    assert plan_of(method, MODEL, 0).train == MODEL.all_names()
    late = plan_of(method, MODEL, 1)
    assert late.train == MODEL.all_names() - frozen - copies_of(frozen)
    assert late.up == BASE.all_names() - frozen
    assert late.keep == copies_of(BASE.all_names()), "a copy that does not train now is kept"


def test_two_plans_beside_the_copy_are_refused() -> None:
    with pytest.raises(MethodError, match="both set the plan"):
        compose(fedfrozen(1), KEPT, fedper(finetune=0))
    with pytest.raises(MethodError, match="both set the plan"):
        compose(KEPT, Method("other", plan=PlanWithCopy(fedavg().plan)))


def test_adaptation_beside_the_copy_is_refused() -> None:
    with pytest.raises(MethodError, match=r"fedbabu\+kept: clients are tested with their personal copy.*finetune = 0"):
        compose(fedbabu(), KEPT)
    assert compose(fedbabu(finetune=0), KEPT).adapt is None


def test_low_rank_factors_get_a_copy_if_they_come_first() -> None:
    both = Method("own", plan=PlanWithCopy(), extend=lambda model, key: add_personal_copy(model, ("lora", "head")))
    method = compose(lora(rank=2), both)
    assert method.extend is not None
    model = method.extend(small_vit(), Key(0))
    factors = model.names("lora", "head")
    assert plan_of(method, model).up == factors
    assert plan_of(method, model).keep == copies_of(factors)
    assert compose(both, fedavg()).extend is both.extend
    assert compose(fedavg(), both).extend is both.extend


# ---- rounds


def test_copies_that_do_not_move_leave_fedavg_bit_for_bit() -> None:
    one = play(toy_run(KEPT, 3, cohort=2), add_personal_copy(toy_model()), CLIENTS)
    two = play(toy_run(fedavg(), 3, cohort=2), toy_model(), CLIENTS)
    shared = {name: value for name, value in final_params(one).items() if not name.startswith("personal.")}
    assert tensors.equal(shared, final_params(two))
    assert [result.traffic for result in one] == [result.traffic for result in two]
    assert [result.loss for result in one] == [result.loss for result in two]


def test_clients_are_evaluated_with_their_copy() -> None:
    model, store = add_personal_copy(toy_model()), MemoryStore()
    run = toy_run(KEPT, 1)
    own = {name: value + 0.5 for name, value in toy_model().initial.items()}
    store.save("b", 0, ClientState({copy_name(name): value for name, value in own.items()}))
    job = make_job(run, model, initial_server(run, model), 0, "b")[0]
    [(_, scores)] = SimulationEngine(run, model, CLIENTS, store=store).evaluate([job])
    assert scores == score(toy_model(), own, CLIENTS["b"].test)
    assert scores != score(toy_model(), toy_model().initial, CLIENTS["b"].test)


def test_copy_belongs_to_the_tower_of_its_original_and_to_no_other() -> None:
    model = add_personal_copy(toy_model())
    for name in toy_model().initial:
        assert model.tags[copy_name(name)].isdisjoint({"vision", "text", "encoder", "decoder"}), name


def test_model_for_other_classes_keeps_its_copy() -> None:
    class Named(ToyTransformer):
        classes: tuple[str, ...] = ()

        def for_classes(self, classes: tuple[str, ...]) -> Named:
            other = Named()
            other.classes = classes
            return other

    model = add_personal_copy(Named())
    other = model.for_classes(("cat", "dog"))
    assert isinstance(other.base, Named)
    assert other.base.classes == ("cat", "dog")
    assert other.initial.keys() == model.initial.keys()
