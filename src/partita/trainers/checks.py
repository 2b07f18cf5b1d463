"""What a Trainer cannot do for a federation. Everything is refused before anything trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from partita.core import tensors
from partita.core.client_rule import ClientRule, overrides
from partita.core.method import Method
from partita.core.method_error import MethodError
from partita.core.options import OptionError
from partita.core.plan import Plan, RoundInfo, plan_for
from partita.core.server_rule import ServerRule
from partita.core.settings import Run, RunError, Training
from partita.trainers.model import TakenApart, TrainerModel

# The tables that `federate` takes, with their keys; None for all.
OWN_KEYS = {
    "federation": "cohort client_dropout min_updates skip_failed_clients max_norm max_examples "
    "clients_have_initial_model",
    "evaluate": "every personal_every max_clients drift",
    "training": "keep_optimizer",
    "stop": "epsilon",
}
TABLES: Mapping[str, list[str] | None] = {
    **{table: keys.split() for table, keys in OWN_KEYS.items()},
    **dict.fromkeys(["checkpoint", "track", "sampling", "privacy", "secure_aggregation", "label"]),
}


def check_tables(tables: Mapping[str, Any]) -> None:
    """Refuse tables and settings that say what a Trainer says, or that need examples or a model of partita.

    Raises:
        OptionError: If there is one.
    """
    for table, value in tables.items():
        if table not in TABLES:
            raise OptionError(f"{table} is the Trainer's own here; leave it out, and choose from: {', '.join(TABLES)}")
        keys = TABLES[table]
        if keys is not None and (others := sorted(value.keys() - {*keys})):
            raise OptionError(
                f"{table}.{others[0]} does not reach into a Trainer; leave it out, and set what the Trainer has itself "
                f"in its TrainingArguments ({table} takes {', '.join(keys)})"
            )
    unit = (tables.get("privacy") or {"unit": "client"}).get("unit", "example")
    if unit != "client":
        raise OptionError(
            f"privacy.unit is '{unit}', which needs the gradient of each example, and a Trainer has none; set "
            "privacy.unit to 'client', or train with partita.run"
        )


def check_trainer(client: str, trainer: Any) -> None:
    """Refuse a Trainer whose model or optimizer cannot be put in and out between rounds.

    Raises:
        RunError: If it is one.
    """
    args = trainer.args
    fsdp = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    broken = {
        "FSDP1, DeepSpeed or tensor parallelism takes its parameters apart; use DDP, or FSDP2 with fsdp=True and "
        "fsdp_config={'version': 2} in its TrainingArguments": (
            (fsdp is not None and fsdp.fsdp_version != 2)
            or trainer.is_deepspeed_enabled
            or getattr(trainer, "is_fsdp_xla_enabled", False)
            or getattr(trainer, "is_distributed_loading_by_transformers", False)
        ),
        "FSDP moves its parameters to the CPU; leave cpu_offload out": isinstance(
            fsdp and fsdp.cpu_offload, CPUOffloadPolicy
        ),
        "it copies its model to several GPUs in one process; start it with torchrun, or show it one GPU": args.n_gpu
        > 1,
        "model_init makes a new model in every train(); hand over a model": trainer.model_init is not None,
        "it has an optimizer or a scheduler already, but every round makes new ones; leave `optimizers` out, name one "
        "with optim or optimizer_cls_and_kwargs, and call train() only after partita has the Trainer": (
            trainer.optimizer is not None or trainer.lr_scheduler is not None
        ),
        "auto_find_batch_size trains a part of a round twice; leave it out": args.auto_find_batch_size,
        "data_seed gives every round the same order of examples; leave it out, the seed of the run says it": (
            args.data_seed is not None
        ),
    }
    for reason, holds in broken.items():
        if holds:
            raise RunError(f"the Trainer of '{client}' cannot take part: {reason}")


def check_rows(client: str, trainer: Any) -> None:
    """Refuse a Trainer without examples, as a server's may be.

    Raises:
        RunError: If it is one.
    """
    if trainer.train_dataset is None:
        raise RunError(f"the Trainer of '{client}' cannot take part: it has no train_dataset")


def size_of(trainer: Any) -> int:
    """Return the number of training examples; of a stream, those of `max_steps`."""
    args = trainer.args
    try:
        return len(trainer.train_dataset)
    except TypeError:
        return int(args.max_steps * args.train_batch_size * args.world_size * args.gradient_accumulation_steps)


def training_of(trainer: Any, keep_optimizer: bool = False) -> Training:
    """Return the settings of a Trainer, as far as rules and the server read them. No client trains by them."""
    args, sgd = trainer.args, optimizer_name(trainer).startswith("sgd")
    return Training(
        lr=args.learning_rate,
        optimizer="sgd" if sgd else "adamw",
        momentum=_momentum(trainer) if sgd else 0.0,
        keep_optimizer=keep_optimizer,
        batch_size=1,  # the server refuses more steps than those of one example each
        epochs=max(1, math.ceil(args.num_train_epochs)),
        steps=args.max_steps if args.max_steps > 0 else None,
        clip=args.max_grad_norm or None,
    )


def optimizer_name(trainer: Any) -> str:
    """Return the name of a Trainer's optimizer, as rules list it in `optimizers`."""
    args, own = trainer.args, trainer.optimizer_cls_and_kwargs
    name = own[0].__name__.lower() if own else str(plain(args.optim))
    name = "adamw" if "adamw" in name else name
    name = "sgd with momentum" if name == "sgd" and _momentum(trainer) else name
    equal = str(plain(args.lr_scheduler_type)).startswith("constant") and not args.warmup_steps
    return name if equal else f"{name} with unequal learning rates"


