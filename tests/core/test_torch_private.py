"""The private names of torch that partita uses: each is there, has the effect that partita needs, and is in one file.

If a new version of torch fails here, the test's name says what to replace in core/torch_private.py.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from partita.core import torch_private
from partita.core.torch_private import PRIVATE, RecompileLimitError, limit_recompiles, own_parameters

PACKAGE = Path(torch_private.__file__).parent.parent
IMPORTED = {"Any", "Callable", "Iterator", "PRIVATE", "annotations", "attrgetter", "contextmanager", "torch"}
WRAPPED = {"_is_view", "_parameters"}  # private names that are reached from a value, not from torch
LEFT = [-1.0, 2.0, 3.0]
RIGHT = [4.0, -5.0, 6.0]

# Name -> what it is called with after the first list, and its effect on each number of LEFT and RIGHT.
OUT_OF_PLACE: dict[str, tuple[tuple[Any, ...], Callable[[float, float], float]]] = {
    "foreach_add": ((RIGHT,), lambda left, right: left + right),
    "foreach_mul": ((torch.tensor(0.5),), lambda left, right: left * 0.5),
    "foreach_norm": ((), lambda left, right: abs(left)),
    "foreach_sqrt": ((), lambda left, right: math.sqrt(left) if left > 0 else math.nan),
    "foreach_sub": ((RIGHT,), lambda left, right: left - right),
}
IN_PLACE: dict[str, tuple[tuple[Any, ...], Callable[[float, float], float]]] = {
    "foreach_add_": ((RIGHT,), lambda left, right: left + right),
    "foreach_addcdiv_": ((RIGHT, RIGHT, [2.0, 3.0, 4.0]), lambda left, right: left + {4: 2, -5: 3, 6: 4}[int(right)]),
    "foreach_addcmul_": ((RIGHT, RIGHT), lambda left, right: left + right * right),
    "foreach_copy_": ((RIGHT,), lambda left, right: right),
    "foreach_div_": (([2.0, 2.0, 2.0],), lambda left, right: left / 2),
    "foreach_lerp_": ((RIGHT, 0.25), lambda left, right: 0.75 * left + 0.25 * right),
    "foreach_mul_": ((3.0,), lambda left, right: left * 3),
    "foreach_sub_": ((RIGHT,), lambda left, right: left - right),
    "foreach_zero_": ((), lambda left, right: 0.0),
}


def tensors_of(value: Any) -> Any:
    """The list RIGHT as tensors; other arguments are passed as they are."""
    return [torch.full((2,), number) for number in value] if value is RIGHT else value


@pytest.mark.parametrize("name", [*OUT_OF_PLACE, *IN_PLACE])
def test_a_list_of_tensors_is_computed_at_once(name: str) -> None:
    arguments, expected = {**OUT_OF_PLACE, **IN_PLACE}[name]
    left = [torch.full((2,), number) for number in LEFT]
    result = getattr(torch_private, name)(left, *map(tensors_of, arguments))
    found = left if name in IN_PLACE else result
    scale = math.sqrt(2) if name == "foreach_norm" else 1.0
    for value, (one, other) in zip(found, zip(LEFT, RIGHT, strict=True), strict=True):
        assert torch.allclose(value, torch.full_like(value, scale * expected(one, other)), equal_nan=True)
    if name not in IN_PLACE:
        assert [value[0].item() for value in left] == LEFT


def test_norms_take_an_order_and_a_dtype() -> None:
    values = [torch.tensor([3.0, -4.0])]
    assert torch_private.foreach_norm(values, ord=math.inf)[0] == 4
    [norm] = torch_private.foreach_norm(values, dtype=torch.float64)
    assert (norm.item(), norm.dtype) == (5.0, torch.float64)


def test_fused_adamw_is_that_of_torch_optim() -> None:
    params, grads = [torch.linspace(-1, 1, 5)], [torch.linspace(2, -3, 5)]
    moments, step_count = [torch.zeros(5), torch.zeros(5)], torch.tensor(1.0)
    reference = nn.Parameter(params[0].clone())
    reference.grad = grads[0].clone()
    torch.optim.AdamW([reference], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3).step()
    torch_private.fused_adamw_(
        params, grads, moments[:1], moments[1:], [], [step_count], lr=torch.tensor(0.1), beta1=0.8, beta2=0.9,
        weight_decay=0.3, eps=1e-6, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert torch.allclose(params[0], reference.detach())


def test_a_view_is_told_from_a_tensor_of_its_own() -> None:
    whole = torch.zeros(4)
    assert torch_private.is_view(whole[:2])
    assert not torch_private.is_view(whole)
    assert not torch_private.is_view(whole[:2].clone())


def test_a_function_sees_the_transform_that_it_runs_under() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(value: Tensor) -> Tensor:
        seen.append((torch_private.is_batchedtensor(value), torch_private.is_gradtrackingtensor(value)))
        return value.sum()

    look(torch.zeros(2))
    torch.vmap(look)(torch.zeros(2, 2))
    torch.func.grad(look)(torch.zeros(2))
    assert seen == [(False, False), (True, False), (False, True)]


def test_a_change_in_place_raises_the_version() -> None:
    value = torch.zeros(2)
    before = torch_private.version(value)
    assert torch_private.version(value) == before
    value.add_(1)
    assert torch_private.version(value) > before


def test_the_tensor_of_all_clients_is_found_under_vmap() -> None:
    """Its gradient is found outside, as if there were no vmap."""
    seen: list[tuple[Tensor, int | None]] = []

    def look(value: Tensor, shared: Tensor) -> Tensor:
        for each in (value, shared, 2 * value):
            seen.append((torch_private.without_vmap(each), torch_private.client_dimension(each)))
        return (2 * value).sum() + seen[-1][0].new_zeros(())

    stacked, shared = torch.arange(6.0).view(3, 2).requires_grad_(), torch.zeros(4)
    torch.vmap(look, in_dims=(1, None))(stacked, shared)
    assert seen[0][0] is stacked
    assert seen[1][0] is shared
    assert [dimension for _, dimension in seen[:2]] == [1, None]
    whole, dimension = seen[2]
    assert dimension is not None
    assert torch.equal(whole.movedim(dimension, 1), 2 * stacked)
    [grad] = torch.autograd.grad(whole.sum(), stacked)
    assert torch.equal(grad, torch.full((3, 2), 2.0))
    assert torch_private.without_vmap(shared) is shared
    assert torch_private.client_dimension(shared) is None


def test_a_module_computes_with_what_its_parameters_are_replaced_by() -> None:
    layer = nn.Linear(2, 1, bias=False)
    own: dict[str, Any] = own_parameters(layer)
    assert own == {"weight": layer.weight, "bias": None}
    own["weight"] = torch.tensor([[2.0, 3.0]])
    assert layer(torch.tensor([1.0, 1.0])).item() == 5


def test_vmap_warns_where_it_runs_client_by_client() -> None:
    with torch_private.vmap_fallback_warnings(), pytest.warns(UserWarning, match="performance drop"):
        torch.vmap(lambda row: torch.histc(row, bins=2))(torch.rand(2, 3))


def test_a_kernel_is_made_from_source() -> None:
    assert [*inspect.signature(torch_private.compile_kernel).parameters][:2] == ["kernel_source", "kernel_name"]
    if torch.cuda.is_available():
        source = 'extern "C" __global__ void twice(float* value, int count) { value[threadIdx.x] *= count; }'
        value = torch.ones(1, device="cuda")
        torch_private.compile_kernel(source, "twice")(grid=(1, 1, 1), block=(1, 1, 1), args=[value, 2])
        assert value.item() == 2


def test_the_memory_of_a_failed_capture_can_be_released() -> None:
    """What this does to a GPU is tested in tests/training/test_devices.py."""
    for function in (torch_private.end_allocate_to_pool, torch_private.release_pool):
        assert callable(function)
        if torch.cuda.is_available():
            with pytest.raises(RuntimeError):
                function(0, torch.cuda.graph_pool_handle())


def test_more_programs_than_the_limit_are_an_error() -> None:
    program = torch.compile(lambda value: value + 1, backend="eager", fullgraph=True, dynamic=False)
    with limit_recompiles(2):
        assert program(torch.zeros(1)).shape == (1,)
        assert program(torch.zeros(2)).shape == (2,)
    with pytest.raises(RecompileLimitError, match="more than 2 compiled programs"), limit_recompiles(2):
        program(torch.zeros(3))


def test_operations_are_those_that_torch_counts() -> None:
    left, right = torch.ones(3, 4, 5), torch.ones(3, 5, 6)
    layer = torch.nn.Linear(6, 7)

    def work() -> torch.Tensor:
        return torch.nn.functional.gelu(layer(left @ right)).sum()

    with FlopCounterMode(display=False) as counter:
        work()
    assert torch_private.operations(work) == counter.get_total_flops() == 2 * 3 * 4 * 5 * 6 + 2 * 12 * 6 * 7


def test_every_name_has_a_test() -> None:
    others = {"fused_adamw_", "is_view", "is_batchedtensor", "is_gradtrackingtensor", "own_parameters"}
    others |= {"compile_kernel", "limit_recompiles", "RecompileLimitError", "vmap_fallback_warnings"}
    others |= {"version", "without_vmap", "client_dimension", "end_allocate_to_pool", "release_pool", "operations"}
    public = {name for name in vars(torch_private) if not name.startswith("_")} - IMPORTED
    assert public | PRIVATE.keys() == {*OUT_OF_PLACE, *IN_PLACE, *others}


def test_a_name_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'foreach_pow'"):
        _ = torch_private.foreach_pow


def private_names(source: str) -> list[str]:
    """The private names of torch in the source, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                words = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                words = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(attr=attribute):
                words = [f"torch._.{attribute}" if attribute in WRAPPED else ast.unparse(node)]
            case _:
                continue
        found += [f"{node.lineno}: {word}" for word in words if re.match(r"torch\.(.*\.)?_(?!_)", word)]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "torch._foreach_add([])",
        "from torch import _dynamo",
        "from torch._C import f",
        "import torch._dynamo",
        "torch.cuda._compile_kernel",
        "part._parameters",
        "(a + b)._is_view()",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert private_names(source)


@pytest.mark.slow
def test_no_other_file_uses_a_private_name_of_torch() -> None:
    assert not private_names("torch.__version__, torch.nn.functional.linear, self._parameter")
    files = [path for path in PACKAGE.rglob("*.py") if path != Path(torch_private.__file__)]
    assert len(files) > 20
    found = [f"{path.relative_to(PACKAGE)}:{each}" for path in files for each in private_names(path.read_text())]
    assert not found, found
