"""Readers of annotated documents: BRAT standoff and i2b2 concepts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from example_fixtures import write_encoder
from hypothesis import given
from hypothesis import strategies as st

from partita.core.rng import Key
from partita.data import DataError, load, split
from partita.data.i2b2 import read_i2b2
from partita.data.inspection import inspect_data
from partita.data.standoff import Document, DocumentFiles, find_documents, read_brat, tag_words
from partita.experiment.starter import config_for

TAGS = ("O", "B-Drug", "I-Drug", "B-Sign", "I-Sign")
WORDS = st.text("abcäß", min_size=1, max_size=5) | st.sampled_from(["10", "mg", ".", "%", "10"])
NOTE = "Takes aspirin 10mg daily.\nNo fever,\nno severe head\nache.\n"


def repaired(tags: Sequence[str]) -> list[str]:
    """Turn any tags into valid BIO tags."""
    valid: list[str] = []
    for tag in tags:
        before = valid[-1] if valid else "O"
        valid.append("O" if tag.startswith("I-") and before[2:] != tag[2:] else tag)
    return valid


rows_of_words = st.lists(
    st.lists(st.tuples(WORDS, st.sampled_from(TAGS)), min_size=1, max_size=6), min_size=1, max_size=4
)


def files_of(folder: Path, suffix: str, text: str, annotations: str, name: str = "note") -> DocumentFiles:
    folder.mkdir(parents=True, exist_ok=True)
    for ending, content in ((".txt", text), (suffix, annotations)):
        (folder / f"{name}{ending}").write_bytes(content.encode())
    return DocumentFiles(name, "", folder / f"{name}.txt", folder / f"{name}{suffix}")


def entity_spans(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    ends = [tag[:2] != "I-" for tag in [*tags[1:], "O"]]
    starts = [place for place, tag in enumerate(tags) if tag.startswith("B-")]
    return [
        (start, next(place for place in range(start, len(tags)) if ends[place]) + 1, tags[start][2:])
        for start in starts
    ]


def write_brat(folder: Path, rows: list[tuple[list[str], list[str]]], line_end: str) -> DocumentFiles:
    """Write rows of words as a text, and their tags as standoff."""
    text, lines = "", []
    for words, tags in rows:
        places = []
        for word in words:
            text += " " if places else ""
            places.append((len(text), len(text) + len(word)))
            text += word
        for start, end, kind in entity_spans(tags):
            first, last = places[start][0], places[end - 1][1]
            lines.append(f"T{len(lines) + 1}\t{kind} {first} {last}\t{text[first:last]}")
        text += line_end
    return files_of(folder, ".ann", text, "".join(f"{line}{line_end}" for line in lines))


def write_i2b2(folder: Path, rows: list[tuple[list[str], list[str]]]) -> DocumentFiles:
    concepts = [
        f'c="{" ".join(words[start:end]).lower()}" {number}:{start} {number}:{end - 1}||t="{kind}"\n'
        for number, (words, tags) in enumerate(rows, 1)
        for start, end, kind in entity_spans(tags)
    ]
    return files_of(folder, ".con", "".join(" ".join(words) + "\n" for words, _ in rows), "".join(concepts))


def read_back(document: Document) -> list[tuple[list[str], list[str]]]:
    from partita.data.standoff import _rows

    tags, left_out = tag_words(document)
    assert left_out == 0
    return [(list(document.words[start:end]), tags[start:end]) for start, end in _rows(document)]


@pytest.mark.slow
@given(rows_of_words, st.sampled_from(["\n", "\r\n"]))
def test_tags_survive_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, raw: list[list[tuple[str, str]]], line_end: str
) -> None:
    rows = [([word for word, _ in row], repaired([tag for _, tag in row])) for row in raw]
    folder = tmp_path_factory.mktemp("documents")
    found = read_brat(write_brat(folder, rows, line_end))
    assert read_back(found) == rows
    assert not found.notes
    assert read_back(read_i2b2(write_i2b2(folder, rows), ("Drug", "Sign"))) == rows


def test_lines_sentences_and_words(tmp_path: Path) -> None:
    annotations = "T1\tDrug 6 13\taspirin\nT2\tSign 39 55\tsevere head\\nache\n".replace("\\n", " ")
    files = files_of(tmp_path, ".ann", NOTE, annotations)
    words = [row for row, _ in read_back(read_brat(files))]
    assert words == [
        ["Takes", "aspirin", "10", "mg", "daily", "."],
        ["No", "fever", ","],
        ["no", "severe", "head", "ache", "."],  # an entity keeps its lines together
    ]
    assert [len(row) for row, _ in read_back(read_brat(files, rows="sentence"))] == [6, 8]


def test_fragments_are_covered_cut_or_refused(tmp_path: Path) -> None:
    text = "severe and mild pain"
    files = files_of(tmp_path, ".ann", text, "T1\tSign 0 6;16 20\tsevere pain\n")
    covered = read_brat(files)
    assert tag_words(covered)[0] == ["B-Sign", "I-Sign", "I-Sign", "I-Sign"]
    assert list(covered.notes) == ["entities have several fragments"]
    assert tag_words(read_brat(files, discontinuous="first"))[0] == ["B-Sign", "O", "O", "O"]
    with pytest.raises(DataError, match=r"line 1 of .*note\.ann' is an entity of several fragments"):
        read_brat(files, discontinuous="refuse")
    # n2c2 writes an entity over a line end as two fragments with nothing but space between them.
    wrapped = files_of(tmp_path, ".ann", "severe\npain", "T1\tSign 0 6;7 11\tsevere pain\n")
    assert not read_brat(wrapped, discontinuous="refuse").notes


def test_the_longest_of_overlapping_entities_is_kept(tmp_path: Path) -> None:
    annotations = "T1\tDrug 7 11\thead\nT2\tSign 0 16\tsevere head ache\nT3\tSign 12 21\tache then\n"
    document = read_brat(files_of(tmp_path, ".ann", "severe head ache then", annotations))
    assert tag_words(document) == (["B-Sign", "I-Sign", "I-Sign", "O"], 2)
    later = "T1\tDrug 0 11\tmild severe\nT2\tSign 5 21\tsevere head ache\n"
    document = read_brat(files_of(tmp_path, ".ann", "mild severe head ache", later))
    assert tag_words(document) == (["O", "B-Sign", "I-Sign", "I-Sign"], 1)  # although it starts later
    twice = read_brat(files_of(tmp_path, ".ann", "head", "T1\tSign 0 4\thead\nT2\tDrug 0 4\thead\n"))
    assert tag_words(twice) == (["B-Sign"], 1)  # the first in the file


def test_other_annotations_types_and_parts_of_words_are_counted(tmp_path: Path) -> None:
    others = "R1\tADE Arg1:T1 Arg2:T2\nE1\tSign:T1\nA1\tNegated T1\n#1\tAnnotatorNotes T1\tnote\n\n"
    files = files_of(tmp_path, ".ann", "aspirins", "T1\tDrug 0 7\taspirin\nT2\tDose 0 7\taspirin\n" + others)
    document = read_brat(files, types=["Drug"])
    assert tag_words(document)[0] == ["B-Drug"]
    assert document.notes == {
        "entities start or end within a word and get the whole word": 1,
        "entities have a type that is not in data.types and are left out": 1,
        "relations, events, attributes and notes are ignored": 4,
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("T1\tDrug 0 99\taspirin", "is for the characters 0 to 99, but the text has 7"),
        ("T1\tDrug 3 3\t", "is for the characters 3 to 3"),
        ("T1\tDrug 0 7\tibuprofen", "says 'ibuprofen', but the text has 'aspirin' there"),
        ("T1 Drug 0 7 aspirin", "is no annotation of BRAT"),
        ("Drug 0 7", "is no annotation of BRAT"),
    ],
)
def test_wrong_annotations_are_named(line: str, message: str, tmp_path: Path) -> None:
    files = files_of(tmp_path, ".ann", "aspirin", f"T0\tDrug 0 7\taspirin\n{line}\n")
    with pytest.raises(DataError, match=rf"line 2 of '.*note\.ann' {message}"):
        read_brat(files)


def test_an_entity_without_a_word_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1 of .* is an entity without a word"):
        read_brat(files_of(tmp_path, ".ann", "a  b", "T1\tDrug 1 3\t  \n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('c="aspirin" 1:0 1:0||t="drug"', "has the unknown type 'drug'; .*problem"),
        ('c="aspirin" 1:1 1:1||t="treatment"', "is for word 1 of line 1, which '.*note.txt' lacks"),
        ('c="aspirin" 0:0 0:0||t="treatment"', "is for word 0 of line 0"),
        ('c="ibuprofen" 1:0 1:0||t="treatment"', "says 'ibuprofen', but the text has 'Aspirin' there"),
        ('c="aspirin" 1:0||t="treatment"', "is no concept of i2b2"),
    ],
)
def test_wrong_concepts_are_named(line: str, message: str, tmp_path: Path) -> None:
    files = files_of(tmp_path, ".con", "Aspirin\n", f'c="aspirin" 1:0 1:0||t="treatment"\n{line}\n')
    with pytest.raises(DataError, match=rf"line 2 of '.*note\.con' {message}"):
        read_i2b2(files)


def test_documents_are_paired_across_folders(tmp_path: Path) -> None:
    for site in ("beth", "partners"):
        for kind, suffix in (("txt", ".txt"), ("concept", ".con")):
            (tmp_path / site / kind).mkdir(parents=True)
            (tmp_path / site / kind / f"record-1{suffix}").write_text("")
    found = find_documents(tmp_path, ".con")
    assert [(each.name, each.folder) for each in found] == [
        ("beth/record-1", "beth"),
        ("partners/record-1", "partners"),
    ]
    assert found[0].text == tmp_path / "beth" / "txt" / "record-1.txt"


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no documents: NAME\.txt with NAME\.ann"):
        find_documents(tmp_path / "nowhere", ".ann")
    files_of(tmp_path, ".ann", "aspirin", "")
    (tmp_path / "other.txt").write_text("text")
    with pytest.raises(DataError, match=r"other\.txt' has no file 'other\.ann'"):
        find_documents(tmp_path, ".ann")
    (tmp_path / "other.txt").rename(tmp_path / "other.ann")
    with pytest.raises(DataError, match=r"other\.ann' has no file 'other\.txt'"):
        find_documents(tmp_path, ".ann")


def write_corpus(folder: Path, documents: int = 10) -> None:
    for number in range(documents):
        place = folder / ("north", "south")[number % 2]
        files_of(
            place,
            ".ann",
            f"no fever {number}\nmild fever\n",
            "T1\tSign 3 8\tfever\nT2\tSign 16 21\tfever\n",
            f"n{number}",
        )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder)
    return str(folder)


def load_quietly(name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(name, Key(0), **options)


def test_a_folder_of_documents_becomes_a_task(tmp_path: Path, encoder: str) -> None:
    write_corpus(tmp_path)
    task = load_quietly("brat", path=tmp_path, tokenizer=encoder)
    assert task.classes == ("B-Sign", "O")
    assert (len(task.train), len(task.test)) == (16, 4)
    held, kept = set(task.test_columns["document"]), set(task.columns["document"])
    assert len(held) == 2
    assert not held & kept, "documents are held out as a whole"
    assert set(split(task, "by_column", key=Key(0), column="folder").clients) == {"north", "south"}
    assert len(split(task, "by_column", key=Key(0), column="document").clients) == 8
    again = load_quietly("brat", path=tmp_path, tokenizer=encoder)
    assert list(again.test_columns["document"]) == list(task.test_columns["document"])


def test_train_and_test_folders_are_used(tmp_path: Path, encoder: str) -> None:
    write_corpus(tmp_path / "train", 3)
    write_corpus(tmp_path / "test", 2)
    write_corpus(tmp_path / "more", 4)
    assert len(load_quietly("brat", path=tmp_path, tokenizer=encoder).test) == 4
    assert len(load_quietly("brat", path=tmp_path, tokenizer=encoder, test="more").test) == 8
    with pytest.raises(DataError, match="has no folders 'train' and 'none'"):
        load("brat", Key(0), path=tmp_path, tokenizer=encoder, test="none")
    with pytest.raises(DataError, match=r"test = 0\.1 would hold out 0 of the 3 documents"):
        load("brat", Key(0), path=tmp_path / "train", tokenizer=encoder, test=0.1)


def test_types_that_never_occur_are_refused(tmp_path: Path, encoder: str) -> None:
    write_corpus(tmp_path)
    with (
        pytest.raises(DataError, match=r"has the type 'Sing' of data\.types"),
        pytest.warns(UserWarning, match="20 entities"),
    ):
        load("brat", Key(0), path=tmp_path, tokenizer=encoder, types=("Sing",))


def test_i2b2_concepts_become_a_task(tmp_path: Path, encoder: str) -> None:
    for number in range(5):
        files_of(tmp_path, ".con", "No severe fever .\nTakes aspirin .\n", 'c="severe fever" 1:1 1:2||t="problem"\n'
                 'c="fever" 1:2 1:2||t="problem"\nc="aspirin" 2:1 2:1||t="treatment"\n', f"n{number}")  # fmt: skip
    with pytest.warns(UserWarning, match="5 entities overlap a longer one and are left out"):
        task = load("i2b2", Key(0), path=tmp_path, tokenizer=encoder)
    assert task.classes == ("B-problem", "B-treatment", "I-problem", "O")
    assert (len(task.train), len(task.test)) == (8, 2)


@pytest.mark.parametrize("name", ["brat", "i2b2"])
def test_inspection_finds_documents_and_writes_a_config(name: str, tmp_path: Path) -> None:
    if name == "brat":
        write_corpus(tmp_path)
    else:
        for place in ("beth", "partners"):
            files_of(tmp_path / place, ".con", "fever .\n" * 4, 'c="fever" 1:0 1:0||t="problem"\n')
    found = inspect_data(tmp_path)
    assert (found.task, found.site, len(found.sites)) == (name, "folder", 2)
    assert found.classes == ({"O": 30, "B-Sign": 20} if name == "brat" else {"O": 14, "B-problem": 2})
    data = config_for(found)["data"]
    assert data == {"name": name, "path": str(tmp_path), "max_length": 256}
