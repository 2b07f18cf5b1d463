"""Registry of the prompts and adapters that methods can train on a dual encoder."""

from __future__ import annotations

from collections.abc import Callable

from partita.core.model import Model
from partita.models.prompts.feature_adapter import feature_adapter
from partita.models.prompts.feature_cache import feature_cache
from partita.models.prompts.low_rank_prompts import low_rank_prompts
from partita.models.prompts.optimal_transport import optimal_transport_prompts
from partita.models.prompts.prompts import dual_prompts

KINDS: dict[str, Callable[..., Model]] = {
    "prompts": dual_prompts,
    "transport": optimal_transport_prompts,
    "low-rank": low_rank_prompts,
    "adapter": feature_adapter,
    "cache": feature_cache,
}
