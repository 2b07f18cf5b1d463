"""Any damaged data file gives a task or a one-line error that names the file."""

from __future__ import annotations

import csv
import json
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.core.rng import Key
from partita.data import load
from partita.data.labels import label_lists, one_label
from partita.data.loading import load_dataset
from partita.engines.availability import read_trace

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

FUZZ = settings(suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)
ROWS = [{"text": f"note {row}", "label": ("yes", "no")[row % 2], "site": row % 3} for row in range(12)]
WORDS = [
    {"tokens": ["no", "fever"], "tags": ["O", "B-Sign"]},
    {"tokens": ["mild", "cough"], "tags": ["B-Sign", "I-Sign"]},
]
TALKS = [
    {"messages": [{"role": "user", "content": "no fever"}, {"role": "assistant", "content": f"note {row}"}]}
    for row in range(6)
]
TRACE = "round,client,work\n0,c0,0.5\n1,c1,1\n2,c2,0\n"
LINES = [
    "{}",
    "[]",
    "null",
    "3",
    '{"text": 3}',
    '{"text": null, "label": null}',
    '{"text": "\\ud800", "label": "yes"}',
]
LINES += [
    '{"text": {"a": 1}, "label": "yes"}',
    '{"text": "x", "label": 99999999999999999999999}',
    "[" * 5000,
    "\0",
    '"',
]
LINES += [
    '{"text": "x", "label": ["yes"]}',
    '{"other": "x"}',
    '{"text": "x", "label": NaN}',
    ",,,,,",
    "a,b",
    "x" * 200_000,
]
TAGS = [["O"], ["O", "O", "O"], ["I-Sign", "O"], ["B-", "O"], ["", "O"], [None, "O"], None, [], "O", ["X-Sign", "O"]]
TAGS += [[["O"], ["O"]], [1, 2], [0.5, 0.5], ["B-Sign", "I-Other"], ["O\n", "O"]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "mild", "fever", "cough", "note"]
    BertTokenizer(
        vocab={word: place for place, word in enumerate(words)}, model_max_length=20, eos_token="[SEP]"
    ).save_pretrained(folder)
    return str(folder)


