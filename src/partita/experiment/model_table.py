"""What a model consists of, and what some methods would cost on it, before any weights are loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from partita.core.model import Model, layer_tags, role_tag
from partita.core.rng import Key
from partita.core.rounds import initial_server, make_job
from partita.core.settings import Run, Training
from partita.engines.dry_run import null_update
from partita.experiment.builder import build_method
from partita.experiment.preview import DATA_DEPENDENT
from partita.models import ModelError
from partita.models.adapter_options import frozen_part
from partita.models.functional import FunctionalModel
from partita.models.hugging_face import frozen_parameters
from partita.models.loading import stored_size
from partita.models.quantization import Mode
from partita.models.without_weights import blocks_of, model_without_weights, module_without_weights
from partita.tasks.chunked_loss import CHUNK

# How the base can be stored: the name, `model.dtype` and `model.quantize`.
STORAGES: tuple[tuple[str, torch.dtype | None, Mode | None], ...] = (
    ("float32", None, None),
    ("bfloat16", torch.bfloat16, None),
    ("8bit", torch.bfloat16, "8bit"),
    ("4bit", torch.bfloat16, "4bit"),
)
ROLES, ALPHA = ("query", "value"), 16.0
VALUE_BYTES = 4  # of a trained parameter, a gradient or a moment: they are float32 whatever the base is
TRAINED_BYTES = 4 * VALUE_BYTES  # the value, its gradient, and two moments of AdamW
# Of the activations of a layer, for each token and unit of width, in 16 bits: Korthikanti et al. (2022), without maps
# of attention, which partita never stores.
ACTIVATION_BYTES = 34
INPUT_BYTES = 2  # of the input of a layer, which is all that `model.checkpointing` keeps
LOGIT_BYTES = 8  # of a logit in a chunk: in 16 bits, in float32, and its gradient


@dataclass(frozen=True)
class StorageRow:
    """A frozen base in one kind of storage.

    Attributes:
        storage: "float32", "bfloat16", "8bit" or "4bit". With the last two, what is not a linear weight is bfloat16.
        base: Bytes of the base.
        training: Bytes for training all clients of a block: the base once, and for each client the adapter and the
            activations.
        recomputing: The same with `model.checkpointing`.
        problem: Why the base cannot be stored so; "" if it can.
    """

    storage: str
    base: int = 0
    training: int = 0
    recomputing: int = 0
    problem: str = ""


@dataclass(frozen=True)
class AdapterTable:
    """A LoRA adapter over a frozen base.

    Attributes:
        rank: The rank of the factors.
        roles: The roles of the adapted weights.
        clients: The number of clients that train together.
        batch_size: The examples in a batch.
        tokens: The tokens of an example.
        trains: The number of elements that train: factors, and a task's head.
        up: Bytes that a client sends, and receives, in a round.
        checkpoint: Bytes of the parameters in a checkpoint.
        per_client: Bytes of a client's values, gradients and two moments.
        activations: Bytes of a client's activations with the base in bfloat16; in float32 they double.
        storages: One row for each kind of storage.
    """

    rank: int
    roles: tuple[str, ...]
    clients: int
    batch_size: int
    tokens: int
    trains: int
    up: int
    checkpoint: int
    per_client: int
    activations: int
    storages: tuple[StorageRow, ...]


def adapter_table(
    model: FunctionalModel, path: str, kind: str, rank: int, clients: int, batch_size: int, tokens: int
) -> AdapterTable:
    """Compute the costs of a LoRA adapter, from a model without weights.

    Args:
        model: The model.
        path: Folder or Hub id.
        kind: Name of the kind of task.
        rank: The rank of the factors.
        clients: The number of clients that train together.
        batch_size: The examples in a batch.
        tokens: The tokens of an example of text; an image has as many as patches.

    Raises:
        ModelError: If the model has no linear layer for factors.
    """
    adapted = model.adapted("lora", Key(0), rank=rank, alpha=ALPHA, roles=ROLES)
    trains = sum(value.numel() for value in adapted.initial.values())
    frozen = frozen_part(True, model.kind.outputs)
    logits = LOGIT_BYTES * CHUNK if model.kind.outputs == "vocabulary" else 0
    config: Any = model.module.config
    tokens = _patches(config) if model.kind.inputs == "image" else tokens
    rows = []
    for storage, dtype, quantize in STORAGES:
        try:
            base = _base_bytes(path, kind, frozen, dtype, quantize)
        except ModelError as error:
            rows.append(StorageRow(storage, problem=str(error)))
            continue
        kept, recomputed = _activations(model, batch_size * tokens, dtype)
        whole = base + clients * TRAINED_BYTES * trains + logits
        rows.append(StorageRow(storage, base, whole + clients * kept, whole + clients * recomputed))
    return AdapterTable(
        rank=rank,
        roles=ROLES,
        clients=clients,
        batch_size=batch_size,
        tokens=tokens,
        trains=trains,
        up=VALUE_BYTES * trains,
        checkpoint=VALUE_BYTES * trains,
        per_client=TRAINED_BYTES * trains,
        activations=_activations(model, batch_size * tokens, torch.bfloat16)[0],
        storages=tuple(rows),
    )


def _base_bytes(path: str, kind: str, frozen: str, dtype: torch.dtype | None, quantize: Mode | None) -> int:
    module = module_without_weights(path, kind)[1]
    fixed = frozen_parameters(str(module.config.model_type), module, (frozen,))
    return stored_size(module, fixed, dtype, quantize)


def _activations(model: FunctionalModel, tokens: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """Return the bytes of the activations of a client's batch: all of them, and what checkpointing keeps."""
    config: Any = model.module.config
    config = getattr(config, "vision_config", config)
    widths = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", None) or 0
    width = widths if isinstance(widths, int) else max(widths)
    layers = len({tag for tags in model.tags.values() for tag in tags if tag.startswith("layer.")})
    units = tokens * width * (2 if dtype is None else 1)
    return ACTIVATION_BYTES * layers * units, (INPUT_BYTES * layers + ACTIVATION_BYTES) * units


