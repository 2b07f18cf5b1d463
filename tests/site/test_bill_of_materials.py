"""The bill of materials follows the official schema and lists what is installed."""

from __future__ import annotations

import json
from importlib.metadata import distribution, version

import pytest
from packaging.requirements import Requirement

from partita.site.kit.sbom import installed, requirements, sbom
from partita.site.toml_tables import SiteError


@pytest.fixture(scope="module")
def text() -> str:
    return sbom(installed())


@pytest.mark.slow
def test_it_follows_the_schema_of_cyclonedx(text: str) -> None:
    schema = pytest.importorskip("cyclonedx.schema", reason="cyclonedx-python-lib is not installed")
    validation = pytest.importorskip("cyclonedx.validation.json")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_5)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"type": "library"', '"type": "book"', 1)) is not None


def test_it_lists_what_is_needed_with_versions_and_no_tools_of_developers(text: str) -> None:
    found = {each["name"]: each for each in json.loads(text)["components"]}
    for name in ("torch", "flwr", "transformers", "cryptography", "typer"):
        assert found[name]["version"] == version(name)
        assert found[name]["purl"].startswith(f"pkg:pypi/{name}@")
    assert not {"pytest", "mypy", "ruff", "partita"} & found.keys()
    assert all(each.get("properties") for each in found.values()), "each has the digest of its files"


def test_its_dependencies_are_those_of_the_packages(text: str) -> None:
    content = json.loads(text)
    graph = {each["ref"]: each["dependsOn"] for each in content["dependencies"]}
    assert {ref for refs in graph.values() for ref in refs} <= graph.keys(), "nothing points outside"
    typer = next(needed for ref, needed in graph.items() if ref.startswith("pkg:pypi/typer@"))
    wanted = [Requirement(each) for each in distribution("typer").requires or ()]
    names = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})}
    assert {ref.removeprefix("pkg:pypi/").partition("@")[0] for ref in typer} == names


@pytest.mark.slow
def test_equal_environments_give_equal_files(text: str) -> None:
    assert sbom(installed()) == text


@pytest.mark.slow
def test_requirements_pin_public_versions_without_partita() -> None:
    lines = requirements(installed()).splitlines()
    assert f"flwr=={version('flwr')}" in lines
    assert all("+" not in line and "==" in line and not line.startswith("partita") for line in lines)


def test_missing_package_is_named_with_its_remedy() -> None:
    with pytest.raises(SiteError, match=r"no-such-package is not installed; install all .* pip install"):
        installed("no-such-package", ())
