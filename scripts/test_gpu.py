"""Run partita on this machine's GPU as a user does, and say what passed.

    python scripts/test_gpu.py                    everything; about ten minutes on 16 cores
    python scripts/test_gpu.py --only methods     the cases whose name begins so; a regular expression
    python scripts/test_gpu.py --record           also write the results by model type for docs/reference/models.md

Each case is one or several commands in a process of its own, many side by side on one GPU. A case passes if all its
commands end without an error; one that is refused in one line passes only where that is allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that this process does not touch the GPU, and can fork

RESULTS = ROOT / "docs" / "reference" / "models-gpu.json"
TASKS = ROOT / "tests" / "gpu_tasks.py"
MOST_REFUSED = {"float32": 3, "bfloat16": 3, "compiled": 14}  # model types; without an entry, all may be
CLOSE = 1e-4  # of the largest number, between a round on the GPU and one on the CPU
Command = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """What is run: commands in a folder of their own, then a function that raises an error if the result is wrong."""

    name: str  # group/what
    commands: tuple[Command, ...] = ()
    check: Callable[[], str | None] | None = None  # returns a note
    prepare: Callable[[], None] | None = None
    may_refuse: bool = False
    seconds: float = 1.0  # roughly; long cases start first
    memory: float | None = None  # the share of the GPU's memory that the case may take


@dataclass
class Result:
    """How a case ended."""

    name: str
    status: str  # "passed", "refused" or "failed"
    note: str = ""
    seconds: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)


# Running a case


def run_case(case: Case) -> Result:
    """Run a case in this process, which is for it alone."""
    started = time.perf_counter()
    folder = Path(mkdtemp(prefix="gpu-"))
    os.environ |= {"XDG_STATE_HOME": str(folder / "state")}
    os.chdir(folder)
    result = Result(case.name, "passed")
    try:
        import torch

        if case.memory is not None and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(case.memory)
        if case.prepare:
            case.prepare()
        for command in case.commands:
            said = partita(*command)
            if said is not None:
                refused = case.may_refuse and "Traceback" not in said
                result = Result(case.name, "refused" if refused else "failed", f"{' '.join(command)}: {said}")
                break
        else:
            result.note = (case.check() if case.check else None) or ""
    except BaseException:
        result = Result(case.name, "failed", traceback.format_exc())
    result.seconds = time.perf_counter() - started
    if (path := folder / "run" / "environment.json").exists():
        found = json.loads(path.read_text())
        result.facts = {name: found[name] for name in ("block", "one_by_one", "findings", "steps") if name in found}
    return result


def partita(*command: str) -> str | None:
    """Run a command of partita in this process. Return what it said if it failed."""
    from partita.cli.main import main

    sys.argv = ["partita", *command]
    before = os.dup(1), os.dup(2)
    with open("output.txt", "w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(before[0], 1)
            os.dup2(before[1], 2)
        output.seek(0)
        text = output.read()
    if not code:
        assert "does not have a deterministic implementation" not in text, f"not told in plain words: {text}"
        return None
    if "Traceback" in text:
        return text[text.index("Traceback") :]
    return next((line for line in reversed(text.splitlines()) if line.startswith("error")), text[-300:])


def _serve(cases: list[Case], numbers: Any, results: Any) -> None:
    """Fork a process for each case, until there are none left."""
    fork = multiprocessing.get_context("fork")
    while (number := numbers.get()) is not None:
        here, there = fork.Pipe()
        child = fork.Process(target=lambda case, end: end.send(run_case(case)), args=(cases[number], there))
        child.start()
        there.close()
        try:
            results.put(here.recv())
        except EOFError:
            child.join()
            results.put(Result(cases[number].name, "failed", f"the process died with exit code {child.exitcode}"))
        child.join()


def run_all(cases: list[Case], jobs: int) -> Iterator[Result]:
    """Run cases side by side, the longest first."""
    fork = multiprocessing.get_context("fork")
    numbers, results = fork.SimpleQueue(), fork.SimpleQueue()
    for number in sorted(range(len(cases)), key=lambda number: -cases[number].seconds):
        numbers.put(number)
    for _ in range(jobs):
        numbers.put(None)
    servers = [fork.Process(target=_serve, args=(cases, numbers, results)) for _ in range(jobs)]
    for server in servers:
        server.start()
    for _ in cases:
        yield results.get()
    for server in servers:
        server.join()


# Model types

TYPE_RUN = """
rounds = 2
data = {{ name = "{tasks}:{task}"{kind} }}
split = {{ name = "iid", clients = 3 }}
model = {{ name = "pretrained", path = "model" }}
method = {{ name = "fedavg" }}
training = {{ optimizer = "adamw", lr = 1e-3, batch_size = 8 }}
"""
COLUMNS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("training.precision=bfloat16",),
    "compiled": ("engine.compile=true", "rounds=1", "training.steps=2", "evaluate.every=0"),
    "dp-sgd": ("privacy={unit='example', clip=1.0, noise=1.0, delta=1e-3, repeatable=true}",),
    "lora": ("model.adapter={rank=2}",),
}


def type_cases() -> Iterator[Case]:
    """Every model type: in float32 and bfloat16, compiled, with DP-SGD and with LoRA."""
    from model_types import CASES  # type: ignore[import-not-found]

    for case in CASES:
        for column, changes in COLUMNS.items():
            yield Case(
                f"types/{case}/{column}",
                (("run", "-c", "type.toml", "--out", "run", "-q", *_sets(*changes)),),
                equals_the_cpu if column == "float32" else None,
                partial(write_type, case),
                may_refuse=True,
                seconds=40.0 if column == "compiled" else 5.0,
            )


def write_type(case: str) -> None:
    """Write the tiny random model of a type, and a config."""
    from model_types import module_of

    from partita.models.functional import without_logs

    kind = case.rpartition("-")[2]
    with without_logs():
        module_of(case).save_pretrained("model")
    image = kind == "image"
    Path("type.toml").write_text(
        TYPE_RUN.format(tasks=TASKS, task="images" if image else "texts", kind="" if image else f', kind = "{kind}"')
    )


def equals_the_cpu() -> str:
    """Compare a round on the GPU with one on the CPU."""
    import torch

    from partita.core.rounds import rounds
    from partita.experiment.builder import build, build_engine
    from partita.experiment.config import load
    from partita.storage.client_store import MemoryStore

    ends = []
    for device in ("cpu", "auto"):
        changes = ("rounds=1", "training.optimizer=sgd", "training.lr=0.1", f"engine.device={device}")
        experiment = build(load(Path("type.toml"), [*changes, "engine.clients_per_block=1"]))
        engine = build_engine(experiment, MemoryStore())
        [played] = rounds(experiment.run, experiment.model, engine)
        ends.append({name: value.cpu() for name, value in played.server.params.items()})
    largest = max(float(value.abs().max()) for value in ends[0].values())
    apart = max(float((ends[1][name] - value).abs().max()) for name, value in ends[0].items()) / max(1.0, largest)
    assert apart <= CLOSE, f"a round on the GPU differs from one on the CPU by {apart:.1e}"
    assert all(bool(torch.isfinite(value).all()) for value in ends[1].values())
    return f"{apart:.1e} from the CPU"


# Methods, adapters and options

SMALL = """
rounds = 4
data = { name = "synthetic", examples = 240, test_examples = 40, size = 4 }
split = { name = "iid", clients = 6 }
federation = { cohort = 0.5 }
evaluate = { personal_every = 2 }
model = { name = "vit", layers = 2, width = 16, heads = 2, patch = 2 }
training = { optimizer = "adamw", lr = 1e-3 }
method = { name = "fedavg" }
"""
RUN: Command = ("run", "-c", "small.toml", "--out", "run", "-q")
DIGITS: Command = ("run", "-c", str(ROOT / "examples" / "digits.toml"), "--out", "run", "-q", "--set", "rounds=3")


def write_small() -> None:
    Path("small.toml").write_text(SMALL)


def method_cases() -> Iterator[Case]:
    """Every method and composition of the shelf, with what it needs."""
    from partita.methods import COMPOSITIONS, INDEX, NEEDS_DUAL_ENCODER, NEEDS_FACTORS, build

    for method in (*INDEX, *COMPOSITIONS):
        parts = method.split("+")
        changes = [f"method={{name='{method}'}}"]
        if {*parts} & {*NEEDS_DUAL_ENCODER}:
            changes += ["model={name='clip', shape='tiny'}"]
        if {*parts} & {*NEEDS_FACTORS} and "lora" not in parts:
            changes += ["model.adapter={rank=2}"]
        if not build(method).supports_optimizer("adamw"):
            changes += ["training={optimizer='sgd', lr=0.05}"]
        yield Case(f"methods/{method}", ((*RUN, *_sets(*changes)),), prepare=write_small, seconds=6)


PRIVATE = "privacy={unit='example', clip=1.0, noise=1.0, delta=1e-3, repeatable=true"
OPTIONS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "bfloat16": ("training.precision=bfloat16",),
    "compiled": ("engine.compile=true", "rounds=1"),
    "compiled-bfloat16": ("engine.compile=true", "training.precision=bfloat16", "rounds=1"),
    "eager": ("engine.cuda_graphs=false",),
    "one-by-one": ("engine.clients_per_block=1",),
    "two-workers": ("engine.workers=2",),
    "disk": ("engine.client_state=disk", "method={name='scaffold'}", "training={optimizer='sgd', lr=0.05}"),
    "deterministic": ("engine.deterministic=true",),
    "not-deterministic": ("engine.deterministic=false",),
    "accumulate": ("training.accumulate=2", "training.batch_size=8"),
    "keep-optimizer": ("training.keep_optimizer=true",),
    "augment": ("training.augment=['flip', 'crop']",),
    "cache-frozen": ("engine.cache_frozen=true", "model.frozen=['embedding', 'layer.0']"),
    "clip": ("training.clip=1.0", "training.label_smoothing=0.1"),
    "attackers": ("federation.attackers=0.2", "method={name='krum'}"),
    "failures": ("federation.client_dropout=0.2", "federation.straggler_rate=0.2"),
    "validation": ("split.validation=0.2", "stop.patience=2"),
    "unseen": ("split.unseen=2", "evaluate.unseen_epochs=1"),
    "dp-example": (f"{PRIVATE}}}",),
    "dp-example-ghost": (f"{PRIVATE}, clipping='ghost'}}", "model.frozen=['embedding']"),
    "dp-example-direct": (f"{PRIVATE}, clipping='direct'}}",),
    "dp-client": ("privacy={unit='client', clip=1.0, noise=1.0, delta=1e-3, repeatable=true}",),
    "dp-bfloat16": (f"{PRIVATE}}}", "training.precision=bfloat16"),
    "secure": ("secure_aggregation={}",),
    "quantized-updates": ("method={name='fedavg+quantize'}",),
}
ADAPTERS = {kind: f"model.adapter={{kind='{kind}'}}" for kind in ("lora", "lokr", "hra", "miss", "ia3")}
ADAPTERS |= {"dora": "model.adapter={dora=true}", "rslora": "model.adapter={rslora=true, dropout=0.1}"}
ADAPTERS |= {"ranks": "model.adapter={rank=4, ranks=[2, 4]}"}


def option_cases() -> Iterator[Case]:
    for name, changes in OPTIONS.items():
        yield Case(f"options/{name}", ((*DIGITS, *_sets("method={name='fedavg'}", *changes)),), seconds=30)
    for name, change in ADAPTERS.items():
        run = (*DIGITS, *_sets("method={name='fedavg'}", change))
        yield Case(f"adapters/{name}", (run, (*run[:-4], "--overwrite", *run[-4:])), seconds=20)
    for bits in ("8bit", "4bit"):
        changes = (f"model.quantize={bits}", "model.adapter={rank=2, roles=['query', 'mlp']}")
        for name, more in {"": (), "-bfloat16": ("model.dtype=bfloat16",), "-dp": (f"{PRIVATE}}}",)}.items():
            run = ("run", "-c", "type.toml", "--out", "run", "-q", *_sets(*changes, *more))
            yield Case(f"options/{bits}{name}", (run,), prepare=partial(write_type, "llama-lm"), seconds=20)
    checkpointing = ("run", "-c", "type.toml", "--out", "run", "-q", *_sets("model.checkpointing=true"))
    yield Case("options/checkpointing", (checkpointing,), prepare=partial(write_type, "llama-lm"), seconds=10)


# Commands and examples


def command_cases() -> Iterator[Case]:
    digits = str(ROOT / "examples" / "digits.toml")
    yield Case(
        "commands/one-run",
        (
            ("plan", "-c", digits),
            (*DIGITS, *_sets("method={name='fedavg'}")),
            ("resume", "run", "--rounds", "5", "-q"),
            ("evaluate", "run"),
            ("export", "run", "--to", "vit"),
            ("report", "run"),
            ("ls", "."),
        ),
        loads_in_transformers,
        seconds=40,
    )
    yield Case(
        "commands/compare-two-processes",
        (("compare", "-c", digits, "--methods", "fedavg,fedfrozen", "--seeds", "2", "--rounds", "2", "--jobs", "2",
          "--out", "all"),),
        seconds=60,
    )  # fmt: skip
    yield Case(
        "commands/tune",
        (("tune", "-c", digits, "--methods", "fedavg,fedprox", "--space", "training.lr=log(1e-4,1e-2)", "--budget", "2",
          "--rounds", "2", "--out", "tuned", *_sets("split.validation=0.2")),),
        seconds=60,
    )  # fmt: skip
    for method in ("scaffold", "fedper"):
        changes = (f"method.name={method}", "training={optimizer='sgd', lr=0.05}", "checkpoint.every=2", "rounds=40")
        run = (*RUN, *_sets(*changes))
        whole = tuple("whole" if word == "run" and place else word for place, word in enumerate(run))
        yield Case(f"commands/killed-and-resumed-{method}", (whole,), partial(killed, run), write_small, seconds=60)


def loads_in_transformers() -> None:
    from transformers import ViTForImageClassification

    assert ViTForImageClassification.from_pretrained("vit").config.model_type == "vit"


def killed(run: Command) -> str:
    """Kill a run with -9 three times, go on, and compare it bit for bit with the run that was left alone."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    rows, kills = Path("run/rows.jsonl"), 0
    for at in (3, 12, 21):
        command = run if not kills else ("resume", "run", "-q")
        process = subprocess.Popen([sys.executable, "-m", "partita", *command], env=environment)
        while process.poll() is None and not (rows.exists() and len(rows.read_text().splitlines()) >= at):
            time.sleep(0.01)
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert partita("resume", "run", "-q") is None
    ends = [json.loads((Path(name) / "result.json").read_text())["digest"] for name in ("whole", "run")]
    assert ends[0] == ends[1], "a run that was killed differs"
    return f"{kills} kills"


