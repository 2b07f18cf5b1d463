"""What a release consists of: versions that agree, dependencies that are pinned, and workflows whose commands exist."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PAGES = ("SECURITY.md", "AGENTS.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")

sys.path.insert(0, str(ROOT / "scripts"))
check_wheel = import_module("check_wheel")


# ---- versions


def test_fallback_version_and_citation_follow_the_changelog() -> None:
    headings = re.findall(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    numbers = [Version(number) for number, _ in headings]
    assert numbers == sorted(numbers, reverse=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date) for _, date in headings)
    assert PROJECT["tool"]["setuptools_scm"]["fallback_version"] == f"{numbers[0]}.dev0"
    released = next((number for number, date in headings if date != "unreleased"), headings[0][0])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == released
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "required by the schema"
    assert citation["license"] == PROJECT["project"]["license"]


def git(folder: Path, *words: str) -> None:
    who = (
        "-c",
        "user.name=x",
        "-c",
        "user.email=x@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    )
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_version_of_clones_with_and_without_tags(tmp_path: Path) -> None:
    scm = pytest.importorskip("setuptools_scm")
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    fallback = PROJECT["tool"]["setuptools_scm"]["fallback_version"]
    source = tmp_path / "source"
    source.mkdir()

    def version(name: str) -> str:
        return scm.get_version(tmp_path / name, fallback_version=fallback)

    assert version("source") == fallback, "an archive without git"
    git(source, "init", "--quiet", "--initial-branch=main")
    for number in range(3):
        git(source, "commit", "--quiet", "--allow-empty", "--message", str(number))
    assert re.fullmatch(fallback.replace("dev0", r"dev3\+g[0-9a-f]+"), version("source"))
    git(tmp_path, "clone", "--quiet", "--depth=1", source.as_uri(), "shallow")
    with pytest.warns(UserWarning, match="shallow"):
        assert re.fullmatch(fallback.replace("dev0", r"dev1\+g[0-9a-f]+"), version("shallow"))
    git(source, "tag", "v7.8.9")
    assert version("source") == "7.8.9"
    git(source, "commit", "--quiet", "--allow-empty", "--message", "more")
    assert re.fullmatch(r"7\.8\.10\.dev1\+g[0-9a-f]+", version("source"))


def test_release_needs_one_version_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(heading: str, citation: str) -> None:
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{heading}\n")
        (tmp_path / "CITATION.cff").write_text(f"title: x\nversion: {citation}\nlicense: y\n")

    write("1.2.3] - 2026-01-31", "1.2.3")
    check_wheel.check_release("v1.2.3", "1.2.3", tmp_path)
    for tag, version in (("1.2.3", "1.2.3"), ("v1.2.3", "1.2.4.dev1+g123"), ("v1.2.2", "1.2.3")):
        with pytest.raises(SystemExit, match=f"the tag is {re.escape(tag)}, but"):
            check_wheel.check_release(tag, version, tmp_path)
    write("1.2.3] - unreleased", "1.2.3")
    with pytest.raises(SystemExit, match="has no section"):
        check_wheel.check_release("v1.2.3", "1.2.3", tmp_path)
    write("1.2.3] - 2026-01-31", "1.2.2")
    with pytest.raises(SystemExit, match=r"CITATION.cff is not of version 1\.2\.3"):
        check_wheel.check_release("v1.2.3", "1.2.3", tmp_path)


# ---- dependencies


def test_each_dependency_is_pinned_within_its_bounds() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    extras = PROJECT["project"]["optional-dependencies"]
    [own] = [Requirement(text) for text in extras["dev"] if text.startswith("partita[")]
    assert extras.keys() - own.extras == {"dev", "flwr-datasets"}, "flwr-datasets holds back datasets"
    texts = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    texts += [text for extra in (*own.extras, "dev") for text in extras[extra] if not text.startswith("partita[")]
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        assert pins[name] in requirement.specifier, f"{requirement} does not admit {pins[name]}"
        assert any(each.operator == ">=" for each in requirement.specifier), f"{requirement} has no lower bound"
    [flower] = map(Requirement, extras["flower"])
    assert any(each.operator == "<" for each in flower.specifier), "Flower is capped at what is tested"


# ---- workflows, templates and pages


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_workflows_run_commands_that_exist() -> None:
    commands = [
        re.sub(r"\$\{\{.*?\}\}", "", step["run"]).split() for path in WORKFLOWS for step in steps(path) if "run" in step
    ]
    assert {words[0] for words in commands} == {".ci/run", "make"}
    for program, *words in commands:
        if program == "make":
            assert words[0] in TARGETS
            for name, _, _ in (word.partition("=") for word in words[1:]):
                assert re.search(rf"^{name} :?= ", MAKEFILE, re.MULTILINE)
        else:
            assert (ROOT / program).stat().st_mode & 0o100
    script = (ROOT / ".ci" / "run").read_text()
    [parts] = re.findall(r"^for part in .venv (.+); do$", script, re.MULTILINE)
    assert {"test", "test-slow", "style", "types"} <= set(parts.split()) <= TARGETS


def test_workflows_use_actions_by_their_major_version() -> None:
    used = [step["uses"] for path in WORKFLOWS for step in steps(path) if "uses" in step]
    assert len(used) >= 6
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", action) for action in used)


def test_workflows_cover_the_supported_pythons_and_both_ends_of_the_dependencies() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    stated = [text.split(" :: ")[-1] for text in PROJECT["project"]["classifiers"] if "Python :: 3." in text]
    assert jobs["check"]["strategy"]["matrix"]["python"] == stated
    assert PROJECT["project"]["requires-python"] == f">={stated[0]}"
    sets = {each["versions"] for each in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert sets == {"lowest", "newest"}
    assert set(re.findall(r"^RESOLUTION_(\w+) :=", MAKEFILE, re.MULTILINE)) == sets
    runtime = PROJECT["project"]["optional-dependencies"].keys() - {"dev", "docs", "flwr-datasets"}
    [extras] = re.findall(r"^EXTRAS := (.+)$", MAKEFILE, re.MULTILINE)
    assert set(extras.split()) == runtime


def test_only_the_job_that_publishes_has_a_permission() -> None:
    for path in WORKFLOWS:
        content = yaml.safe_load(path.read_text())
        assert content["permissions"] == {"contents": "read"}
        given = {name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job}
        assert given == ({"publish": {"id-token": "write"}} if path.name == "release.yml" else {})


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_has_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    kinds = {"markdown", "input", "textarea", "dropdown", "checkboxes"}
    assert {field["type"] for field in form["body"]} <= kinds
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in asked}) == len(asked) > 0
    assert all(field["attributes"]["label"] for field in asked)


def test_three_kinds_of_issues_have_forms() -> None:
    assert [path.stem for path in FORMS] == ["bug", "method", "privacy"]


@pytest.mark.parametrize("name", PAGES)
def test_page_links_existing_files(name: str) -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)#]+)[^)]*\)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/guide/privacy.md", "docs/guide/secure-aggregation.md"])
def test_page_of_promises_names_existing_tests(page: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / page).read_text())
    assert len(named) > 10
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_page_for_agents_names_existing_commands_and_files() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    assert set(re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)) <= TARGETS
    for path in re.findall(r"\b(?:src|tests|scripts|docs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(core/\w+\.py)`", text):
        assert (ROOT / "src" / "partita" / path).exists(), path
