"""A person's approval of an experiment: what they are shown, and the lines of the policy that record it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from partita.site.answering import site_log
from partita.site.config import SiteConfig
from partita.site.consent import History
from partita.site.form import ConsentForm
from partita.site.own_experiment import load_terms, unapproved_code
from partita.site.policy import load_policy
from partita.site.toml_tables import SiteError
from partita.storage import atomic_files
from partita.storage.safe_text import printable

Agree = Callable[[str, str], bool]  # what is shown, the question -> whether the person agrees


def approve(site: SiteConfig, agree: Agree, scores: bool = False) -> bool:
    """Show a person what an experiment asks of this site, and record their approval in the policy.

    Custom code comes first, because the rest of the page can only be shown by running it.

    Args:
        site: The site's settings.
        agree: Shows a text, asks the question, and returns the answer.
        scores: Also let scores on this site's own examples leave.

    Returns:
        Whether the person approved. If not, nothing is changed.

    Raises:
        SiteError: If the policy refuses more than the approval, or has no place for it.
    """
    policy = load_policy(site.policy_file)
    code = dict(unapproved_code(site, policy))
    if code:
        shown = "\n".join(printable(f"custom code {key}, digest {digest}") for key, digest in code.items())
        if not agree(shown, "Have you read this code, and may it run here?"):
            return False
        policy = replace(policy, code=(*policy.code, *code.values()))
    terms = load_terms(site, policy)
    approved = tuple(dict.fromkeys((*policy.experiments, terms.digest)))
    leave = replace(policy.leave, scores=policy.leave.scores or scores)
    policy = replace(policy, experiments=approved, leave=leave)
    form = ConsentForm(site, policy, terms, History(site_log(site).lines()))
    if refused := form.refusals():
        hint = "; or approve with --scores" if terms.scores and not leave.scores else ""
        raise SiteError(f"{site.policy_file} does not cover the experiment: {refused[0]}{hint}")
    if not agree(form.to_text(), f"Do you approve experiment {terms.digest}?"):
        return False
    _record(site, {"experiments": policy.experiments, "code": policy.code}, leave.scores)
    return True


def _record(site: SiteConfig, lists: Mapping[str, Sequence[str]], scores: bool) -> None:
    """Change these keys in the policy's text, and nothing else, so that its comments stay."""
    text = atomic_files.read(site.policy_file).decode()
    wanted: dict[str, Any] = tomllib.loads(text)
    for key, values in lists.items():
        if list(values) != wanted.get(key, []):
            wanted[key] = list(values)
            text = _with_line(text, "", rf"{key}\s*=\s*\[[^\]]*\]", f"{key} = {json.dumps(list(values))}")
    if scores != wanted["leave"].get("scores", False):
        wanted["leave"] |= {"scores": scores}
        text = _with_line(text, "[leave]\n", r"scores\s*=\s*\w+", f"scores = {str(scores).lower()}")
    if tomllib.loads(text) != wanted:
        added = " ".join(value for values in lists.values() for value in values)
        raise SiteError(f"{site.policy_file} is written in a way that cannot be changed here; add by hand: {added}")
    atomic_files.write(site.policy_file, text.encode())


def _with_line(text: str, heading: str, pattern: str, line: str) -> str:
    """Return a TOML text in which a line under a heading, "" for the top, is replaced or added."""
    before, found, rest = text.partition(heading) if heading else ("", "", text)
    own, following = re.match(r"((?:(?!\[).*\n)*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    changed, count = re.subn(rf"(?m)^{pattern}", lambda _: line, own, count=1)
    return before + found + (changed if count else f"{line}\n{own}") + following