ROWS = {"clinical": "notes/train.jsonl", "statements": "statements/train.jsonl", "dates": "dates/train.jsonl"}


def example_cases() -> Iterator[Case]:
    """Each example with its data. The language model of the last one is not here; a tiny one takes its place."""
    from partita.experiment.starter import EXAMPLES

    for name in EXAMPLES:
        run: Command = ("run", "-c", f"{name}.toml", "--rounds", "2", "--out", "run", "-q")
        if name == "language_model":
            names = ["chat", name]
            changes = ("data.path=conversations", "data.max_length=64", "split.column=school", "model.path=tiny-llama")
            run = (*run, *_sets(*changes))
        else:
            names = [name]
        init = tuple(("init", "--example", each) for each in names)
        after: tuple[Command, ...] = (("evaluate", "run"),)
        after += (("export", "run", "--to", "exported"),) if name != "prompts" else ()
        after += tuple(("predict", folder, ROWS[name]) for folder in ("run", "exported") if name in ROWS)
        yield Case(f"examples/{name}", (*init, run, *after), seconds=60)
    groups = "privacy={unit='group', group='hospital', clip=1.0, noise=1.0, delta=1e-3, repeatable=true}"
    run = ("run", "-c", "statements.toml", "--rounds", "1", "--out", "run", "-q", *_sets(groups, "data.test=0.5"))
    yield Case("options/dp-group", (("init", "--example", "statements"), run), seconds=20)


