"""Options that make slow methods fast enough for tests."""

from __future__ import annotations

from typing import Any

# Ten epochs of the head are too many for a fast test; the promises are the same for two.
BRIEF: dict[str, dict[str, Any]] = {"fedrep": {"head_epochs": 2}, "lora": {"rank": 2}, "flora": {"rank": 2}}
BRIEF |= {
    "pfeddc": {"text_tokens": 2, "vision_tokens": 2},
    "promptfl": {"text_tokens": 2},
    "vpfl": {"vision_tokens": 2},
    "coop": {"text_tokens": 2},
}
BRIEF |= {"fedala": {"passes": 2, "batch_size": 8}}
BRIEF |= {"fedotp": {"text_tokens": 2, "iterations": 5}, "fedpgp": {"text_tokens": 2, "rank": 1}}
BRIEF |= {"pfedprompt": {"text_tokens": 2, "shots": 2}}
BRIEF |= {"pfedme": {"inner_steps": 2}}
