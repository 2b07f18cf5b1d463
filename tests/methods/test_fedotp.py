"""FedOTP: logits under the transport plan, its limits, and the local context."""

from __future__ import annotations

import image_fixtures
import pytest
import torch
from torch.nn import functional

from partita.core.method_error import MethodError
from partita.core.model import Model
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.methods.fedotp import fedotp
from partita.models.prompts.optimal_transport import sinkhorn

INPUTS = {"pixel_values": image_fixtures.random_images(5, seed=9).pixels}


def fedotp_model(**options: object) -> Model:
    method = fedotp(text_tokens=2, **options)  # type: ignore[arg-type]
    assert method.extend
    return method.extend(image_fixtures.tiny_clip(), Key(4))


def patch_text_cosines(model: Model) -> torch.Tensor:
    """(example, class, patch, owner), one by one."""
    towers = image_fixtures.tiny_clip()
    patches = towers.encode_image(INPUTS["pixel_values"], patches=True)[:, 1:]
    texts = [towers.text_features(model.initial[f"prompt.text.{owner}"]) for owner in ("global", "local")]
    result = torch.empty(5, 3, patches.shape[1], 2, dtype=torch.float64)
    for example, name, patch, owner in torch.cartesian_prod(*(torch.arange(size) for size in result.shape)).tolist():
        result[example, name, patch, owner] = functional.cosine_similarity(
            patches[example, patch], texts[owner][name], dim=0
        )
    return result


def test_fedotp_logit_is_the_similarity_under_the_transport_plan() -> None:
    model = fedotp_model(mass=0.7, iterations=60)
    alike = patch_text_cosines(model)
    scale = model.initial["logit_scale"].exp()
    logits = model(model.initial, INPUTS).logits
    for example in range(5):
        for name in range(3):
            plan = sinkhorn(1 - alike[example, name], 0.7, 0.1, 60)
            assert torch.allclose(logits[example, name], scale * (plan * alike[example, name]).sum(), atol=1e-9)


def test_fedotp_with_large_smoothing_gives_the_mean_cosine() -> None:
    model = fedotp_model(mass=0.8, smoothing=1e8, iterations=20)
    expected = 0.8 * model.initial["logit_scale"].exp() * patch_text_cosines(model).mean((-1, -2))
    assert torch.allclose(model(model.initial, INPUTS).logits, expected.double(), atol=1e-6)


def test_fedotp_gradient_does_not_pass_through_the_transport_plan() -> None:
    model = fedotp_model(iterations=20)
    params = {name: value.double().requires_grad_() for name, value in model.initial.items()}
    model(params, INPUTS).logits.sum().backward()
    plan = sinkhorn(1 - patch_text_cosines(model), 0.8, 0.1, 20)
    towers = image_fixtures.tiny_clip()
    context = model.initial["prompt.text.local"].double().requires_grad_()
    texts = functional.normalize(towers.text_features(context), dim=-1)
    patches = functional.normalize(towers.encode_image(INPUTS["pixel_values"], patches=True)[:, 1:], dim=-1)
    similar = torch.einsum("epf,cf->ecp", patches, texts)
    (model.initial["logit_scale"].double().exp() * plan[..., 1] * similar).sum().backward()
    assert context.grad is not None
    assert torch.allclose(params["prompt.text.local"].grad, context.grad, atol=1e-7)  # type: ignore[arg-type]


def test_fedotp_equal_contexts_get_equal_transport() -> None:
    model = fedotp_model()
    same = {**model.initial, "prompt.text.local": model.initial["prompt.text.global"]}
    model.initial.update(same)
    plan = sinkhorn(1 - patch_text_cosines(model), 0.8, 0.1, 100)
    assert torch.allclose(plan[..., 0], plan[..., 1], atol=1e-12)


def test_fedotp_keeps_the_local_context() -> None:
    method = fedotp(text_tokens=2)
    model = fedotp_model()
    plan = plan_for(method.plan, model, RoundInfo(0, 3, "a"))
    assert plan.up == plan.down == {"prompt.text.global"}
    assert plan.keep == {"prompt.text.local"}


@pytest.mark.parametrize("options", [{"mass": 0.0}, {"mass": 1.1}, {"smoothing": 0.0}, {"iterations": 0}])
def test_fedotp_refuses_invalid_options(options: dict[str, float]) -> None:
    with pytest.raises(MethodError, match=r"method\.mass is .* give more than 0 up to 1, more than 0, and 1 or more"):
        fedotp(**options)  # type: ignore[arg-type]


def test_fedotp_clients_keep_momentum_between_rounds() -> None:
    assert image_fixtures.clients_keep_momentum(fedotp(text_tokens=2))