# Memory, and a model of real size

DINO = """
rounds = 3
data = {{ name = "{tasks}:images", size = 112, count = 1200 }}
split = {{ name = "dirichlet", clients = 20, alpha = 0.5 }}
federation = {{ cohort = 10 }}
model = {{ name = "pretrained", path = "dino" }}
method = {{ name = "fedavg" }}
training = {{ optimizer = "adamw", lr = 1e-4, batch_size = 32 }}
"""


def write_dino() -> None:
    """Write a random model with the shape of DINOv2-small, whose positions are those of 518-pixel images."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    shape = Dinov2Config(hidden_size=384, num_attention_heads=6, num_hidden_layers=12, image_size=518, patch_size=14)
    Dinov2ForImageClassification(shape).save_pretrained("dino")
    Path("dino.toml").write_text(DINO.format(tasks=TASKS))


def memory_cases() -> Iterator[Case]:
    run: Command = ("run", "-c", "dino.toml", "--out", "run", "-q")
    yield Case("memory/dinov2-small-112px", (run,), prepare=write_dino, seconds=60)
    exact = (*run, *_sets("engine.deterministic=true"))
    yield Case("memory/dinov2-small-exact", (exact,), prepare=write_dino, seconds=60)
    large = (*run, *_sets("engine.clients_per_block=20", "federation.cohort=20", "rounds=1"))
    # Clients of some 600 MB each.
    yield Case("memory/block-ten-times-too-large", (large,), halved, write_dino, seconds=60, memory=0.02)
    yield Case("memory/client-too-large", (), too_large, write_dino, seconds=30, memory=0.002)


def halved() -> str:
    said = Path("output.txt").read_text()
    sizes = re.findall(r"from now on it is (\w+)", said)
    assert sizes, said
    return f"halved to {sizes[-1]}"


def too_large() -> str:
    said = partita("run", "-c", "dino.toml", "--out", "run", "-q", *_sets("training.batch_size=256"))
    assert said is not None
    assert re.match(r"error: .* are free.*training\.batch_size", said), said
    return said


# The tests that need a GPU


def pytest_cases() -> Iterator[Case]:
    """The tests marked `gpu`, each test function in a process of its own."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test in re.findall(r"@pytest\.mark\.gpu\n(?:@.*\n|[ )].*\n)*def (test_\w+)", path.read_text()):
            yield Case(f"tests/{path.stem}/{test}", check=partial(pytest_of, f"{path}::{test}"), seconds=90)


