"""Names from elsewhere: what a terminal shows of them, and which folders they get."""

from __future__ import annotations

import hashlib

import pytest

from partita.storage.safe_text import MAX_LABEL, _escaped, client_of_folder, label_folder, path_component, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("é ü\u00a0x", "é ü\u00a0x"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x00\n\x7f", "\\x00\\x0a\\x7f"),
        ("\u00ad\u202e", "\\xad\\u202e"),
        ("\u0100\u200b", "Ā\\u200b"),
        ("\uffff\U000e0001", "\\uffff\\U000e0001"),
        (12, "12"),
    ],
)
def test_what_cannot_be_seen_is_spelled_out(text: object, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("code", "shown"),
    [(0xFF, "\\xff"), (0x100, "\\u0100"), (0xFFFF, "\\uffff"), (0x10000, "\\U00010000"), (0x10001, "\\U00010001")],
)
def test_a_character_is_spelled_out_as_python_does(code: int, shown: str) -> None:
    assert _escaped(chr(code)) == shown


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("a", "a"),
        ("..", "%2E%2E"),
        ("a/b.c", "a%2Fb%2Ec"),
        ("é", "%C3%A9"),
        ("\ud800", "%ED%A0%80"),
        ("a@b", "a%40b"),
        ("x" * MAX_LABEL, "x" * MAX_LABEL),
    ],
)
def test_a_client_has_a_folder_and_a_folder_its_client(name: str, folder: str) -> None:
    assert path_component(name) == folder
    assert client_of_folder(folder) == name


@pytest.mark.parametrize("name", ["", "x" * (MAX_LABEL + 1), "\ud800" * 99])
def test_a_name_that_does_not_fit_is_shortened_to_its_digest(name: str) -> None:
    folder = path_component(name)
    assert folder.endswith("@" + digest(name))
    assert len(folder) == (MAX_LABEL if name else 33)
    assert client_of_folder(folder) is None


@pytest.mark.parametrize(
    ("label", "folder"),
    [
        ("fedavg lr=0.1", "fedavg_lr=0.1"),
        ("  a // b  ", "a_b"),
        ("", "run"),
        ("..", "run"),
        ("///", "run"),
        (".a", ".a"),
        ("é" * (MAX_LABEL // 2), "é" * (MAX_LABEL // 2)),
    ],
)
def test_a_label_is_readable_in_a_path(label: str, folder: str) -> None:
    assert label_folder(label) == folder


def test_a_long_label_keeps_its_start_and_whole_letters() -> None:
    folder = label_folder("é" * 91)
    assert folder == "é" * 73 + "@" + digest("é" * 91)
    assert len(folder.encode()) <= MAX_LABEL
