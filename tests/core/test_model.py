"""Names by tag, layers, and the parts of a model before its first layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from partita.core.data import Batch
from partita.core.model import (
    HeadOutput,
    Model,
    Output,
    TagError,
    input_side_names,
    layer_number,
    layer_tag,
    layer_tags,
    logits_and_losses,
    role_tag,
)
from partita.core.rng import Key
from partita.core.tensors import Tensors


class Tagged(Model):
    """A model without a forward pass: names and their tags, separated by spaces."""

    name = "tagged"

    def __init__(self, **tags: str) -> None:
        self.tags = {name: frozenset(words.split()) for name, words in tags.items()}
        self.initial = {name: torch.zeros(1) for name in tags}


MODEL = Tagged(q0="query layer.0", k0="key layer.0", q1="query layer.1", head="head")


def test_names_have_at_least_one_of_the_tags() -> None:
    assert MODEL.all_names() == {"q0", "k0", "q1", "head"}
    assert MODEL.names("query") == {"q0", "q1"}
    assert MODEL.names("layer.0", "head") == {"q0", "k0", "head"}
    assert MODEL.names() == frozenset()


@pytest.mark.parametrize(("tag", "hint"), [("querry", r" Did you mean 'query'\?$"), ("zzz", "$")])
def test_unknown_tag_is_refused_with_the_known_ones(tag: str, hint: str) -> None:
    known = r"head, key, layer\.0, layer\.1, query"
    with pytest.raises(TagError, match=rf"^no parameter of tagged is tagged '{tag}'; it has: {known}\.{hint}"):
        MODEL.names("query", tag)


UNSUPPORTED: dict[str, Callable[[], object]] = {
    "does not support low-rank factors": lambda: MODEL.low_rank(1, 1.0, ("query",), Key(0)),
    "cannot report its attention": lambda: MODEL.attention({}, Batch({}, torch.zeros(1)), "first"),
    "cannot separate its heads": MODEL.head_dimensions,
    "cannot skip layers": lambda: MODEL.skip_layers(frozenset({"layer.0"})),
    "does not support prompts": lambda: MODEL.prompted("vision", Key(0)),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_optional_operation_is_refused_when_the_model_has_none(what: str) -> None:
    with pytest.raises(TagError, match=f"^tagged {what}.*; use a "):
        UNSUPPORTED[what]()


def test_forward_pass_and_losses_are_required() -> None:
    for call in (lambda: MODEL({}, {}), lambda: MODEL.losses(MODEL({}, {}), torch.zeros(1))):
        with pytest.raises(NotImplementedError):
            call()


def test_layers_are_in_numeric_order() -> None:
    model = Tagged(a="layer.10 mlp", b="layer.2 mlp", c="layer.0 mlp", d="layer.2 norm", e="head")
    assert layer_tags(model) == ["layer.0", "layer.2", "layer.10"]
    assert layer_number("layer.10") == 10
    assert layer_tag(model.tags["b"]) == "layer.2"
    assert layer_tag(model.tags["e"]) is None


def test_input_side_is_what_precedes_the_first_layer() -> None:
    model = Tagged(before="norm", embed="embedding", first="mlp layer.0", after="norm", late="embedding", head="head")
    assert input_side_names(model) == {"before", "embed", "late"}


def test_input_side_is_found_for_each_tower() -> None:
    model = Tagged(
        eye="vision embedding",
        lens="vision norm",
        look="vision mlp layer.0",
        blink="vision norm",
        word="text embedding",
        pause="text norm",
        read="text mlp layer.0",
        close="text norm",
        scale="head",
    )
    assert input_side_names(model) == {"eye", "lens", "word", "pause"}
    assert input_side_names(Tagged(scale="head", embed="embedding")) == {"embed"}


def test_role_is_independent_of_layer_and_tower() -> None:
    assert role_tag(frozenset({"query", "layer.3", "vision"})) == "query"
    assert role_tag(frozenset({"lora", "query", "layer.3", "text"})) == "lora"
    assert role_tag(frozenset({"layer.3", "text"})) == ""


def test_logits_of_a_head_are_computed_when_they_are_read() -> None:
    states, weight = torch.randn(2, 3, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    out = HeadOutput(states, weight, states[:, 0])
    assert torch.equal(out.logits, (states @ weight.T).float())
    assert out.logits.dtype == torch.float32
    assert out.features is not None
    whole = out.with_logits()
    assert type(whole) is Output
    assert torch.equal(whole.logits, out.logits)
    assert whole.features is out.features
    assert whole.with_logits() is whole
    assert HeadOutput(states, weight).features is None


def test_a_model_compiles_whole_unless_it_says_otherwise() -> None:
    assert not Model().compiles_by_layer()


def test_an_evaluation_computes_logits_once_and_losses_from_them() -> None:
    states, weight = torch.randn(2, 3, 4), torch.randn(5, 4)

    class Head(Model):
        def __call__(self, params: Tensors, inputs: Tensors) -> Output:
            return HeadOutput(inputs["states"], params["weight"])

        def losses(self, out: Output, targets: Tensor) -> Tensor:
            assert type(out) is Output
            return out.logits.sum((1, 2)) + targets

    logits, losses = logits_and_losses(Head(), {"weight": weight}, {"states": states}, torch.tensor([1, 2]))
    assert torch.equal(logits, states @ weight.T)
    assert torch.equal(losses, logits.sum((1, 2)) + torch.tensor([1, 2]))
