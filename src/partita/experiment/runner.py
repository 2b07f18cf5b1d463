"""Run an experiment's rounds and record them in a run folder, from the start or from a checkpoint."""

from __future__ import annotations

import json
import time
import tomllib
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.core import tensors
from partita.core.dp_settings import PrivacyError
from partita.core.rng import Key
from partita.core.rounds import Engine, Listener, initial_server, rounds
from partita.core.server_rule import Server
from partita.core.settings import RunError
from partita.engines.autotune import first_with_examples
from partita.engines.multiprocess import MultiprocessEngine
from partita.engines.secure import SecureEngine
from partita.engines.simulation import SimulationEngine
from partita.evaluation.metrics import NEW_CLASS_METRICS
from partita.experiment import extension, run_folder
from partita.experiment.base_digest import BASE_DIGEST, check_base
from partita.experiment.builder import build, build_engine, makes_secret, new_secret
from partita.experiment.config import Config, differences, load_recorded
from partita.experiment.config_code import code_copies
from partita.experiment.experiment import Experiment
from partita.experiment.progress_file import Connected, OnReply, ReplyCounter, record_progress
from partita.experiment.round_log import log_round, restore_history, stages, why_stop
from partita.experiment.run_ledger import RunLedger, open_ledger
from partita.experiment.samples import sample_answers
from partita.experiment.split_record import describe_split
from partita.experiment.tracking import Track, open_trackers
from partita.experiment.trusted_code import trust
from partita.privacy import secret
from partita.privacy.guard import PrivacyGuard
from partita.record import file_names
from partita.record.row import Row
from partita.storage import checkpoint
from partita.storage.atomic_files import read_json
from partita.storage.client_store import ClientStore, DiskStore, MemoryStore

IN_MEMORY = "in memory"  # what the environment says about data without notes


def start(
    config: Config,
    folder: Path,
    overwrite: bool = False,
    on_reply: OnReply | None = None,
    checkpoints: bool = True,
) -> Iterator[Row]:
    """Start a run in a new folder and yield one row per round.

    Args:
        config: The experiment.
        folder: The run folder.
        overwrite: Delete the run that the folder holds. This happens when the new run is ready to start.
        on_reply: Called for every client that replies.
        checkpoints: Whether to write checkpoints. Without them the run cannot be resumed, and only its rows are kept.

    Raises:
        RunFolderError: If the folder already holds a run; with `overwrite`, if it is not a run folder.
        RunError: If no client has training examples on this machine.
    """
    check_free(folder, overwrite)
    experiment = build(config, new_secret(config))
    if first_with_examples(experiment.federation) is None:
        raise RunError(
            "no client has training examples on this machine; with split.name = 'site', run the sites with "
            "'partita flower', or set split.client to the site whose data is here"
        )
    yield from start_built(experiment, folder, overwrite, on_reply, checkpoints)


def start_built(
    experiment: Experiment,
    folder: Path,
    overwrite: bool = False,
    on_reply: OnReply | None = None,
    checkpoints: bool = True,
) -> Iterator[Row]:
    """Start a run whose parts are built, in a folder that `check_free` allows, and yield one row per round."""
    listeners = _listeners(_admitted(experiment, folder), on_reply)
    with run_folder.lock(folder):
        if overwrite:
            run_folder.remove_run(folder)
        prepare(experiment, folder)
        disk = DiskStore(folder / file_names.CLIENTS, experiment.device, {})
        with _engine_and_store(experiment, disk) as (engine, store):
            server = initial_server(experiment.run, experiment.model)
            yield from run_rounds(experiment, folder, engine, store, server, 0, listeners, checkpoints=checkpoints)


def check_free(folder: Path, overwrite: bool = False) -> None:
    """Raise RunFolderError if a run cannot start in this folder; see `start`."""
    if overwrite:
        run_folder.refuse_others(folder)
    else:
        run_folder.refuse_run(folder)


