"""Conversations: columns, templates, answer tokens, truncation, and errors that name the row."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_fixtures import NUMBERS, QUESTIONS, ROWS, conversation, message, write_decoder, write_rows
from transformers import AutoTokenizer

from partita import data
from partita.core.data import IGNORE_INDEX
from partita.core.rng import Key
from partita.data import DataError
from partita.data.chat_template import PLAIN, ChatTemplate, chat_template
from partita.data.task import Task

GENERATION = (
    "{% for message in messages %}{{ '[' + message['role'] | upper + '] ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' ' }}{% endgeneration %}{{ eos_token }}{% else %}"
    "{{ message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[ASSISTANT] ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def load(decoder: Path, tmp_path: Path) -> Callable[..., Task]:
    def load(rows: list[Mapping[str, Any]], **options: Any) -> Task:
        file = write_rows(tmp_path / "train.jsonl", rows)
        return data.load("chat", Key(0), path=str(file), tokenizer=str(decoder), **{"max_length": 64, **options})

    return load


def decoded(task: Task) -> list[tuple[str, str]]:
    """Return what is read, and what of it is learned, of all examples in the order of the file."""
    pairs = []
    for table in (task.train, task.test):
        batch = table.take(torch.arange(len(table)))
        for ids, mask, targets in zip(
            batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.targets, strict=True
        ):
            read = [token for token, real in zip(ids.tolist(), mask.tolist(), strict=True) if real]
            learned = [token for token in targets.tolist() if token != IGNORE_INDEX]
            pairs.append(
                (" ".join(task.tokenizer.convert_ids_to_tokens(part)) for part in (read, learned)),
            )
    return sorted(tuple(pair) for pair in pairs)  # type: ignore[misc]


def test_only_answers_and_the_ends_of_their_turns_are_learned(load: Callable[..., Task]) -> None:
    task = load([{"messages": conversation(number)} for number in range(5)])
    asked = "[USER] what comes after {} ? [SEP] [ASSISTANT] {} ."
    expected = [(asked.format(NUMBERS[n], NUMBERS[n + 1]), f"{NUMBERS[n + 1]} . [SEP]") for n in range(5)]
    assert decoded(task) == sorted(expected)


def test_a_target_is_the_next_token(load: Callable[..., Task]) -> None:
    task = load(ROWS)
    batch = task.train.take(torch.arange(len(task.train)))
    ids, targets = batch.inputs["input_ids"], batch.targets
    inside = (targets[:, :-1] != IGNORE_INDEX) & (batch.inputs["attention_mask"][:, 1:] > 0)
    assert torch.equal(targets[:, :-1][inside], ids[:, 1:][inside])
    assert (targets[batch.inputs["attention_mask"] == 0] == IGNORE_INDEX).all()


def test_all_answers_of_a_conversation_count_or_only_the_last(load: Callable[..., Task]) -> None:
    rows = [{"messages": conversation(number, 2)} for number in range(5)]
    for (_, every), (_, last) in zip(decoded(load(rows)), decoded(load(rows, answers="last")), strict=True):
        assert every.count("[SEP]") == 2
        assert last.count("[SEP]") == 1
        assert every.endswith(last)


def test_a_conversation_may_start_with_an_answer_and_end_with_a_question(load: Callable[..., Task]) -> None:
    rows = [{"messages": [message("assistant", "one ."), *conversation(1), message("user", "next ?")]}] * 5
    assert (
        decoded(load(rows))
        == [
            ("[ASSISTANT] one . [SEP] [USER] what comes after one ? [SEP] [ASSISTANT] two .", "one . [SEP] two . [SEP]")
        ]
        * 5
    )


def test_all_ways_to_write_a_conversation_are_read_alike(load: Callable[..., Task]) -> None:
    ways: list[list[dict[str, Any]]] = [
        [{"messages": conversation(n)} for n in range(5)],
        [
            {
                "conversations": [
                    {"from": ("human", "gpt")[i], "value": m["content"]} for i, m in enumerate(conversation(n))
                ]
            }
            for n in range(5)
        ],
        [{"instruction": a["content"], "input": "", "output": b["content"]} for a, b in map(conversation, range(5))],
        [{"prompt": a["content"], "completion": b["content"]} for a, b in map(conversation, range(5))],
        [{"messages": json.dumps(conversation(n))} for n in range(5)],
    ]
    first, *others = (decoded(load(rows)) for rows in ways)
    assert all(other == first for other in others)
    named = [{"q": a["content"], "a": b["content"]} for a, b in map(conversation, range(5))]
    assert decoded(load(named, instruction="q", output="a")) == first


def test_an_input_follows_the_instruction(load: Callable[..., Task]) -> None:
    task = load([{"instruction": "what comes", "input": "after one ?", "output": "two ."}] * 5)
    assert decoded(task)[0][0] == "[USER] what comes after one ? [SEP] [ASSISTANT] two ."


def test_csv_files_and_clients_by_a_column(decoder: Path, tmp_path: Path) -> None:
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion", "site"])
        writer.writeheader()
        for row in ROWS:
            ask, say = row["messages"][:2]
            writer.writerow({"prompt": ask["content"], "completion": say["content"], "site": row["site"]})
    task = data.load("chat", Key(0), path=str(tmp_path / "train.csv"), tokenizer=str(decoder), max_length=64)
    federation = data.split(task, "by_column", column="site", key=Key(1))
    assert list(federation.clients) == ["s0", "s1", "s2"]
    with pytest.raises(DataError, match="exactly one class"):
        data.split(task, "dirichlet", clients=2, alpha=0.5, key=Key(1))


# Templates


def test_marked_answers_equal_those_found_by_prefixes(decoder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    by_prefixes = chat_template(tokenizer, "tokenizer")
    marked = ChatTemplate(tokenizer, GENERATION)
    rows = [[message("assistant", "one ."), *conversation(1, 2)], *(row["messages"] for row in ROWS)]
    assert by_prefixes.encode(rows, str) == marked.encode(rows, str)
    assert not by_prefixes._marks_answers
    assert marked._marks_answers


def test_white_space_after_the_end_of_a_turn_is_no_answer() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(("<unk>", "<end>", "a", "b", "user", "assistant", "\n"))}
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    source = (
        "{% for message in messages %}{{ message.role + ' ' + message.content + ' <end> ' + '\\n' + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    [found] = ChatTemplate(tokenizer, source).encode([[message("user", "a"), message("assistant", "b")]], str)
    assert tokenizer.convert_ids_to_tokens(found.ids[found.answers[0][0] : found.answers[0][1]]) == ["b", "<end>"]


def test_a_tokenizer_without_a_template_needs_the_plain_one(load: Callable[..., Task], decoder: Path) -> None:
    for file in ("chat_template.jinja",):
        source = (decoder / file).read_text()
        (decoder / file).unlink()
    try:
        with pytest.raises(DataError, match=r"no chat template.*set data\.template = 'plain'"):
            load(ROWS)
        task = load([{"messages": conversation(n)} for n in range(5)], template="plain")
    finally:
        (decoder / file).write_text(source)
    assert decoded(task)[0][1].endswith(" . [SEP]")
    assert task.tokenizer.chat_template == PLAIN


def test_the_date_in_a_template_does_not_depend_on_the_day(decoder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}"
    assert chat_template(tokenizer, "tokenizer").source == "{{ '26 Jul 2024' }}"


def test_a_template_that_rewrites_earlier_turns_is_refused(decoder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    source = (
        "{% for message in messages %}{{ message['content'] if loop.last or message['role'] == 'user' else 'one' }} "
        "{% endfor %}"
    )
    with pytest.raises(DataError, match=r"which tokens of row 0 are an answer.*data\.template = 'plain'"):
        ChatTemplate(tokenizer, source).encode([conversation(1, 2)], lambda place: f"row {place}")
    straddling = "{% for message in messages %}{{ 'th' }}{% generation %}{{ 'ree' }}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match="which tokens of row 0"):
        ChatTemplate(tokenizer, straddling).encode([conversation(1)], lambda place: f"row {place}")


# Truncation


def test_long_conversations_are_cut_and_those_without_an_answer_left_out(load: Callable[..., Task]) -> None:
    long = [message("user", "what " * 30), message("assistant", "one .")]
    rows = [{"messages": conversation(n, 3), "n": n} for n in range(5)] + [
        {"messages": long, "n": 5 + n} for n in range(5)
    ]
    with pytest.warns(UserWarning, match="of 10 conversations") as caught:
        task = load(rows, max_length=16)
    told = [str(warning.message) for warning in caught]
    assert any("10 of 10 conversations" in text and "their last 175 tokens are not read" in text for text in told), told
    assert any("5 of 10 conversations" in text and "left out" in text and "data.max_length" in text for text in told)
    assert len(task.train) + len(task.test) == 5
    assert len(task.notes) == 2
    numbers = sorted(int(n) for columns in (task.columns, task.test_columns) for n in columns["n"])
    assert numbers == list(range(5))
    with pytest.raises(
        DataError, match=r"longer than max_length = 16 tokens, the first is row \d+ of .*data\.long_texts"
    ):
        load(rows, max_length=16, long_texts="error")


def test_a_set_without_any_answer_is_refused(load: Callable[..., Task]) -> None:
    with pytest.raises(DataError, match=r"no conversation of .* has a token of an answer.*data\.max_length"):
        load([{"messages": [message("user", "what " * 30), message("assistant", "one")]}] * 5, max_length=16)


def test_tokens_on_disk_equal_those_in_memory(
    load: Callable[..., Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    indices = torch.arange(8)
    in_memory = load(ROWS).train.take(indices)
    for _ in range(2):  # the second time from the cache
        on_disk = load(ROWS, memory=0)
        assert on_disk.notes == ("tokens are memory-mapped",)
        batch = on_disk.train.take(indices)
        assert torch.equal(batch.targets, in_memory.targets)
        assert torch.equal(batch.inputs["input_ids"], in_memory.inputs["input_ids"])
    # Another choice of answers is another entry.
    assert not torch.equal(load(ROWS, memory=0, answers="last").train.take(indices).targets, in_memory.targets)


# Multiple choice


def test_a_question_trains_on_its_right_choice(load: Callable[..., Task]) -> None:
    task = load(QUESTIONS, choices="choices")
    assert task.kind.name == "choice"
    batch = task.train.take(torch.arange(len(task.train)))
    for ids, targets in zip(batch.inputs["input_ids"], batch.targets, strict=True):
        asked, said = (task.tokenizer.decode([t for t in row.tolist() if t > 4 or t == 3]) for row in (ids, targets))
        number = NUMBERS.index(asked.split("after ")[1].split("?")[0].strip())
        assert said == f"{NUMBERS[(number + 1) % 6]} [SEP]"


def test_choices_are_taken_together(load: Callable[..., Task]) -> None:
    task = load(QUESTIONS, choices="choices")
    batch, counts, right = task.test.take_choices(torch.tensor([2, 0]))  # type: ignore[union-attr]
    assert counts.tolist() == [4, 4]
    own = task.test.take(torch.tensor([2, 0]))
    rows = torch.tensor([0, 4]) + right
    width = own.targets.shape[1]
    assert torch.equal(batch.targets[rows][:, :width], own.targets)


def test_a_question_with_a_choice_that_is_too_long_is_left_out(load: Callable[..., Task]) -> None:
    rows = [*QUESTIONS, *({**row, "choices": [*row["choices"], "one " * 60]} for row in QUESTIONS)]
    with pytest.warns(UserWarning, match="24 of 48 conversations .* left out, because they are longer than 32 tokens"):
        task = load(rows, choices="choices", max_length=32)
    assert len(task.train) + len(task.test) == 24


# Errors


USER = message("user", "what comes after one ?")
BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], r"row \d of .*train.jsonl.* has no messages in 'messages'; remove the row"),
    ([USER], r"row \d of .* has no answer.*assistant"),
    ([USER, message("asistant", "two")], r"message 1 of row \d of .* has the role 'asistant'; did you mean"),
    ([message("narrator", "two")], r"message 0 of row \d .* the role 'narrator'"),
    ([{"role": "user", "content": 3}], r"message 0 of row \d of .* has 3 as content, which is not text"),
    ([{"role": "user", "content": None}], r"message 0 of row \d .* as content, which is not text"),
    ([{"role": "user", "text": "one"}], r"message 0 of row \d .* has no field 'content'; its fields are role, text"),
    (["one"], r"message 0 of row \d .* a message has the fields role and content"),
    ("one", r"'messages' in row \d of .* must be a list or a list as JSON.* cannot be read"),
    (7, r"row \d of .* has no list of messages in 'messages'"),
]


@pytest.mark.parametrize(("value", "told"), BAD_MESSAGES)
def test_bad_messages(load: Callable[..., Task], value: Any, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        load([{"messages": value}] * 5, test=0.2)
    assert "\n" not in str(caught.value)


BAD_ROWS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"a": "one"}, {}, r"has no column of messages .* none for data\.instruction .*its columns are a"),
    ({"prompt": "one"}, {}, r"none for data\.output \(output, completion, response\)"),
    ({"messages": [USER]}, {"messages": "mesages"}, r"has no column 'mesages'; did you mean 'messages'"),
    ({"prompt": "one", "output": "two"}, {"messages": "prompt", "output": "output"}, r"remove the others"),
    ({"prompt": " ", "output": "two"}, {}, r"row \d of .* has no text in 'prompt'"),
    ({"prompt": "one", "output": None, "output2": "x"}, {}, r"row \d of .* has no text in 'output'"),
    ({"prompt": "one", "output": 2}, {}, r"row \d of .* has 2 in 'output', which is not text"),
    ({"prompt": "one", "input": 2, "output": "x"}, {}, r"row \d of .* has 2 in 'input', which is not text"),
    (
        {**QUESTIONS[0], "choices": ["one"]},
        {"choices": "choices"},
        r"row \d of .* has fewer than 2 choices in 'choices'; add",
    ),
    ({**QUESTIONS[0], "choices": [1, 2]}, {"choices": "choices"}, r"row \d of .* not a list of texts"),
    ({**QUESTIONS[0], "answer": 4}, {"choices": "choices"}, r"row \d of .* has 4 in 'answer'.* 4 choices.* 0 to 3"),
    ({**QUESTIONS[0], "answer": "A"}, {"choices": "choices"}, r"has 'A' in 'answer'"),
    (
        {"messages": conversation(1), "choices": ["one", "two"], "answer": 0},
        {"choices": "choices"},
        r"row \d of .* ends with an answer in 'messages'",
    ),
]


@pytest.mark.parametrize(("row", "options", "told"), BAD_ROWS)
def test_bad_rows(load: Callable[..., Task], row: dict[str, Any], options: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        load([row] * 5, **options)
    assert "\n" not in str(caught.value)


def test_a_template_that_fails_names_the_row(load: Callable[..., Task], decoder: Path) -> None:
    file = decoder / "chat_template.jinja"
    source = file.read_text()
    file.write_text(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('start with a user') }}{% endif %}" + source
    )
    rows = [{"messages": conversation(n)} for n in range(4)] + [
        {"messages": [message("system", "one"), *conversation(4)]}
    ]
    try:
        with pytest.raises(DataError, match=r"template fails for row 4 of .*: start with a user; correct the row, or"):
            load(rows)
    finally:
        file.write_text(source)


def test_nothing_is_told_of_short_conversations(load: Callable[..., Task]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(ROWS).notes == ()


# Templates as released with models, on a byte-level tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message['role'] + '<|stop|>\n\n' + "
    "message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
MODEL_TURNS = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}{{ '<|start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    special = ["<s>", "<|im_end|>", "<|im_start|>", "<|start|>", "<|stop|>"]
    backend = Tokenizer(models.BPE())
    split: Any = pre_tokenizers.Split(pieces, "isolated")  # as LLaMA 3 and Qwen do
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["what comes after one ?", "two comes after one .", "user assistant\n\n"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")


@pytest.mark.parametrize("source", [CHATML, HEADERS, INST, MODEL_TURNS, PLAIN])
@pytest.mark.parametrize("system", [False, True])
def test_answers_by_templates_of_released_models(source: str, system: bool) -> None:
    tokenizer = byte_level_tokenizer()
    answers = ["two.", "Three — naïve 😀, with\n\nlines\n  and   spaces", "x"]
    messages = [message("system", "Be brief.")] if system and source != INST else []
    for number, answer in enumerate(answers):
        messages += [message("user", f"question {number} <b>?"), message("assistant", answer)]
    [found] = ChatTemplate(tokenizer, source).encode([messages], str)
    assert [tokenizer.decode(found.ids[start:end]).lstrip(" ") for start, end in found.answers] == [
        f"{answer}<|im_end|>" for answer in answers
    ]
    prompt = tokenizer.apply_chat_template(
        messages[:-1], chat_template=source, add_generation_prompt=True, return_dict=False
    )
    assert found.ids[: found.answers[-1][0]] == prompt, "generation starts from the same tokens"


@pytest.mark.parametrize("source", [CHATML, HEADERS, MODEL_TURNS, PLAIN])
def test_a_first_answer_is_found_after_what_a_template_adds(source: str) -> None:
    tokenizer = byte_level_tokenizer()
    messages = [message("assistant", "hello"), message("user", "a"), message("assistant", "b")]
    [found] = ChatTemplate(tokenizer, source).encode([messages], str)
    texts = [tokenizer.decode(found.ids[start:end]).lstrip(" ") for start, end in found.answers]
    assert texts == ["hello<|im_end|>", "b<|im_end|>"]


def test_an_answer_that_merges_with_its_prompt_is_refused() -> None:
    """The tokens of a prompt that ends with a line feed change if the answer starts with one."""
    messages = [message("user", "a"), message("assistant", "\nb")]
    with pytest.raises(DataError, match="remove white space at the start of answers"):
        ChatTemplate(byte_level_tokenizer(), CHATML).encode([messages], str)
