"""From a config to a recorded run: build the parts, play the rounds, and write down what happened."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from partita import data, methods, models, record
from partita.alarms import LONG, Sight, alarms, sight
from partita.config import Config
from partita.core import checkpoint, tree
from partita.core.files import sealed
from partita.core.learn import Job
from partita.core.method import Local, Server
from partita.core.model import Model, layer_of, layers_of, role_of
from partita.core.plan import Plan, Turn, plan_for
from partita.core.private import PrivacyError
from partita.core.rng import Key
from partita.core.rounds import Engine, Round, ask, begin, rounds
from partita.core.run import Run, RunError
from partita.core.store import Disk, Memory, Store
from partita.data import Federation
from partita.engines.choose import choose_block, use_onednn
from partita.engines.embedded import Embedded
from partita.engines.faults import Faults, read_trace
from partita.engines.workers import Workers
from partita.evaluate import Measure, measure_for, score
from partita.privacy.guard import Guard, protect

Row = dict[str, Any]
PRIVACY = "privacy.json"  # in a run's folder: the promise, and the noise that keeps it


@dataclass(frozen=True)
class Experiment:
    """The parts of a run, built and checked."""

    config: Config
    run: Run
    model: Model
    federation: Federation
    faults: Faults
    device: torch.device
    block: int
    measure: Measure
    guard: Guard | None = None


def build(config: Config) -> Experiment:
    key = Key(config.seed)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    use_onednn(config.engine.onednn)
    device = _device(config.engine.device)
    if device.type == "cuda":
        # Without it, the fused attention's backward pass sums in whatever order its blocks finish.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.engine.deterministic)
        # cuDNN's attention plans each new shape anew, and batches of text come in many.
        torch.backends.cuda.enable_cudnn_sdp(False)
    method = methods.build(config.method["name"], _rest(config.method, "name"))
    task = data.load(config.data["name"], key / "data", **_data_options(config))
    federation = data.split(task, **config.split, key=key / "split")
    federation = federation.pooled() if method.pool else federation
    if strange := sorted(name for name in method.clients if name not in federation.clients):
        known = ", ".join(federation.clients[:3])
        raise RunError(
            f"method names the client '{strange[0]}', who is not there; clients are called {known} and so on"
        )
    model = models.build(config.model["name"], task, key / "model", **_rest(config.model, "name"))
    model = method.extend(model, key / "extend") if method.extend else model
    if config.engine.cache_frozen:
        model, federation = _cached(model, federation)
    federate = config.federation
    run = Run(
        method,
        config.training.build(),
        config.rounds,
        key,
        cohort=1.0 if method.pool else federate.cohort,
        minimum=federate.minimum,
        tolerate=federate.tolerate,
        preloaded=federate.preloaded,
        drift=config.evaluate.drift,
        secret=_secret(config.engine.secret),
    )
    run.cohort_size(len(federation.clients))
    guard = None
    if config.privacy:
        sizes = {client: len(federation[client].train) for client in federation.clients}
        guard = protect(run, model, sizes, config.privacy)
        run = guard.run
    trace = read_trace(Path(federate.trace)) if federate.trace else {}
    faults = Faults() if method.pool else Faults(federate.dropout, federate.straggle, trace)
    block = config.engine.block
    if block == "auto":
        block = choose_block(run, model, federation, device)
    if block < 1:
        raise RunError(f"engine.block is {block}; it must be at least 1, or 'auto'")
    plan_for(method.plan, model, Turn(0, run.rounds, federation.clients[0]))
    plan_for(method.plan, model, Turn(run.rounds - 1, run.rounds, federation.clients[0]))
    if method.adapt:
        method.adapt(model)  # a phase that cannot be is refused now and not after hours of training
    return Experiment(config, run, model, federation, faults, device, block, measure_for(task), guard)


def start(config: Config, folder: Path) -> Iterator[Row]:
    """Run from the beginning in a new folder, a row at a time."""
    if (folder / record.CONFIG).exists():
        raise record.RecordError(
            f"{folder} already holds a run; resume it with 'partita resume {folder}', or choose another folder"
        )
    experiment = build(config)
    with record.lock(folder):
        prepare(experiment, folder)
        with _embedded(experiment, folder) as (engine, store):
            yield from play(experiment, folder, engine, store, begin(experiment.run, experiment.model), 0)


def resume(config: Config, folder: Path) -> Iterator[Row]:
    """Go on after the newest checkpoint as if nothing had happened."""
    experiment = build(config)
    with record.lock(folder):
        done, server = recall(experiment, folder)
        Disk(folder / "clients").rewind(done)
        with _embedded(experiment, folder) as (engine, store):
            yield from play(experiment, folder, engine, store, server, done)


def prepare(experiment: Experiment, folder: Path) -> None:
    """Write down what is known before the first round."""
    config = replace(experiment.config, engine=replace(experiment.config.engine, block=experiment.block))
    record.write(folder / record.CONFIG, config.to_toml().encode())
    record.write_json(folder / record.ENVIRONMENT, record.environment(experiment.device, experiment.block))
    record.write_json(
        folder / record.PLAN, {"metric": asdict(experiment.measure.primary), "stages": stages(experiment)}
    )
    if experiment.guard:
        record.write_json(folder / PRIVACY, experiment.guard.about())


def recall(experiment: Experiment, folder: Path) -> tuple[int, Server]:
    """(rounds done, the server after them) by the newest checkpoint; rows of later rounds are dropped."""
    saved = sealed(folder / "checkpoints")
    done, server = 0, begin(experiment.run, experiment.model)
    if saved:
        done, server = checkpoint.load(saved[-1], experiment.device)
    record.keep_rows(folder, done)
    if experiment.guard:
        _recall_spending(experiment.guard, folder)
    return done, server


def _recall_spending(guard: Guard, folder: Path) -> None:
    """What earlier rounds cost is part of the bill; under another noise they would not have been the same run."""
    noise = json.loads((folder / PRIVACY).read_text())["noise"]
    if noise != guard.terms.noise:
        raise PrivacyError(
            f"{folder} was begun with the noise {noise:g}, but now it would be {guard.terms.noise:g}: has the data or "
            f"dp-accounting changed? To go on as it began, set privacy.noise = {noise:g} in its {record.CONFIG}"
        )
    for row in record.read_rows(folder):
        guard.charge(row["round"], row["cohort"], row["privacy"]["signal"])


@contextmanager
def _embedded(experiment: Experiment, folder: Path) -> Iterator[tuple[Engine, Store]]:
    disk = Disk(folder / "clients", experiment.device)
    store: Store = disk if experiment.config.engine.state == "disk" else Memory(disk)
    engine = Embedded(
        experiment.run,
        experiment.model,
        experiment.federation,
        experiment.block,
        experiment.device,
        store,
        experiment.faults,
        measure=experiment.measure,
    )
    if experiment.config.engine.workers == 1:
        yield engine, store
        return
    with closing(Workers(engine, experiment.config.engine.workers)) as workers:
        yield workers, store


def play(
    experiment: Experiment, folder: Path, engine: Engine, store: Store, server: Server, done: int
) -> Iterator[Row]:
    """Rounds from `done` on, whoever carries them, each recorded as it ends."""
    config, run, model = experiment.config, experiment.run, experiment.model
    state = {slot: tree.to(part, experiment.device) for slot, part in server.state.items()}
    server = replace(server, params=tree.to(server.params, experiment.device), state=state)
    begun = clock = time.perf_counter()
    sights = _recall_sights(folder)
    row: Row = {}
    for each in rounds(run, model, engine, server, done):
        signal = run.method.server.signal(server)
        server, done = each.server, each.number + 1
        row = _row(experiment, each, time.perf_counter() - clock)
        row |= measure(experiment, engine, each)
        row |= _spending(experiment, each, signal)
        row |= _choices(experiment, each, sights)
        record.append_row(folder, row)
        if done % config.checkpoint.every == 0 or done == run.rounds:
            store.commit(done)
            checkpoint.save(folder / "checkpoints", done, server)
        yield row
        clock = time.perf_counter()
    result = {
        "rounds": run.rounds,
        "seconds": round(time.perf_counter() - begun, 3),
        "digest": digest(experiment, server, store),
        "test": row.get("test"),
    }
    if record.finished(folder) is None:
        record.write_json(folder / record.RESULT, result)


def digest(experiment: Experiment, server: Server, store: Store) -> str:
    """Of the server's tensors and of every client's own."""
    own: tree.Tensors = {}
    for client in store.known():
        state = store.load(client, experiment.run.rounds)
        for slot, part in {"personal": state.personal, **state.memory}.items():
            own |= {f"{client}/{slot}/{name}": value for name, value in part.items()}
    return tree.digest({**server.params, **own})


def measure(experiment: Experiment, engine: Engine, each: Round) -> Row:
    """The model on the central test set, and clients' models on their own test parts, when they are due."""
    due, run, last = experiment.config.evaluate, experiment.run, each.number + 1 == experiment.run.rounds
    federation, model = experiment.federation, experiment.model
    present = engine.clients()
    clients = sorted((run.key / "evaluate").sample(present, min(due.clients, len(present))))

    def jobs() -> Iterator[Job]:
        return (ask(run, model, each.server, each.number, client)[0] for client in clients)

    test: dict[str, float] | None = None
    if last or (each.number + 1) % due.every == 0:
        if _personal(run, *ask(run, model, each.server, each.number, clients[0]), each.server):
            # No single model exists: the mean over clients of how each one's own model does.
            # There is no such mean where clients are elsewhere, since none holds the central test set.
            found = [scores for _, scores in engine.evaluate(jobs(), federation.test)]
            test = _mean(found) if found else None
        else:
            test = score(model, each.server.params, federation.test, experiment.measure)
    personal: dict[str, dict[str, float]] | None = None
    if last or (each.number + 1) % due.personal == 0:
        personal = {}
        for client, scores in engine.evaluate(jobs()):
            for metric, value in scores.items():
                personal.setdefault(metric, {})[client] = value
    return {"test": test, "personal": personal}


