"""pFedPrompt: a shared context, and a cache of own images that never leaves the client."""

from __future__ import annotations

from dataclasses import replace

import image_fixtures
import pytest
import torch
from helpers import final_params, play, toy_run
from torch.nn import functional

from partita.core import tensors
from partita.core.dp_settings import PrivacySettings
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.optim import SGD, AdamW, Optimizer
from partita.core.plan import RoundInfo, plan_for
from partita.core.rng import Key
from partita.core.rounds import make_job, rounds
from partita.core.tensors import Tensors
from partita.engines.simulation import SimulationEngine
from partita.methods.pfedprompt import pfedprompt
from partita.methods.promptfl import promptfl
from partita.models import ModelError
from partita.models.prompts.feature_cache import KEYS, WEIGHT, CachedFeatures, similarities

CONTEXT = "prompt.text.global"
CLASSES, SHOTS, WIDTH = 3, 2, 16
IMAGES = image_fixtures.random_images(12, seed=3)
INPUTS = {"pixel_values": IMAGES.pixels}


def cached_model(method: Method, dtype: str = "float32") -> CachedFeatures:
    assert method.extend
    model = method.extend(image_fixtures.tiny_clip(dtype), Key(4))  # type: ignore[arg-type]
    assert isinstance(model, CachedFeatures)
    return model


def filled(model: CachedFeatures) -> Tensors:
    """Parameters of a client whose cache holds two images of class 0, one of class 1 and none of class 2."""
    features = functional.normalize(model.towers.encode_image(IMAGES.pixels[:3])[:, 0], dim=-1)
    keys = torch.zeros(CLASSES, SHOTS, WIDTH)
    keys[0, 0], keys[0, 1], keys[1, 0] = features
    return {**model.initial, KEYS: keys}


def client_params(method: Method, optimizer: Optimizer, count: int = 2) -> tuple[CachedFeatures, dict[str, Tensors]]:
    """The parameters of each client after some rounds."""
    model, run = cached_model(method), toy_run(method, count, optimizer)
    engine = SimulationEngine(run, model, image_fixtures.FOUR)
    played = list(rounds(run, model, engine))
    jobs = [make_job(run, model, played[-1].server, count - 1, client)[0] for client in image_fixtures.FOUR.clients]
    return model, {job.client: engine._all_params(job) for job in jobs}


def test_pfedprompt_sends_the_context_and_keeps_the_cache() -> None:
    method = pfedprompt(text_tokens=3, shots=SHOTS)
    model = cached_model(method)
    plan = plan_for(method.plan, model, RoundInfo(0, 5, "a"))
    assert plan.up == plan.down == {CONTEXT}
    assert plan.keep == {KEYS}
    assert model.initial[KEYS].shape == (CLASSES, SHOTS, WIDTH)
    assert not model.initial[KEYS].any()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), AdamW(weight_decay=0.1)])
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_pfedprompt_learns_the_context_of_promptfl(optimizer: Optimizer, alpha: float) -> None:
    """The cache takes no part in training, so the shared context is that of PromptFL bit for bit."""
    own, plain = pfedprompt(text_tokens=3, shots=SHOTS, alpha=alpha), promptfl(text_tokens=3)
    assert plain.extend
    ours = final_params(play(toy_run(own, 3, optimizer), cached_model(own), image_fixtures.FOUR))
    towers = image_fixtures.tiny_clip("float32")
    theirs = final_params(play(toy_run(plain, 3, optimizer), plain.extend(towers, Key(4)), image_fixtures.FOUR))
    assert torch.equal(ours[CONTEXT], theirs[CONTEXT])
    assert not torch.equal(ours[CONTEXT], cached_model(own).initial[CONTEXT]), "and it has moved"


def test_pfedprompt_without_weight_predicts_like_promptfl() -> None:
    model = cached_model(pfedprompt(text_tokens=3, shots=SHOTS, alpha=0.0))
    params = model.personal(filled(model))
    assert promptfl(text_tokens=3).extend
    plain = promptfl(text_tokens=3).extend(image_fixtures.tiny_clip("float32"), Key(4))  # type: ignore[misc]
    expected = plain(plain.initial, INPUTS).logits
    assert torch.equal(model(params, INPUTS).logits, expected)
    weighted = replace(model, alpha=1.0)
    assert not torch.equal(weighted(weighted.personal(params), INPUTS).logits, expected)
    assert torch.equal(weighted(weighted.personal(model.initial), INPUTS).logits, expected), "so does an empty cache"
    assert torch.equal(weighted(filled(model), INPUTS).logits, expected), "and the model that trains"


def test_pfedprompt_predictions_match_tip_adapters_formula() -> None:
    """scale * f W + alpha * exp(-beta (1 - f K)) L, with the keys as rows and one-hot labels as in its code."""
    model = cached_model(pfedprompt(text_tokens=3, shots=SHOTS, alpha=2.5, beta=1.7))
    params = model.personal(filled(model))
    image = functional.normalize(model.towers.encode_image(IMAGES.pixels)[:, 0], dim=-1)
    texts = functional.normalize(model.towers.text_features(params[CONTEXT]), dim=-1)
    keys = torch.stack([params[KEYS][0, 0], params[KEYS][0, 1], params[KEYS][1, 0]])
    labels = functional.one_hot(torch.tensor([0, 0, 1]), CLASSES).float()
    affinity = (-1.7 * (1 - image @ keys.T)).exp()
    expected = params["logit_scale"].exp() * image @ texts.T + 2.5 * affinity @ labels
    assert torch.allclose(model(params, INPUTS).logits, expected, atol=1e-5)