def plain(value: Any) -> Any:
    """Return a value of TrainingArguments without its enumeration."""
    return getattr(value, "value", value)


def _momentum(trainer: Any) -> float:
    _, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    return float(options.get("momentum", 0.0))


def check_method(method: Method) -> None:
    """Refuse a method that needs examples, gradients at other points, or a model of partita.

    Raises:
        MethodError: If it is one.
    """
    why = ""
    if method.extend is not None:
        why = "it adds parameters to the model; add them before, with PEFT"
    elif method.shape is not None:
        why = "it gives clients models of other shapes; use partita.run"
    elif method.pool:
        why = "it pools all data; give one Trainer all data"
    elif method.adapt is not None:
        why = "it fine-tunes a copy for each test; set method.finetune = 0"
    elif method.privacy is not None:
        why = "it clips the gradient of each example; use partita.run"
    for rule in method.client_rules:
        what = type(rule).__name__
        if overrides(rule, "step_gradient"):
            why = why or f"{what} evaluates gradients at points of its own (step_gradient); use partita.run"
        elif overrides(rule, "optimizer_state"):
            why = why or f"{what} starts from an optimizer state of the server; use partita.run"
        elif rule.uses_data or rule.per_example:
            why = why or f"{what} reads the examples of a client or the output of its model; use partita.run"
    if why:
        raise MethodError(f"{method.name} cannot run on a Trainer, because {why}")


def check_steps(method: Method, client: str, trainer: Any) -> None:
    """Refuse an optimizer or a clipping of gradients for which a rule is not derived.

    Raises:
        MethodError: If there is one.
    """
    name = optimizer_name(trainer)
    rules: tuple[ClientRule | ServerRule, ...] = (*method.client_rules, method.server_rule)
    for rule in rules:
        what = f"{method.name}: {type(rule).__name__}"
        if rule.optimizers is not None and name not in rule.optimizers:
            known = sorted(each for each in rule.optimizers if " with " not in each)
            raise MethodError(
                f"{what} is derived for {' or '.join(known)}, but the Trainer of '{client}' steps with {name}; set "
                f"optim = '{'adamw_torch' if known[0] == 'adamw' else known[0]}' without momentum, lr_scheduler_type = "
                "'constant' and no warm-up in its TrainingArguments"
            )
        if not rule.allows_clip and trainer.args.max_grad_norm:
            raise MethodError(
                f"{what} is derived for steps along the whole gradient, but the Trainer of '{client}' clips it; set "
                "max_grad_norm = 0 in its TrainingArguments"
            )


def check_plans(run: Run, model: TrainerModel, clients: list[str]) -> None:
    """Refuse plans of several phases, and those that take a fused projection apart.

    Raises:
        MethodError: If there is one.
    """
    apart = TakenApart(model)
    seen = set[Plan]()
    for info in (RoundInfo(number, run.rounds, client) for client in clients for number in range(run.rounds)):
        plan = plan_for(run.method.plan, apart, info)
        if plan in seen:
            continue
        seen.add(plan)
        check_phases(run.method.name, plan)
        for name, parts in apart.parts.items():
            if any(0 < len(parts & chosen) < len(parts) for chosen in (plan.train, plan.up, plan.down, plan.keep)):
                raise MethodError(
                    f"{run.method.name}: round {info.round} treats queries, keys and values differently, but '{name}' "
                    "holds them in one parameter; use partita.run, which splits it, or another model"
                )


def check_phases(method: str, plan: Plan) -> None:
    """Refuse a plan that a single call of `train()` does not carry out.

    Raises:
        MethodError: If it has several phases or numbers of epochs of its own, or trains nothing.
    """
    if len(plan.phases) != 1 or plan.phases[0].epochs is not None:
        raise MethodError(
            f"{method}: a round has {len(plan.phases)} phases with epochs of their own, and a Trainer trains one; use "
            "a method that trains all its parameters together"
        )


def check_alike(models: Mapping[str, TrainerModel], first: str) -> None:
    """Refuse clients whose models differ in what trains, in shapes or in frozen weights.

    Raises:
        RunError: If two differ.
    """
    bases: dict[int, str] = {}
    for client, model in models.items():
        key = id(next(iter(model.parameters.values()), None))  # Trainers may share a module
        if key not in bases:
            bases[key] = tensors.sha256(model.frozen_weights()) if model.frozen_tags else ""
        here, there = _forms(model), _forms(models[first])
        for name in sorted(here.keys() | there.keys()):
            one, other = here.get(name, "frozen"), there.get(name, "frozen")
            if one != other:
                raise RunError(
                    f"'{name}' is {one} at '{client}', but {other} at '{first}'; give all Trainers the same model"
                )
        if len({*bases.values()}) > 1:
            raise RunError(f"the frozen weights of '{client}' and '{first}' differ; give all Trainers the same base")


def _forms(model: TrainerModel) -> dict[str, str]:
    return {name: f"{tuple(value.shape)} and {value.dtype}" for name, value in model.initial.items()}