def resume(config: Config, folder: Path, rounds: int | None = None, on_reply: OnReply | None = None) -> Iterator[Row]:
    """Resume a run from its newest checkpoint and yield one row per round.

    The result is the same as without the interruption, and as if the run had been started with `rounds` rounds.

    Args:
        config: The run's config, from its folder.
        folder: The run folder.
        rounds: The number of rounds to extend the run to; None to leave it as it is.
        on_reply: Called for every client that replies.

    Raises:
        ExtensionError: If the run cannot be extended exactly.
        RunFolderError: If it already has more rounds.
    """
    identity, planned = run_folder.verify(folder), config.rounds
    config = replace(config, rounds=rounds or config.rounds)
    if config.rounds < planned:
        raise run_folder.RunFolderError(
            f"{folder} is a run of {planned} rounds, of which {run_folder.saved_rounds(folder)} are done; it can be "
            f"extended to more than {planned} but not cut to {config.rounds}, so start a new run instead"
        )
    experiment = build(config, restore_secret(config, folder))
    longer = planned if config.rounds > planned and identity else None
    yield from resume_built(experiment, folder, on_reply, longer)


def resume_built(
    experiment: Experiment, folder: Path, on_reply: OnReply | None = None, planned: int | None = None
) -> Iterator[Row]:
    """Resume a run whose parts are built, as `resume` does.

    Args:
        experiment: The experiment.
        folder: The run folder.
        on_reply: Called for every client that replies.
        planned: The number of rounds before, of a run that is extended; None if it is not.
    """
    listeners = _listeners(_admitted(experiment, folder), on_reply)
    with run_folder.lock(folder):
        if planned is not None:
            extension.check(experiment, planned, folder)
            run_folder.replace_files(folder, _derived_files(experiment))
        saved = restore_all(experiment, folder)
        disk = DiskStore(folder / file_names.CLIENTS, experiment.device, saved.states)
        disk.rewind(saved.done)
        with _engine_and_store(experiment, disk) as (engine, store):
            yield from run_rounds(experiment, folder, engine, store, saved.server, saved.done, listeners)


def start_or_resume(config: Config, folder: Path, on_reply: OnReply | None = None) -> Iterator[Row]:
    """Start a run, or resume it if the folder holds this very run. Yield one row per round; none if it is finished.

    If the config has more rounds than the recorded run, the run is extended.

    Raises:
        RunFolderError: If the folder holds another run. The engine's settings may differ; the recorded ones are used.
        ExtensionError: If the run cannot be extended exactly.
    """
    if not (folder / file_names.CONFIG).exists():
        return start(config, folder, on_reply=on_reply)
    run_folder.complete_extension(folder)
    planned = load_recorded(folder, own_code=config.code).rounds
    recorded = check_same_run(replace(config, rounds=planned), folder)
    if run_folder.finished(folder) and config.rounds == planned:
        return iter(())
    return resume(recorded, folder, config.rounds, on_reply)


def check_same_run(config: Config, folder: Path) -> Config:
    """Check that a run folder holds the run of this config, apart from the engine, and return the recorded config.

    Raises:
        RunFolderError: If it holds another run.
    """
    run_folder.verify(folder)
    recorded = load_recorded(folder, own_code=config.code)
    if differing := differences(recorded, config):
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise run_folder.RunFolderError(
            f"{folder} holds another run: {', '.join(differing[:3])}{more}; replace it with --overwrite, or choose "
            "another folder with --out"
        )
    return recorded


def restore_secret(config: Config, folder: Path) -> Key | None:
    """Load the secret that the run created when it started, if it did."""
    return secret.load(folder) if makes_secret(config) else None


