"""Untrusted run folders and names: no links are followed, no code runs, and no name becomes markup."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import re
import shutil
import struct
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from report_fixtures import write_run
from shell import Shell

from partita.core.client import ClientState
from partita.core.server_rule import Server
from partita.core.versions import ParameterVersions
from partita.experiment.compare import expand
from partita.experiment.config import ConfigError, load
from partita.report import ReportError, RunRecord, compare, load_run, page, to_json, to_markdown, to_text
from partita.storage import atomic_files, checkpoint
from partita.storage.atomic_files import DamageError, LinkError
from partita.storage.client_store import DiskStore
from partita.storage.safe_text import _escaped, client_of_folder, label_folder, path_component, printable

SOURCE = Path(__file__).resolve().parent.parent.parent / "src" / "partita"
NAMES = [
    "../x", "a/b", "nul\0l", ".", "..", "", "<script>alert(1)</script>", '"onmouseover="alert(1)', "</script>",
    "'onload='x", "&lt;b&gt;", "x" * 10_000, "ü" * 200, "\u202eltr\u2066", "\x1b[31mred\x1b[0m\x07\r\n", "__proto__",
    "-->", "]]>", "<!--", "</style><img src=x>", "$\\frac{", "[bold]x[/bold]", "@", "%", "日本", "\x9b31m", "\u2028",
]  # fmt: skip


# ---- names as folders


def test_any_client_name_gets_a_separate_state_folder(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "clients")
    names = [*NAMES, "x" * 10_001, "ü" * 201, *(path_component(name) for name in ("", "x" * 10_000))]
    for value, name in enumerate(names):
        disk.save(name, 0, ClientState({"w": torch.tensor(float(value))}))
    assert [float(disk.load(name, 1).personal["w"]) for name in names] == list(map(float, range(len(names))))
    assert disk.known() == sorted(names)
    places = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(places) == len(names)
    assert all(path.parent.parent == tmp_path / "clients" for path in places)
    disk.rewind(0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def shortened_name(start: str, name: str) -> str:
    """A 180-byte folder name: the beginning of a name and the digest of the whole name."""
    return f"{start}@{hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("client-7", "client-7"),
        ("a", "a"),
        ("a.b/c d", "a%2Eb%2Fc%20d"),
        ("..", "%2E%2E"),
        ("ü\ud800", "%C3%BC%ED%A0%80"),
        ("", shortened_name("", "")),
        ("x" * 180, "x" * 180),
        ("x" * 181, shortened_name("x" * 147, "x" * 181)),
        ("\ud800" * 21, shortened_name(("%ED%A0%80" * 21)[:147], "\ud800" * 21)),
    ],
)
def test_path_component_quotes_names_and_shortens_long_ones(name: str, folder: str) -> None:
    """Existing run folders must stay readable, so the exact text counts."""
    assert path_component(name) == folder
    assert len(folder) <= 180
    assert client_of_folder(folder) == (None if "@" in folder else name)


@pytest.mark.parametrize(
    ("label", "folder"),
    [
        ("lr=0.1+b-2", "lr=0.1+b-2"),
        ("/a  b/", "a_b"),
        ("...", "run"),
        ("_._", "run"),
        ("", "run"),
        ("ü", "ü"),
        ("x" * 180, "x" * 180),
        ("x" * 181, shortened_name("x" * 147, "x" * 181)),
        ("ü" * 90, "ü" * 90),
        ("ü" * 91, shortened_name("ü" * 73, "ü" * 91)),
    ],
)
def test_label_folder_is_shortened_by_bytes_without_splitting_a_character(label: str, folder: str) -> None:
    assert label_folder(label) == folder
    assert len(folder.encode()) <= 180


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü\u3000日本", "plain ü\u3000日本"),
        ("\x07\x7f\x9f\xad", "\\x07\\x7f\\x9f\\xad"),
        ("\u0378\u202e\uffff", "\\u0378\\u202e\\uffff"),
        ("\U000e0001\U0010ffff", "\\U000e0001\\U0010ffff"),
        (7, "7"),
    ],
)
def test_unprintable_characters_are_shown_as_escapes(text: object, shown: str) -> None:
    assert printable(text) == shown


def test_escapes_have_two_four_or_eight_digits() -> None:
    escapes = {code: _escaped(chr(code)) for code in (0, 0xFF, 0x100, 0xFFFF, 0x10000)}
    wanted = {0: "x00", 0xFF: "xff", 0x100: "u0100", 0xFFFF: "uffff", 0x10000: "U00010000"}
    assert escapes == {code: f"\\{text}" for code, text in wanted.items()}


@pytest.mark.slow
@given(st.text(), st.text())
@settings(max_examples=40)
def test_path_component_is_plain_unique_and_reversible(one: str, other: str) -> None:
    folder = path_component(one)
    assert re.fullmatch(r"[\w%@~-]{1,220}", folder, re.ASCII)
    assert client_of_folder(folder) in (one, None)
    assert (path_component(other) == folder) == (one == other)
    assert re.fullmatch(r"[\w.=+@-]+", label_folder(one))
    assert len(label_folder(one).encode()) < 220
    assert label_folder(one) not in (".", "..")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("label", ["../../x", "/etc/x", "..", "a/b", ".a", "~", "<b>", "x" * 10_000])
def test_run_folder_of_any_label_stays_below_runs(
    label: str, tmp_path: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Path] = []
    monkeypatch.setattr("partita.experiment.runner.start", lambda config, folder, *_: seen.append(folder) or iter(()))
    (tmp_path / "e.toml").write_text(f"label = {json.dumps(label)}\n[method]\nname = 'fedavg'\n")
    run_partita("run", "-c", tmp_path / "e.toml")
    [folder] = seen
    assert folder.parent == Path("runs")
    folder.mkdir(parents=True)


def test_two_methods_with_equal_labels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("[method]\nname = 'fedavg'\n")
    with pytest.raises(ConfigError, match="would share the folder"):
        expand(tmp_path / "e.toml", [], "fedprox(mu=0.1), fedprox( mu=0.1)", 1, tmp_path / "out")


# ---- names in reports and on terminals


class Skeleton(HTMLParser):
    """Collects elements with their attribute names, and comments."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.comments: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(sorted(name for name, _ in attributes))))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


