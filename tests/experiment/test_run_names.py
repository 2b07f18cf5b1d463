"""Names of runs: labels show the options that are not defaults, and `--methods` reads them back."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.core.options import OptionError
from partita.experiment.compare import expand
from partita.experiment.config import ConfigError, differences, parse
from partita.experiment.run_names import default_folder, method_label, option_text, overrides_of, split_methods

FILE = "experiment.toml"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / FILE
    path.write_text("[method]\nname = 'fedavg'\n")
    return path


LABELS = {
    "fedavg": "fedavg",
    "fedavg()": "fedavg",
    "fedprox(mu=0.01)": "fedprox",
    "fedprox( mu = 1e-1 )": "fedprox(mu=0.1)",
    "fedprox(mu=1.0)": "fedprox(mu=1)",
    "fedfrozen(warmup=1)": "fedfrozen(warmup=1)",
    "fedfrozen(warmup=1.0)": "fedfrozen(warmup=1.0)",  # a fraction of the rounds, not a round
    "fedfrozen(freeze=random, warmup=auto)": "fedfrozen(warmup=auto, freeze=random)",
    "fedfrozen+scaffold(warmup=5)": "fedfrozen+scaffold(warmup=5)",
    "layer-skipping(layers=[0,2], embeddings=true)": "layer-skipping(layers=[0, 2], embeddings=true)",
    "lora(roles=['query'])": 'lora(roles=["query"])',
    "safl(capacity={c1=0.5, 'c 2'=3}, k=2)": 'safl(k=2, capacity={"c 2"=3, c1=0.5})',
    "pfeddc(init_text='a photo, of (a) \"b\" [')": 'pfeddc(init_text="a photo, of (a) \\"b\\" [")',
    "pfeddc(init_text=\"true\")": 'pfeddc(init_text="true")',
    "fedavg(training.lr=0.5, federation.cohort=2)": "fedavg(training.lr=0.5, federation.cohort=2)",
    "fedavg(training.lr=0.001)": "fedavg",
}  # fmt: skip


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("spec", LABELS)
def test_label_shows_what_is_not_a_default_and_can_be_read_back(spec: str, config: Path, tmp_path: Path) -> None:
    changes = ["training.optimizer=sgd"] if "scaffold" in spec else []
    [(folder, settings)] = expand(config, changes, spec, 1, tmp_path)
    assert settings.label == LABELS[spec]
    assert folder.parent.parent == tmp_path
    assert expand(config, changes, settings.label, 1, tmp_path) == [(folder, settings)]
    if "." not in spec.partition("=")[0]:
        raw = {"method": dict(settings.method), "training": {"optimizer": settings.training.optimizer}}
        assert parse(raw).label == settings.label, "`run` gives the same label"


def test_long_label_is_whole_and_its_folder_is_shortened(config: Path, tmp_path: Path) -> None:
    specs = [f"lora(roles={[f'{kind}{number}' for number in range(60)]})" for kind in "ab"]
    runs = expand(config, [], ",".join(specs), 1, tmp_path)
    assert all('59"])' in settings.label and len(folder.parent.name) <= 180 for folder, settings in runs)
    assert runs[0][0] != runs[1][0]


def test_label_in_a_config_stays() -> None:
    settings = parse({"method": {"name": "fedprox", "mu": 0.5}, "label": "mine"})
    assert settings.label == "mine"
    assert parse({"method": {"name": "fedprox", "mu": 0.5}}).label == "fedprox(mu=0.5)"
    assert default_folder("fedprox(mu=0.5)", 3) == Path("runs/fedprox_mu=0.5-seed-3")


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(
    "methods",
    [
        "fedavg,fedavg",
        "fedavg,fedavg,\n",
        "fedavg,fedavg()",
        "fedprox(mu=0.1),fedprox(mu=1e-1)",
        "fedprox(mu=1),fedprox(mu=1.0)",
        "fedprox,fedprox(mu=0.01)",
        "fedavg,fedavg(training.lr=1e-3)",
        "safl(k=1,every=2),safl(every=2,k=1)",
    ],
)
def test_comparison_refuses_one_run_twice(methods: str, config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\Atwo of --methods '.*' would share the folder .*\Z"):  # on one line
        expand(config, [], methods, 2, tmp_path)


@pytest.mark.parametrize("methods", ["", ",", "(", "fedavg(mu", "fedavg)x", "fedavg(mu=1)x", "a b"])
def test_methods_that_cannot_be_read_are_refused(methods: str) -> None:
    with pytest.raises(OptionError, match="cannot read --methods"):
        split_methods(methods)


def test_option_of_a_method_needs_a_value() -> None:
    with pytest.raises(OptionError, match=r"cannot read 'mu' in --methods 'fedprox\(mu\)'; write option=value"):
        overrides_of("fedprox(mu)")


def test_options_that_make_a_config_valid_are_all_shown(config: Path, tmp_path: Path) -> None:
    changes = ["training.momentum=0.9"]  # without sgd this is an error
    [(_, settings)] = expand(config, changes, "fedavg(training.optimizer=sgd, training.lr=0.001)", 1, tmp_path)
    assert settings.label == "fedavg(training.optimizer=sgd, training.lr=0.001)"


def test_texts_of_values() -> None:
    assert [option_text(value) for value in (True, 1, 1.0, "a-b", "1", "", "é")] == [
        "true", "1", "1.0", "a-b", '"1"', '""', '"é"',
    ]  # fmt: skip
    assert option_text(2, float) == option_text(2.0, float) == "2"
    assert method_label({"name": "fedprox", "mu": 2}) == "fedprox(mu=2)"


def test_differences_name_the_keys_and_both_values() -> None:
    def config(**more: object) -> dict[str, object]:
        return {"method": {"name": "fedavg"}, **more}

    one = parse(config(training={"lr": 1}, engine={"workers": 2}))
    assert differences(one, parse(config(training={"lr": 1.0}))) == []
    other = parse(config(training={"lr": 2, "clip": 3.0}, federation={"cohort": 1}))
    assert differences(one, other) == [
        "training.lr is 1 there and 2 here",
        "federation.cohort is 1.0 there and 1 here",
        "training.clip is not set there and 3 here",
    ]
