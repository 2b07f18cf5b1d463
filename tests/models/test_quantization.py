"""Quantized frozen weights: their error, their products and gradients under every transform, and runs on them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from base_fixtures import WORDS, frozen_weights, load, save_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from partita.core import tensors
from partita.core.rng import Key
from partita.models import ModelError, quantization
from partita.models.quantization import (
    BLOCK,
    NF4,
    Mode,
    QuantizedLinear,
    dequantize,
    dynamic_code_book,
    quantize,
    quantize_frozen,
    stored_bytes,
)

MODES: tuple[Mode, ...] = ("8bit", "4bit")
SHAPES = [(16, 8), (24, 64), (5, 7), (1, 1), (300, 70)]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=(Key(9) / seed).generator()).to(dtype)


def quantized_layer(mode: Mode, shape: tuple[int, int] = (24, 16), bias: bool = True) -> QuantizedLinear:
    layer = nn.Linear(shape[1], shape[0], bias=bias)
    with torch.no_grad():
        layer.weight.copy_(noise(*shape))
        if layer.bias is not None:
            layer.bias.copy_(noise(shape[0], seed=8))
    holder = nn.ModuleDict({"layer": layer})
    quantize_frozen(holder, mode, frozenset({"layer.weight"}))
    assert isinstance(layer, QuantizedLinear)
    return layer


def plain(layer: QuantizedLinear, inputs: Tensor) -> Tensor:
    return functional.linear(inputs, layer.dequantized(inputs.dtype), layer.bias)


# The format


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_within_the_bound(mode: Mode, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = noise(*shape, dtype=dtype)
    layer = quantized_layer(mode, shape)
    packed = quantize(weight, mode)
    assert len(packed) == packed.nbytes == stored_bytes(mode, *shape)
    error = (dequantize(packed, layer.tables, mode, shape, torch.float32) - weight.float()).abs()
    if mode == "8bit":  # half a step of the largest value's 127
        bound = weight.float().abs().amax(1, keepdim=True) / 254
        assert (error <= bound * (1 + 1e-5)).all()
        return
    flat = functional.pad(weight.float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = flat.abs().amax(1, keepdim=True)
    gaps = torch.tensor(NF4).diff() / 2
    # Half the widest gap, and what the scale itself is rounded by: up to half a gap of its 8 bits.
    slack = (largest - largest.mean()).abs().amax() * dynamic_code_book().diff().amax() / 2
    bound = (largest * gaps.amax() + slack).expand_as(flat).flatten()[: weight.numel()].view(shape)
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("mode", MODES)
def test_zeros_stay_zero(mode: Mode) -> None:
    layer = nn.ModuleDict({"layer": nn.Linear(64, 2)})
    nn.init.zeros_(layer["layer"].weight)  # type: ignore[arg-type]
    quantize_frozen(layer, mode, frozenset({"layer.weight"}))
    assert torch.count_nonzero(layer["layer"].dequantized(torch.float32)) == 0  # type: ignore[operator]


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_nf4_codes_are_the_nearest_ones(seed: int) -> None:
    weight = noise(4, 64, seed=seed)
    layer = quantized_layer("4bit", (4, 64))
    packed = quantize(weight, "4bit")
    codes = torch.stack([packed[:128] >> 4, packed[:128] & 15], 1).view(4, 64)
    scaled = weight / weight.abs().amax(1, keepdim=True)
    distance = (scaled.unsqueeze(-1) - torch.tensor(NF4)).abs()
    assert torch.allclose(distance.gather(2, codes.long().unsqueeze(-1)).squeeze(-1), distance.amin(-1), atol=1e-6)
    values = dequantize(packed, layer.tables, "4bit", (4, 64), torch.float32)
    assert torch.allclose(values, torch.tensor(NF4)[codes.long()] * weight.abs().amax(1, keepdim=True), atol=0.05)


def test_codes_do_not_depend_on_how_many_blocks_are_quantized_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = noise(300, 70)
    packed = quantize(weight, "4bit")
    monkeypatch.setattr(quantization, "CHUNK", 3)
    assert torch.equal(quantize(weight, "4bit"), packed)


def test_codes_are_those_of_bitsandbytes() -> None:
    bnb: Any = pytest.importorskip("bitsandbytes.functional")
    weight = noise(512, 256, dtype=torch.bfloat16)
    codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    packed = quantize(weight, "4bit")
    assert torch.equal(packed[: codes.numel()], codes.flatten())
    assert (packed[-state.absmax.numel() :] == state.absmax).float().mean() > 0.98, "a tie may fall either way"
    assert torch.equal(torch.tensor(NF4), bnb.get_4bit_type("nf4", "cpu"))
    assert torch.equal(dynamic_code_book(), bnb.create_dynamic_map())


@pytest.mark.parametrize(("mode", "share"), [("8bit", 0.51), ("4bit", 0.26)])
def test_codes_and_scales_are_small(mode: Mode, share: float) -> None:
    assert stored_bytes(mode, 2048, 2048) < share * 2 * 2048**2
    assert stored_bytes(mode, 512, 2048) == len(quantize(noise(512, 2048), mode))


# Products and gradients


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_a_plain_one_with_the_dequantized_weight(mode: Mode, bias: bool) -> None:
    layer = quantized_layer(mode, bias=bias)
    inputs = [noise(3, 5, 16, seed=1).requires_grad_() for _ in range(2)]
    outs = layer(inputs[0]), plain(layer, inputs[1])
    for out in outs:
        (out.square().sum() / 100).backward()
    assert torch.allclose(*outs, atol=1e-6)
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_layer_under_vmap_over_clients_and_examples(mode: Mode) -> None:
    """As in training: lifted over clients with a plain backward pass, and with the gradient of each example."""
    layer = quantized_layer(mode)
    factors, inputs = noise(3, 24, 16, seed=2), noise(3, 5, 4, 16, seed=3)

    def loss(factor: Tensor, given: Tensor, product: Any = layer) -> Tensor:
        return torch.tanh(product(given * 0.1) + given @ factor.T).square().mean()

    def reference(factor: Tensor, given: Tensor) -> Tensor:
        return loss(factor, given, lambda values: plain(layer, values))

    def lifted(function: Any) -> Tensor:
        leaf = factors.clone().requires_grad_()
        return torch.autograd.grad(torch.vmap(function)(leaf, inputs).sum(), [leaf])[0]

    def by_example(function: Any) -> Tensor:
        return torch.vmap(torch.vmap(torch.func.grad(function), in_dims=(None, 0)))(factors, inputs)

    def twice(function: Any) -> Tensor:
        """Through two layers, so that the gradient passes the quantized one."""
        return torch.func.grad(lambda given: function(factors[0], torch.tanh(given)))(inputs[0])

    for way in (lifted, by_example, twice):
        assert torch.allclose(way(loss), way(reference), atol=1e-6)
    assert torch.allclose(torch.vmap(torch.func.grad(loss))(factors, inputs), lifted(reference), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_only_codes_are_kept_for_the_backward_pass(mode: Mode) -> None:
    layer, kept = quantized_layer(mode, (64, 128)), list[Tensor]()

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        layer(noise(2, 128).requires_grad_())
    assert {value.data_ptr() for value in kept} == {layer.weight.data_ptr(), layer.tables.data_ptr()}


@pytest.mark.parametrize("mode", MODES)
def test_autocast_and_bfloat16_run_in_half_precision(mode: Mode) -> None:
    layer = quantized_layer(mode)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(noise(2, 16))
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), plain(layer, noise(2, 16)), rtol=0.02, atol=0.1)
    assert quantized_layer(mode, bias=False)(noise(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layer_under_vmap(mode: Mode) -> None:
    layer = quantized_layer(mode)

    def loss(factor: Tensor, given: Tensor) -> Tensor:
        return (layer(torch.tanh(given @ factor)) / 10).square().mean()

    factors, inputs = noise(3, 16, 16, seed=2), noise(3, 4, 16, seed=3)
    expected = torch.vmap(torch.func.grad(loss))(factors, inputs)
    leaf = factors.clone().requires_grad_()
    total = torch.compile(torch.vmap(loss), fullgraph=True)(leaf, inputs).sum()
    assert torch.allclose(torch.autograd.grad(total, [leaf])[0], expected, atol=1e-5)


# Models


@pytest.mark.parametrize("mode", MODES)
def test_only_frozen_linear_weights_of_the_body_are_quantized(mode: Mode, tmp_path: Path) -> None:
    path = save_llama(tmp_path)
    model, whole = load(path, frozen=("base",), quantize=mode), load(path, frozen=("base",))
    kinds = {name: value.dtype for name, value in frozen_weights(model).items()}
    assert model.initial.keys() == whole.initial.keys()
    for name, dtype in kinds.items():
        assert dtype == (torch.uint8 if "_proj" in name else torch.float32), name
    assert sum("_proj" in name for name in kinds) == 14
    out, expected = (each(each.initial, WORDS).logits for each in (model, whole))
    assert 0 < (out - expected).abs().max() < 0.1


def test_quantized_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    model = load(save_llama(tmp_path / "llama"), frozen=("base",), quantize="4bit", dtype="bfloat16")
    model.save_pretrained(model.initial, tmp_path / "saved")
    module: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.allclose(module(**WORDS).logits.float(), model(model.initial, WORDS).logits, atol=1e-2)


def test_quantizing_is_the_same_before_and_after_peft_wraps_the_layers(tmp_path: Path) -> None:
    path = save_llama(tmp_path)
    config = LoraConfig(target_modules=["q_proj", "v_proj"])
    before, after = (load(path, frozen=("all",), quantize=mode).module for mode in ("4bit", None))
    linear = frozenset(name for name, _ in after.named_parameters() if "_proj" in name)
    inject_adapter_in_model(config, before)
    inject_adapter_in_model(config, after)
    quantize_frozen(after, "4bit", linear)
    assert tensors.equal(
        *({name: value for name, value in each.state_dict().items() if "lora" not in name} for each in (before, after))
    )
    with torch.no_grad():
        assert torch.equal(before(**WORDS).logits, after(**WORDS).logits)


def test_quantizing_what_is_not_frozen_is_refused_or_told(tmp_path: Path) -> None:
    path = save_llama(tmp_path)
    for frozen in ((), ("embedding", "norm"), ("head",)):
        with pytest.raises(ModelError, match=r"no linear weight of llama is frozen, .*; set \[model.adapter\]"):
            load(path, frozen=frozen, quantize="8bit")
    with pytest.warns(UserWarning, match=r"7 linear weights train and stay in float32, such as 'model.layers.1.mlp."):
        load(path, frozen=("embedding", "layer.0"), quantize="8bit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, frozen=("base",), quantize="8bit")
