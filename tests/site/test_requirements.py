"""The versions that a site installs are those that are installed here."""

from __future__ import annotations

from importlib.metadata import distribution, version

import pytest
from packaging.requirements import Requirement

from partita.site.kit.requirements import requirements
from partita.site.toml_tables import SiteError


def test_package_gets_what_it_needs_and_nothing_else() -> None:
    wanted = [Requirement(each) for each in distribution("rich").requires or ()]
    needed = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})}
    lines = requirements("rich", ()).splitlines()
    assert needed <= {line.partition("==")[0] for line in lines}
    assert not [line for line in lines if line.startswith(("rich==", "pytest=="))]


@pytest.mark.slow
def test_versions_are_public_and_without_partita_or_tools_of_developers() -> None:
    pins = dict(line.split("==") for line in requirements().splitlines())
    assert pins["flwr"] == version("flwr")
    assert pins["torch"] == version("torch").partition("+")[0]
    assert not {"partita", "pytest", "mypy", "ruff"} & pins.keys()
    assert not [found for found in pins.values() if "+" in found]


def test_missing_package_is_named_with_its_remedy() -> None:
    with pytest.raises(SiteError, match=r"no-such-package is not installed; install all .* pip install"):
        requirements("no-such-package", ())
