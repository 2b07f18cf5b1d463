"""FedAvgM is torch's SGD momentum with the negative mean update as the gradient."""

from __future__ import annotations

import pytest
import torch
from helpers import Clients, final_params, play, toy_model, toy_run
from torch.testing import assert_close
from torch_servers import TorchServer, apply_all, random_deltas

from partita.core import tensors
from partita.core.method_error import MethodError
from partita.methods.fedavg import fedavg
from partita.methods.fedavgm import fedavgm


def test_fedavgm_equals_torch_sgd_with_momentum() -> None:
    torchs = TorchServer(lambda values: torch.optim.SGD(values, lr=0.7, momentum=0.8))
    ours = apply_all(fedavgm(lr=0.7, beta=0.8).server_rule, random_deltas())
    assert_close(ours, torchs.apply_all(random_deltas()), rtol=0, atol=1e-12)


def test_fedavgm_keeps_value_and_velocity_of_a_name_nobody_sent() -> None:
    both, one = random_deltas(count=2), [{"a": each["a"]} for each in random_deltas(count=2)]
    apart = [both[0], one[1], both[1]]
    together = [both[0], both[1]]
    assert_close(apply_all(fedavgm().server_rule, apart)["b"], apply_all(fedavgm().server_rule, together)["b"])


def test_fedavgm_without_momentum_is_fedavg_bit_for_bit() -> None:
    clients = Clients(a=5, b=9, c=6)
    one, two = (play(toy_run(method, 3, cohort=2), toy_model(), clients) for method in (fedavgm(beta=0.0), fedavg()))
    assert tensors.equal(final_params(one), final_params(two))


def test_fedavgm_refuses_a_momentum_of_one() -> None:
    with pytest.raises(MethodError, match=r"method\.beta is 1"):
        fedavgm(beta=1)
