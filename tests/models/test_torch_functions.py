"""Functions of torch that modules call by their full names are replaced, with equal results."""

from __future__ import annotations

import pytest
import torch
from model_types import inputs_of, module_of
from torch import nn

from partita.models.hugging_face import from_module
from partita.models.torch_functions import resized
from partita.tasks import KINDS


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(8, 8), (5, 9), (3, 4)])
def test_resizing_by_matrix_products_equals_interpolation(mode: str, size: tuple[int, int], antialias: bool) -> None:
    value = torch.randn(2, 3, 5, 6, requires_grad=True)
    expected = nn.functional.interpolate(value, size, mode=mode, align_corners=False, antialias=antialias)
    found = resized(value, size=size, mode=mode, align_corners=False, antialias=antialias)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    slopes = [torch.autograd.grad((out * weights).sum(), value)[0] for out in (found, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("case", ["dinov2-image", "dinov2_with_registers-image"])
def test_images_of_another_size_need_no_interpolation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, model = module_of(case), from_module(case, module_of(case), kind=KINDS["image"])
    pixels = {"pixel_values": torch.randn(2, 3, 24, 32, generator=torch.Generator().manual_seed(0))}
    with torch.inference_mode():
        expected = module(**pixels).logits
        model(model.initial, pixels)  # makes the weights, which training uses as well
    monkeypatch.setattr(nn.functional, "interpolate", None)
    params = {name: value.clone().requires_grad_() for name, value in model.initial.items()}
    found = model(params, pixels).logits
    torch.testing.assert_close(found, expected)
    found.sum().backward()  # type: ignore[no-untyped-call]
    with torch.autocast("cpu", torch.bfloat16):
        half = model(params, pixels).logits
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("case", ["falcon-lm", "data2vec-vision-image"])
def test_fused_attention_is_that_of_partita(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kind = module_of(case), case.rpartition("-")[2]
    model = from_module(case, module_of(case), kind=KINDS[kind])
    monkeypatch.setattr("partita.models.torch_functions.scaled_dot_product", no_attention)
    with pytest.raises(ZeroDivisionError):
        model(model.initial, inputs_of(kind))
    assert module(**inputs_of(kind)).logits.isfinite().all(), "other modules of the class keep torch's"


def no_attention(*given: object) -> torch.Tensor:
    raise ZeroDivisionError
