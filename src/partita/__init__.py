"""partita: federated fine-tuning of Transformers. Say which parts train, which travel, and which stay."""

from partita import data, methods, models
from partita.conformance import check_method
from partita.core.method import Aggregate, Context, Local, Method, Rule, Server, Transform, Update, average, compose
from partita.core.model import Batch, ClientData, Examples, Model, Output, Population
from partita.core.optim import SGD, AdamW, Schedule
from partita.core.plan import Phase, Plan, Turn, share, share_everything
from partita.core.rng import Key
from partita.core.rounds import Round, rounds
from partita.core.run import Run, Training
from partita.engines.embedded import Embedded
from partita.engines.faults import Faults
from partita.evaluate import score

__all__ = [
    "SGD",
    "AdamW",
    "Aggregate",
    "Batch",
    "ClientData",
    "Context",
    "Embedded",
    "Examples",
    "Faults",
    "Key",
    "Local",
    "Method",
    "Model",
    "Output",
    "Phase",
    "Plan",
    "Population",
    "Round",
    "Rule",
    "Run",
    "Schedule",
    "Server",
    "Training",
    "Transform",
    "Turn",
    "Update",
    "average",
    "check_method",
    "compose",
    "data",
    "methods",
    "models",
    "rounds",
    "score",
    "share",
    "share_everything",
]
