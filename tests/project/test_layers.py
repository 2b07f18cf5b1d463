"""Imports only go one way. Every import counts, also those inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent.parent / "src" / "partita"

# Each line may import itself and the lines above it.
CORE = [
    ["core.torch_private", "core.hub", "core.layer_compiler", "core.sharing"],
    ["core.packed", "core.cuda_kernels", "core.outside_vmap"],
    ["core.chacha"],
    ["core.tensors", "core.rng", "core.options", "core.memory", "core.discrete_gaussian"],
    ["core.keyed_bits"],
    ["core.own_code", "core.given"],
    ["core.registry", "core.rules"],
    ["core.data", "core.noise", "core.dp_settings", "core.secure_settings", "core.update", "core.sampling"],
    ["core.client_noise", "core.group_units"],
    ["core.model", "core.versions", "core.serialization"],
    ["core.plan", "core.method_error"],
    ["core.personal_copy"],
    ["core.client_rule", "core.update_transform", "core.server_rule"],
    ["core.method", "core.optim"],
    ["core.compose"],
    ["core.settings", "core.drift"],
    ["core.batch_schedule"],
    ["core.client"],
    ["core.update_checks", "core.traffic"],
    ["core.rounds"],
    ["core.__init__"],
]

# Part -> what it may import of partita beside all of core and itself.
ON_CORE = ["methods", "compression", "evaluation", "storage", "training"]
ON_TASKS = ["models", "data"]
ABOVE_CORE = {
    **{part: [] for part in ON_CORE},
    "tasks": ["evaluation"],
    **{part: ["tasks"] for part in ON_TASKS},
    "privacy": ["training", "storage", "secure_aggregation"],
    "secure_aggregation": [],
    "track": [],
    "engines": ["training", "storage", "evaluation", "secure_aggregation"],
    "testing": ["engines", "storage", "tasks", *ON_TASKS],
    "experiment": [*ON_CORE, "tasks", *ON_TASKS, "privacy", "secure_aggregation", "engines", "track"],
    "site": ["experiment", "engines", "privacy", "storage", "data"],
}
EVERYWHERE = "record"  # what a run records; all may import it
TOP_LEVEL = [
    "__init__",
    "__main__",
    "cli",
    "runs",
    "fitting",
    "trainers",
]  # may import anything, and no other may import them
# They read run folders, so they may import only themselves, what is named here, and the modules in FILES.
REPORT_ONLY: dict[str, list[str]] = {EVERYWHERE: [], "report": [EVERYWHERE], "watch": ["report", EVERYWHERE]}
FILES = ["storage.atomic_files", "storage.png", "storage.processes", "storage.safe_text"]

# Library -> the only parts that may import it.
OUTSIDE_CORE = [*ABOVE_CORE, *TOP_LEVEL, *REPORT_ONLY]
LIBRARIES = {
    "torch": ["*"],
    "safetensors": ["*"],
    "numpy": ["*"],
    "filelock": [
        "experiment.run_folder",
        "engines.flower.site_files",
        "storage.chained_lines",
        "site.program",
    ],
    "scipy": OUTSIDE_CORE,
    "rich": ["cli", "experiment.preview", "experiment.model_table", "report"],
    "typer": ["cli"],
    "matplotlib": ["report"],
    "jinja2": ["report.templating", "watch", "site.kit.templating"],
    "markupsafe": ["report.templating"],
    "transformers": ["models", "data.tokenization", "data.chat_template", "trainers"],
    "peft": ["models.exported", "models.given_model", "models.peft_adapters", "models.trained"],
    "huggingface_hub": ["experiment.model_card", "experiment.hub_push"],
    "sklearn": ["data", "evaluation"],
    "rouge_score": ["evaluation.generation"],
    "datasets": ["data"],
    "flwr_datasets": ["data"],
    "PIL": ["data"],
    "pandas": ["runs"],
    "pyarrow": ["data"],
    "tomli_w": ["experiment", "site.kit.templating", "trainers"],
    "flwr": ["engines.flower", "experiment.flower_app", "site.answering"],
    "httpx": ["engines.flower.task_loop"],
    "optuna": ["experiment.trial_sampler"],
    "dp_accounting": ["privacy.accountant"],
    "cryptography": [
        "core.chacha",
        "secure_aggregation.key_agreement",
        "secure_aggregation.signatures",
        "site.doctor.files",
    ],
    "packaging": ["site.kit.requirements"],
    "wandb": ["track.to_wandb"],
    "mlflow": ["track.to_mlflow"],
    "trackio": ["track.to_trackio"],
}
IMPORT_FUNCTIONS = ["import_module", "need"]  # functions that import the module named by their first argument


def matches_part(module: str, part: str) -> bool:
    return fnmatch(module, part) or fnmatch(module, f"{part}.*")


def allowed_parts(module: str) -> list[str] | None:
    """The parts of partita that a module may import; None where the tables do not name the module."""
    for line, parts in enumerate(CORE):
        if module in parts:
            return [*(part for earlier in CORE[: line + 1] for part in earlier), EVERYWHERE]
    for part, others in ABOVE_CORE.items():
        if matches_part(module, part):
            return ["core", part, *others, EVERYWHERE]
    if any(matches_part(module, part) for part in TOP_LEVEL):
        return ["*"]
    return next(([part, *others, *FILES] for part, others in REPORT_ONLY.items() if matches_part(module, part)), None)


@cache
def imports_in(source: str) -> list[tuple[int, str]]:
    """Line and full name of every import; the last part of a name may be an object in a module."""
    return list(_imports_in(source))


def _imports_in(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORT_FUNCTIONS
        ):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def imported_module(name: str, modules: set[str]) -> str:
    """The module of partita that an import runs; for a package, its __init__."""
    steps = name.split(".")[1:]
    while steps and ".".join(steps) not in modules and ".".join([*steps, "__init__"]) not in modules:
        steps = steps[:-1]
    return ".".join(steps) if ".".join(steps) in modules else ".".join([*steps, "__init__"])


def broken_rules(module: str, source: str, modules: set[str]) -> list[str]:
    """One sentence for each import that breaks a rule."""
    where = f"src/partita/{module.replace('.', '/')}.py"
    may = allowed_parts(module)
    if may is None:
        return [
            f"{where}:1: no rule for partita.{module}; give it a place in the tables of tests/project/test_layers.py"
        ]
    found = []
    for line, name in imports_in(source):
        library = name.split(".")[0]
        if library == "partita":
            target = imported_module(name, modules)
            if not any(matches_part(target, part) for part in may):
                found.append(f"{where}:{line}: imports partita.{target}; of partita it may import: {', '.join(may)}")
        elif library == "":
            found.append(f"{where}:{line}: a relative import; write it out, from partita.")
        elif library not in LIBRARIES and library not in sys.stdlib_module_names:
            found.append(f"{where}:{line}: imports {library}, which has no rule; name its few files in LIBRARIES")
        elif not any(matches_part(module, home) for home in LIBRARIES.get(library, ["*"])):
            found.append(f"{where}:{line}: imports {library}; only these may: {', '.join(LIBRARIES[library])}")
    return found


def read_package() -> dict[str, str]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "templates"  # partita new copies them; nothing imports them
    }


def test_imports_go_one_way() -> None:
    sources = read_package()
    assert len(sources) > 20, f"{PACKAGE} holds {len(sources)} modules: is this the right folder?"
    found = [sentence for module, source in sources.items() for sentence in broken_rules(module, source, set(sources))]
    assert not found, "\n" + "\n".join(found)


def circles(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of modules each of which imports all others, if only by way of others."""

    def reached(module: str) -> set[str]:
        found, left = set[str](), [module]
        while left:
            new = imports[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {module: reached(module) for module in imports}
    return {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in imports
        if module in reach[module]
    }


def test_imports_have_no_circle() -> None:
    sources = read_package()
    imports = {
        module: {
            imported_module(name, set(sources)) for _, name in imports_in(source) if name.split(".")[0] == "partita"
        }
        - {module}
        for module, source in sources.items()
    }
    assert not circles(imports)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {frozenset("abc")}
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == set()


MODULES = {
    "__init__",
    "cli.main",
    "core.__init__",
    "core.client",
    "core.plan",
    "core.tensors",
    "data.__init__",
    "data.task",
    "evaluation",
    "experiment.builder",
    "methods.__init__",
    "methods.fedavg",
    "privacy.client_level",
    "record.metric",
    "report.__init__",
    "report.load",
    "training.local_training",
}


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("core.tensors", "from partita.core.plan import Plan", "core/tensors.py:1: imports partita.core.plan;"),
        ("core.tensors", "from partita.core import plan", "imports partita.core.plan;"),
        ("core.tensors", "import partita.training.local_training", "imports partita.training.local_training;"),
        ("core.client", "import torch\nimport partita.core", "client.py:2: imports partita.core.__init__;"),
        ("core.client", "def f():\n    import partita.methods.fedavg", "client.py:2: imports partita.methods.fedavg;"),
        ("core.client", "from partita import Plan", "imports partita.__init__;"),
        ("core.client", "from .plan import Plan", "a relative import"),
        ("core.client", "import scipy.stats", "imports scipy; only these may: methods"),
        ("methods.fedavg", "from partita.data import task", "imports partita.data.task; of partita"),
        ("methods.fedavg", "from partita.privacy.client_level import clip", "it may import: core, methods"),
        ("models.vit", "from partita.methods import method", "imports partita.methods.__init__;"),
        (
            "engines.simulation",
            "import partita.experiment.builder",
            "it may import: core, engines, training, storage",
        ),
        ("engines.simulation", "import flwr.client", "imports flwr; only these may: engines.flower"),
        ("experiment.builder", "from partita.cli.main import main", "imports partita.cli.main;"),
        ("experiment.builder", "import typer", "only these may: cli"),
        ("report.page", "from partita.core.tensors import Names", "it may import: report"),
        ("record.metric", "import partita.report.load", "it may import: record"),
        ("data.text", "from transformers import AutoTokenizer", "only these may: models"),
        ("models.vit", "import sklearn.datasets", "only these may: data, evaluation"),
        ("evaluation", "if TYPE_CHECKING:\n    import matplotlib", "evaluation.py:2: imports matplotlib;"),
        ("core.client", 'importlib.import_module("partita.cli.main")', "imports partita.cli.main;"),
        ("core.client", 'need("flwr", "flower")', "only these may: engines.flower"),
        ("data.text", "import polars", "imports polars, which has no rule"),
        ("core.extra", "import torch", "no rule for partita.core.extra"),
    ],
)
def test_forbidden_import_is_named(module: str, source: str, rule: str) -> None:
    [sentence] = broken_rules(module, source, MODULES)
    assert rule in sentence


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.plan", "import os.path\nimport numpy as np\nfrom partita.core import tensors"),
        ("methods.fedavg", "from partita.core import Plan, tensors\nfrom partita.core.client import reply"),
        ("engines.flower", "import flwr.client\nfrom partita.evaluation import score"),
        ("cli.runs", "import typer\nfrom partita import report\nimport partita.experiment.builder"),
        ("__init__", "from partita.methods.fedavg import fedavg"),
        ("report.page", "import matplotlib.pyplot\nfrom partita.report import load"),
        ("core.client", "from partita.record.metric import Metric"),
        ("watch", "from partita.record import metric"),
    ],
)
def test_allowed_import_passes(module: str, source: str) -> None:
    assert broken_rules(module, source, MODULES) == []
