"""The file that calls `fit` is a config: its data and its model have names that other processes can find."""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from python_file_fixtures import FILE, write_file
from shell import Shell

from partita.core.own_code import CodeError
from partita.experiment import builder, handing_over
from partita.experiment.builder import build
from partita.experiment.config import Config, differences, load, load_recorded, parse, shared_digest
from partita.experiment.flower_app import modules_of
from partita.record import file_names

HEAD = "import torch\nimport partita as pt\n"
CALL = "    run = pt.fit("  # in FILE


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return write_file(tmp_path)


def digest(folder: Path) -> str:
    return str(json.loads((folder / file_names.RESULT).read_text())["digest"])


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as another process would, which has loaded no file."""
    monkeypatch.setattr(handing_over, "_NAMED", {})
    for name in [name for name in sys.modules if name.startswith("partita_code_")]:
        monkeypatch.delitem(sys.modules, name)


def load_again(config: Config) -> Config:
    return parse(config.written())


def table(name: str, **more: object) -> Config:
    """A config of which one table names an object."""
    what = "model" if name.endswith(":model") else "data"
    return parse({"method": {"name": "fedavg"}, what: {"name": name}, **more})


def test_file_alone_and_as_a_config_give_the_same_digest(file: Path, run_partita: Shell) -> None:
    code, _, errors = run_partita("run", "--config", file.name, "--out", "there", "--quiet")
    assert code == 0, errors
    runpy.run_path(str(file), run_name="__main__")
    here, there = file.parent / "runs" / "fedavg-seed-0", file.parent / "there"
    assert digest(there) == digest(here)
    recorded = tomllib.loads((there / file_names.CONFIG).read_text())
    assert recorded["data"] == {"name": "code/federation.py:data"}
    assert recorded["model"] == {"name": "code/federation.py:model"}
    assert recorded["split"]["column"] == "hospital"
    assert (recorded["training"]["lr"], recorded["rounds"]) == (0.05, 2)
    assert (there / "code" / "federation.py").read_text() == FILE


def test_config_that_the_command_prints_says_the_same(file: Path, run_partita: Shell) -> None:
    code, printed, errors = run_partita("config", "--config", file.name, "--trust-code", "--set", "rounds=7")
    assert code == 0, errors
    Path("experiment.toml").write_text(printed)
    assert '[data]\nname = "federation.py:data"\n' in printed
    assert differences(load(file, ["rounds=7"]), load(Path("experiment.toml"))) == []


@pytest.mark.slow
def test_recorded_run_needs_no_objects(file: Path, run_partita: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("whole", "run"):
        rounds = "3" if folder == "whole" else "2"
        run_partita("run", "--config", file, "--out", folder, "--quiet", "--set", f"rounds={rounds}")
    forget(monkeypatch)
    assert differences(load_recorded(Path("run")), load(file)) == []
    code, _, errors = run_partita("resume", "run", "--rounds", "3", "--quiet")
    assert code == 0, errors
    assert digest(Path("run")) == digest(Path("whole"))
    code, _, errors = run_partita("export", "run", "--to", "model")
    assert code == 0, errors
    assert json.loads(Path("model/config.json").read_text())["id2label"] == {"0": "1", "1": "2", "2": "3"}
    assert Path("model/tokenizer.json").is_file()


@pytest.mark.slow
def test_looking_runs_no_file_that_is_not_trusted(file: Path, run_partita: Shell) -> None:
    file.write_text("from pathlib import Path\nPath('pwned').touch()\n" + FILE)
    for command in ("config", "plan", "split"):
        code, _, errors = run_partita(command, "--config", file)
        assert code == 1
        assert "federation.py (digest" in errors
        assert "which you have not run or trusted on this machine" in errors
    assert not Path("pwned").exists()
    assert run_partita("config", "--config", file, "--trust-code")[0] == 0
    assert Path("pwned").exists(), "trusted code runs, so the test above can fail"


NET = HEAD + "net = torch.nn.Linear(4, 2)\n"
NUMBERS = (
    HEAD + "draw = torch.Generator().manual_seed(0)\n"
    "rows = [(value, int(value[0] > 0)) for value in torch.randn(40, 4, generator=draw)]\n"
)
OBJECTS: dict[str, tuple[str, str, str]] = {
    "rows": (f"{NUMBERS}data = rows\n", "data", "object"),
    "a source": (f"{NUMBERS}data = pt.from_dataset(rows)\n", "data", "object"),
    "a task": (f"{NUMBERS}data = pt.from_dataset(rows).task()\n", "data", "object"),
    "a function": (f"{NUMBERS}def data():\n    return pt.from_dataset(rows).task()\n", "data", "file.py:data"),
    "a table": ("data = {'name': 'digits'}\n", "data", "digits"),
    "a module": (f"{NET}model = net\n", "model", "module"),
    "a pair": (f"{NET}model = net, torch.nn.functional.cross_entropy\n", "model", "module"),
    "a folder": ("model = 'somewhere/else'\n", "model", "pretrained"),
    "of transformers": (FILE, "model", "pretrained"),
    "of peft": (
        f"{FILE}import peft\nmodel = peft.get_peft_model(model, peft.LoraConfig(target_modules=['query']))\n",
        "model",
        "pretrained",
    ),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_names_stand_for_what_fit_makes_of_the_object(case: str, file: Path) -> None:
    text, what, reader = OBJECTS[case]
    Path("file.py").write_text(text)
    config = table(f"file.py:{what}", rounds=3)
    found = getattr(config, what)["name"]
    assert found.removeprefix(f"{file.parent}/") == reader
    if case != "a function":
        assert config.objects == {what: {"name": f"{file.parent}/file.py:{what}"}}
    assert tomllib.loads(config.to_toml())[what]["name"] == f"code/file.py:{what}"
    assert load_again(config) == config


def test_keys_beside_the_name_are_those_of_the_object(file: Path) -> None:
    name = f"{file}:data"
    config = parse({"method": {"name": "fedavg"}, "data": {"name": name, "max_length": 5, "test": 0.5}})
    assert (config.data["name"], config.data["max_length"], config.data["text"]) == ("text", 5, "review")
    assert config.written()["data"] == {"name": name, "max_length": 5, "test": 0.5}
    assert config.split["column"] == "hospital", "the split that the data says"
    assert table(name, split={"name": "iid", "clients": 2}).split["name"] == "iid", "the config's own wins"
    with pytest.raises(ValueError, match=r"unknown key 'data\.max_lenght'; did you mean 'max_length'\?"):
        parse({"method": {"name": "fedavg"}, "data": {"name": name, "max_lenght": 5}})


def test_fit_may_get_the_data_of_a_variable_with_another_split(file: Path) -> None:
    file.write_text(FILE.replace("(model, data,", "(model, data.split('iid', clients=4),"))
    config = load(file)
    assert config.objects["data"] == {"name": f"{file}:data"}
    assert (config.split["name"], config.split["clients"]) == ("iid", 4)


def test_settings_of_the_model_stand_beside_its_name(file: Path) -> None:
    file.write_text(FILE.replace("rounds=2,", "rounds=2, adapter={'rank': 2},"))
    config = load(file)
    assert config.objects["model"] == {"name": f"{file}:model", "adapter": {"rank": 2}}
    assert config.model["adapter"]["rank"] == 2
    assert load_again(config) == config


def test_texts_are_as_long_as_the_model_of_the_file_takes(file: Path) -> None:
    text = FILE.replace("**shape,", "**shape, max_position_embeddings=9,")
    file.write_text(text.replace('"and"]', '"and", "tell"]').replace("=15", "=16"))  # a tokenizer of no other test
    raw = {"method": {"name": "fedavg"}, "data": {"name": f"{file}:data"}, "model": {"name": f"{file}:model"}}
    assert parse(raw).data["max_length"] == 9
    assert load(file).data["max_length"] == 9


def test_processes_are_prepared_for_the_libraries_of_the_objects(file: Path) -> None:
    assert {"datasets", "transformers.models.bert.modeling_bert"} <= set(modules_of(load(file)))


def test_workers_on_a_gpu_take_objects_that_have_a_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_configure_torch", lambda engine: torch.device("cuda"))
    monkeypatch.setattr(builder, "build_method", stop := Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(load(file, ["engine.workers=2"]))
    assert stop.called, "the environment was found fit"


def test_a_pair_is_a_module_and_its_loss(file: Path) -> None:
    text = f"{NUMBERS}data = pt.from_dataset(rows).split('iid', clients=2, test=0.0, validation=0.0)\n"
    text += "def loss(logits, targets):\n    return 3 * (logits[:, 0] - targets) ** 2\n"
    text += "model = torch.nn.Linear(4, 2), loss\nif __name__ == '__main__':\n    pt.fit(model, data, rounds=1)\n"
    file.write_text(text)
    built = build(load(file))
    batch = built.federation.task.train.take(torch.arange(3))
    out = built.model(built.model.initial, batch.inputs)
    torch.testing.assert_close(built.model.losses(out, batch.targets), 3 * (out.logits[:, 0] - batch.targets).square())


def test_weights_without_a_seed_are_the_same_in_every_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(FILE.replace("torch.manual_seed(0)\n", ""))
    torch.manual_seed(77)
    before = torch.get_rng_state()
    first = load(file).model["path"]
    assert torch.equal(torch.get_rng_state(), before)
    forget(monkeypatch)
    torch.rand(3)
    assert load(file).model["path"] == first


def test_object_that_differs_by_process_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(FILE.replace("torch.manual_seed(0)", "import time\ntorch.manual_seed(time.time_ns())"))
    config = load(file)
    build(config)
    forget(monkeypatch)
    with pytest.raises(CodeError, match=r"model\.name is '.*federation\.py:model', which is another object each time"):
        build(config)


@pytest.mark.slow
def test_processes_load_the_objects_again(file: Path, run_partita: Shell) -> None:
    for workers in (1, 2):
        more = ("--set", f"engine.workers={workers}", "--set", "engine.clients_per_block=1")
        code, _, errors = run_partita("run", "--config", file, "--out", f"with-{workers}", "--quiet", *more)
        assert code == 0, errors
    assert digest(Path("with-1")) == digest(Path("with-2"))
    code, _, errors = run_partita(
        "compare", "--config", file, "--methods", "fedavg,fedprox(mu=0.1)", "--out", "both", "--quiet"
    )
    assert code == 0, errors


def test_site_may_have_data_of_its_own_and_no_other_model(file: Path) -> None:
    (file.parent / "mine.py").write_text(FILE)
    whole = shared_digest(load(file))
    assert shared_digest(load(file, ["data.name=mine.py:data"])) == whole
    assert shared_digest(load(file, ["model.name=mine.py:model"])) != whole
    file.write_text(f"{FILE}\n# another version\n")
    assert shared_digest(load(file)) != whole


LOOP = "    for rounds in (1, 2):\n        print(pt.fit(model, data, rounds=rounds).scores)\n"
REFUSED: dict[str, tuple[str, str]] = {
    "no call": (
        FILE.partition("if __name__")[0],
        r"federation\.py does not call fit; add a call of partita\.fit\(model, data, \.\.\.\) under: if __name__ == "
        "'__main__':$",
    ),
    "no guard": (
        FILE.replace('if __name__ == "__main__":', "if True:"),
        r"cannot load .*federation\.py: line 23: CodeError: the file calls fit when it is loaded; put the call under: ",
    ),
    "two calls": (f"{FILE}    pt.fit(model, data, 'fedprox')\n", "federation.py calls fit more than once; leave one"),
    "a loop": (FILE.partition(CALL)[0] + LOOP, "federation.py calls fit more than once; leave one"),
    "an error": (f"import no_such_package\n{FILE}", r"cannot load .*: line 1: ModuleNotFoundError: No module named"),
    "an error in main": (FILE.replace("lr=0.05", "lr=1 / 0"), r"cannot run .*: line 23: ZeroDivisionError: division"),
    "a misspelled setting": (FILE.replace("lr=", "lrr="), r"cannot run .*: line 23: OptionError: fit has no setting"),
    "another model": (
        FILE.replace("pt.fit(model,", "pt.fit(type(model)(model.config),"),
        r"fit gets the model under no name of .*federation\.py, so no other process can find it; give it a name",
    ),
    "other data": (FILE.replace("(model, data,", "(model, pt.from_dataset(rows[:9], text='review', label='stars')"
        ".by('hospital'),"), "fit gets the data under no name of"),
    "a loss": (
        f"{NUMBERS}model = torch.nn.Linear(4, 2)\nloss = torch.nn.CrossEntropyLoss(reduction='none')\n"
        "data = pt.from_dataset(rows).split('iid', clients=2)\n"
        "if __name__ == '__main__':\n    pt.fit(model, data, loss=loss)\n",
        "fit gets a pair of model and loss under no name of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_no_config_are_refused_in_one_line(case: str, file: Path) -> None:
    text, message = REFUSED[case]
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(file)
    assert "\n" not in str(error.value)


WRONG: dict[str, tuple[str, str]] = {
    "no such object": ("federation.py:modell", r"has no object or function 'modell'; did you mean 'model'\?$"),
    "no such name at all": ("federation.py:zzz", r"; it can be: .*, model, .*tokenizer$"),
    "a number": ("federation.py:number", r"data\.name is '.*:number': data is of type int; give a datasets\.Dataset"),
    "a model as data": ("federation.py:model_too", "data is of type BertForSequenceClassification; give a"),
    "a text as data": ("federation.py:text", "data is 'reviews.csv'; say how it is read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_objects_of_a_wrong_type_are_refused_in_one_line(case: str, file: Path) -> None:
    file.write_text(f"{FILE}\nnumber, text, model_too = 3, 'reviews.csv', model\n")
    name, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as error:
        table(name)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"model\.name is '.*:number': the model is of type int; give a module"):
        parse({"method": {"name": "fedavg"}, "model": {"name": "federation.py:number"}})


def test_no_config_sets_what_its_objects_are(file: Path) -> None:
    raw = {"method": {"name": "fedavg"}, "data": {"name": "digits"}}
    assert parse(raw).objects == {}
    with pytest.raises(ValueError, match="unknown key 'objects'"):
        parse({**raw, "objects": {"data": {"name": "federation.py:data"}}})
