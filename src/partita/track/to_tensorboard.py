"""TensorBoard: event files in the run folder."""

from __future__ import annotations

import html
from collections.abc import Mapping

from partita.track import Table, TrackedRun


class TensorBoard:
    """Writes the scalars, the tables as text, and the settings as hyperparameters.

    Event files can only grow, and a process that is killed may leave a part of a round. So every start writes all
    rounds again: `purge_step` makes TensorBoard drop what earlier files hold.
    """

    first = 0

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(str(run.folder), purge_step=0)
        # `SummaryWriter.add_hparams` would write them into a run of their own.
        for summary in hparams(dict(run.settings), {}):
            self.writer._get_file_writer().add_summary(summary)

    def log(self, round: int, scalars: Mapping[str, float], tables: Mapping[str, Table]) -> None:
        """Write a round and flush, so that a killed process loses none."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, round)
        for name, table in tables.items():
            self.writer.add_text(name, to_markdown(table), round)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        """Close the file."""
        self.writer.close()


def open_run(run: TrackedRun) -> TensorBoard:
    """Open a run."""
    return TensorBoard(run)


def to_markdown(table: Table) -> str:
    """Return a table as Markdown. Texts come from clients, so that HTML and the table's own signs are escaped."""
    lines = [list(table[0]), ["---"] * len(table[0]), *(list(line.values()) for line in table)]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else html.escape(str(value), quote=False)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