def _patches(config: Any) -> int:
    """Return the number of patches of an image, for a model with patches of one size."""
    config = getattr(config, "vision_config", config)
    size, patch = (
        each[0] if isinstance(each, list | tuple) else each
        for each in (getattr(config, "image_size", 224), getattr(config, "patch_size", 16))
    )
    return int(size // patch) ** 2


METHODS = ("fedavg", "fedfrozen", "safl", "fedper", "lora")
CLIENT, ROUNDS = "client", 10


@dataclass(frozen=True)
class RoleRow:
    """All parameters of one role.

    Attributes:
        role: The role.
        layers: The number of layers with such parameters; 0 if they are outside the layers.
        tensors: The number of parameters.
        parameters: The number of their elements.
        example: The name of one of them.
    """

    role: str
    layers: int
    tensors: int
    parameters: int
    example: str


@dataclass(frozen=True)
class MethodRow:
    """One client's last round of a method.

    Attributes:
        method: The name of the method.
        trains: The number of elements that train.
        up: Bytes of the parameters that the client sends.
        down: Bytes of the parameters that the client receives.
        memory: Bytes for weights, gradients and two moments, without activations.
        problem: Why the method does not fit the model; "" if it does.
    """

    method: str
    trains: int = 0
    up: int = 0
    down: int = 0
    memory: int = 0
    problem: str = ""


@dataclass(frozen=True)
class ModelTable:
    """What `partita model` prints.

    Attributes:
        path: Folder or Hub id.
        model_type: The `model_type` of transformers.
        kind: The kind of task.
        layers: The number of layers.
        roles: One row per role.
        blocks: Whether clients can train in blocks; None if a run must try it.
        why: Why not.
        methods: One row per method.
        adapter: A LoRA adapter over a frozen base; None if the model has no place for one.
        adapter_problem: Why it has none; "" if it has one.
    """

    path: str
    model_type: str
    kind: str
    layers: int
    roles: tuple[RoleRow, ...]
    blocks: bool | None
    why: str
    methods: tuple[MethodRow, ...]
    adapter: AdapterTable | None
    adapter_problem: str

    def to_json(self) -> dict[str, object]:
        """Return the fields as a dict for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """Format the two tables."""
        text = StringIO()
        console = Console(file=text, width=110)
        title = f"{self.path} · {self.model_type} · {self.kind} · {self.layers} layers"
        roles = _table(title, ("role", "layers", "tensors", "parameters", "for example"))
        for row in self.roles:
            roles.add_row(row.role, str(row.layers or "–"), f"{row.tensors:,}", f"{row.parameters:,}", row.example)
        total = [sum(getattr(row, of) for row in self.roles) for of in ("tensors", "parameters")]
        roles.add_row("all", "", *(f"{count:,}" for count in total), "", style="bold")
        console.print(roles)
        console.print(f"\n{self._blocks()}\n", soft_wrap=True)
        costs = _table("One client's round", ("method", "trains", "up, bytes", "down, bytes", "memory, MiB"))
        for cost in self.methods:
            if not cost.problem:
                numbers = (cost.trains, cost.up, cost.down, -(-cost.memory // 2**20))
                costs.add_row(cost.method, *(f"{number:,}" for number in numbers))
        console.print(costs)
        for cost in self.methods:
            if cost.problem:
                console.print(f"{cost.method}: {cost.problem}", soft_wrap=True, highlight=False)
        console.print(f"\n{NOTE}", soft_wrap=True, highlight=False)
        if self.adapter:
            self._print_adapter(console, self.adapter)
        else:
            console.print(f"LoRA over a frozen base: {self.adapter_problem}", soft_wrap=True, highlight=False)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"

    def _print_adapter(self, console: Console, adapter: AdapterTable) -> None:
        console.print(
            f"LoRA of rank {adapter.rank} on {' and '.join(adapter.roles)} over a frozen base: {adapter.trains:,} "
            f"parameters train; {adapter.up:,} bytes up and down; {adapter.checkpoint:,} bytes in a checkpoint\n",
            soft_wrap=True,
            highlight=False,
        )
        training = f"training {adapter.clients} clients, MiB"
        table = _table("Frozen base", ("storage", "base, MiB", training, "with checkpointing, MiB"))
        for row in adapter.storages:
            if not row.problem:
                table.add_row(
                    row.storage, *(f"{-(-size // 2**20):,}" for size in (row.base, row.training, row.recomputing))
                )
        console.print(table)
        for problem in {row.problem: None for row in adapter.storages if row.problem}:
            console.print(problem, soft_wrap=True, highlight=False)
        console.print(f"\n{ADAPTER_NOTE.format(adapter)}", soft_wrap=True, highlight=False)

    def _blocks(self) -> str:
        if self.blocks is None:
            return f"Blocks of clients: not known without weights; {self.why}."
        return "Blocks of clients: yes." if self.blocks else f"Blocks of clients: no, one at a time: {self.why}."


NOTE = (
    "The last of ten rounds; safl with layers drawn at random. Bytes are those of parameters, without headers and a\n"
    "method's own slots. Memory is for weights, gradients and two moments in float32, without activations.\n"
)


ADAPTER_NOTE = (
    "Training holds the base once, 16 bytes per trained parameter of each client (value, gradient, two moments), 0.5\n"
    "GiB for a chunk of the logits of a language model, and an estimate of each client's activations: 34 bytes per\n"
    "token, layer and unit of width in bfloat16, in batches of {0.batch_size} x {0.tokens} tokens. With "
    "model.checkpointing\nthese are 2 bytes, and 34 for one layer.\n"
)


def model_table(
    path: str, kind: str | None = None, rank: int = 8, clients: int = 8, batch_size: int = 8, tokens: int = 512
) -> ModelTable:
    """Describe a model from its config alone.

    Args:
        path: Folder or Hub id.
        kind: Name of the kind of task. Default: the first that fits.
        rank: Rank of the LoRA adapter.
        clients: Clients that train together, for the estimate of memory.
        batch_size: Examples in a batch, for the estimate of memory.
        tokens: Tokens of a text, for the estimate of memory.

    Raises:
        ModelError: If there is no such model, or it does not fit the kind.
    """
    model = model_without_weights(path, kind)
    blocks, why = blocks_of(model)
    adapter, problem = _adapter(model, path, rank, clients, batch_size, tokens)
    return ModelTable(
        path=path,
        model_type=str(model.module.config.model_type),
        kind=model.kind.name,
        layers=len(layer_tags(model)),
        roles=_roles(model),
        blocks=blocks,
        why=why,
        methods=tuple(_cost(name, model) for name in METHODS),
        adapter=adapter,
        adapter_problem=problem,
    )


def _adapter(
    model: FunctionalModel, path: str, rank: int, clients: int, batch_size: int, tokens: int
) -> tuple[AdapterTable | None, str]:
    try:
        return adapter_table(model, path, model.kind.name, rank, clients, batch_size, tokens), ""
    except ModelError as error:
        return None, str(error)


def _roles(model: Model) -> tuple[RoleRow, ...]:
    names: dict[str, list[str]] = {}
    for name, tags in model.tags.items():
        names.setdefault(role_tag(tags), []).append(name)
    rows = []
    for role, own in names.items():
        layers = Counter(tag for name in own for tag in model.tags[name] if tag.startswith("layer."))
        elements = sum(model.initial[name].numel() for name in own)
        rows.append(RoleRow(role, len(layers), len(own), elements, own[0]))
    return tuple(rows)


def _cost(name: str, base: Model) -> MethodRow:
    """Compute the plan of the last round of a method. What does not fit the model is said, and not an error."""
    try:
        method = build_method({"name": name, **DATA_DEPENDENT.get(name, {})})
        model = method.extend(base, Key(0)) if method.extend else base
        run = Run(method, Training(), ROUNDS, Key(0))
        job, plan = make_job(run, model, initial_server(run, model), ROUNDS - 1, CLIENT)
        plan = plan.narrow(frozenset(null_update(run, model, job).steps))
    except ValueError as error:
        return MethodRow(name, problem=str(error))
    trains, up, down, every = (
        sum(model.initial[each].numel() for each in names) for names in (plan.train, plan.up, plan.down, model.initial)
    )
    inside = getattr(model, "module", None)  # what an adapter freezes for good is in the module
    every += sum(value.numel() for value in inside.parameters()) if inside is not None else 0
    memory = TRAINED_BYTES * trains + VALUE_BYTES * (every - trains)
    return MethodRow(name, trains, VALUE_BYTES * up, VALUE_BYTES * down, memory)


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, box=None, header_style="bold", title_style="bold", title_justify="left")
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in ("role", "method", "storage", "for example") else "right"
        )
    return table