def prepare(experiment: Experiment, folder: Path) -> None:
    """Write what is known before the first round: config, environment, plan, split, privacy and checksums."""
    if makes_secret(experiment.config):
        assert experiment.run.secret is not None
        (folder / secret.FILE).unlink(missing_ok=True)  # left over from a run that was stopped before its first round
        secret.save(folder, experiment.run.secret)
    derived = _derived_files(experiment)
    references = experiment.config.references()
    copies = code_copies(references)
    for name, text in copies.items():  # before the config, which cannot be loaded without them
        run_folder.write(folder / name, text)
    trust(references)
    run_folder.write(folder / file_names.CONFIG, derived.pop(file_names.CONFIG))
    notes = "; ".join(experiment.federation.task.notes) or IN_MEMORY
    notes = "withheld" if experiment.guard and notes != IN_MEMORY else notes  # notes may count what clients hold
    chosen = {"block": experiment.pace.block, "steps": experiment.pace.graphs or "taken plainly", "data": notes}
    if experiment.base_digest:
        chosen[BASE_DIGEST] = experiment.base_digest
    if experiment.pace.one_by_one:
        chosen["one_by_one"] = experiment.pace.one_by_one
    if experiment.pace.findings:
        chosen["findings"] = "; ".join(experiment.pace.findings)
    if experiment.pace.compiling.reason:
        chosen["compile"] = experiment.pace.compiling.reason
    run_folder.write_json(folder / file_names.ENVIRONMENT, run_folder.environment(experiment.device, **chosen))
    for name, data in derived.items():
        run_folder.write(folder / name, data)
    written = [file_names.CONFIG, file_names.ENVIRONMENT, *derived, *copies]
    # Under privacy, exact counts of what clients hold are withheld.
    if not experiment.guard and (held := describe_split(experiment.federation)):
        run_folder.write(folder / file_names.SPLIT, (json.dumps(held) + "\n").encode())
        written.append(file_names.SPLIT)
    run_folder.write_checksums(folder, [*written, *([str(secret.FILE)] if makes_secret(experiment.config) else [])])


def _derived_files(experiment: Experiment) -> dict[str, bytes]:
    """Return the files that follow from the experiment alone, by name: config, plan and privacy."""
    evaluator, new = experiment.evaluator, NEW_CLASS_METRICS if experiment.federation.task.new else ()
    metrics = [asdict(metric) for metric in dict.fromkeys((evaluator.primary, *evaluator.metrics, *new))]
    files = {
        file_names.CONFIG: _resolved(experiment).to_toml().encode(),
        file_names.PLAN: run_folder.to_json({"metrics": metrics, "stages": stages(experiment)}),
    }
    if experiment.guard:
        about = {**experiment.guard.about(), "secret": _fingerprint(experiment)}
        files[file_names.PRIVACY] = run_folder.to_json(about)
    return files


def _fingerprint(experiment: Experiment) -> str | None:
    """Return a hash that identifies the secret without revealing it."""
    key = experiment.run.secret
    return (key / "fingerprint").digest(8).hex() if key else None


def describe_compute(config: Config, folder: Path) -> str:
    """Describe device, threads, block size and step mode in one line, and which of them "auto" chose."""
    env = read_json(folder / file_names.ENVIRONMENT)
    names = ("device", "clients_per_block", "cuda_graphs", "compile")
    auto = [name for name in names if getattr(config.engine, name) == "auto"]
    text = f"on {env['device']}, {env['threads']} threads, blocks of {env['block']}, steps {env['steps']}"
    if reason := env.get("one_by_one"):
        text += f"; clients train one at a time, because {reason}"
    if found := env.get("findings"):
        text += f"; {found}"
    if reason := env.get("compile"):
        text += f"; {'' if 'compiled' in env['steps'] else 'not '}compiled, because {reason}"
    text += f"; {env['data']}" if env.get("data", IN_MEMORY) != IN_MEMORY else ""
    return text + (f" (auto: {', '.join(auto)})" if auto else "")


def restore(experiment: Experiment, folder: Path) -> tuple[int, Server]:
    """Restore the newest checkpoint and drop the rows of later rounds.

    Returns:
        The number of finished rounds, and the server state after them.
    """
    saved = restore_all(experiment, folder)
    return saved.done, saved.server


