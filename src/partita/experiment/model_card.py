"""The model card of an exported folder: a README.md that the Hugging Face Hub shows.

It holds what the run recorded and nothing that a privacy guarantee does not cover. Names come from configs and data
sets, so they are escaped; local folders appear by their last name only.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from partita import methods
from partita.core.given import is_given
from partita.evaluation import Evaluator
from partita.experiment import run_folder
from partita.experiment.exported import Export, Form
from partita.experiment.recorded_model import RecordedModel
from partita.methods.cards import card as method_card
from partita.models.from_task import HUB_ID
from partita.privacy.disclosure import OUTSIDE_ROWS
from partita.record import file_names
from partita.record.metric import Metric
from partita.record.row import QUANTITIES, Unit
from partita.storage.atomic_files import read_json
from partita.storage.safe_text import printable

FILE = "README.md"
LABELS_SHOWN = 50
LIBRARIES: dict[Form, str] = {"model": "transformers", "adapter": "peft", "prompts": "partita"}
# By kind of task, the Hub's name of it. Others have none.
PIPELINES = {
    "image": "image-classification",
    "multi-label image": "image-classification",
    "segmentation": "image-segmentation",
    "text": "text-classification",
    "multi-label text": "text-classification",
    "text regression": "text-classification",
    "tokens": "token-classification",
    "lm": "text-generation",
    "chat": "text-generation",
    "choice": "text-generation",
    "seq2seq": "text2text-generation",
}
USE: dict[Form, str] = {
    "model": """from transformers import AutoTokenizer, {auto_class}

model = {auto_class}.from_pretrained({place!r})""",
    "adapter": """from peft import PeftModel
from transformers import {auto_class}

base = {auto_class}.from_pretrained({base!r}{labels})
model = PeftModel.from_pretrained(base, {place!r})""",
    "prompts": """from load_prompts import load_prompts  # a file in this folder

model = load_prompts({place!r})  # from pixel values to logits""",
}


