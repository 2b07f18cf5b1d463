"""partita: federated fine-tuning of Transformers. Say which parts train, which travel, and which stay.

Names are imported on first access, so that a program imports only what it uses and `partita --help` does not import
torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.platform == "win32":  # file writes, locks and memory checks use POSIX calls
    raise ImportError("partita needs Linux or macOS; on Windows, use the Windows Subsystem for Linux (WSL)")

if TYPE_CHECKING:
    from partita import data, methods, models
    from partita.core.client import ClientError, ClientState, Job
    from partita.core.client_rule import ClientRule, Context, LayerSelection, PrivacyRelease
    from partita.core.compose import compose
    from partita.core.data import Batch, ClientData, Examples, Population
    from partita.core.method import Method
    from partita.core.method_error import MethodError
    from partita.core.model import Model, Output
    from partita.core.optim import SGD, AdamW, Schedule
    from partita.core.plan import Phase, Plan, RoundInfo, share, share_everything
    from partita.core.rng import Key
    from partita.core.rounds import ClientFailure, Engine, RoundResult, rounds
    from partita.core.server_rule import Server, ServerRule, average
    from partita.core.settings import FederationSettings, Run, Training
    from partita.core.tensors import Mean, Names, Slots, Tensors
    from partita.core.update import Aggregate, Update
    from partita.core.update_transform import UpdateTransform
    from partita.data.objects import from_dataset
    from partita.engines.availability import Availability
    from partita.engines.simulation import SimulationEngine
    from partita.evaluation import score
    from partita.evaluation.own_metrics import metric
    from partita.fitting import fit
    from partita.methods import method
    from partita.runs import Fitted, load_run, run, to_frame
    from partita.testing.conformance import check_method

    __version__: str

__all__ = [
    "SGD",
    "AdamW",
    "Aggregate",
    "Availability",
    "Batch",
    "ClientData",
    "ClientError",
    "ClientFailure",
    "ClientRule",
    "ClientState",
    "Context",
    "Engine",
    "Examples",
    "Fitted",
