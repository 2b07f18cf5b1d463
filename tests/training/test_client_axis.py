"""The client dimension: what a block computes for each client is what a single client computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from partita.core import tensors
from partita.core.tensors import Tensors
from partita.training.client_axis import (
    ClientAxis,
    ClientVmap,
    VmapError,
    leading_clients,
    stack_all,
    stack_or_share,
    translate_errors,
)

ONE, TWO, THREE = ClientAxis(1), ClientAxis(2), ClientAxis(3)


def numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def shares_memory(one: Tensor, two: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


# ---- the axis


def test_client_axis_has_a_dimension_only_for_several_clients() -> None:
    assert [ClientAxis(count).many for count in (1, 2, 3)] == [False, True, True]


def test_stack_returns_new_tensors_with_a_client_dimension_only_for_several_clients() -> None:
    first, second = numbers(2, 3), -numbers(2, 3)
    assert torch.equal(TWO.stack([first, second]), torch.stack([first, second]))
    alone = ONE.stack([first])
    assert torch.equal(alone, first)
    assert not shares_memory(alone, first)


def test_leading_returns_the_first_clients_as_a_view() -> None:
    block = numbers(3, 2)
    assert torch.equal(THREE.leading(block, 2), block[:2])
    assert shares_memory(THREE.leading(block, 2), block)
    assert ONE.leading(block, 1) is block, "its first dimension is not the client"


@pytest.mark.parametrize("shape", [(), (4,), (4, 5)])
def test_broadcast_multiplies_each_client_by_its_own_number(shape: tuple[int, ...]) -> None:
    factors, value = torch.tensor([2.0, 3.0, 5.0]), numbers(3, *shape)
    found = value * THREE.broadcast(factors, value)
    assert torch.equal(found, torch.stack([value[rank] * factors[rank] for rank in range(3)]))
    factor = torch.tensor(2.0)
    assert ONE.broadcast(factor, value) is factor


@pytest.mark.parametrize("part", ["views", "split"])
def test_views_and_split_give_each_client_its_part_without_a_copy(part: str) -> None:
    block = {"a": numbers(3, 2), "b": -numbers(3)}
    clients = getattr(THREE, part)(block)
    assert len(clients) == 3
    for rank, client in enumerate(clients):
        assert len(client) == 2
        assert list(client) == ["a", "b"]
        assert tensors.equal(client, {name: value[rank] for name, value in block.items()})
        assert shares_memory(client["a"], block["a"])
    [alone] = getattr(ONE, part)(block)
    assert alone is block


def test_split_of_no_tensors_still_has_every_client() -> None:
    assert THREE.split({}) == [{}, {}, {}]
    assert ONE.split({}) == [{}]


# ---- functions of one client, for a block


def dot(left: Tensor, right: Tensor) -> Tensor:
    """A function of vectors: with a client dimension it would fail without vmap."""
    assert left.ndim == right.ndim == 1
    return left @ right


def test_client_vmap_applies_a_function_to_each_client() -> None:
    left, right = numbers(3, 4), -numbers(4)
    found = ClientVmap(THREE, "it")(dot, [0, None])(left, right)
    assert torch.equal(found, torch.stack([row @ right for row in left]))


def test_client_vmap_returns_the_function_itself_for_a_single_client() -> None:
    assert ClientVmap(ONE, "it")(dot, [0, None]) is dot
    checked = ClientVmap(ONE, "it", checked=True)(dot, [0, None])
    assert float(checked(numbers(2), numbers(2))) == 5.0, "no dimension is mapped"


def fails(*given: Any) -> Tensor:
    raise RuntimeError("no such operation")


@pytest.mark.parametrize(("axis", "checked"), [(TWO, False), (TWO, True), (ONE, True)])
def test_client_vmap_error_names_the_model_and_the_remedy(axis: ClientAxis, checked: bool) -> None:
    with pytest.raises(VmapError) as caught:
        ClientVmap(axis, "a model", "clients", "use another", checked)(fails, [0])(numbers(2))
    assert str(caught.value) == "vmap does not support a model over clients: no such operation; use another"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_client_vmap_leaves_errors_of_a_single_client_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^no such operation$"):
        ClientVmap(ONE, "a model")(fails, [0])(numbers(2))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyError("w"), ValueError("wrong")])
def test_translate_errors_passes_on_all_errors_that_are_not_of_the_runtime(error: Exception) -> None:
    def function(*given: Any) -> Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        translate_errors(function, lambda cause: VmapError(str(cause)))()
    assert caught.value is error


# ---- what clients share


def test_stack_or_share_keeps_objects_that_all_clients_share() -> None:
    common = numbers(2)
    assert stack_or_share([common, common]) == (common, None)
    first = {"a": common, "b": common}
    value, dims = stack_or_share([first, dict(first), dict(first)])
    assert value is first
    assert dims is None
    assert stack_or_share([{}, {}]) == ({}, None)


def test_stack_or_share_stacks_equal_tensors_that_are_different_objects() -> None:
    value, dims = stack_or_share([numbers(2), numbers(2)])
    assert (value.shape, dims) == ((2, 2), 0)


def test_stack_or_share_decides_for_each_name_of_nested_dicts() -> None:
    common = numbers(2)
    clients = [
        {"same": {"x": common}, "own": {"x": common, "y": numbers(3) * rank}, "last": numbers(1) * rank}
        for rank in (1, 2)
    ]
    value, dims = stack_or_share(clients)
    assert dims == {"same": None, "own": {"x": None, "y": 0}, "last": 0}
    assert value["same"] is clients[0]["same"]
    assert value["own"]["x"] is common
    assert torch.equal(value["own"]["y"], torch.stack([numbers(3), numbers(3) * 2]))
    assert torch.equal(value["last"], torch.tensor([[1.0], [2.0]]))


def test_stack_or_share_compares_names_with_their_objects() -> None:
    """Two clients whose dicts hold the same objects under swapped names share neither."""
    one, two = numbers(2), -numbers(2)
    value, dims = stack_or_share([{"a": one, "b": two}, {"b": one, "a": two}])
    assert dims == {"a": 0, "b": 0}
    assert torch.equal(value["a"], torch.stack([one, two]))


def test_leading_clients_cuts_stacked_values_and_keeps_shared_ones() -> None:
    common = numbers(3)
    clients: list[dict[str, Any]] = [{"same": common, "own": {"y": numbers(2) * rank}} for rank in (1, 2, 3)]
    whole = stack_or_share(clients)
    value, dims = leading_clients(whole, 2)
    assert dims == whole[1]
    assert value["same"] is common, "its first dimension is not the client"
    assert torch.equal(value["own"]["y"], torch.stack([numbers(2), numbers(2) * 2]))
    shared = common, None
    assert leading_clients(shared, 2) is shared
    empty: Tensors = {}
    assert leading_clients((empty, None), 1) == ({}, None)


def test_what_belongs_to_each_client_is_stacked_even_if_it_is_one_object() -> None:
    """After a restart each client has a copy of its own, and results must not depend on that."""
    same = numbers(2)
    parts = [{"a": same, "b": {"c": numbers(3) + rank}} for rank in range(2)]
    value, dims = stack_all(parts)
    assert dims == {"a": 0, "b": {"c": 0}}
    assert torch.equal(value["a"], torch.stack([same, same]))
    assert torch.equal(value["b"]["c"], torch.stack([numbers(3), numbers(3) + 1]))
    copies = [{"a": same.clone(), "b": part["b"]} for part in parts]
    assert stack_all(copies)[1] == dims
    assert stack_or_share([part["a"] for part in parts]) == (same, None)
    alone, none = stack_all(parts[:1])
    assert alone is parts[0]
    assert none is None