ALLOWED = """
html head meta title style body main header h1 h2 h3 p dl div dt dd section table thead tbody tr th td small svg line ul
li b figure figcaption details summary span pre rect a wbr nav caption script image g text path ol code
"""


def write_run_with_name(root: Path, name: str, place: int) -> Path:
    """A run in which everything that can be named has this name: label, clients, layers, attacks."""

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        chosen = {name: ["layer.0"], "c1": ["layer.0", "layer.1"]}
        personal = {"accuracy": {name: 0.5, "c1": 0.4}}
        more = {"lost": {name: name}, "cohort": [name], "chosen": chosen, "alarms": {name: name}, "personal": personal}
        return {**row, **more, "drift": {}, "privacy": {"epsilon": 1.0, "delta": 1e-5}}

    folder = write_run(root, f"label{place}", place, rounds=2, edit=edit)
    config = (folder / "config.toml").read_text().replace(f'"label{place}"', json.dumps(name + str(place)))
    (folder / "config.toml").write_text(config.replace("alpha = 0.3", f"{json.dumps(name + 'k')} = {json.dumps(name)}"))
    plan = json.loads((folder / "plan.json").read_text())
    for stage in plan["stages"]:
        stage |= {"client": name, "rows": [{**stage["rows"][0], "layer": name, "role": name}, *stage["rows"][1:3]]}
    (folder / "plan.json").write_text(json.dumps(plan))
    held = {
        "population": 2,
        "classes": [name, "b"],
        "clients": [{"name": name, "train": 3, "validation": 0, "test": 1}],
    }
    held["clients"][0]["labels"] = [1, 2]  # type: ignore[index]
    (folder / "split.json").write_text(json.dumps(held))
    (folder / "environment.json").write_text(json.dumps({name: name, "python": "3"}))
    privacy = {"unit": name, "sampling": name, "accountant": name, "noise": 1.0, "clip": 1.0}
    (folder / "privacy.json").write_text(json.dumps(privacy))
    attack = {"auc": 0.5, "true_at_1%": 0.1, "members": 3, "outsiders": 3, "false": [0.1, 1], "true": [0.1, 1]}
    (folder / "audit.json").write_text(json.dumps({"attacks": {name: attack}}))
    return folder


