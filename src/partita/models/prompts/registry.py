"""What can be learnt beside frozen towers, by the name under which methods ask for it."""

from __future__ import annotations

from collections.abc import Callable

from partita.core.model import Model
from partita.models.prompts.feature_adapter import gated
from partita.models.prompts.low_rank_prompts import factored
from partita.models.prompts.optimal_transport import transported
from partita.models.prompts.prompts import prompted

KINDS: dict[str, Callable[..., Model]] = {
    "prompts": prompted,
    "transport": transported,
    "low-rank": factored,
    "adapter": gated,
}
