"""Packing: a packed row gives the loss and the gradients of its examples, and nothing leaks from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_fixtures import ROWS, write_decoder, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from partita import data, models
from partita.core.data import IGNORE_INDEX, Batch
from partita.core.rng import Key
from partita.core.tensors import Tensors
from partita.data import Federation
from partita.data.packing import pack
from partita.data.ragged import ragged
from partita.data.task import Subset
from partita.models import ModelError
from partita.models.architectures import decoders

LIMIT = 64


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("models") / request.param, request.param)


def federation_of(folder: Path, tmp_path: Path, **options: Any) -> Federation:
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    options = {"max_length": LIMIT, "pack": True, **options}
    task = data.load("chat", Key(0), path=str(path), tokenizer=str(folder), **options)
    return data.split(task, "by_column", column="site", key=Key(1))


def summed(model: Any, params: Tensors, batch: Batch) -> Tensor:
    """Return the sum of the losses of all answer tokens."""
    counts = (batch.targets != IGNORE_INDEX).sum(1)
    return (model.losses(model(params, batch.inputs), batch.targets) * counts).sum()


def loss_and_gradients(model: Any, batch: Batch) -> tuple[Tensor, Tensors]:
    gradients, loss = torch.func.grad_and_value(lambda params: summed(model, params, batch))(model.initial)
    return loss, gradients


def difference(federation: Federation, model: Any) -> float:
    """Return the largest relative difference between packed and single examples, in loss and gradients."""
    packed = federation[federation.clients[0]].train
    examples = packed.examples
    assert 1 < len(packed) < len(examples)
    loss, gradients = loss_and_gradients(model, packed.take(torch.arange(len(packed))))
    expected = [loss_and_gradients(model, examples.take(torch.tensor([place]))) for place in range(len(examples))]
    total = sum(own for own, _ in expected)
    gaps = [abs(loss - total) / total]
    for name, value in gradients.items():
        of_single = sum(own[name] for _, own in expected)
        gaps.append((value - of_single).abs().max() / of_single.abs().max().clamp(min=1e-3))
    return float(max(gaps))


@pytest.mark.fast_cases(1)
def test_packed_rows_have_the_loss_and_gradients_of_their_examples(folder: Path, tmp_path: Path) -> None:
    federation = federation_of(folder, tmp_path)
    model = models.build("pretrained", federation.task, Key(2), path=str(folder))
    assert difference(federation, model) < 1e-5


@pytest.mark.fast_cases(1)
def test_that_test_sees_a_leaking_mask_and_running_positions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federation_of(folder, tmp_path)
    model = models.build("pretrained", federation.task, Key(2), path=str(folder))
    with monkeypatch.context() as patch:
        leaking = decoders.within_segments
        patch.setattr(decoders, "within_segments", lambda segments: leaking((segments > 0).long()))
        assert difference(federation, model) > 1e-3
    state = decoders._state
    running = {"position_ids": torch.arange(LIMIT)}
    # Rotary positions are relative, so LLaMA alone does not tell running positions from restarting ones.
    with monkeypatch.context() as patch:
        patch.setattr(
            decoders,
            "_state",
            lambda module, inputs: state(
                module,
                {
                    **inputs,
                    "position_ids": running["position_ids"][: inputs["input_ids"].shape[1]].expand_as(
                        inputs["input_ids"]
                    ),
                },
            ),
        )
        assert (difference(federation, model) > 1e-3) == (folder.name == "gpt2")


def test_blocks_of_clients_compute_the_same(folder: Path, tmp_path: Path) -> None:
    from partita.training.batching import collate

    federation = federation_of(folder, tmp_path)
    model = models.build("pretrained", federation.task, Key(2), path=str(folder))
    batches = [federation[client].train.take(torch.arange(2)) for client in federation.clients]
    joined = collate(batches)
    together = torch.vmap(lambda inputs, targets: summed(model, model.initial, Batch(inputs, targets)))(
        joined.inputs, joined.targets
    )
    single = torch.stack([summed(model, model.initial, batch) for batch in batches])
    torch.testing.assert_close(together, single, rtol=1e-5, atol=1e-5)


@pytest.mark.fast_cases(1)
def test_attention_to_content_is_that_of_the_examples(folder: Path, tmp_path: Path) -> None:
    """SAFL ranks layers by it. The first token of every example is an attention sink, not only that of the row."""
    packed = federation_of(folder, tmp_path)["s0"].train
    model = models.build("pretrained", federation_of(folder, tmp_path).task, Key(2), path=str(folder))

    def per_token(examples: Any) -> Tensor:
        batch = examples.take(torch.arange(len(examples)))
        counts = batch.inputs["attention_mask"].sum(1).unsqueeze(1)  # (example, 1)
        return (model.attention(model.initial, batch, "content")["layer.1"] * counts).sum(0) / counts.sum()

    torch.testing.assert_close(per_token(packed), per_token(packed.examples), rtol=1e-5, atol=1e-6)


def test_only_the_rows_of_a_client_to_train_on_are_packed(folder: Path, tmp_path: Path) -> None:
    federation = federation_of(folder, tmp_path)
    plain = federation_of(folder, tmp_path, pack=False)
    for client in federation.clients:
        packed, single = federation[client], plain[client]
        assert torch.equal(packed.train.examples.indices, single.train.indices)  # type: ignore[attr-defined]
        batch = packed.test.take(torch.arange(len(packed.test)))
        assert "segment_ids" not in batch.inputs
        assert torch.equal(batch.targets, single.test.take(torch.arange(len(single.test))).targets)
    assert "segment_ids" not in federation.test.take(torch.arange(2)).inputs


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.data())
def test_every_example_is_in_one_row_that_has_room_for_it(lengths: list[int], draw: st.DataObject) -> None:
    rows = [[100 * number + place for place in range(length)] for number, length in enumerate(lengths)]
    table = ragged(rows, 20, tags=[[token + 1 for token in row] for row in rows])
    chosen = torch.arange(len(rows))[torch.tensor(draw.draw(st.permutations(range(len(rows)))), dtype=torch.long)]
    packed = pack(Subset(table, chosen))
    found = []
    for number in range(len(packed)):
        batch = packed.take(torch.tensor([number]))
        ids, positions, segments = (batch.inputs[name][0] for name in ("input_ids", "position_ids", "segment_ids"))
        for segment in range(1, int(segments.max()) + 1):
            own = segments == segment
            assert positions[own].tolist() == list(range(int(own.sum())))
            assert batch.targets[0][own].tolist() == [token + 1 for token in ids[own].tolist()]
            found.append(ids[own].tolist())
        assert batch.inputs["attention_mask"][0].tolist() == (segments > 0).long().tolist()
        assert (batch.targets[0][segments == 0] == IGNORE_INDEX).all()
    assert sorted(found) == sorted(rows)
    # Two rows that are both at most half full could be one.
    assert sum(int(packed.take(torch.tensor([n])).inputs["attention_mask"].sum()) <= 10 for n in range(len(packed))) < 2


def test_rows_are_taken_together_as_one_by_one(folder: Path, tmp_path: Path) -> None:
    packed = federation_of(folder, tmp_path)["s0"].train
    together = packed.take(torch.arange(len(packed)))
    for number in range(len(packed)):
        alone = packed.take(torch.tensor([number]))
        for name, value in alone.inputs.items():
            assert torch.equal(together.inputs[name][number, : value.shape[1]], value[0])


# Refusals


def test_architectures_that_do_not_keep_examples_apart_are_refused(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    folder = write_decoder(tmp_path / "opt")
    config = OPTConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=16,
        max_position_embeddings=128,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    federation = federation_of(folder, tmp_path)
    with pytest.raises(ModelError, match=r"data\.pack = true needs .*gpt2, llama.* is a 'opt'; set data\.pack = false"):
        models.build("pretrained", federation.task, Key(0), path=str(folder))
    models.build("pretrained", federation_of(folder, tmp_path, pack=False).task, Key(0), path=str(folder))


def test_short_attention_windows_are_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    folder = write_decoder(tmp_path / "mistral")
    for window in (16, LIMIT, None):
        config = MistralConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=16, sliding_window=window, max_position_embeddings=128,
        )  # fmt: skip
        MistralForCausalLM(config).save_pretrained(folder)
        task = federation_of(folder, tmp_path).task
        if window == 16:
            with pytest.raises(ModelError, match=r"attend to the last 16 tokens only.*set data\.pack = false"):
                models.build("pretrained", task, Key(0), path=str(folder))
        else:
            models.build("pretrained", task, Key(0), path=str(folder))


CONFIG = {
    "rounds": 1,
    "data": {"name": "chat", "max_length": LIMIT, "pack": True},
    "split": {"name": "by_column", "column": "site"},
    "method": {"name": "fedavg"},
}
