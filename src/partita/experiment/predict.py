"""Predict with the model of a run or of an exported folder. Rows need no labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from partita import data
from partita.core import tensors
from partita.core.model import Model
from partita.core.options import MISSING, OptionError, closest_match, format_value
from partita.core.registry import options_by_name
from partita.core.tensors import Tensors
from partita.data import Table, Task
from partita.data.chat import answer_example
from partita.data.chat_template import chat_template
from partita.data.conversations import ANSWER, INPUT, INSTRUCTIONS, MESSAGES, ChatColumns, read_prompt
from partita.data.errors import DataError
from partita.data.images import Normalize
from partita.data.loading import HANDED_OVER
from partita.data.ragged import RaggedExamples, ragged
from partita.data.row_stream import NUMBER, Row, decode_image, save_mask, stream_rows
from partita.data.tokenization import TextEncoder, load_tokenizer, text_encoder
from partita.experiment.evaluate import Source, open_source
from partita.experiment.exported import read_export
from partita.experiment.recorded_model import RoundChoice
from partita.storage.safe_text import path_component
from partita.tasks import CHAT, CHOICE

Answers = list[dict[str, Any]]
BATCH = 32
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Options:
    """How to predict.

    Attributes:
        round: Which checkpoint of a run.
        client: The client whose own model to use; None for the server's.
        batch_size: Rows in a forward pass.
        columns: Columns of the input to write too.
        masks: Folder for the masks of segmentation.
        max_new_tokens: Maximum number of tokens of a generated text.
        base: Folder or Hub id of the model under an exported adapter or prompts.
        device: "cpu", "cuda" or "auto"; for exported folders.
        trust_code: Run own code in the folder of a run even if this user has not run it before.
    """

    round: RoundChoice = "last"
    client: str | None = None
    batch_size: int = BATCH
    columns: tuple[str, ...] = ()
    masks: Path | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    base: str | None = None
    device: str = "auto"
    trust_code: bool = False


@dataclass
class Cut:
    """Counts texts of which the end was not read."""

    texts: int = 0


def predict_file(
    folder: Path, file: Path | Sequence[Any], options: Options, cut: Cut | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a prediction for each row of a file, in order.

    Args:
        folder: Run folder or exported folder.
        file: A file (csv, json, jsonl, parquet, txt), an image, a folder of images, or rows: dicts, or texts.
        options: How to predict.
        cut: Counts the texts that are longer than the model's limit.

    Raises:
        ValueError: If the model, the file and the options do not fit each other.
    """
    source = open_source(folder, options.round, options.client, options.base, options.device, options.trust_code)
    if source.kind.head == "segmentation" and options.masks is None:
        raise OptionError("a model for segmentation writes a mask for each image; name a folder for them with --out")
    where = file if isinstance(file, Path) else Path(HANDED_OVER)
    predictor, number = _predictor(source, folder, where, options, cut or Cut()), 0
    if isinstance(file, Path):
        batches = stream_rows(file, predictor.column, options.batch_size)
    else:
        named = [row if isinstance(row, Mapping) else {predictor.column: row} for row in file]
        batches = (named[start : start + options.batch_size] for start in range(0, len(named), options.batch_size))
    for rows in batches:
        for name in options.columns:
            if name not in rows[0]:
                raise OptionError(
                    f"--columns names '{name}', which {where} does not have; {closest_match(name, rows[0])}"
                )
        with torch.inference_mode():
            answers = predictor(rows, number)
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True), number):
            known = {"id": row["id"]} if "id" in row else {NUMBER: place}
            yield {**known, **{name: row.get(name) for name in options.columns}, **answer}
        number += len(rows)


