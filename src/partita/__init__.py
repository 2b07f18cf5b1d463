"""partita: federated fine-tuning of Transformers. Say which parts train, which travel, and which stay.

Names are imported on first access, so that a program imports only what it uses and `partita --help` does not import
torch.
"""

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if sys.platform == "win32":  # file writes, locks and memory checks use POSIX calls
    raise ImportError("partita needs Linux or macOS; on Windows, use the Windows Subsystem for Linux (WSL)")

if TYPE_CHECKING:
    from partita import data as data
    from partita import methods as methods
    from partita import models as models
    from partita.core.client_rule import ClientRule, Context
    from partita.core.compose import compose
    from partita.core.dp_settings import PrivacySettings
    from partita.core.method import Method
    from partita.core.model import Model
    from partita.core.options import Range
    from partita.core.plan import Phase, Plan, RoundInfo, share
    from partita.core.rng import Key
    from partita.core.rounds import Listener, rounds
    from partita.core.server_rule import ServerRule, average
    from partita.core.settings import FederationSettings, Run, Training
    from partita.core.update import Update
    from partita.core.update_transform import UpdateTransform
    from partita.data import Table, Task
    from partita.data import load as task
    from partita.data.objects import from_dataset
    from partita.engines.simulation import SimulationEngine
    from partita.evaluation import score
    from partita.evaluation.own_metrics import metric
    from partita.fitting import fit
    from partita.methods import method
    from partita.models import build as model
    from partita.runs import Fitted, load_run, run, to_frame
    from partita.testing.conformance import check_method
    from partita.trainers import federate, patch

    __version__: str

__all__ = [
    "ClientRule",
    "Context",
    "FederationSettings",
    "Fitted",
    "Key",
    "Listener",
    "Method",
    "Model",
    "Phase",
    "Plan",
    "PrivacySettings",
    "Range",
    "RoundInfo",
    "Run",
    "ServerRule",
    "SimulationEngine",
    "Table",
    "Task",
    "Training",
    "Update",
    "UpdateTransform",
    "average",
    "check_method",
    "compose",
    "federate",
    "fit",
    "from_dataset",
    "load_run",
    "method",
    "metric",
    "model",
    "patch",
    "rounds",
    "run",
    "score",
    "share",
    "task",
    "to_frame",
]

# What for -> name -> where it is, the same as in the imports for type checkers above.
_PLACES = {
    "run": {
        "fit": "fitting.fit",
        "patch": "trainers.patch",
        "federate": "trainers.federate",
        "run": "runs.run",
        "load_run": "runs.load_run",
        "to_frame": "runs.to_frame",
        "score": "evaluation.score",
        "Fitted": "runs.Fitted",
    },
    "set": {
        "Training": "core.settings.Training",
        "FederationSettings": "core.settings.FederationSettings",
        "PrivacySettings": "core.dp_settings.PrivacySettings",
        "Range": "core.options.Range",
        "Run": "core.settings.Run",
        "metric": "evaluation.own_metrics.metric",
    },
    "bring": {
        "from_dataset": "data.objects.from_dataset",
        "Task": "data.Task",
        "Table": "data.Table",
        "Model": "core.model.Model",
        "task": "data.load",
        "model": "models.build",
        "method": "methods.method",
    },
    "write a method": {
        "Method": "core.method.Method",
        "Plan": "core.plan.Plan",
        "Phase": "core.plan.Phase",
        "RoundInfo": "core.plan.RoundInfo",
        "share": "core.plan.share",
        "ClientRule": "core.client_rule.ClientRule",
        "Context": "core.client_rule.Context",
        "ServerRule": "core.server_rule.ServerRule",
        "UpdateTransform": "core.update_transform.UpdateTransform",
        "Update": "core.update.Update",
        "average": "core.server_rule.average",
        "compose": "core.compose.compose",
        "check_method": "testing.conformance.check_method",
    },
    "own the loop": {
        "rounds": "core.rounds.rounds",
        "SimulationEngine": "engines.simulation.SimulationEngine",
        "Listener": "core.rounds.Listener",
        "Key": "core.rng.Key",
    },
}
_PLACE_OF = {name: place for names in _PLACES.values() for name, place in names.items()}
_PACKAGES = ("data", "methods", "models")
_OLD = {  # names of before 0.2, which go with the next release
    "RecordedRun": "runs.Fitted",
    "SGD": "core.optim.SGD",
    "AdamW": "core.optim.AdamW",
    "Schedule": "core.optim.Schedule",
    "Aggregate": "core.update.Aggregate",
    "Availability": "engines.availability.Availability",
    "Batch": "core.data.Batch",
    "ClientData": "core.data.ClientData",
    "Examples": "core.data.Examples",
    "Population": "core.data.Population",
    "ClientError": "core.client.ClientError",
    "ClientState": "core.client.ClientState",
    "Job": "core.client.Job",
    "ClientFailure": "core.rounds.ClientFailure",
    "Engine": "core.rounds.Engine",
    "RoundResult": "core.rounds.RoundResult",
    "LayerSelection": "core.client_rule.LayerSelection",
    "PrivacyRelease": "core.client_rule.PrivacyRelease",
    "MethodError": "core.method_error.MethodError",
    "Output": "core.model.Output",
    "Server": "core.server_rule.Server",
    "Mean": "core.tensors.Mean",
    "Names": "core.tensors.Names",
    "Slots": "core.tensors.Slots",
    "Tensors": "core.tensors.Tensors",
    "share_everything": "core.plan.share_everything",
}


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
        elif name in _PLACE_OF:
            value = _at(_PLACE_OF[name])
        elif name in _PACKAGES:
            value = import_module(f"partita.{name}")
        elif name in _OLD:
            warnings.warn(
                f"partita.{name} is partita.{_OLD[name]} since 0.2; the old name goes in the next release",
                DeprecationWarning,
                stacklevel=2,
            )
            return _at(_OLD[name])
        else:
            raise AttributeError(f"module 'partita' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
        globals()[name] = value  # later accesses do not call this function
        return value

    def _at(place: str) -> object:
        module, _, name = place.rpartition(".")
        return getattr(import_module(f"partita.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