def _personal(run: Run, job: Job, plan: Plan, server: Server) -> bool:
    """Whether a client keeps something, adapts before it is tested, or is sent what was made for it alone."""
    made = any(value is not server.params[name] for name, value in job.params.items())
    return bool(plan.keep) or run.method.adapt is not None or made


def _mean(scores: list[dict[str, float]]) -> dict[str, float]:
    """Of the metrics that all have: one may be left out where a model's answers are no numbers."""
    shared = [metric for metric in scores[0] if all(metric in each for each in scores)]
    return {metric: sum(each[metric] for each in scores) / len(scores) for metric in shared}


def _row(experiment: Experiment, each: Round, seconds: float) -> Row:
    return {
        "round": each.number,
        "seconds": round(seconds, 4),
        "lr": experiment.run.rate(each.number),
        "cohort": list(each.cohort),
        "lost": {lost.client: lost.reason for lost in each.lost},
        "train_loss": each.loss,
        "bytes": {"up": sum(each.traffic.up.values()), "down": sum(each.traffic.down.values())},
        "up": dict(each.traffic.up),
        "down": dict(each.traffic.down),
        "drift": each.drift,
    }


def _spending(experiment: Experiment, each: Round, signal: Mapping[str, float]) -> Row:
    """What the run has cost in privacy up to this round; the signal is kept since the plan depended on it."""
    guard = experiment.guard
    if guard is None:
        return {}
    guard.charge(each.number, each.cohort, signal)
    spent = guard.spent()
    finite = spent is not None and math.isfinite(spent)
    return {"privacy": {"epsilon": spent if finite else None, "delta": guard.terms.delta, "signal": dict(signal)}}


