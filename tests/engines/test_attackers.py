"""Simulated attackers change their own updates only, as their kind says; a false number of examples is refused."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, final_params, max_difference, play, toy_model, toy_run

from partita.core import tensors
from partita.core.client import ClientError
from partita.core.compose import compose
from partita.core.rng import Key
from partita.core.update import Update
from partita.engines.attackers import Attack, add_attack, choose_attackers
from partita.experiment.builder import build
from partita.experiment.config import parse
from partita.methods import build as build_method
from partita.methods.fedavg import fedavg

DELTA = {"a": torch.tensor([3.0, 4.0]), "b": torch.arange(2000.0) / 2000}


def attacked(kind: str, strength: float = 3.0, client: str = "bad") -> Update:
    sent = Update(client, DELTA, {"slot": {"a": torch.ones(2)}}, 10.0, {"a": 2, "b": 2}, 0.5)
    changed, remembered = Attack(kind, frozenset({"bad"}), strength).encode(sent, {}, Key(3))  # type: ignore[arg-type]
    assert not remembered
    return changed


def test_each_kind_changes_the_update_as_described() -> None:
    assert tensors.equal(dict(attacked("sign-flip").delta), tensors.scale(DELTA, -3.0))
    assert tensors.equal(dict(attacked("sign-flip").slots["slot"]), {"a": torch.full((2,), -3.0)})
    assert tensors.equal(dict(attacked("scale").delta), tensors.scale(DELTA, 3.0))
    assert attacked("examples").weight == 30.0
    assert tensors.equal(dict(attacked("examples").delta), DELTA)
    noise = attacked("noise")
    ratio = float(tensors.norm(dict(noise.delta)) / tensors.norm(DELTA))
    assert ratio == pytest.approx(3.0, rel=0.1)
    cosine = sum(float((noise.delta[name] * DELTA[name]).sum()) for name in DELTA)
    assert abs(cosine) / float(tensors.norm(DELTA)) ** 2 / 3 < 0.1
    assert noise.weight == 10.0


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "noise", "examples"])
def test_honest_clients_are_not_changed(kind: str) -> None:
    assert attacked(kind, client="good").delta is DELTA
    assert attacked(kind, client="good").weight == 10.0


def test_attackers_are_drawn_by_number_or_fraction() -> None:
    clients = [f"c{i}" for i in range(10)]
    assert len(choose_attackers(clients, 3, Key(0))) == 3
    assert len(choose_attackers(clients, 0.29, Key(0))) == 2
    assert choose_attackers(clients, 0, Key(0)) == choose_attackers(clients, 0.0, Key(0)) == frozenset()
    assert choose_attackers(clients, 3, Key(0)) != choose_attackers(clients, 3, Key(1))
    with pytest.raises(ValueError, match=r"federation\.attackers is 11, but there are 10 clients"):
        choose_attackers(clients, 11, Key(0))


def test_sign_flip_of_strength_one_by_everyone_runs_the_round_backward() -> None:
    def moved(method) -> tensors.Tensors:  # type: ignore[no-untyped-def]
        return tensors.subtract(
            final_params(play(toy_run(method, count=1), toy_model(), Clients(a=8, b=4))), toy_model().initial
        )

    everyone = add_attack(fedavg(), "sign-flip", frozenset({"a", "b"}), 1.0)
    back, forth = moved(everyone), moved(fedavg())
    assert max_difference(back, tensors.scale(forth, -1.0)) < 1e-6
    assert float(tensors.norm(forth)) > 0.01


def test_attack_comes_before_compression() -> None:
    method = add_attack(compose(fedavg(), build_method("quantize")), "scale", frozenset({"a"}), 2.0)
    assert isinstance(method.transforms[0], Attack)
    play(toy_run(method, count=1), toy_model(), Clients(a=8, b=4))  # a scaled quantized tensor would be refused


def test_false_number_of_examples_is_refused_where_the_true_one_is_known() -> None:
    method = add_attack(fedavg(), "examples", frozenset({"a"}), 10.0)
    with pytest.raises(ClientError, match="client 'a': sent the weight"):
        play(toy_run(method, count=1, examples={"a": 8, "b": 4}), toy_model(), Clients(a=8, b=4))


def config(**federation: object):  # type: ignore[no-untyped-def]
    return parse(
        {
            "method": {"name": "fedavg"},
            "rounds": 1,
            "data": {"name": "digits"},
            "split": {"name": "iid", "clients": 5},
            "model": {"name": "vit", "layers": 1, "width": 16},
            "federation": federation,
            "engine": {"clients_per_block": 5},
        }
    )


def test_label_flip_changes_the_training_labels_of_attackers_only() -> None:
    honest, flipped = (build(config(**table)).federation for table in ({}, {"attackers": 2, "attack": "label-flip"}))
    changed = 0
    for client in honest.clients:
        for part in ("train", "validation", "test"):
            before, after = (getattr(each[client], part) for each in (honest, flipped))
            rows = torch.arange(len(before))
            old, new = before.take(rows).targets, after.take(rows).targets
            if part == "train" and not torch.equal(old, new):
                changed += 1
                assert torch.equal(new, 9 - old)
            else:
                assert torch.equal(new, old)
    assert changed == 2
    assert torch.equal(honest.test.take(torch.arange(9)).targets, flipped.test.take(torch.arange(9)).targets)


def test_config_puts_the_attack_into_the_method() -> None:
    assert build(config()).run.method.transforms == ()
    made = build(config(attackers=0.4, attack="noise", attack_strength=2.0)).run.method
    [attack] = made.transforms
    assert isinstance(attack, Attack)
    assert (attack.kind, len(attack.attackers), attack.strength) == ("noise", 2, 2.0)
