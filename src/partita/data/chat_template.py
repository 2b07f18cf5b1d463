"""Conversations as tokens, by a chat template, with the places of the answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, Literal

from partita.data.conversations import ASSISTANT, Messages
from partita.data.errors import DataError, first_line

# A role, a colon and the content on a line. An answer ends with the tokenizer's end token.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ ' ' + message['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ ' ' + message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template may mark what the assistant generates
WRITES_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
DAY = date(2024, 7, 26)  # for templates that write today's date: tokens must not depend on the day of the run
LONGEST_TAIL = 8  # tokens after the end of a turn, such as a line feed

Span = tuple[int, int]  # first token of an answer, and the one after its last


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens."""

    ids: list[int]
    answers: list[Span]


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A tokenizer with a chat template."""

    tokenizer: Any
    source: str

    def encode(self, conversations: Sequence[Messages], row: Callable[[int], str]) -> list[Encoded]:
        """Return the tokens of conversations, and where their answers are. The end of a turn belongs to the answer.

        Args:
            conversations: The messages of each conversation. The last message is an answer.
            row: Names a conversation, by its place, in an error message.

        Raises:
            DataError: If the template fails, or does not tell which tokens are an answer.
        """
        if self._marks_answers:
            return self._by_marks(conversations, row)
        return self._by_prefixes(conversations, row)

    def prompts(self, conversations: Sequence[Messages], row: Callable[[int], str]) -> list[list[int]]:
        """Return the tokens of conversations up to where an answer starts.

        Args:
            conversations: The messages of each conversation. The last message is not an answer.
            row: Names a conversation, by its place, in an error message.

        Raises:
            DataError: If the template fails.
        """
        texts = [self._render(messages, row(place), True)[0] for place, messages in enumerate(conversations)]
        ids: list[list[int]] = self._tokenize(texts)["input_ids"]
        return ids

    @cached_property
    def _marks_answers(self) -> bool:
        return bool(MARKS_ANSWERS.search(self.source)) and self.tokenizer.is_fast

    @cached_property
    def _special(self) -> frozenset[int]:
        added = (number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return frozenset([*added, *self.tokenizer.all_special_ids])

    def _by_marks(self, conversations: Sequence[Messages], row: Callable[[int], str]) -> list[Encoded]:
        """Find the answers by the marks of the template, which are places in the text."""
        rendered = [self._render(messages, row(place)) for place, messages in enumerate(conversations)]
        encoded = self._tokenize([text for text, _ in rendered], return_offsets_mapping=True)
        found = []
        for place, (text, marks) in enumerate(rendered):
            ids, offsets = encoded["input_ids"][place], encoded["offset_mapping"][place]
            spans = [_tokens_between(offsets, start, end) for start, end in marks]
            for (start, _), (first, last) in zip(marks, spans, strict=True):
                if first < last and text[offsets[first][0] : start].strip():
                    raise DataError(self._unclear(row(place)))
            found.append(Encoded(ids, [self._whole_turn(ids, span) for span in spans if span[0] < span[1]]))
        return found

    def _by_prefixes(self, conversations: Sequence[Messages], row: Callable[[int], str]) -> list[Encoded]:
        """Find each answer as what follows the conversation before it.

        The tokens of the conversation before an answer, with the template's generation prompt, and those through the
        answer must both start the tokens of the whole conversation.
        """
        texts: list[str] = []
        turns: list[list[int]] = []  # of each conversation, which of its messages are answers
        for place, messages in enumerate(conversations):
            turns.append([number for number, each in enumerate(messages) if each["role"] == ASSISTANT])
            for number in turns[-1]:
                if number:
                    before = self._render(messages[:number], row(place), True)[0]
                else:  # an answer to nothing: a generation prompt after it is also the one before it
                    before = self._render(messages[:1], row(place), True)[0]
                texts += [before, self._render(messages[: number + 1], row(place))[0]]
        tokens = iter(self._tokenize(texts)["input_ids"])
        found = []
        for place, numbers in enumerate(turns):
            pairs = [(next(tokens), next(tokens)) for _ in numbers]
            ids, spans = pairs[-1][1], list[Span]()
            for number, (before, through) in zip(numbers, pairs, strict=True):
                start = len(before) if number else _after_prompt(before, through)
                prompt = before if number else through[:start]
                if start >= len(through) or ids[: len(through)] != through or through[:start] != prompt:
                    raise DataError(self._unclear(row(place)))
                spans.append(self._whole_turn(ids, (start, len(through))))
            found.append(Encoded(ids, spans))
        return found

    def _render(self, messages: Messages, row: str, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the marked places in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # transformers declares another type than it returns
        try:
            [text], marks = render(
                [messages],
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self._marks_answers,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template can raise any exception
            raise DataError(
                f"the chat template fails for {row}: {first_line(error)}; correct the row, or set "
                "data.template = 'plain'"
            ) from error
        return text, marks[0] if marks else []

    def _tokenize(self, texts: list[str], **options: Any) -> Any:
        # The template writes the special tokens itself.
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )

    def _whole_turn(self, ids: Sequence[int], span: Span) -> Span:
        """Let an answer end with the token that ends the turn: with it, and without the white space after it."""
        start, end = span
        if end < len(ids) and ids[end] == self.tokenizer.eos_token_id:
            return start, end + 1
        for last in range(end - 1, max(start, end - LONGEST_TAIL) - 1, -1):
            if ids[last] in self._special:
                return (start, last + 1) if not self.tokenizer.decode(ids[last + 1 : end]).strip() else span
        return span

    def _unclear(self, row: str) -> str:
        return (
            f"the chat template does not tell which tokens of {row} are an answer: it writes the messages before it "
            "otherwise than with it; remove white space at the start of answers, use a template with "
            "{% generation %}, or set data.template = 'plain'"
        )


def chat_template(tokenizer: Any, template: Literal["tokenizer", "plain"]) -> ChatTemplate:
    """Return the chat template to use. The tokenizer is saved with it.

    Raises:
        DataError: If the tokenizer has no template, or the plain one needs an end token that it does not have.
    """
    name = tokenizer.name_or_path
    if template == "plain":
        if tokenizer.eos_token is None:
            raise DataError(
                f"the tokenizer '{name}' has no end token (eos_token), with which an answer ends; set one in its "
                "tokenizer_config.json, or set data.tokenizer to that of a model that generates text"
            )
        tokenizer.chat_template = PLAIN
        return ChatTemplate(tokenizer, PLAIN)
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer '{name}' has no chat template, as that of a model which was not trained to chat; set "
            "data.template = 'plain' for a simple one, or use the chat version of the model"
        )
    source = WRITES_TODAY.sub(lambda found: repr(DAY.strftime(found[2])), tokenizer.get_chat_template())
    return ChatTemplate(tokenizer, source)


def _tokens_between(offsets: Sequence[Span], start: int, end: int) -> Span:
    """Return the tokens whose text reaches into [start, end)."""
    inside = [
        place
        for place, (first, last) in enumerate(offsets)
        if (first < end and last > start) or (first == last and start <= first < end)
    ]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _after_prompt(prompted: Sequence[int], conversation: Sequence[int]) -> int:
    """Return where the generation prompt ends that a conversation starts with, after the template's own text.

    Args:
        prompted: The conversation, followed by a generation prompt.
        conversation: The conversation. It is one answer.
    """
    prompt = prompted[len(conversation) :]
    places = range(len(conversation) - len(prompt))
    starts = (place for place in places if conversation[place : place + len(prompt)] == prompt)
    return next(starts, len(conversation)) + len(prompt)
