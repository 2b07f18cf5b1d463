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
    from partita.trainers import federate, patch

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
    "FederationSettings",
    "Fitted",
    "Job",
    "Key",
    "LayerSelection",
    "Mean",
    "Method",
    "MethodError",
    "Model",
    "Names",
    "Output",
    "Phase",
    "Plan",
    "Population",
    "PrivacyRelease",
    "RoundInfo",
    "RoundResult",
    "Run",
    "Schedule",
    "Server",
    "ServerRule",
    "SimulationEngine",
    "Slots",
    "Tensors",
    "Training",
    "Update",
    "UpdateTransform",
    "average",
    "check_method",
    "compose",
    "data",
    "federate",
    "fit",
    "from_dataset",
    "load_run",
    "method",
    "methods",
    "metric",
    "models",
    "patch",
    "rounds",
    "run",
    "score",
    "share",
    "share_everything",
    "to_frame",
]

# Module -> its public names, the same as in the imports for type checkers above.
_MODULES = {
    "testing.conformance": ["check_method"],
    "core.method": ["Method"],
    "core.method_error": ["MethodError"],
    "core.client_rule": ["ClientRule", "Context", "LayerSelection", "PrivacyRelease"],
    "core.update_transform": ["UpdateTransform"],
    "core.server_rule": ["Server", "ServerRule", "average"],
    "core.compose": ["compose"],
    "core.update": ["Aggregate", "Update"],
    "core.data": ["Batch", "ClientData", "Examples", "Population"],
    "core.model": ["Model", "Output"],
    "core.optim": ["SGD", "AdamW", "Schedule"],
    "core.plan": ["Phase", "Plan", "RoundInfo", "share", "share_everything"],
    "core.rng": ["Key"],
    "core.rounds": ["ClientFailure", "Engine", "RoundResult", "rounds"],
    "core.client": ["ClientError", "ClientState", "Job"],
    "core.tensors": ["Mean", "Names", "Slots", "Tensors"],
    "core.settings": ["FederationSettings", "Run", "Training"],
    "engines.simulation": ["SimulationEngine"],
    "engines.availability": ["Availability"],
    "evaluation": ["score"],
    "evaluation.own_metrics": ["metric"],
    "runs": ["Fitted", "load_run", "run", "to_frame"],
    "fitting": ["fit"],
    "data.objects": ["from_dataset"],
    "methods": ["method"],
    "trainers": ["federate", "patch"],
}
_MODULE_OF = {name: f"partita.{module}" for module, names in _MODULES.items() for name in names}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("partita")
    except PackageNotFoundError as error:
        raise AttributeError("partita has no version because it is not installed: pip install -e .") from error


if not TYPE_CHECKING:  # with a module __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = _version()
        elif name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        elif name in __all__:
            value = import_module(f"partita.{name}")
        else:
            raise AttributeError(f"module 'partita' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
        globals()[name] = value  # later accesses do not call this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