def escaped(text: object) -> str:
    """Return text that Markdown and HTML show as it is, on one line."""
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([!-%'-,./:=?@\[-`{-~-])", r"\\\1", plain)


def write_card(folder: Path, export: Export, recorded: RecordedModel, place: str, clients: int = 0) -> None:
    """Write the model card.

    Args:
        folder: The exported folder.
        export: Its description.
        recorded: The model and its run.
        place: Hub id or name of the folder, for the example of use.
        clients: Number of clients whose own models lie beside it.
    """
    facts = _Facts(export, recorded)
    data = ModelCardData(
        base_model=export.base.name if export.base.on_hub else None,
        datasets=[facts.dataset] if facts.dataset else None,
        library_name=LIBRARIES[export.form],
        pipeline_tag=PIPELINES.get(export.kind),
        tags=["federated-learning", "partita", *re.findall(r"[\w-]+", export.method)[:8]],
        model_name=facts.title,
        eval_results=list(facts.eval_results()) or None,
    )
    body = "\n\n".join(part for part in facts.sections(place, clients) if part)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
    card.save(folder / FILE)


class _Facts:
    """What a card says about one run."""

    def __init__(self, export: Export, recorded: RecordedModel) -> None:
        self.export, self.recorded = export, recorded
        self.config, self.task = recorded.experiment.config, recorded.experiment.federation.task
        self.unit: Unit | None = self.config.privacy.unit if self.config.privacy else None
        rows = list(run_folder.read_rows(recorded.folder))
        self.rows = rows[: export.round]
        self.environment: Mapping[str, Any] = read_json(recorded.folder / file_names.ENVIRONMENT)
        self.title = f"{export.base.name.rpartition('/')[2] or self.config.model['name']} by {export.method}"
        path = str(self.config.data.get("path", ""))
        self.dataset = path if "/" in path and HUB_ID.fullmatch(path) and not Path(path).exists() else ""
        self.data_name = (
            self.dataset
            or ("" if is_given(path) else Path(path).name)
            or str(self.config.data["name"]).rpartition(":")[2]
        )

    def shows(self, what: str) -> bool:
        """Return whether a quantity may be shown: under privacy, only if the guarantee covers it."""
        if self.unit is None:
            return True
        return {**QUANTITIES, **OUTSIDE_ROWS}[what].under(self.unit) in ("public", "charged", "noised")

    def latest(self, key: str) -> tuple[int, Mapping[str, Any]]:
        """Return the newest recorded table of scores, and after how many rounds it was measured."""
        rows: Iterable[Mapping[str, Any]] = self.rows if self.shows(key) else ()
        found = [(row["round"] + 1, row[key]) for row in rows if row.get(key)]
        return found[-1] if found else (0, {})

    def personal(self) -> tuple[int, Mapping[str, Mapping[str, float]]]:
        """Return the newest scores on the clients' own test sets: by metric and client."""
        return self.latest("personal")

    def eval_results(self) -> Iterator[EvalResult]:
        """Return the scores as the Hub shows them."""
        client = self.export.client
        if client is None:
            scores, split = self.latest("test")[1], "test"
        else:
            split = "test set of the client"
            scores = {name: by[client] for name, by in self.personal()[1].items() if client in by}
        for metric in self.metrics():
            value = _finite(scores.get(metric.name))
            if value is not None:
                yield EvalResult(
                    task_type=PIPELINES.get(self.export.kind, "other"),
                    dataset_type=self.dataset or "own",
                    dataset_name=self.data_name,
                    dataset_split=split,
                    metric_type=metric.name,
                    metric_name=metric.name,
                    metric_value=value,
                )

    def metrics(self) -> tuple[Metric, ...]:
        evaluator: Evaluator = self.recorded.experiment.evaluator
        return evaluator.metrics

    def sections(self, place: str, clients: int) -> Iterator[str]:
        """Return the parts of the card's text."""
        export = self.export
        whose = f"the own model of client {escaped(export.client)}" if export.client is not None else "the shared model"
        yield f"# {escaped(self.title)}"
        yield (
            f"This is {whose} of a federated run with partita, after "
            f"{export.round} of {self.config.rounds} rounds: a task of kind *{escaped(export.kind)}*."
        )
        if clients:
            yield (
                f"`shared/` holds the shared model. `clients/` holds what differs from it in the models of {clients} "
                "clients. `python load_client.py NAME FOLDER` writes the whole model of a client to a folder; it needs "
                "torch and safetensors only."
            )
        if export.labels:
            shown = ", ".join(escaped(label) for label in export.labels[:LABELS_SHOWN])
            more = len(export.labels) - LABELS_SHOWN
            yield f"Outputs: {shown}" + (f", and {more} more." if more > 0 else ".")
        yield self.usage(place)
        yield from self.training()
        yield from self.scores()
        yield from self.privacy()
        yield from self.reproduction()

    def usage(self, place: str) -> str:
        auto_class = self.task.kind.auto_class if "prompt" not in self.export.model else "AutoModel"
        count = len(self.export.labels)
        labels = f", num_labels={count}" if count and self.export.form == "adapter" else ""
        base = self.export.base.name or "BASE"
        text = USE[self.export.form].format(auto_class=auto_class, place=place, base=base, labels=labels)
        if self.task.tokenizer is None:
            text = text.replace("AutoTokenizer, ", "")
        elif self.export.form == "model":
            text += f"\ntokenizer = AutoTokenizer.from_pretrained({place!r})"
        return f"## Use\n\n```python\n{printable_lines(text)}\n```"

    def training(self) -> Iterator[str]:
        export, config = self.export, self.config
        base = "random weights"
        if export.base.name:
            base = escaped(export.base.name) + ("" if export.base.on_hub else " (a local folder)")
        if export.base.digest:
            base += f", frozen weights with SHA-256 {_code(export.base.digest)}"
        facts = [("base model", base), ("method", escaped(export.method)), ("data", escaped(self.data_name))]
        if self.shows("population"):
            facts.append(("clients", str(len(self.recorded.experiment.federation.clients))))
        facts.append(("rounds", str(export.round)))
        if self.shows("bytes"):
            for way, name in ("up", "sent by clients"), ("down", "sent to clients"):
                facts.append((name, f"{sum(int((row.get('bytes') or {})[way]) for row in self.rows):,} bytes"))
        facts.append(("seed", str(config.seed)))
        yield "## Training\n\n" + _table(("", ""), facts)
        for part in export.method.split("+"):
            if part in methods.INDEX:
                idea = method_card(part).partition("## Idea\n")[2].partition("\n## ")[0].strip()
                yield f"**{part}.** {idea}"

    def scores(self) -> Iterator[str]:
        done, test = self.latest("test")
        own_done, personal = self.personal()
        lines: list[tuple[str, ...]] = []
        for metric in self.metrics():
            by_client = [
                value for each in personal.get(metric.name, {}).values() if (value := _finite(each)) is not None
            ]
            cells = [_number(test.get(metric.name))]
            if personal:
                cells += [_number(value) for value in _spread(by_client, metric)]
            if any(cell != MISSING for cell in cells):
                lines.append((escaped(metric.name), *cells))
        if not lines:
            return
        heads = ["metric", "central test set"]
        told = [f"The central test set was scored after {done} rounds." if test else ""]
        if personal:
            heads += ["mean over clients", "spread over clients", "worst tenth"]
            told.append(
                f"Clients' models were scored on their own test sets after {own_done} rounds; the spread is the "
                "standard deviation over clients, and the worst tenth the mean over the worst 10% of them."
            )
        yield "## Scores\n\n" + _table(heads, lines) + "\n\n" + " ".join(part for part in told if part)

    def privacy(self) -> Iterator[str]:
        if self.unit is None:
            return
        about = read_json(self.recorded.folder / file_names.PRIVACY)
        spent = [row["privacy"].get("epsilon") for row in self.rows if row.get("privacy")]
        epsilon = _number(spent[-1] if spent else None)
        group = f" ({_code(about['group'])})" if about.get("group") else ""
        lines = [("unit", f"{self.unit}{group}"), ("epsilon", epsilon), ("delta", _number(about.get("delta")))]
        lines.append(("accountant", escaped(about.get("accountant", MISSING))))
        told = "Everything in this card is covered by the guarantee, or does not depend on the data of clients."
        audit = self.recorded.folder / file_names.AUDIT
        found = read_json(audit) if audit.is_file() else {}
        bound = found.get("bound")
        if bound and found.get("group", about.get("group")) == about.get("group"):  # an audit may attack other units
            share = f"{100 * float(bound['confidence']):g}%"
            lines.append(("audited lower bound of epsilon", f"{_number(bound['epsilon'])} (confidence {share})"))
            told = (
                "The audit trained the model again with canaries. Its bound is measured on raw examples, so epsilon "
                "does not cover it. It covers all else in this card that depends on the data of clients."
            )
        yield "## Privacy\n\n" + _table(("", ""), lines) + "\n\n" + told

    def reproduction(self) -> Iterator[str]:
        known = ("partita", "torch", "transformers", "numpy", "safetensors", "python", "system", "device")
        lines = [(name, _code(self.environment[name])) for name in known if name in self.environment]
        lines.append(("run", _code(self.export.run)))
        result = run_folder.finished(self.recorded.folder)
        if result and self.shows("digest") and result.get("rounds") == self.export.round:
            lines.append(("digest of the result", _code(result.get("digest", MISSING))))
        hub_ids = {name for name in (self.dataset, self.export.base.name if self.export.base.on_hub else "") if name}
        command = portable_command(str(self.environment.get("command", "")), hub_ids)
        yield "## Reproduce\n\n" + _table(("", ""), lines) + f"\n\n```sh\n{printable_lines(command)}\n```"


def portable_command(command: str, hub_ids: Iterable[str] = ()) -> str:
    """Return the command of a run with file names in place of paths.

    Args:
        command: The recorded command. Other programs than partita's are replaced by the run's own config.
        hub_ids: Ids on the Hub, which stay.
    """
    if not command.startswith("partita "):
        return "partita run --config config.toml"  # of the run folder
    kept = {*hub_ids}

    def shorten(found: re.Match[str]) -> str:
        return found[0] if found[0] in kept else re.split(r"[/\\]", found[0].rstrip("/\\"))[-1]

    return re.sub(r"[^\s=,'\"\[\]{}]+", shorten, command)


def printable_lines(text: str) -> str:
    """Return text for a fenced block: printable, and without fences of its own."""
    return "\n".join(printable(line).replace("`", "'") for line in text.split("\n"))


MISSING = "–"


def _code(text: object) -> str:
    """Return text as code in a table."""
    return f"`{printable_lines(str(text)).replace('|', ' ')}`"


def _number(value: object) -> str:
    known = _finite(value)
    return MISSING if known is None else f"{known:.4g}"


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _spread(values: Sequence[float], metric: Metric) -> tuple[float | None, float | None, float | None]:
    """Return mean, standard deviation over clients, and mean of the worst tenth."""
    if not values:
        return None, None, None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return statistics.fmean(values), deviation, statistics.fmean(metric.worst_tenth(values))


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