def test_pfedprompt_image_in_the_cache_gets_its_label_when_similarity_is_sharp() -> None:
    """As beta grows, only the key that equals the query votes. Cosines differ by at most 2, so alpha > 2 e^s wins."""
    model = cached_model(pfedprompt(text_tokens=3, shots=SHOTS, beta=1e6))
    scale = float(model.initial["logit_scale"].exp())
    images = IMAGES.pixels[:3]
    keys = functional.normalize(model.towers.encode_image(images)[:, 0], dim=-1)
    assert ((keys @ keys.T)[~torch.eye(3, dtype=torch.bool)] < 1 - 1e-4).all(), "the images differ"
    for labels in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        cache = torch.zeros(CLASSES, SHOTS, WIDTH)
        cache[torch.tensor(labels), 0] = keys
        strong = replace(model, alpha=2.1 * scale * 1e3)  # rounding of a cosine of 1 costs exp(-1e6 * 1e-7) or so
        out = strong(strong.personal({**model.initial, KEYS: cache}), {"pixel_values": images})
        assert out.logits.argmax(1).tolist() == labels
    votes = similarities(keys.double(), functional.normalize(keys.double(), dim=-1).unsqueeze(1), 1e6)
    assert torch.allclose(votes, torch.eye(3, dtype=torch.float64), atol=0.5), "one vote each"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), AdamW(weight_decay=0.5)])
def test_pfedprompt_cache_holds_features_of_own_images_by_class(optimizer: Optimizer) -> None:
    model, params = client_params(pfedprompt(text_tokens=2, shots=SHOTS), optimizer)
    _, longer = client_params(pfedprompt(text_tokens=2, shots=SHOTS), optimizer, 4)
    for client, own in params.items():
        part = image_fixtures.FOUR.parts[client]
        features = functional.normalize(model.towers.encode_image(part.pixels)[:, 0], dim=-1)
        for label in range(CLASSES):
            theirs = features[part.labels == label]
            keys = own[KEYS][label]
            count = min(SHOTS, len(theirs))
            assert not keys[count:].any(), "the rest is empty"
            near = (keys[:count, None] - theirs).abs().amax(-1) < 1e-6  # (shot, image)
            if not count:
                continue
            assert near.any(1).all()
            assert near.int().argmax(1).unique().numel() == count, "different images"
        assert torch.equal(own[KEYS], longer[client][KEYS]), "no later round and no weight decay changes it"
        assert not own[WEIGHT].any()
    assert len({tuple(own[KEYS].flatten().tolist()) for own in params.values()}) == 4, "each client has its own"


def test_pfedprompt_new_classes_are_predicted_by_the_context_alone() -> None:
    method, plain = pfedprompt(text_tokens=3, shots=SHOTS, alpha=5.0), promptfl(text_tokens=3)
    assert plain.extend
    model, other = cached_model(method), plain.extend(image_fixtures.tiny_clip("float32"), Key(4))
    classes = ("dog", "cat")
    found = model.for_classes(classes)(model.personal(filled(model)), INPUTS).logits
    assert torch.equal(found, other.for_classes(classes)(other.initial, INPUTS).logits)


def test_pfedprompt_blocks_agree_with_single_clients() -> None:
    method = pfedprompt(text_tokens=3, shots=SHOTS)
    run = toy_run(method, 2, SGD(momentum=0.9))
    one, two = (final_params(play(run, cached_model(method), image_fixtures.FOUR, block=block)) for block in (1, 4))
    assert tensors.norm(tensors.subtract(one, two)) < 1e-6 * tensors.norm(one)


def test_pfedprompt_clients_keep_momentum_between_rounds() -> None:
    assert image_fixtures.clients_keep_momentum(pfedprompt(text_tokens=2, shots=SHOTS))


def test_pfedprompt_rejects_example_level_privacy_and_bad_options() -> None:
    with pytest.raises(MethodError, match="FillCache starts or selects by a client's examples and adds no noise"):
        replace(pfedprompt(), privacy=PrivacySettings(clip=1.0, noise=1.0))
    with pytest.raises(MethodError, match=r"method.alpha is -1 and method.beta 5.5; give 0 or more"):
        pfedprompt(alpha=-1)
    with pytest.raises(MethodError, match=r"method.beta 0; give 0 or more, and more than 0"):
        pfedprompt(beta=0)
    with pytest.raises(ModelError, match="shots is 0; set it to 1 or more"):
        cached_model(pfedprompt(shots=0))
    with pytest.raises(ModelError, match="text_tokens is 0; set it to 1 or more"):
        cached_model(pfedprompt(text_tokens=0))
