"""The kinds of tasks. A kind says what a model takes and predicts, by which loss it trains, and how it is scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch

from partita.evaluation.answers import Answers, Choices
from partita.evaluation.evaluator import Evaluator
from partita.evaluation.generation import GeneratedText
from partita.evaluation.metrics import Accuracy, Entities, MultiLabel, NextToken, Regression, SingleLabel
from partita.evaluation.segmentation import Segmentation
from partita.tasks import losses

Inputs = Literal["image", "text"]
# One prediction per image, text, token or pixel. "lm" and "seq2seq": logits of the next token, of the text itself or of
# the text that answers it.
Head = Literal["image", "text", "tokens", "lm", "seq2seq", "segmentation"]
Outputs = Literal["classes", "numbers", "vocabulary"]
ProblemType = Literal["multi_label_classification", "regression"]
Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation, per channel or one for all
Loss: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"  # (logits, targets) -> (example,)


@dataclass(frozen=True)
class AnyClasses:
    """Builds the same evaluator for all classes. Not a lambda, because kinds are pickled with their models."""

    evaluator: Evaluator

    def __call__(self, classes: tuple[str, ...]) -> Evaluator:
        return self.evaluator


@dataclass(frozen=True)
class TaskKind:
    """A kind of task. Everything that depends on the kind reads it here.

    Attributes:
        name: Name for error messages.
        inputs: "image": "pixel_values" (example, channel, size, size).
            "text": "input_ids" and "attention_mask" (example, token). Pairs of texts may also have "token_type_ids",
            sequence to sequence has "decoder_input_ids", and packed rows have "position_ids" and "segment_ids".
        head: What the model predicts. Selects the forward function of an architecture.
        auto_class: Class of transformers that loads a pretrained model with this head.
        loss: Loss of each example.
        evaluator: Builds the evaluator from the names of the outputs. The evaluator's `primary` metric judges a run.
        one_class: Whether the target of an example is one class (example,). Splits by label need it.
        outputs: What the logits stand for. "classes" and "numbers": one class or one target for each name in
            `TaskInfo.classes`. The head belongs to the task and may be missing in a checkpoint. "vocabulary": the
            tokens. The task has no names, and the head is the checkpoint's.
        problem_type: `problem_type` in the config of transformers, which then uses the same loss.
    """

    name: str
    inputs: Inputs
    head: Head
    auto_class: str
    loss: Loss
    evaluator: Callable[[tuple[str, ...]], Evaluator]
    one_class: bool = False
    outputs: Outputs = "classes"
    problem_type: ProblemType | None = None


class TaskInfo(Protocol):
    """The properties of a task that models need."""

    @property
    def kind(self) -> TaskKind:
        """What a model takes and predicts, and its loss."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the model's outputs: classes or targets. Empty for language modeling."""
        ...

    @property
    def channels(self) -> int:
        """Channels of the images; 0 for other inputs."""
        ...

    @property
    def size(self) -> int:
        """Side of the square images in pixels; 0 for other inputs."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Upper bound of token ids, exclusive; 0 for inputs that are not text."""
        ...

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest padded batch; 0 for inputs that are not text."""
        ...

    @property
    def packed(self) -> bool:
        """Whether a row to train on holds several examples, which must not attend to one another."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the texts, which is saved with a model; None for other inputs."""
        ...

    @property
    def normalization(self) -> Normalization | None:
        """How pixels from 0 to 255 were scaled, which is saved with a model; None for other inputs."""
        ...


IMAGE = TaskKind(
    name="image",
    inputs="image",
    head="image",
    auto_class="AutoModelForImageClassification",
    loss=losses.cross_entropy,
    evaluator=AnyClasses(Accuracy()),
    one_class=True,
)
MULTI_LABEL_IMAGE = TaskKind(
    name="multi-label image",
    inputs="image",
    head="image",
    auto_class="AutoModelForImageClassification",
    loss=losses.binary_cross_entropy,
    evaluator=AnyClasses(MultiLabel()),
    problem_type="multi_label_classification",
)
TEXT = TaskKind(
    name="text",
    inputs="text",
    head="text",
    auto_class="AutoModelForSequenceClassification",
    loss=losses.cross_entropy,
    evaluator=AnyClasses(SingleLabel()),
    one_class=True,
)
MULTI_LABEL_TEXT = TaskKind(
    name="multi-label text",
    inputs="text",
    head="text",
    auto_class="AutoModelForSequenceClassification",
    loss=losses.binary_cross_entropy,
    evaluator=AnyClasses(MultiLabel()),
    problem_type="multi_label_classification",
)
TOKENS = TaskKind(
    name="tokens",
    inputs="text",
    head="tokens",
    auto_class="AutoModelForTokenClassification",
    loss=losses.token_cross_entropy,
    evaluator=Entities,
)
LM = TaskKind(
    name="lm",
    inputs="text",
    head="lm",
    auto_class="AutoModelForCausalLM",
    loss=losses.token_cross_entropy,
    evaluator=AnyClasses(NextToken()),
    outputs="vocabulary",
)
CHAT = TaskKind(
    name="chat",
    inputs="text",
    head="lm",
    auto_class="AutoModelForCausalLM",
    loss=losses.token_cross_entropy,
    evaluator=AnyClasses(Answers()),
    outputs="vocabulary",
)
CHOICE = TaskKind(
    name="choice",
    inputs="text",
    head="lm",
    auto_class="AutoModelForCausalLM",
    loss=losses.token_cross_entropy,
    evaluator=AnyClasses(Choices()),
    outputs="vocabulary",
)
IMAGE_REGRESSION = TaskKind(
    name="image regression",
    inputs="image",
    head="image",
    auto_class="AutoModelForImageClassification",
    loss=losses.squared_error,
    evaluator=AnyClasses(Regression()),
    outputs="numbers",
    problem_type="regression",
)
TEXT_REGRESSION = TaskKind(
    name="text regression",
    inputs="text",
    head="text",
    auto_class="AutoModelForSequenceClassification",
    loss=losses.squared_error,
    evaluator=AnyClasses(Regression()),
    outputs="numbers",
    problem_type="regression",
)
SEQ2SEQ = TaskKind(
    name="seq2seq",
    inputs="text",
    head="seq2seq",
    auto_class="AutoModelForSeq2SeqLM",
    loss=losses.token_cross_entropy,
    evaluator=AnyClasses(GeneratedText()),
    outputs="vocabulary",
)
SEGMENTATION = TaskKind(
    name="segmentation",
    inputs="image",
    head="segmentation",
    auto_class="AutoModelForSemanticSegmentation",
    loss=losses.pixel_cross_entropy,
    evaluator=AnyClasses(Segmentation()),
)
KINDS = {
    kind.name: kind
    for kind in (
        IMAGE,
        MULTI_LABEL_IMAGE,
        IMAGE_REGRESSION,
        SEGMENTATION,
        TEXT,
        MULTI_LABEL_TEXT,
        TEXT_REGRESSION,
        TOKENS,
        LM,
        CHAT,
        CHOICE,
        SEQ2SEQ,
    )
}