def report_skeleton(root: Path, name: str) -> tuple[Skeleton, str, list[RunRecord]]:
    records = [load_run(write_run_with_name(root, name, place)) for place in (1, 2)]
    text = page(records, root / "page.html").read_text(encoding="utf-8")
    found = Skeleton()
    found.feed(text)
    return found, text, records


@pytest.fixture(scope="module")
def plain_skeleton(tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    return report_skeleton(tmp_path_factory.mktemp("plain"), "plain")[0]


MIXED = "\"><script>alert(1)</script>'onload='x' \x1b[31m\u202e</style></svg><!-- $\\frac{ [bold] \r\n|`"


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.filterwarnings("ignore:.*layout not applied")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(MIXED, id="mixed"),
        *(
            pytest.param(name, marks=pytest.mark.slow, id=f"name{place}")
            for place, name in enumerate(NAMES)
            if name and "\0" not in name  # TOML has no NUL, and a label is not empty
        ),
    ],
)
def test_names_add_no_html_elements_or_attributes(name: str, plain_skeleton: Skeleton, tmp_path: Path) -> None:
    strange, html, records = report_skeleton(tmp_path, name)
    assert {tag for tag, _ in strange.elements} <= {*ALLOWED.split()}
    assert not [names for _, names in strange.elements for each in names if each.startswith("on")]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
    for tag in ("script", "img", "style", "svg", "table", "tr", "td", "th", "li", "a", "pre", "summary"):
        found = [[each for each in page.elements if each[0] == tag] for page in (plain_skeleton, strange)]
        assert found[0] == found[1], tag
    assert len(strange.comments) == len(plain_skeleton.comments)
    shown = compare(records)
    for text in (to_text(shown), to_markdown(shown)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028]", text)
    assert json.loads(to_json(shown))["lines"]


@given(st.text(alphabet=st.characters()))
@settings(max_examples=40)
def test_printable_text_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert all(each.isprintable() or each.isspace() for each in shown)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", shown)
    assert shown.encode() or not text


@pytest.mark.slow
def test_ls_and_errors_print_control_characters_as_text(tmp_path: Path, run_partita: Shell) -> None:
    folder = write_run(tmp_path, "x", 0, rounds=2)
    label = "\\u001b[b]"
    (folder / "config.toml").write_text(
        (folder / "config.toml").read_text().replace('label = "x"', f'label = "{label}"')
    )
    code, out, _ = run_partita("ls", tmp_path)
    assert code == 0
    assert "\x1b" not in out
    assert r"\x1b[b]" in out
    _, _, err = run_partita("report", tmp_path, "--against", "\x1b[31mnobody")
    assert "\x1b" not in err
    assert r"\x1b[31mnobody" in err


# ---- untrusted run folders


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "config.toml", "plan.json", "split.json", "environment.json", "audit.json"]
)
def test_report_refuses_symlinked_run_files(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 0, rounds=2)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/etc/passwd")
    with pytest.raises(LinkError, match=f"{name} is a symbolic link"):
        load_run(folder)


def test_report_replaces_a_symlink_instead_of_following_it(tmp_path: Path) -> None:
    folder, target = write_run(tmp_path, "a", 0, rounds=2), tmp_path / "target"
    target.write_text("mine")
    (folder / "report.html").symlink_to(target)
    page([load_run(folder)], folder / "report.html")
    assert target.read_text() == "mine"
    assert not (folder / "report.html").is_symlink()


opened_files: list[str] | None = None


def _record_opened_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opened_files is not None and isinstance(arguments[0], str | os.PathLike):
        opened_files.append(os.fspath(arguments[0]))


sys.addaudithook(_record_opened_files)


