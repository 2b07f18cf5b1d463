"""Layers that are compiled on their own, or recomputed in the backward pass, compute what plain layers compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_fixtures import TINY, inputs_of, make_case, make_model, targets_of
from seq2seq_fixtures import write_bart, write_t5
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from partita import Key
from partita.core.data import EXAMPLE_SEEDS
from partita.core.layer_compiler import compiled_layers
from partita.core.tensors import Tensors
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import from_module
from partita.models.layer_forward import layer_forwards
from partita.tasks import SEQ2SEQ

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountingCompiler:
    """Compiles without generating code, and counts the programs. `traces_only` leaves out their backward passes."""

    def __init__(self, traces_only: bool = False) -> None:
        self.programs, self.traces_only = 0, traces_only
        self.known: dict[Any, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self.known:
            self.known[function] = torch.compile(function, fullgraph=True, backend=self._backend)
        return self.known[function]

    def _backend(self, graph: torch.fx.GraphModule, examples: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.programs += 1
        return graph.forward if self.traces_only else aot_eager(graph, examples)


def block_gradients(
    model: FunctionalModel,
    clients: int,
    inputs: Tensors,
    targets: Tensor,
    frozen: str = "",
    kept: list[int] | None = None,
) -> tuple[Tensor, Tensors]:
    """Losses and gradients of a block of clients with parameters and inputs of their own."""
    draw = torch.Generator().manual_seed(1)
    leaves = {
        name: (value + 0.1 * torch.randn(clients, *value.shape, generator=draw)).requires_grad_()
        for name, value in model.initial.items()
        if not frozen or frozen not in model.tags[name]
    }
    shared = {name: value for name, value in model.initial.items() if name not in leaves}
    seeds = torch.arange(clients * len(targets)).view(clients, -1) * 2**33 + 7
    given = {name: value.expand(clients, *value.shape) for name, value in inputs.items()}
    if model.uses_dropout():
        given[EXAMPLE_SEEDS] = seeds

    def loss(own: Tensors, inputs: Tensors) -> Tensor:
        return model.losses(model({**shared, **own}, inputs), targets).mean()

    def keep(value: Tensor) -> Tensor:
        if kept is not None:
            kept.append(value.numel())
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        losses = (
            torch.vmap(loss)(leaves, given)
            if clients > 1
            else loss(
                {name: value[0] for name, value in leaves.items()}, {name: value[0] for name, value in given.items()}
            )
        )
    grads = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    return losses.detach(), {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def close(left: tuple[Tensor, Tensors], right: tuple[Tensor, Tensors], bound: float) -> bool:
    assert left[1].keys() == right[1].keys()
    pairs = [(left[0], right[0]), *((left[1][name], right[1][name]) for name in left[1])]
    return all(bool((a - b).abs().max() <= bound * max(1.0, float(b.abs().max()))) for a, b in pairs)


def batch_of(case: str) -> tuple[Tensors, Tensor]:
    return inputs_of(make_case(case)), targets_of(make_case(case))


# A client alone, a fused projection, and two kinds of layers: qwen2, whose windows differ. The types whose layers are
# alike are below.
@pytest.mark.slow
@pytest.mark.parametrize(("case", "clients"), [("bert-text", 1), ("gpt2-lm", 3), ("qwen2-lm", 3)])
def test_compiled_layers_equal_plain_ones(case: str, clients: int) -> None:
    model, compiler = make_model(case), CountingCompiler()
    plain = block_gradients(model, clients, *batch_of(case))
    with compiled_layers(compiler):
        compiled = block_gradients(model, clients, *batch_of(case))
    assert compiler.programs
    assert close(compiled, plain, 1e-5)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("case", ["vit-image", "bert-text", "gpt2-lm", "qwen2-lm", "clip-towers"])
def test_recomputed_layers_equal_plain_ones_bit_for_bit_with_less_memory(case: str, clients: int) -> None:
    much: list[int] = []
    less: list[int] = []
    plain = block_gradients(make_model(case), clients, *batch_of(case), kept=much)
    saving = block_gradients(make_model(case, checkpointing=True), clients, *batch_of(case), kept=less)
    assert close(saving, plain, 0.0)
    assert sum(less) < 0.8 * sum(much)


@pytest.mark.slow
def test_layers_can_be_compiled_and_recomputed() -> None:
    plain = block_gradients(make_model("bert-text"), 2, *batch_of("bert-text"))
    with compiled_layers(CountingCompiler()):
        both = block_gradients(make_model("bert-text", checkpointing=True), 2, *batch_of("bert-text"))
    assert close(both, plain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bert-text", "vit-image", "dinov2-image", "clip-image", "llama-lm"])
def test_one_program_serves_all_layers_that_are_alike(case: str) -> None:
    """Also their dropout, which is drawn by layer. The first layer has no gradient of its inputs."""
    depth: dict[str, Any] = {"num_hidden_layers": 3}
    if case == "clip-image":
        depth = {"vision_config": {**TINY["clip"][1]["vision_config"], **depth}}
    model = make_model(case, ("embedding",), depth)
    compiler = CountingCompiler(traces_only=case != "bert-text")
    plain = block_gradients(model, 2, *batch_of(case))
    with compiled_layers(compiler):
        compiled = block_gradients(model, 2, *batch_of(case))
        assert compiler.programs == 2
        block_gradients(model, 2, *batch_of(case))
    assert close(compiled, plain, 1e-5)
    assert compiler.programs == 2


@pytest.mark.slow
def test_parts_that_do_not_train_need_one_more_program() -> None:
    """Of one client; test_compiled_layers.py freezes a part of a layer in a block."""
    model = make_model("llama-lm", ("embedding",), {"num_hidden_layers": 3}).low_rank(2, 4.0, ("query",), Key(0))
    compiler, counts = CountingCompiler(), []
    with compiled_layers(compiler):
        for frozen in ("", "query", "", "query"):
            found = block_gradients(model, 1, *batch_of("llama-lm"), frozen=frozen)
            counts.append(compiler.programs)
    assert counts == [2, 4, 4, 4]  # the first layer, and the others
    assert close(found, block_gradients(model, 1, *batch_of("llama-lm"), frozen="query"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_t5, write_bart])
def test_layers_of_encoder_decoders_compile_and_recompute(write: Callable[[Path], None], tmp_path: Path) -> None:
    """T5's layers pass position biases on, and BART's call `nn.functional.dropout`."""
    write(tmp_path)
    ids = torch.tensor([[5, 6, 7, 4], [8, 9, 4, 0]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "decoder_input_ids": ids}
    models = [
        from_module("seq2seq", AutoModelForSeq2SeqLM.from_pretrained(tmp_path), kind=SEQ2SEQ, checkpointing=saving)
        for saving in (False, True)
    ]
    plain = block_gradients(models[0], 2, inputs, ids)
    assert close(block_gradients(models[1], 2, inputs, ids), plain, 1e-6)
    with compiled_layers(CountingCompiler(traces_only=True)):
        assert close(block_gradients(models[0], 2, inputs, ids), plain, 1e-5)


def test_a_skipped_layer_is_neither_compiled_nor_lost() -> None:
    model = make_model("vit-image")
    plain = block_gradients(model, 1, *batch_of("vit-image"))
    block_gradients(model.skip_layers(frozenset({"layer.0"})), 1, *batch_of("vit-image"))
    assert len(layer_forwards(model.module)) == 2
    assert close(block_gradients(model, 1, *batch_of("vit-image")), plain, 0.0)


def test_nothing_stays_in_the_layers() -> None:
    model = make_model("bert-text", checkpointing=True)
    block_gradients(model, 2, *batch_of("bert-text"))
    assert not list(model.module.parameters())
    assert model.draws is not None
    assert model.draws.seeds is None