def restore_all(experiment: Experiment, folder: Path) -> checkpoint.Checkpoint:
    """Reset the folder to its newest checkpoint, or to the start if there is none, and return that checkpoint.

    Raises:
        DamageError: If a file that the run needs is damaged or missing.
    """
    identity = run_folder.verify(folder)
    if identity is None:
        prepare(experiment, folder)
    check_base(experiment, folder)
    first = initial_server(experiment.run, experiment.model)
    saved = checkpoint.newest(
        folder / file_names.CHECKPOINTS, identity, first, experiment.device, experiment.initial_values
    )
    run_folder.keep_rows(folder, saved.done, saved.rows if saved.done else None)
    with run_folder.expect_format(folder / file_names.ROWS):
        best = restore_history(experiment, folder).best(experiment)
    checkpoint.rewind_best(folder / file_names.CHECKPOINTS, saved.done, best)
    if experiment.guard:
        with run_folder.expect_format(folder / file_names.ROWS):
            _restore_spending(experiment, experiment.guard, folder)
    return saved


def _restore_spending(experiment: Experiment, guard: PrivacyGuard, folder: Path) -> None:
    """Charge the rounds that were already run. The secret, the training data and the noise must be the same as then."""
    recorded = read_json(folder / file_names.PRIVACY)
    if recorded["secret"] != _fingerprint(experiment):
        raise PrivacyError(
            f"{folder} was started with other training data or another secret; restore them, or start a new run: with "
            "the same noise, the difference of two models would reveal the change"
        )
    noise = recorded["noise"]
    if noise != guard.privacy.noise:
        raise PrivacyError(
            f"{folder} was started with noise {noise:g}, but now it would be {guard.privacy.noise:g}: has "
            "the data or dp-accounting changed? Restore the original versions, or start a new run in another folder "
            f"with privacy.noise = {noise:g}"
        )
    for row in run_folder.read_rows(folder):
        guard.charge(row["round"], row["cohort"], row["privacy"]["signal"], row["population"])


def _admitted(experiment: Experiment, folder: Path) -> RunLedger | None:
    """Return the ledger of the run, if it has one, which allows all its rounds.

    Raises:
        LedgerError: If the ledger does not allow them.
    """
    charged = open_ledger(experiment, folder)
    if charged is not None:
        charged.admit()
    return charged


def _listeners(charged: RunLedger | None, on_reply: OnReply | None) -> list[Listener]:
    return [*([charged] if charged else ()), *([ReplyCounter(on_reply)] if on_reply else ())]


@contextmanager
def _engine_and_store(experiment: Experiment, disk: DiskStore) -> Iterator[tuple[Engine, ClientStore]]:
    """Build the engine, with its workers if there are several, and the store of the clients' state."""
    config = experiment.config.engine
    store: ClientStore = disk if config.client_state == "disk" else MemoryStore(disk)
    engine: Any = (experiment.make_engine or build_engine)(experiment, store)

    def masked(engine: Engine) -> Engine:
        secure = experiment.run.secure_aggregation is not None
        return SecureEngine(engine, experiment.run, experiment.model) if secure else engine

    if config.workers == 1:
        yield masked(engine), store
        return
    rebuild = None
    if experiment.device.type == "cuda":
        rebuild = partial(rebuild_engine, _resolved(experiment), experiment.run.secret)
    with closing(MultiprocessEngine(engine, config.workers, rebuild)) as workers:
        yield masked(workers), store


def rebuild_engine(config: Config, secret: Key | None) -> SimulationEngine:
    """Build an engine in a spawned worker, which shares no memory and must load data and model itself."""
    warnings.simplefilter("ignore")  # the first process has said it
    return build_engine(build(config, secret), MemoryStore())


def _resolved(experiment: Experiment) -> Config:
    """Return the config with what "auto" chose and a resumed run and every worker must share.

    A run that is compiled stays at "auto", so that a failure of the compiler is no error. A longer run is compiled too.
    """
    engine = replace(experiment.config.engine, clients_per_block=experiment.pace.block)
    if not experiment.pace.compiling.compile:
        engine = replace(engine, compile=False)
    return replace(experiment.config, engine=engine)