def _predictor(source: Source, folder: Path, file: Path, options: Options, cut: Cut) -> Predictor:
    name = source.reading["name"]
    defaults: dict[str, Any] = {}
    if name in data.INDEX:
        known = options_by_name("data", name)
        defaults = {key: option.default for key, option in known.items() if option.default is not MISSING}
    reading = {**defaults, **source.reading}
    recorded = source.recorded
    task = recorded.experiment.federation.task if recorded is not None else _described(folder, source)
    if source.kind.inputs == "image" and task.normalization is None:
        raise OptionError(
            f"the images of the task '{name}' are not read from files, so nothing says how to read others; use a model "
            "that was trained on image files"
        )
    model, params = source.load(task)
    return Predictor(source, model, params, task, reading, file, options, cut)


def _described(folder: Path, source: Source) -> Task:
    """Return a task without examples, which says what a model needs to know about its data."""
    images = read_export(folder).images
    nothing = Table({}, torch.empty(0))
    tokenizer = None
    if source.kind.inputs == "text":
        assert source.tokenizer is not None
        tokenizer = load_tokenizer(str(folder))[0]
    return Task(
        folder.name,
        nothing,
        nothing,
        source.classes,
        channels=images.channels if images else 0,
        size=images.size if images else 0,
        kind=source.kind,
        tokenizer=tokenizer,
        normalization=(images.mean, images.std) if images and images.mean else None,
    )