def png(width: int = 4, height: int = 4, shade: int = 7) -> bytes:
    """A gray 4 x 4 image whose header may claim another size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes([0, *[shade] * 4] * 4)))
        + chunk(b"IEND", b"")
    )


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Valid files, by name."""
    folder = tmp_path_factory.mktemp("valid")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(folder / "all.parquet")
    table.cast_column("label", datasets.ClassLabel(names=["no", "yes"])).to_parquet(folder / "classes.parquet")
    table.to_csv(folder / "all.csv", index=False)
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "all.json").write_text(json.dumps(ROWS))
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in WORDS * 3))
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALKS))
    (folder / "1.png").write_bytes(png())
    (folder / "trace.csv").write_text(TRACE)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def load_file(file: Path, tokenizer: str) -> object:
    """Load the file as an experiment would."""
    if file.name == "trace.csv":
        return read_trace(file)
    if file.suffix == ".png":
        return load("images", Key(0), path=str(file.parent.parent), channels=1)
    if file.name.startswith("tokens"):
        return load("tokens", Key(0), path=str(file), tokenizer=tokenizer, max_length=16)
    if file.name.startswith("chat"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # damage may lengthen a conversation
            return load("chat", Key(0), path=str(file), tokenizer=tokenizer, template="plain", max_length=20)
    source = load_dataset(str(file), Key(0))
    return one_label(source, "label"), source.train.texts("text"), source.train.columns()


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Functions that damage the bytes of a file, at positions given as fractions of its length."""
    kind = draw(st.sampled_from(["flip", "flip", "truncate", "zero", "swap", "huge", "insert", "repeat", "line"]))
    start, stop = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    bits = draw(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=6))
    junk = draw(
        st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff\xfe", b'"', b"\n", b",", b"{", b"\x80", b"99999999999"])
    )
    line = draw(st.sampled_from(LINES)).encode()

    def damage(data: bytes) -> bytes:
        first, last = int(start * len(data)), int(stop * len(data))
        if kind == "flip":
            changed = bytearray(data)
            for place, mask in bits:
                changed[min(int(place * len(data)), len(data) - 1)] ^= mask
            return bytes(changed)
        if kind == "line":
            lines = data.splitlines(keepends=True)
            return b"".join([*lines[: int(start * len(lines))], line + b"\n", *lines[int(start * len(lines)) :]])
        return {
            "truncate": data[:first],
            "zero": data[:first] + b"\0" * (last - first) + data[last:],
            "swap": data[last:] + data[first:last] + data[:first],
            "huge": b"\xff" * 8 + data[8:-8] + b"\xff\xff\xff\x7f" + data[-4:],
            "insert": data[:first] + junk + data[first:],
            "repeat": data + data[first:last],
        }[kind]

    return damage


def try_to_load(name: str, data: bytes, folder: Path, tokenizer: str) -> str | None:
    if name.endswith(".png"):
        for label in ("cat", "dog"):
            (folder / "train" / label).mkdir(parents=True)
            for number in range(3):
                (folder / "train" / label / f"{number}.png").write_bytes(png(shade=number))
        folder = folder / "train" / "cat"
    (folder / name).write_bytes(data)
    path = folder / name if not name.endswith(".png") else folder
    message = refusal(lambda: load_file(folder / name, tokenizer))
    assert message is None or str(path.parent.parent if path == folder else path) in message, message
    return message


NAMES = ["all.parquet", "classes.parquet", "all.csv", "all.jsonl", "all.json", "tokens.jsonl", "chat.jsonl"]
NAMES += ["1.png", "trace.csv"]


@pytest.mark.parametrize("name", NAMES)
def test_valid_file_is_read(name: str, valid_files: dict[str, bytes], tokenizer: str, tmp_path: Path) -> None:
    assert try_to_load(name, valid_files[name], tmp_path, tokenizer) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff" * 100, b"\n\n", b"PAR1", b"not data"], ids=repr)
def test_file_without_data_is_refused_by_name(
    name: str, data: bytes, valid_files: dict[str, bytes], tokenizer: str, tmp_path: Path
) -> None:
    assert try_to_load(name, data, tmp_path, tokenizer) is not None


@pytest.mark.slow
def test_damaged_data_file_is_read_or_refused_by_name(
    valid_files: dict[str, bytes], tokenizer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @given(name=st.sampled_from(NAMES), damage=damages())
    @settings(FUZZ, max_examples=1200)
    def check(name: str, damage: Callable[[bytes], bytes]) -> None:
        try_to_load(name, damage(valid_files[name]), tmp_path_factory.mktemp("damaged"), tokenizer)

    check()


@pytest.mark.parametrize("place", [0, 1])
def test_json_line_without_an_object_is_refused_by_row(place: int, tokenizer: str, tmp_path: Path) -> None:
    """pyarrow crashes the process if `null` is the first line."""
    rows = [json.dumps(row) for row in ROWS]
    rows.insert(place, "null")
    message = try_to_load("all.jsonl", "\n".join(rows).encode(), tmp_path, tokenizer)
    assert message is not None
    assert f"row {place} of " in message
    assert "is not an object with named columns" in message


def test_json_lines_may_start_with_a_byte_order_mark(tokenizer: str, tmp_path: Path) -> None:
    data = "\n".join(json.dumps(row) for row in ROWS).encode("utf-8-sig")
    assert try_to_load("all.jsonl", data, tmp_path, tokenizer) is None


@pytest.mark.parametrize("tags", TAGS, ids=repr)
def test_broken_tags_are_refused_by_row(tags: Any, tokenizer: str, tmp_path: Path) -> None:
    rows = [*WORDS * 3, {"tokens": ["no", "cough"], "tags": tags}]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    assert try_to_load("tokens.jsonl", data, tmp_path, tokenizer) is not None


@pytest.mark.parametrize("size", [(10**5, 10**5), (2**31 - 1, 2**31 - 1), (0, 0), (2**32 - 1, 1), (4, 40_000)])
def test_image_with_a_false_header_is_refused(size: tuple[int, int], tokenizer: str, tmp_path: Path) -> None:
    assert try_to_load("1.png", png(*size), tmp_path, tokenizer) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "round,client,work\n0,c0,nan\n",
        "round,client,work\n0,c0,-0.1\n",
        "round,client,work\n" + "9" * 5000 + ",c0,1\n",
        'round,client,work\n0,"c0,1\n',
        "round,client,work\n0,\n",
        "work,round,client\n1,0\n",
        f"round,client,work\n0,{'x' * 200_000},1\n",
    ],
    ids=lambda text: text[:40],
)
def test_broken_trace_is_refused_by_name(text: str, tokenizer: str, tmp_path: Path) -> None:
    assert csv.field_size_limit() < 200_000
    assert try_to_load("trace.csv", text.encode(), tmp_path, tokenizer) is not None


def test_label_lists_are_read_from_a_list_column(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"label": ["a", "b"]}) + "\n" for _ in range(10)))
    assert label_lists(load_dataset(str(tmp_path / "all.jsonl"), Key(0)), "label")[0] == ("a", "b")
