"""Privacy guarantees and spending of runs, and the results of attacks on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.record.metric import MISSING, short
from partita.report.load import RunRecord, by_label, number


def spent(record: RunRecord) -> list[tuple[int, float]]:
    """Return (rounds completed, epsilon) for the rounds with a known epsilon."""
    values = [(row["round"] + 1, number((row.get("privacy") or {}).get("epsilon"))) for row in record.rows]
    return [(completed, value) for completed, value in values if value is not None]


def guarantees(records: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return one table row for each label with privacy. If seeds differ, use the one with the largest epsilon."""
    lines: list[tuple[str, ...]] = []
    for label, runs in by_label(records).items():
        if private_runs := [run for run in runs if run.privacy]:
            worst = max(private_runs, key=lambda run: spent(run)[-1][1] if spent(run) else 0.0)
            about = worst.privacy
            cost = short(spent(worst)[-1][1]) if spent(worst) else MISSING
            drawn = f"{_number(about, 'noise')} × {_number(about, 'clip')}"
            lines.append(
                (
                    label,
                    f"{_unit(about)}, {about.get('sampling')}",
                    _number(about, "budget"),
                    cost,
                    _number(about, "delta"),
                    drawn,
                    str(about.get("noise_added", MISSING)),
                    str(about.get("accountant", MISSING)),
                )
            )
    return lines


def _unit(about: Mapping[str, Any]) -> str:
    return f"group ({about['group']})" if about.get("group") else str(about.get("unit"))


def attack_results(records: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return one table row for each attack on each audited run."""
    lines: list[tuple[str, ...]] = []
    for record in records:
        for name, attack in (record.audit.get("attacks") or {}).items():
            true_rate = number(attack.get("true_at_1%"))
            rate = MISSING if true_rate is None else f"{true_rate:.1%}"
            counts = f"{attack.get('members')} / {attack.get('outsiders')}"
            lines.append((f"{record.label}, seed {record.seed}", name, _number(attack, "auc"), rate, counts))
    return lines


def bounds(records: Sequence[RunRecord]) -> list[str]:
    """Return the bounds of canaries, compared with the claims."""
    comments = []
    for record in records:
        bound, claimed = record.audit.get("bound"), record.audit.get("claim")
        if not bound:
            continue
        evidence = f"{bound['right']} of {bound['guesses']} guesses right, {bound['canaries']} canaries"
        text = f"epsilon is at least {_number(bound, 'epsilon')} with {bound['confidence']:.0%} confidence ({evidence})"
        planned = number((claimed or {}).get("planned"))
        claim = "and no privacy was claimed" if planned is None else f"and is claimed to be at most {short(planned)}"
        group = record.audit.get("group")
        if group is not None and group != record.privacy.get("group"):
            planned, claim = None, f"for all examples with the same {group}, about which nothing was claimed"
        broken = planned is not None and bound["epsilon"] > planned
        alarm = ". The claim is false: look for what leaves a client without noise" if broken else ""
        comments.append(f"{record.label}, seed {record.seed}: {text}, {claim}{alarm}.")
    return comments


def not_covered(records: Sequence[RunRecord]) -> list[str]:
    """Return what the guarantees do not cover, as recorded by the runs, without duplicates."""
    return list(dict.fromkeys(text for record in records for text in record.privacy.get("not_covered", ())))


def _number(table: Mapping[str, Any], key: str) -> str:
    value = number(table.get(key))
    return MISSING if value is None else f"{value:.3g}"
