"""FedPGP: a low-rank local context and a contrastive loss."""

from __future__ import annotations

import image_fixtures
import pytest
import torch
from helpers import final_params, play, toy_model, toy_run
from torch.nn import functional

from partita.core import tensors
from partita.core.client_rule import Context
from partita.core.data import Batch
from partita.core.method_error import MethodError
from partita.core.model import Model, Output
from partita.core.plan import NO_NAMES, Plan, RoundInfo, plan_for
from partita.core.rng import Key
from partita.methods.fedpgp import TextContrast, fedpgp
from partita.methods.promptfl import promptfl

INPUTS = {"pixel_values": image_fixtures.random_images(5, seed=9).pixels}
LEFT, RIGHT, SHARED = "prompt.text.left", "prompt.text.right", "prompt.text.global"


def fedpgp_model(**options: object) -> Model:
    method = fedpgp(text_tokens=3, rank=2, **options)  # type: ignore[arg-type]
    assert method.extend
    return method.extend(image_fixtures.tiny_clip(), Key(4))


def context_for(model: Model) -> Context:
    return Context(model, Plan((), NO_NAMES, NO_NAMES), {}, {}, {}, 0.1)


def test_fedpgp_equals_promptfl_with_the_factor_product_added() -> None:
    model, method = fedpgp_model(), promptfl(text_tokens=3)
    assert method.extend
    plain = method.extend(image_fixtures.tiny_clip(), Key(4))
    zero = {**model.initial, LEFT: torch.zeros_like(model.initial[LEFT])}
    assert torch.equal(model(zero, INPUTS).logits, plain(plain.initial, INPUTS).logits)
    product = {**plain.initial, SHARED: model.initial[SHARED] + model.initial[LEFT] @ model.initial[RIGHT]}
    assert torch.equal(model(model.initial, INPUTS).logits, plain(product, INPUTS).logits)


def test_fedpgp_penalty_is_the_cross_entropy_of_two_similarities() -> None:
    """As in the authors' code: the written text is the positive of two."""
    model = fedpgp_model()
    out = model(model.initial, INPUTS)
    penalty = TextContrast(3.0, 0.5).penalty(out, model.initial, Batch(INPUTS, torch.zeros(5)), context_for(model))
    towers = image_fixtures.tiny_clip()
    shared = towers.text_features(model.initial[SHARED])
    own = towers.text_features(model.initial[SHARED] + model.initial[LEFT] @ model.initial[RIGHT])
    near, far = (functional.cosine_similarity(shared, other) for other in (towers.precomputed["texts"], own))
    expected = functional.cross_entropy(torch.stack([near, far], 1) / 0.5, torch.zeros(3, dtype=torch.long))
    assert penalty is not None
    assert torch.allclose(penalty, 3 * expected)


def test_fedpgp_with_large_mu_moves_the_shared_context_toward_the_text() -> None:
    method = fedpgp(text_tokens=3, rank=2, mu=30.0)
    model = fedpgp_model()
    towers = image_fixtures.tiny_clip()
    after = final_params(play(toy_run(method, 3, lr=0.02), model, image_fixtures.FOUR))

    def nearness(params: tensors.Tensors) -> float:
        return float(
            functional.cosine_similarity(towers.text_features(params[SHARED]), towers.precomputed["texts"]).mean()
        )

    assert nearness(after) > nearness(model.initial) + 0.01


def test_fedpgp_keeps_the_local_factors() -> None:
    model = fedpgp_model()
    plan = plan_for(fedpgp().plan, model, RoundInfo(0, 3, "a"))
    assert plan.up == plan.down == {SHARED}
    assert plan.keep == {LEFT, RIGHT}


def test_fedpgp_refuses_invalid_options_and_models_without_texts() -> None:
    with pytest.raises(MethodError, match=r"method\.mu is -1 and method\.temperature 0\.5"):
        fedpgp(mu=-1)
    with pytest.raises(MethodError, match="fedpgp compares texts, and tiny attention gives none"):
        TextContrast(1.0, 0.5).penalty(Output(torch.zeros(1)), {}, Batch({}, torch.zeros(1)), context_for(toy_model()))
    assert not fedpgp(mu=0.0).client_rules


def test_fedpgp_clients_keep_momentum_between_rounds() -> None:
    assert image_fixtures.clients_keep_momentum(fedpgp(text_tokens=2, rank=1))


def test_fedpgp_context_starts_from_init_text() -> None:
    words = image_fixtures.tiny_clip().embed(["photo of"])[0][0, 1:-1]
    assert torch.equal(fedpgp_model(init_text="photo of").initial[SHARED][-len(words) :], words)
    assert not torch.equal(fedpgp_model().initial[SHARED][-len(words) :], words)
