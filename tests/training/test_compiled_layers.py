"""Rounds in which each layer is compiled on its own equal eager rounds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from architecture_fixtures import WORDS, make_model
from graph_fixtures import max_relative_difference
from torch._dynamo.backends.debugging import aot_eager

from partita import Key, Run, SimulationEngine, Training, data, methods, rounds
from partita.core.optim import AdamW
from partita.core.tensors import Tensors
from partita.data import Table, Task
from partita.engines.autotune import choose_graphs
from partita.models import functional
from partita.models.functional import FunctionalModel
from partita.tasks import LM, chunked_loss
from partita.testing.trial import states_of
from partita.training import compilation
from partita.training.compilation import CompileError
from partita.training.cuda_graphs import GraphCache

programs: list[Any] = []


@pytest.fixture(autouse=True)
def _no_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without generating code, and count the programs."""

    def count(graph: Any, examples: Any) -> Any:
        programs.append(graph)
        return aot_eager(graph, examples)

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda made, **told: whole(made, backend=count, fullgraph=told["fullgraph"]))
    forget = compilation._layer_program.cache_clear
    forget()
    torch.compiler.reset()
    programs.clear()
    yield
    forget()
    torch.compiler.reset()


def play(
    model: FunctionalModel,
    method: str,
    graphs: GraphCache | None,
    block: int,
    count: int = 1,
    device: str = "cpu",
    **options: Any,
) -> Tensors:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, WORDS, (24, 7), generator=draw)
    table = Table({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous())
    federation = data.split(Task("texts", table, table, (), kind=LM), "iid", clients=3, key=Key(0)).to(
        torch.device(device)
    )
    training = Training(1e-2, AdamW(eps=1e-4), batch_size=3, steps=2)
    run = Run(methods.build(method, options), training, rounds=count, key=Key(0))
    engine = SimulationEngine(run, model, federation, block, torch.device(device), graphs=graphs)
    played = list(rounds(run, model, engine))
    ended = dict(played[-1].server.params)
    for client, kept in states_of(run, engine).items():
        ended |= {f"{client} {name}": value for name, value in kept.items()}
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "block", "checkpointing"),
    [("fedavg", 1, False), ("fedper", 3, True)],
)
def test_compiled_rounds_equal_eager_ones(method: str, block: int, checkpointing: bool) -> None:
    """One by one and together, with recomputed activations, and with parameters that stay with each client."""
    model = make_model("llama-lm", ("embedding", "layer.0"), checkpointing=checkpointing)
    compiled = play(model, method, GraphCache(None, compile=True), block)
    assert programs
    assert max_relative_difference(compiled, play(model, method, None, block)) < 1e-4


@pytest.mark.slow
def test_clients_one_by_one_do_not_change_the_programs_of_blocks() -> None:
    """A client has no client dimension. That must not make all sizes of a block's weights those that may change."""
    model = make_model("llama-lm", ("embedding",))
    graphs = GraphCache(None, compile=True)
    play(model, "fedavg", graphs, 1)
    programs.clear()
    compiled = play(model, "fedavg", graphs, 3)
    assert not any(symbols_of(graph) for graph in programs)
    assert max_relative_difference(compiled, play(model, "fedavg", None, 3)) < 1e-4


def symbols_of(graph: Any) -> list[str]:
    """The names of a program's inputs that are sizes."""
    return [node.name for node in graph.graph.nodes if isinstance(node.meta.get("example_value"), torch.SymInt)]


@pytest.mark.slow
def test_a_plan_that_changes_compiles_a_layer_once_more() -> None:
    """The layers that are alike share both programs: test_layer_forward.py."""
    model = make_model("llama-lm", ("embedding",), {"num_hidden_layers": 1})
    # The second round freezes queries and keys, and the third has the same plan.
    compiled = play(model, "fedfrozen", GraphCache(None, compile=True), 3, 3, warmup=1)
    assert len(programs) == 2
    assert max_relative_difference(compiled, play(model, "fedfrozen", None, 3, 3, warmup=1)) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_language_models_run_in_cuda_graphs(
    compile: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "FEW", 0)
    model = make_model("llama-lm", ("embedding",), checkpointing=checkpointing)
    graphs = choose_graphs(True, compile, torch.device("cuda"))
    recorded = play(model, "fedavg", graphs, 3, 4, device="cuda")
    assert max_relative_difference(recorded, play(model, "fedavg", None, 3, 4, device="cuda")) < 1e-3


def test_small_models_of_classes_compile_as_a_whole() -> None:
    """Which is faster for them."""
    assert make_model("llama-lm").compiles_by_layer()
    assert not make_model("vit-image").compiles_by_layer()
    assert make_model("vit-image", checkpointing=True).compiles_by_layer()
    assert make_model("vit-image", sizes={"num_hidden_layers": 13}).compiles_by_layer()


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("case", ["bert-text", "vit-image", "dinov2-image", "clip-image", "clip-towers"])
@pytest.mark.parametrize("frozen", [(), ("layer.0",)])
def test_large_models_compile_by_layer(case: str, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parameters count too."""
    size = sum(value.numel() for value in make_model(case).initial.values())
    for limit in (size - 1, size):
        monkeypatch.setattr(functional, "SMALL_MODEL", limit)
        assert make_model(case, frozen).compiles_by_layer() is (limit < size)


def test_a_layer_that_cannot_be_compiled_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama-lm")

    def fail(*_: Any) -> None:
        raise RuntimeError("no code for this\nand more")

    monkeypatch.setattr(compilation, "_layer_program", cache(lambda function, combine: fail))
    with pytest.raises(CompileError, match=r"llama-lm with fedavg cannot be compiled: no code.*compile = false"):
        play(model, "fedavg", GraphCache(None, compile=True), 1)