def test_report_opens_no_file_named_in_the_config(tmp_path: Path) -> None:
    global opened_files
    folder = write_run(tmp_path / "run", "a", 0, rounds=2)
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    tables = f'[data]\nname = "images"\npath = "{secret}"\n[engine]\nsecret_file = "{secret}"\n'
    plain = re.sub(r"\[(data|engine)\]\n.*\n", "", (folder / "config.toml").read_text())
    (folder / "config.toml").write_text(f'{plain}trace = "{secret}"\n{tables}')
    opened_files = []
    try:
        record = load_run(folder)
        opened = opened_files
        to_text(compare([record]))
    finally:
        opened_files = None
    assert str(secret) not in opened
    assert {Path(path).parent for path in opened if str(tmp_path) in path} == {folder}


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "deep rows": ("rows.jsonl", lambda path: path.write_text("[" * 100_000 + "\n")),
    "deep plan": ("plan.json", lambda path: path.write_text('{"stages":' * 100_000)),
    "deep config": ("config.toml", lambda path: path.write_text(f"label = 'x'\nseed = 0\nx = {'[' * 50_000}")),
    "many tables": ("config.toml", lambda path: path.write_text(f"label='x'\nseed=0\n[{'.'.join('a' * 3000)}]\nb = 1")),
    "a text as a table": ("config.toml", lambda path: path.write_text("label='x'\nseed=0\ndata='x'")),
    "a text as a seed": ("config.toml", lambda path: path.write_text("label='x'\nseed='zero'")),
    "bytes": ("config.toml", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "huge": ("rows.jsonl", lambda path: path.write_text('{"round": 1e999}\n')),
    "many digits": ("rows.jsonl", lambda path: path.write_text('{"round": ' + "9" * 10_000 + "}\n")),
    "a number for a table": ("rows.jsonl", lambda path: path.write_text('{"round": 0, "test": 7}\n')),
    "no layers": ("rows.jsonl", lambda path: path.write_text('{"round": 0, "chosen": {"a": ["layer.x"]}}\n')),
    "a strange metric": ("plan.json", lambda path: path.write_text('{"metric": {"name": "$\\\\frac{"}}')),
    "a metric without a direction": ("plan.json", lambda path: path.write_text('{"metrics": [{"name": "f1"}]}')),
    "deep split": ("split.json", lambda path: path.write_text('{"clients":' * 100_000)),
    "a split that is none": ("split.json", lambda path: path.write_text('{"population": 3, "clients": [{"name": 1}]}')),
    "labels of no class": (
        "split.json",
        lambda path: path.write_text(
            '{"population": 1, "classes": ["a"], "clients": '
            '[{"name": "c0", "train": 1, "validation": 0, "test": 0, "labels": [1, 2]}]}'
        ),
    ),
    "a negative size": (
        "split.json",
        lambda path: path.write_text(
            '{"population": 1, "clients": [{"name": "c0", "train": -1, "validation": 0, "test": 0}]}'
        ),
    ),
    "a plan that is none": ("plan.json", lambda path: path.write_text('{"stages": [{"first": 0}]}')),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_unreportable_file_is_named(what: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 0, rounds=2)
    name, spoil = HOSTILE[what]
    spoil(folder / name)
    with pytest.raises((ReportError, DamageError), match=name):
        load_run(folder)


@pytest.mark.slow
def test_endless_lines_and_huge_files_are_refused_unread(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 0, rounds=2)
    with (folder / "rows.jsonl").open("wb") as file:
        file.truncate(2**30)  # sparse: a gigabyte of zeros
    with pytest.raises(DamageError, match=r"rows\.jsonl, line 1 has more than"):
        load_run(folder)
    with (folder / "plan.json").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(DamageError, match=r"plan\.json has 17,179,869,184 bytes"):
        atomic_files.read_json(folder / "plan.json")


VALUES: list[Any] = [None, True, -1, 2**70, 1e999, -1e300, float("nan"), "", "x", [], [[]], {}, {"a": {}}, [None], 0.5]


def mutate(value: Any, draws: random.Random) -> Any:
    """The value with one place replaced or removed."""
    if isinstance(value, dict) and value and draws.random() < 0.85:
        key = draws.choice(sorted(value))
        if draws.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: mutate(value[key], draws)}
    if isinstance(value, list) and value and draws.random() < 0.85:
        place = draws.randrange(len(value))
        return [*value[:place], mutate(value[place], draws), *value[place + 1 :]]
    return draws.choice(VALUES)


def spoil_one_file(folder: Path, draws: random.Random) -> None:
    name = draws.choice(["rows.jsonl", "plan.json", "audit.json", "privacy.json", "environment.json"])
    if name == "rows.jsonl":
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        place = draws.randrange(len(lines))
        lines[place] = mutate(lines[place], draws)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        (folder / name).write_text(json.dumps(mutate(json.loads((folder / name).read_text()), draws)))


