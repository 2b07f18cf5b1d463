"""`partita budget`: what privacy costs, what a ledger has left, and a statement in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.options import Changes, TrustCode, look
from partita.storage.safe_text import printable

if TYPE_CHECKING:
    from partita.privacy.budget import Forecast


def budget(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="Experiment config with a [privacy] table: TOML, or a Python file that calls fit."
        ),
    ] = None,
    changes: Changes = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Privacy budget. The noise multiplier is computed from it. With --new: the ledger's limit."),
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Noise multiplier, relative to the clipping norm. Use instead of --epsilon.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Default: min(1e-5, 0.1 / examples or groups).")] = None,
    examples: Annotated[
        int | None, typer.Option(help="Training examples of one client that takes part in every round.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(help="Groups, such as patients, of one client, instead of --examples.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Expected number of examples or groups in a batch.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds in which the client takes part.")] = 20,
    epochs: Annotated[int, typer.Option(help="Epochs per round.")] = 1,
    run: Annotated[Path | None, typer.Option(help="Run folder, for --statement.")] = None,
    statement: Annotated[
        bool, typer.Option("--statement", help="Print a statement in plain words, for an ethics board.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the statement to this file (Markdown).")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Privacy ledger: print what is spent, or name it in the statement.")
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Create the ledger, with the limit --epsilon and --delta.")
    ] = False,
    group: Annotated[
        str | None, typer.Option(help="With --new: the ledger protects the groups of this column, not single examples.")
    ] = None,
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the noise a privacy budget needs, how epsilon grows, and the effect of other settings.

    With --statement, say in plain words what the guarantee means. With --ledger, show what is spent and left.
    """
    from partita.core.options import OptionError

    if out is not None and not statement:
        raise OptionError("--out is for --statement; give both")
    if run is not None and not statement:
        raise OptionError("--run is for --statement; give both")
    if group is not None and not new:
        raise OptionError("--group is for --new; a config names its column in privacy.group")
    if statement:
        text = _statement(config, changes or [], trust_code, run, ledger)
        if out is None:
            print(text, end="")
        else:
            from partita.storage import atomic_files

            atomic_files.write(out, text.encode())
            print(f"statement: {printable(out)}")
    elif ledger is not None or new:
        _show_ledger(ledger, new, epsilon, delta, group, as_json)
    else:
        from partita.privacy.budget import Client, forecast_client

        if config is not None:
            shown = _forecast(config, changes or [], trust_code, epsilon, noise, delta)
        elif (examples is None) == (groups is None):
            raise OptionError("give --config, or --examples or --groups and the other settings of one client")
        else:
            units, unit = (examples, "example") if examples is not None else (groups, "group")
            assert units is not None
            shown = forecast_client(Client(units, batch, rounds, epochs, unit), epsilon, noise, delta)
        print(json.dumps(shown.to_json(), indent=1) if as_json else shown.to_text())


def _forecast(
    config: Path,
    changes: list[str],
    trust_code: bool,
    epsilon: float | None,
    noise: float | None,
    delta: float | None,
) -> Forecast:
    from partita.core.options import OptionError
    from partita.experiment.builder import build
    from partita.privacy.budget import forecast_run

    options = {"privacy.epsilon": epsilon, "privacy.noise": noise, "privacy.delta": delta}
    overrides = [f"{key}={value}" for key, value in options.items() if value is not None]
    guard = build(look(config, [*changes, *overrides], trust_code)).guard
    if guard is None:
        raise OptionError(f"{config} has no [privacy] table; add one, or pass --epsilon")
    return forecast_run(guard)


def _statement(config: Path | None, changes: list[str], trust_code: bool, run: Path | None, ledger: Path | None) -> str:
    from partita.core.options import OptionError
    from partita.experiment.privacy_statement import statement_of_config, statement_of_run

    if (config is None) == (run is None):
        raise OptionError("--statement needs --config or --run, and not both")
    if run is not None:
        return statement_of_run(run, ledger)
    assert config is not None
    return statement_of_config(look(config, changes, trust_code), ledger)


def _show_ledger(
    ledger: Path | None, new: bool, epsilon: float | None, delta: float | None, group: str | None, as_json: bool
) -> None:
    from partita.core.options import OptionError
    from partita.privacy.ledger import Ledger, Limit

    if ledger is None:
        raise OptionError("--new is for --ledger; name the file of the ledger")
    if not new:
        found = Ledger.load(ledger)
    elif epsilon is None or delta is None:
        raise OptionError("--new needs the limit of the ledger; give --epsilon and --delta")
    else:
        found = Ledger.create(ledger, Limit(epsilon, delta, "example" if group is None else "group", group))
    print(json.dumps(found.about(), indent=1) if as_json else "\n".join(map(printable, found.to_text().splitlines())))