@dataclass
class Predictor:
    """Turns rows into predictions."""

    source: Source
    model: Model
    params: Tensors
    task: Task
    reading: Mapping[str, Any]
    file: Path
    options: Options
    cut: Cut
    encoders: dict[bool, TextEncoder] = field(default_factory=dict)

    @property
    def column(self) -> str:
        """The column that is read, in files that do not name their columns."""
        kind = self.source.kind
        if kind.inputs == "image":
            return str(self.reading.get("image", "image"))
        if kind.head == "seq2seq":
            return str(self.reading.get("source", "source"))
        if kind in (CHAT, CHOICE):
            return str(self.reading.get("instruction") or INSTRUCTIONS[0])
        return "text" if kind.head == "tokens" else str(self.reading.get("text", "text"))

    def __call__(self, rows: Sequence[Row], first: int) -> Answers:
        """Return the predictions for some rows; `first` is the number of the first in its file."""
        kind = self.source.kind
        if kind.inputs == "image":
            return self._images(rows, first)
        by_head: dict[str, Callable[[Sequence[Row], int], Answers]] = {
            "text": self._texts,
            "tokens": self._tokens,
            "seq2seq": self._answers,
            "lm": self._choices if kind is CHOICE else self._conversations if kind is CHAT else self._continuations,
        }
        return by_head[kind.head](rows, first)

    def _row(self, number: int) -> str:
        return f"row {number} of '{self.file}'"

    def _read(self, rows: Sequence[Row], column: str, first: int) -> list[str]:
        found = []
        for number, row in enumerate(rows, first):
            if column not in row:
                raise DataError(f"{self._row(number)} has no column '{column}'; {closest_match(column, row)}")
            value = row[column]
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{self._row(number)} has no text in '{column}'; fill it in or remove the row")
            found.append(value)
        return found

    def _encoder(self, words: bool = False) -> TextEncoder:
        if words not in self.encoders:
            limit = self.reading.get("max_length") or self.reading.get("block_size")
            self.encoders[words] = text_encoder(self.source.tokenizer, int(limit or 256), words=words)
        return self.encoders[words]

    def _logits(self, inputs: Tensors) -> torch.Tensor:
        device = next(iter(self.params.values())).device
        return self.model(self.params, tensors.to(inputs, device)).logits.double().cpu()

    def _texts(self, rows: Sequence[Row], first: int) -> Answers:
        encode, pair = self._encoder(), self.reading.get("pair")
        texts = self._read(rows, self.column, first)
        limit, long_texts = encode.limit, self.reading.get("long_texts")
        if pair is None and long_texts == "windows":
            overlap = self.reading.get("overlap")
            ids, of_text = encode.windows(texts, limit // 4 if overlap is None else overlap)
            logits = torch.cat(
                [self._logits(part) for part in self._batches(ragged(ids, limit, torch.zeros(len(ids))))]
            )
            places = torch.tensor(of_text)
            return self._named(torch.stack([logits[places == place].mean(0) for place in range(len(texts))]))
        seconds = None if pair is None else self._read(rows, pair, first)
        if seconds is None:
            ids, segments = encode.texts(texts), None
        else:
            ids, segments = encode.pairs(texts, seconds)
        self._count(encode.lengths(texts, ids, seconds), limit, first)
        return self._named(self._logits(self._inputs(ragged(ids, limit, torch.zeros(len(ids)), segments=segments))))

    def _count(self, lengths: Sequence[int], limit: int, first: int) -> None:
        """Count what is longer than the limit, or refuse it if the run did."""
        too_long = [place for place, length in enumerate(lengths) if length > limit]
        if too_long and self.reading.get("long_texts") == "error":
            place = too_long[0]
            raise DataError(
                f"{self._row(first + place)} has {lengths[place]:,} tokens, but the model was trained on at most "
                f"{limit}; shorten it"
            )
        self.cut.texts += len(too_long)

    @staticmethod
    def _inputs(table: RaggedExamples) -> Tensors:
        return table.take(torch.arange(len(table))).inputs

    def _batches(self, table: RaggedExamples) -> Iterator[Tensors]:
        for rows in torch.arange(len(table)).split(self.options.batch_size):
            yield table.take(rows).inputs

    def _named(self, logits: torch.Tensor) -> Answers:
        """Return labels with probabilities, or numbers, from logits (example, output)."""
        names, kind = self.source.classes, self.source.kind
        if kind.outputs == "numbers":
            values = [dict(zip(names, row, strict=True)) for row in logits.tolist()]
            return [{"value": row[names[0]]} if len(names) == 1 else {"values": row} for row in values]
        if kind.one_class:
            shares = [dict(zip(names, row, strict=True)) for row in logits.softmax(1).tolist()]
            chosen = logits.argmax(1).tolist()
            return [{"label": names[place], "probabilities": row} for place, row in zip(chosen, shares, strict=True)]
        shares = [dict(zip(names, row, strict=True)) for row in logits.sigmoid().tolist()]
        return [
            {"labels": [name for name, on in zip(names, row, strict=True) if on], "probabilities": share}
            for row, share in zip((logits > 0).tolist(), shares, strict=True)
        ]

    def _images(self, rows: Sequence[Row], first: int) -> Answers:
        task = self.task
        assert task.normalization is not None
        folder = self.file if self.file.is_dir() else self.file.parent
        pixels, shapes = [], []
        for number, row in enumerate(rows, first):
            if self.column not in row:
                raise DataError(f"{self._row(number)} has no column '{self.column}'; {closest_match(self.column, row)}")
            named = f"the image in {self._row(number)}" + (f" ({row['id']!r})" if "id" in row else "")
            decoded, shape = decode_image(row[self.column], named, folder, task.size, task.channels)
            pixels.append(decoded)
            shapes.append(shape)
        logits = self._logits(Normalize(*task.normalization)({"pixel_values": torch.stack(pixels)}))
        if self.source.kind.head == "segmentation":
            return self._masks(rows, first, logits.argmax(1), shapes)
        return self._named(logits)

    def _masks(
        self, rows: Sequence[Row], first: int, classes: torch.Tensor, shapes: Sequence[tuple[int, int]]
    ) -> Answers:
        folder, names = self.options.masks, self.source.classes
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        answers = []
        for number, (row, own, shape) in enumerate(zip(rows, classes, shapes, strict=True), first):
            title = path_component(str(row["id"])).replace("%2E", ".") if "id" in row else str(number)
            mask = folder / f"{title}.png"
            save_mask(own, shape, mask)
            counts = torch.bincount(own.flatten(), minlength=len(names)).double() / own.numel()
            answers.append({"mask": str(mask), "shares": dict(zip(names, counts.tolist(), strict=True))})
        return answers

    def _tokens(self, rows: Sequence[Row], first: int) -> Answers:
        """Return the entities of each row: of its list of words, or of its text."""
        column = str(self.reading.get("tokens", "tokens"))
        if all(column in row for row in rows):
            found = [self._words(row[column], self._row(number)) for number, row in enumerate(rows, first)]
            encode = self._encoder(words=True)
            encoded = [(ids, starts) for ids, starts in encode.words(found)]
            spans = [[(place, place + 1) for place in range(len(words))] for words in found]
            sources: Sequence[str | list[str]] = found
        else:
            texts, encode = self._read(rows, self.column, first), self._encoder()
            encoded, spans = self._split(texts, encode)
            sources = texts
        self._count([len(ids) for ids, _ in encoded], encode.limit, first)
        tagged = self._tagged(encode, encoded)
        return [
            {
                "entities": [
                    {"type": kind, "text": _part(text, start, end), "start": start, "end": end, "score": score}
                    for kind, start, end, score in _entities(tags, own)
                ]
            }
            for tags, own, text in zip(tagged, spans, sources, strict=True)
        ]

    @staticmethod
    def _words(value: Any, row: str) -> list[str]:
        if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
            raise DataError(f"{row} has {format_value(value)}, which is no list of words; correct it")
        return value

    @staticmethod
    def _split(
        texts: Sequence[str], encode: TextEncoder
    ) -> tuple[list[tuple[list[int], list[int]]], list[list[tuple[int, int]]]]:
        """Return tokens with the first token of each word, and the characters of each word."""
        encoded = encode.tokenizer(list(texts), return_offsets_mapping=True, verbose=False)
        found, spans = [], []
        for number in range(len(texts)):
            starts: dict[int, int] = {}
            places: dict[int, tuple[int, int]] = {}
            pairs = zip(encoded.word_ids(number), encoded["offset_mapping"][number], strict=True)
            for token, (word, (start, end)) in enumerate(pairs):
                if word is not None:
                    starts.setdefault(word, token)
                    places[word] = (places[word][0] if word in places else start, end)
            found.append((encoded["input_ids"][number], list(starts.values())))
            spans.append(list(places.values()))
        return found, spans

    def _tagged(
        self, encode: TextEncoder, encoded: Sequence[tuple[list[int], list[int]]]
    ) -> list[list[tuple[str, float]]]:
        """Return the tag and its probability for each word; O for words that are not read."""
        overlap = self.reading.get("overlap")
        step = None
        if self.reading.get("long_texts") == "windows":
            step = encode.limit // 4 if overlap is None else overlap
        windows = [encode.word_windows(ids, starts[0] if starts else 0, step) for ids, starts in encoded]
        pieces = [[ids[place] for place in each.places]
                  for (ids, _), own in zip(encoded, windows, strict=True) for each in own]  # fmt: skip
        table = ragged(pieces, encode.limit, torch.zeros(len(pieces)))
        logits = iter([row for inputs in self._batches(table) for row in self._logits(inputs).softmax(-1)])
        found = []
        for (_, starts), own in zip(encoded, windows, strict=True):
            of_token: dict[int, torch.Tensor] = {}
            for window in own:
                shares = next(logits)
                of_token |= {place: shares[at] for at, place in enumerate(window.places) if place in window.own}
            tags = [of_token.get(start) for start in starts]
            found.append([("O", 1.0) if tag is None else (self.source.classes[int(tag.argmax())], float(tag.max()))
                          for tag in tags])  # fmt: skip
        return found

    def _generate(self, inputs: Tensors) -> Answers:
        device = next(iter(self.params.values())).device
        texts = self.model.generate(self.params, tensors.to(inputs, device), self.options.max_new_tokens)
        return [{"text": text} for text in texts]

    def _answers(self, rows: Sequence[Row], first: int) -> Answers:
        encode, prefix = self._encoder(), self.reading.get("prefix") or ""
        texts = [prefix + text for text in self._read(rows, self.column, first)]
        ids = encode.texts(texts)
        self._count(encode.lengths(texts, ids), encode.limit, first)
        return self._generate(self._inputs(ragged(ids, encode.limit, torch.zeros(len(ids)))))

    def _continuations(self, rows: Sequence[Row], first: int) -> Answers:
        ids = self._encoder().without_special_tokens(self._read(rows, self.column, first))
        return self._generate(_padded_before(ids))

    def _prompts(self, rows: Sequence[Row], first: int, choices: bool) -> list[Any]:
        given = {key: self.reading.get(key) for key in ("messages", "instruction", "input")}
        known = rows[0]
        if given["messages"] is None and given["instruction"] is None:
            given["messages"] = next((name for name in MESSAGES if name in known), None)
        if given["messages"] is None:
            given["instruction"] = given["instruction"] or next((name for name in INSTRUCTIONS if name in known), None)
            given["input"] = given["input"] or (INPUT if INPUT in known else None)
        if given["messages"] is None and given["instruction"] is None:
            raise DataError(
                f"'{self.file}' has no column of messages ({', '.join(MESSAGES)}) and none of instructions "
                f"({', '.join(INSTRUCTIONS)}); rename the column"
            )
        columns = ChatColumns(**given, choices=self.reading["choices"] if choices else None)
        return [read_prompt(self._row(number), row, columns) for number, row in enumerate(rows, first)]

    def _conversations(self, rows: Sequence[Row], first: int) -> Answers:
        prompts = [each.messages for each in self._prompts(rows, first, False)]
        template = chat_template(self._encoder().tokenizer, self.reading.get("template", "tokenizer"))
        return self._generate(_padded_before(template.prompts(prompts, lambda place: self._row(first + place))))

    def _choices(self, rows: Sequence[Row], first: int) -> Answers:
        """Return the most likely choice of each row."""
        encode = self._encoder()
        template = chat_template(encode.tokenizer, self.reading.get("template", "tokenizer"))
        answers = []
        for number, asked in enumerate(self._prompts(rows, first, True), first):
            versions = [asked.with_answer(place) for place in range(len(asked.choices))]
            encoded = template.encode(versions, lambda _, number=number: self._row(number))  # type: ignore[misc]
            made = [answer_example(each) for each in encoded]
            longest = max(len(ids) for ids, _ in made)
            if longest > encode.limit:
                raise DataError(f"{self._row(number)} has {longest:,} tokens, more than {encode.limit}; shorten it")
            table = ragged([ids for ids, _ in made], encode.limit, tags=[wanted for _, wanted in made])
            batch = table.take(torch.arange(len(table)))
            device = next(iter(self.params.values())).device
            out = self.model(self.params, tensors.to(batch.inputs, device))
            losses = self.model.losses(out, batch.targets.to(device)).double().cpu()
            shares = (-losses * (batch.targets >= 0).sum(1)).softmax(0)
            best = int(shares.argmax())
            answers.append({ANSWER: best, "text": asked.choices[best], "probabilities": shares.tolist()})
        return answers


def _padded_before(rows: Sequence[Sequence[int]]) -> Tensors:
    """Return token rows padded at their start, as generation needs them."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _part(source: str | list[str], start: int, end: int) -> str:
    """Return characters of a text, or words of a list."""
    return source[start:end] if isinstance(source, str) else " ".join(source[start:end])


def _entities(tags: Sequence[tuple[str, float]], spans: Sequence[tuple[int, int]]) -> list[tuple[str, int, int, float]]:
    """Return type, start, end and mean probability of entities.

    As in transformers' pipelines, a word with I-type that does not continue its type starts an entity too.
    """
    found: list[tuple[str, int, int, list[float]]] = []
    before = "O"
    for (tag, share), (start, end) in zip(tags, spans, strict=True):
        kind = tag[2:]
        if tag != "O" and not tag.startswith("B-") and before[2:] == kind and before != "O":
            found[-1] = (kind, found[-1][1], end, [*found[-1][3], share])
        elif tag != "O":
            found.append((kind, start, end, [share]))
        before = tag
    return [(kind, start, end, sum(shares) / len(shares)) for kind, start, end, shares in found]