def pytest_of(test: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--show-capture=no",
        "-m",
        "gpu",
        test,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-500:]
    return done.stdout.strip().splitlines()[-1]


def _sets(*changes: str) -> Command:
    return tuple(word for change in changes for word in ("--set", change))


# Telling


def all_cases() -> list[Case]:
    groups = (pytest_cases, type_cases, method_cases, option_cases, command_cases, example_cases, memory_cases)
    return [case for group in groups for case in group()]


def judge(results: list[Result]) -> list[str]:
    """Return what failed, with the groups of model types of which too many were refused."""
    failed = [f"{each.name}: {each.note}" for each in results if each.status == "failed"]
    refused = Counter(each.name.rpartition("/")[2] for each in results if each.status == "refused")
    failed += [
        f"types/*/{column}: {refused[column]} types are refused, more than {most}"
        for column, most in MOST_REFUSED.items()
        if refused[column] > most
    ]
    return failed


def record(results: list[Result]) -> None:
    """Write what was found of each model type."""
    import torch
    import transformers

    types: dict[str, dict[str, str]] = {}
    for each in sorted(results, key=lambda each: each.name):
        if each.name.startswith("types/"):
            _, case, column = each.name.split("/")
            found = types.setdefault(case, {})
            found[column] = "yes" if each.status == "passed" else each.note.partition("error: ")[2] or "failed"
            if column == "float32":
                found["blocks"] = each.facts.get("one_by_one") or "yes"
            if notes := each.facts.get("findings"):
                found[column] = notes
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    RESULTS.write_text(json.dumps({**about, "types": types}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], help="only cases whose name this pattern matches; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="cases side by side")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--log", type=Path, help="also write every result as a line of JSON to this file")
    parser.add_argument("--anywhere", action="store_true", help="also without a GPU, to try the cases themselves")
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not given.anywhere:
        print("skipped: torch sees no GPU on this machine")
        return
    # Once, before processes fork; and compiled programs are shared among them.
    import dp_accounting  # noqa: F401
    import torch._inductor.compile_fx
    import transformers  # noqa: F401

    import partita.experiment.runner  # noqa: F401

    os.environ["PARTITA_CACHE"] = mkdtemp(prefix="gpu-cache-")

    started = time.perf_counter()
    cases = [case for case in all_cases() if not given.only or any(re.match(only, case.name) for only in given.only)]
    results = []
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(given.log.open("w")) if given.log else None
        for result in run_all(cases, given.jobs):
            results.append(result)
            if log:
                print(json.dumps(asdict(result)), file=log, flush=True)
            if result.status != "passed":
                print(f"{result.status:8}{result.name}: {result.note.strip().splitlines()[-1][:240]}", flush=True)
    groups = Counter((each.name.partition("/")[0], each.status) for each in results)
    for (group, status), count in sorted(groups.items()):
        print(f"{group:10}{status:8}{count:5}")
    if given.record:
        record(results)
    failed = judge(results)
    for line in failed:
        print(f"FAILED {line}")
    passed = sum(each.status != "failed" for each in results)
    print(f"{passed} passed, {len(failed)} failed in {time.perf_counter() - started:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
