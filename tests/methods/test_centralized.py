"""Centralized is local-only on the pooled data."""

from __future__ import annotations

from dataclasses import replace

from partita.core.server_rule import ServerRule
from partita.methods.centralized import centralized
from partita.methods.local_only import local_only


def test_centralized_is_local_only_on_pooled_data() -> None:
    alone, whole = local_only(), centralized()
    assert whole == replace(alone, name="centralized", server_rule=whole.server_rule, pool=True)
    assert type(whole.server_rule) is type(alone.server_rule) is ServerRule
    assert not alone.pool