def run_rounds(
    experiment: Experiment,
    folder: Path,
    engine: Engine,
    store: ClientStore,
    server: Server,
    done: int,
    listeners: Sequence[Listener] = (),
    connected: Connected | None = None,
    checkpoints: bool = True,
) -> Iterator[Row]:
    """Run the rounds from `done` on, record each one, and write the result at the end.

    Args:
        experiment: The experiment.
        folder: The run folder, already prepared.
        engine: Any engine.
        store: The store of the clients' state. It is committed with every checkpoint.
        server: The server state after `done` rounds.
        done: Rounds that are already finished.
        listeners: Told what happens in each round.
        connected: Returns the clients that are connected, if they are remote.
        checkpoints: Whether to write checkpoints, and at the end the digest of the models.

    Yields:
        The row of each round.
    """
    config = experiment.config
    with (
        open_trackers(config.track.to, tomllib.loads(_resolved(experiment).to_toml()), folder) as track,
        record_progress(folder, experiment.run, experiment.guard is not None, connected) as progress,
    ):
        heard = (*listeners, progress)
        yield from _run_rounds(experiment, folder, engine, store, server, done, heard, track, checkpoints)


def _run_rounds(
    experiment: Experiment,
    folder: Path,
    engine: Engine,
    store: ClientStore,
    server: Server,
    done: int,
    listeners: Sequence[Listener],
    track: Track,
    checkpoints: bool,
) -> Iterator[Row]:
    config, run, model = experiment.config, experiment.run, experiment.model
    state = {slot: tensors.to(part, experiment.device) for slot, part in server.state.items()}
    server = replace(server, params=tensors.to(server.params, experiment.device), state=state)
    started = clock = time.perf_counter()
    identity, written = run_folder.verify(folder) or "", run_folder.RowLog(folder)
    with run_folder.expect_format(folder / file_names.ROWS):
        history = restore_history(experiment, folder)
    last = deque(run_folder.read_rows(folder), maxlen=1)
    row: Row = last[0] if last else {}  # the run may have been stopped after its last round, before writing its result
    # A run that was killed before it wrote its result, or that is extended, may have stopped already.
    history.stopped = why_stop(experiment, engine, server, history, done)
    for result in () if history.stopped else rounds(run, model, engine, server, done, history.losses, listeners):
        signal = run.method.server_rule.signal(server)
        server, done = result.server, result.number + 1
        row = log_round(experiment, engine, result, time.perf_counter() - clock, signal, history)
        written.append(row)
        best = history.best(experiment)
        due = done % config.checkpoint.every == 0 or done in (run.rounds, best) or history.stopped
        if checkpoints and due:
            store.commit(done, best)
            checkpoint.save(
                folder / file_names.CHECKPOINTS,
                done,
                server,
                identity,
                rows=written.digest(),
                states=store.states(),
                initial=experiment.initial_values,
                best=done == best,
            )
        track(row)
        yield row
        clock = time.perf_counter()
        if history.stopped:
            break
    summary = {
        "rounds": run.rounds,
        "seconds": round(time.perf_counter() - started, 3),
        **({"digest": digest(experiment, server, store)} if checkpoints else {}),
        "test": row.get("test"),
        **({"stopped": {"after": done, "reason": history.stopped}} if history.stopped else {}),
        **({"best": {"after": best}} if (best := history.best(experiment)) else {}),
    }
    if run_folder.finished(folder) is None:
        if config.evaluate.samples:
            model, task = experiment.model, experiment.federation.task
            initial = tensors.to(model.initial, experiment.device)
            samples = sample_answers(config.evaluate, model, task, initial, server.params)
            run_folder.write_json(folder / file_names.SAMPLES, {"samples": samples})
        run_folder.write_json(folder / file_names.RESULT, summary)


def digest(experiment: Experiment, server: Server, store: ClientStore) -> str:
    """Hash the server's parameters and every client's state."""
    own: tensors.Tensors = {}
    for client in store.known():
        state = store.load(client, experiment.run.rounds)
        for slot, part in {"personal": state.personal, **state.memory}.items():
            own |= {f"{client}/{slot}/{name}": value for name, value in part.items()}
    return tensors.digest({**server.params, **own})
