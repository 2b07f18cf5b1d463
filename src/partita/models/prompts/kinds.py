"""What can be learnt beside frozen towers, by the name under which methods ask for it."""

from __future__ import annotations

from collections.abc import Callable

from partita.core.model import Model
from partita.models.prompts.dual import prompted
from partita.models.prompts.factored import factored
from partita.models.prompts.gate import gated
from partita.models.prompts.transport import transported

KINDS: dict[str, Callable[..., Model]] = {
    "prompts": prompted,
    "transport": transported,
    "low-rank": factored,
    "adapter": gated,
}