def _choices(experiment: Experiment, each: Round, sights: deque[Sight]) -> Row:
    """Where clients choose their layers: which, by what scores, and the signs that this has lost its point."""
    if all(type(rule).narrow is Local.narrow for rule in experiment.run.method.local):
        return {}
    now = sight(each, experiment.model)
    sights.append(now)
    return {
        "chosen": {client: sorted(layers) for client, layers in now.sent.items()},
        "scores": {client: dict(scores) for client, scores in now.scores.items()},
        "alarms": {alarm.kind: alarm.text for alarm in alarms(list(sights), layers_of(experiment.model))},
    }


def _recall_sights(folder: Path) -> deque[Sight]:
    """Those of the last rounds recorded, so that a run that was stopped raises the alarms it would have raised."""
    found = deque[Sight](maxlen=LONG)
    for row in record.read_rows(folder):
        if "chosen" in row:
            sent = {client: frozenset(layers) for client, layers in row["chosen"].items()}
            found.append(Sight(row["round"], sent, row["scores"]))
    return found


def stages(experiment: Experiment) -> list[Row]:
    """The first client's plan; rounds with the same plan are one stage."""
    run, model, client = experiment.run, experiment.model, experiment.federation.clients[0]
    found: list[tuple[Plan, Row]] = []
    for number in range(run.rounds):
        plan = plan_for(run.method.plan, model, Turn(number, run.rounds, client))
        if found and found[-1][0] == plan:
            found[-1][1]["last"] = number
        else:
            found.append((plan, {"first": number, "last": number, "client": client, "rows": plan_rows(model, plan)}))
    return [row for _, row in found]


def plan_rows(model: Model, plan: Plan) -> list[Row]:
    """A plan by parameter."""
    rows = []
    for name, value in model.initial.items():
        layer, role = layer_of(model.tags[name]), role_of(model.tags[name])
        does = {"trains": plan.train, "up": plan.up, "down": plan.down, "keep": plan.keep}
        size = {"parameters": value.numel(), "bytes": value.numel() * value.element_size()}
        rows.append({"name": name, "layer": layer, "role": role, **size, **{k: name in v for k, v in does.items()}})
    return rows


def _data_options(config: Config) -> dict[str, Any]:
    """Texts are cut into the tokens of the model, unless another tokenizer is named."""
    options, name = _rest(config.data, "name"), config.data["name"]
    return {"tokenizer": config.model.get("path"), **options} if data.takes(name, "tokenizer") else options


def _cached(model: Model, federation: Federation) -> tuple[Model, Federation]:
    """What the frozen lowest layers make of each example is computed once."""
    from partita.models.cache import cache_frozen  # only there is transformers needed

    task = federation.task
    above, (train, test) = cache_frozen(model, task.train, task.test)
    return above, replace(federation, task=replace(task, train=train, test=test))  # type: ignore[arg-type]


def _rest(table: Any, key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def _secret(path: str | None) -> Key | None:
    if path is None:
        return None
    try:
        words = Path(path).read_bytes()
    except OSError as error:
        raise RunError(f"cannot read engine.secret, {path}: {error.strerror}") from error
    if len(words) < 16:
        raise RunError(
            f"engine.secret, {path}, holds {len(words)} bytes; fill it with 16 or more that nobody can guess"
        )
    return Key(int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "big"))


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("engine.device is 'cuda', but torch sees no GPU; use 'cpu', or install a CUDA build of torch")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)