MUTATED = 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_report_of_mutated_files_is_made_or_names_the_file(tmp_path: Path) -> None:
    whole, refused = write_run_with_name(tmp_path / "whole", "a", 1), 0
    for number in range(MUTATED):
        draws = random.Random(number)
        folder = Path(shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True))
        for _ in range(draws.choice([1, 1, 3])):
            spoil_one_file(folder, draws)
        try:
            record = load_run(folder)
        except (ReportError, DamageError) as error:
            refused += str(folder) in str(error) or pytest.fail(f"{number}: {error} does not name the file")
            continue
        to_text(compare([record]))
        to_json(compare([record]))
        if number % 2:
            page([record], tmp_path / "page.html")
    assert 0 < refused < MUTATED


# ---- tensors


def safetensors_header(about: object, length: int | None = None) -> bytes:
    text = json.dumps(about).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


TENSORS = {
    "gigabytes": safetensors_header({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
    "a long header": safetensors_header({}, 2**62),
    "negative": safetensors_header({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}),
    "overflow": safetensors_header({"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}),
    "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "empty": b"",
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
    "no metadata": safetensors_header({}),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_malicious_tensor_files_are_refused(kind: str, tmp_path: Path) -> None:
    data = TENSORS[kind]
    path = atomic_files.write_checksummed(tmp_path / "checkpoints", 1, data)
    with pytest.raises(DamageError, match=path.name):
        checkpoint.read(path)
    state = atomic_files.write_checksummed(tmp_path / "clients" / "c0", 1, data)
    if kind != "no metadata":
        with pytest.raises(DamageError, match=state.name):
            DiskStore(tmp_path / "clients").load("c0", 2)


def test_checkpoint_of_another_model_or_round_is_refused(tmp_path: Path) -> None:
    one, two = (Server({"w": torch.zeros(size)}, {}, ParameterVersions({"w": 0})) for size in (2, 3))
    path = checkpoint.save(tmp_path, 1, one)
    assert checkpoint.read(path, like=one).done == 1
    with pytest.raises(DamageError, match="of another model or method"):
        checkpoint.read(path, like=two)
    moved = path.rename(path.with_name(path.name.replace("000001", "000007")))
    with pytest.raises(DamageError, match="under another name"):
        checkpoint.read(moved)


# ---- nothing is executed


@cache
def source_calls() -> list[tuple[str, ast.Call]]:
    return [
        (path.relative_to(SOURCE).as_posix(), node)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


@pytest.mark.slow
def test_source_unpickles_and_executes_no_file() -> None:
    """Only the pipes between a run's own processes use pickle, and only own code that the user trusts is executed."""
    dangerous = {"eval", "exec", "compile", "torch.load", "np.load", "numpy.load", "os.system", "joblib.load"}
    dangerous |= {"pickle.load", "pickle.loads", "yaml.load", "marshal.loads", "runpy.run_path", "shelve.open"}
    found = {
        (path, ast.unparse(call.func))
        for path, call in source_calls()
        if ast.unparse(call.func) in dangerous and "allow_pickle=False" not in map(ast.unparse, call.keywords)
    }
    own_code = {("core/own_code.py", "exec"), ("core/own_code.py", "compile")}
    assert found == {("engines/ipc.py", "pickle.loads"), *own_code}


@pytest.mark.slow
def test_source_never_trusts_remote_code() -> None:
    loads = [
        (path, call)
        for path, call in source_calls()
        if ast.unparse(call.func).endswith(".from_pretrained")
        and "Peft" not in ast.unparse(call.func)  # it has no remote code, and its weights must be safetensors
    ]
    loads += [
        (path, call)
        for path, call in source_calls()
        if path in ("models/loading.py", "models/exported.py") and ast.unparse(call.func) == "load"
    ]
    assert len(loads) >= 5
    for path, call in loads:
        said = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert said.get("trust_remote_code") == "False", (path, call.lineno)
    assert any("use_safetensors=True" in ast.unparse(call) for _, call in loads)


def test_deeply_nested_or_binary_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for content in (b"x = " + b"[" * 100_000, b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.toml"):
            load(path)
