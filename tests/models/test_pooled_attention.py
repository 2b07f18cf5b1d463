"""Attention of the token that the head reads, and attention to words, against eager attention maps of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_fixtures import END, EXAMPLES, LAYERS, PAD, make_case, make_model, perturbed, random_texts
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from partita.core.data import Batch
from partita.core.tensors import Tensors
from partita.models import ModelError
from partita.models.attention_scores import attention_to, label_words, matching_tokens, resolve_tokens, word_tokens

CASES = ["bert-text", "distilbert-text", "roberta-text", "llama-text", "gpt2-text"]
DECODERS = ("llama", "gpt2")


def eager_maps(case: str, inputs: Tensors) -> list[Tensor]:
    with torch.no_grad():
        return list(make_case(case).plain(**inputs, output_attentions=True).attentions)


def expected_concentration(case: str, inputs: Tensors) -> Tensor:
    """(example, layer, head), in plain Python from the eager maps."""
    found = torch.zeros(EXAMPLES, LAYERS, 2)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    for layer, maps in enumerate(eager_maps(case, inputs)):
        for row in range(EXAMPLES):
            valid = [place for place in range(mask.shape[1]) if mask[row, place]]
            if case.startswith(DECODERS):
                read = valid[-1]
                content = [place for place in valid[1:] if int(inputs["input_ids"][row, place]) not in (PAD, END)]
            else:
                read, content = valid[0], valid[1:-1]
            for head in range(2):
                given = [float(maps[row, head, read, place]) for place in content]
                if len(given) > 1:
                    shares = [value / sum(given) for value in given]
                    entropy = -sum(share * math.log(share) for share in shares)
                    found[row, layer, head] = 1 - entropy / math.log(len(given))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padding", ["left", "right", "none"])
def test_pooled_scores_match_eager_attention_maps(case: str, padding: str) -> None:
    it = make_case(case)
    inputs = random_texts(1, left=padding == "left")
    if padding == "none":
        inputs = {"input_ids": random_texts(0)["input_ids"].clamp(min=2)}
    batch = Batch(inputs, torch.zeros(EXAMPLES).long())
    scores = torch.stack(list(it.model.attention(it.params, batch, "pooled").values()), 1)
    expected = expected_concentration(case, inputs)
    assert (scores - expected).abs().max() < 2e-5
    assert scores.std() > 1e-3
    assert 0 <= scores.min() <= scores.max() <= 1


@pytest.mark.parametrize("left", [False, True])
def test_pooled_scores_of_padded_texts_are_those_of_each_text_alone(left: bool) -> None:
    it = make_case("llama-text")
    inputs = random_texts(0, left)
    together = it.model.attention(it.params, Batch(inputs, torch.zeros(EXAMPLES).long()), "pooled")
    for row in range(EXAMPLES):
        ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
        alone = it.model.attention(it.params, Batch({"input_ids": ids}, torch.zeros(1).long()), "pooled")
        for layer, scores in together.items():
            assert torch.allclose(scores[row], alone[layer][0], atol=1e-5)


def test_pooled_scores_do_not_change_what_the_model_computes() -> None:
    """The scores of the second layer depend on the output of the first."""
    it = make_case("llama-text")
    batch = Batch(random_texts(0), torch.zeros(EXAMPLES).long())
    before = it.model(it.params, batch.inputs).logits
    attention_to(it.model, it.params, batch, "pooled")
    assert torch.equal(before, it.model(it.params, batch.inputs).logits)


def test_attention_that_is_spread_evenly_scores_zero_and_on_one_token_one() -> None:
    from partita.models.attention_scores import _Scores

    it = make_case("bert-text")
    ids = torch.full((2, 6), 5)
    scores = _Scores(it.model, Batch({"input_ids": ids}, torch.zeros(2).long()), "pooled", None, {})
    even = torch.full((2, 3, 6), 1 / 6)
    one = torch.zeros(2, 3, 6)
    one[:, :, 2] = 0.25
    one[:, :, 0] = 0.75  # the sink has no part in the score
    assert torch.allclose(scores._concentration(even), torch.zeros(2, 3), atol=1e-6)
    assert torch.allclose(scores._concentration(one), torch.ones(2, 3), atol=1e-6)
    assert torch.allclose(scores._concentration(0.1 * one), torch.ones(2, 3), atol=1e-6)


def test_pooled_scores_are_no_function_of_the_sink() -> None:
    """Content scores are: they are what the first token leaves."""
    it = make_case("llama-text")
    ids = random_texts(0)["input_ids"].clamp(min=2, max=END - 1)
    batch = Batch({"input_ids": ids}, torch.zeros(EXAMPLES).long())
    maps = eager_maps("llama-text", batch.inputs)
    for number, (layer, scores) in enumerate(it.model.attention(it.params, batch, "content").items()):
        assert layer == f"layer.{number}"
        sink = maps[number][:, :, :, 0].mean(-1)
        assert torch.allclose(scores, 1 - sink, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "options"),
    [("bert-tokens", {}), ("llama-lm", {}), ("vit-image", {}), ("clip-towers", {}), ("bert-text", {"pooling": "mean"})],
    ids=["tokens", "lm", "image", "towers", "mean pooling"],
)
def test_pooled_needs_a_head_that_reads_one_token(case: str, options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="'pooled' needs a head that reads one token of each input"):
        resolve_tokens(make_model(case, **options), "pooled")


# ---- words


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "eye", "##lid", "heart", "dis", "##ease", "##s", "pain", "of", "the", "in"]
WORDS += ["\u0120"]  # a letter of Maltese, which byte-level BPE uses to mark a space
SENTENCES = ["the eye pain", "eyelid pain", "heart disease in the eye", "pain of heart diseases"]


def wordpiece() -> Any:
    built = Tokenizer(WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    built.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="[UNK]", pad_token="[PAD]")


def byte_level() -> Any:
    letters = sorted(ByteLevel.alphabet())
    merges = [("#", "#"), ("##", "#")]  # headings, which look like pieces of words in other vocabularies
    marked = ["\u0120eye", "\u0120heart", "\u0120disease", "\u0120Heart"]
    for word in (*marked, "eye", "lid", "heart", "disease", "pain", "Heart"):  # earlier merges go first
        for end in range(2, len(word) + 1):
            if (word[: end - 1], word[end - 1]) not in merges:
                merges.append((word[: end - 1], word[end - 1]))
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys([*letters, *("".join(m) for m in merges)]))}
    built = Tokenizer(BPE(vocabulary, merges))
    built.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=built)


def found_words(tokenizer: Any, text: str, words: tuple[str, ...]) -> str:
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    [mask] = matching_tokens(ids, word_tokens(tokenizer, words))
    tokens = tokenizer.convert_ids_to_tokens(ids[0])
    return " ".join(token for token, kept in zip(tokens, mask.tolist(), strict=True) if kept)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("the eye pain", ("eye",), "eye"),
        ("eyelid pain", ("eye",), ""),  # a part of a word is another word
        ("eyelid pain", ("eyelid", "pain"), "eye ##lid pain"),
        ("heart disease in the eye", ("disease", "eye"), "dis ##ease eye"),
        ("pain of heart diseases", ("disease",), ""),
        ("pain of heart diseases", ("diseases", "of"), "of dis ##ease ##s"),
        ("heart disease", ("heart disease",), "heart dis ##ease"),
        ("pain pain", ("pain", "unknownword"), "pain pain"),
        ("pain", ("heart disease in the eye",), ""),  # longer than the text
    ],
)
def test_words_are_found_as_whole_words_in_word_pieces(text: str, words: tuple[str, ...], expected: str) -> None:
    assert found_words(wordpiece(), text, words) == expected


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("the eye in", ("eye",), "\u0120eye"),
        ("the eyelid", ("eye",), ""),
        ("the Heart disease", ("heart",), "\u0120Heart"),
        ("the heart diseases", ("disease", "heart"), "\u0120heart"),
    ],
)
def test_words_are_found_as_whole_words_after_a_space(text: str, words: tuple[str, ...], expected: str) -> None:
    assert found_words(byte_level(), text, words) == expected


@pytest.mark.parametrize("left", [False, True])
def test_attention_to_words_matches_eager_attention_maps(left: bool) -> None:
    for case in ("bert-text", "llama-text"):
        it = make_case(case)
        model = make_model(case, processor=wordpiece())
        tokenizer = wordpiece()
        tokenizer.padding_side = "left" if left else "right"
        inputs = {
            name: value
            for name, value in tokenizer(SENTENCES, padding=True, return_tensors="pt", add_special_tokens=False).items()
            if name != "token_type_ids"
        }
        scores = model.attention(it.params, Batch(inputs, torch.zeros(4).long()), ("eye", "disease", "diseases"))
        marks = {"the eye pain": [1], "eyelid pain": [], "heart disease in the eye": [1, 2, 5]}
        marks["pain of heart diseases"] = [3, 4, 5]
        with torch.no_grad():
            maps = it.plain(**inputs, output_attentions=True).attentions
        for layer, alpha in enumerate(maps):
            for row, sentence in enumerate(SENTENCES):
                seen = [place for place in range(alpha.shape[-1]) if inputs["attention_mask"][row, place]]
                chosen = [seen[place] for place in marks[sentence]]
                expected = alpha[row][:, seen][:, :, chosen].sum(-1).mean(-1)
                assert torch.allclose(scores[f"layer.{layer}"][row], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["Eye Diseases", "Wounds and Injuries"], ("eye", "diseases", "wounds", "injuries")),
        (["LABEL_0", "LABEL_1"], ()),
        (["C01", "C23"], ()),
        (["side_effect", "otherReason", "heart/lung"], ("side", "effect", "reason", "heart", "lung")),
        (["x", "42", "of the"], ()),
    ],
)
def test_words_of_class_names(names: list[str], words: tuple[str, ...]) -> None:
    assert label_words(names) == words


def test_labels_are_the_words_of_the_class_names() -> None:
    model = make_model("bert-text", processor=wordpiece())
    with pytest.raises(ModelError, match=r"tokens = 'labels' needs classes whose names are words.*LABEL_0"):
        resolve_tokens(model, "labels")
    model.module.config.id2label = {0: "Eye Disease", 1: "Heart Disease", 2: "other"}
    assert resolve_tokens(model, "labels") == ("eye", "disease", "heart")
    batch = Batch(random_texts(0), torch.zeros(EXAMPLES).long())
    params = perturbed(model.initial)
    one, two = (model.attention(params, batch, tokens) for tokens in ("labels", ("eye", "disease", "heart")))
    assert all(torch.equal(one[layer], two[layer]) for layer in one)


@pytest.mark.parametrize(
    ("case", "tokens", "message"),
    [
        ("vit-image", ("eye",), "looks for words in texts with the model's tokenizer, but vit-image has none"),
        ("bert-text", "labels", "but bert-text has none"),
        ("llama-lm", ("eye",), "but llama-lm has none"),
    ],
)
def test_words_need_texts_and_a_tokenizer(case: str, tokens: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_tokens(make_model(case), tokens)


def test_empty_words_are_refused() -> None:
    model = make_model("bert-text", processor=wordpiece())
    for words in ((), ("eye", " ")):
        with pytest.raises(ModelError, match="list words of the texts"):
            resolve_tokens(model, words)


def test_safl_takes_words_from_a_config(tmp_path: Path) -> None:
    from partita.experiment.config import parse
    from partita.methods import build
    from partita.methods.selectors import Attention

    config = parse({"method": {"name": "safl", "tokens": ["tumor", "cancer"]}})
    [rule] = build("safl", {key: value for key, value in config.method.items() if key != "name"}).client_rules
    assert rule.select == Attention(("tumor", "cancer"))  # type: ignore[attr-defined]
    assert hash(rule)
