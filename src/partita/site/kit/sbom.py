"""The software bill of materials (SBOM) of an environment, as CycloneDX 1.5, and the versions to install from it.

It lists partita and all that it needs, as installed here. It has no time in it, so equal environments give equal files.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from partita.site.toml_tables import SiteError

ROOT = "partita"
EXTRAS = ("data", "flower", "lora", "privacy", "text")  # what a site or a server may need; not what a desk needs
_NAMESPACE = uuid.UUID("6c1f6f7a-5d0b-5f0e-9a35-6f2d8a1f9f10")
_SHORT = 100  # characters; a longer license field is the text of the license itself


def installed(root: str = ROOT, extras: Iterable[str] = EXTRAS) -> dict[Distribution, list[str]]:
    """Return a package and all that it needs as installed, each with the names of what it needs itself.

    Args:
        root: The package.
        extras: Its optional parts to follow.

    Raises:
        SiteError: If a needed package is not installed.
    """
    found: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    waiting = [(root, "", extra) for extra in ("", *extras)]
    seen = set()
    while waiting:
        name, asked_by, extra = waiting.pop()
        key = canonicalize_name(name)
        if asked_by:
            needs[asked_by].add(key)
        if (key, extra) in seen:
            continue
        seen.add((key, extra))
        try:
            package = found.setdefault(key, distribution(name))
        except PackageNotFoundError as error:
            wanted = f"{root}[{','.join(extras)}]"
            raise SiteError(
                f"{name} is not installed; install all that a site needs: pip install '{wanted}'"
            ) from error
        needs.setdefault(key, set())
        for text in package.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, key, each) for each in ("", *requirement.extras)]
    return {found[key]: sorted(needs[key]) for key in sorted(found)}


def requirements(packages: Iterable[Distribution], root: str = ROOT) -> str:
    """Return the versions of packages as a file for pip, without the root, which is a wheel of its own.

    A local version, such as torch's "+cpu", is left out: each platform finds its own build.
    """
    pins = [(str(canonicalize_name(each.name)), Version(each.version).public) for each in packages]
    return "".join(f"{name}=={version}\n" for name, version in pins if name != root)


def sbom(packages: dict[Distribution, list[str]], root: str = ROOT) -> str:
    """Return the bill of materials as JSON."""
    refs = {str(canonicalize_name(each.name)): _purl(each) for each in packages}
    components = {canonicalize_name(each.name): _component(each) for each in packages}
    main = components.pop(canonicalize_name(root))
    content = {
        "metadata": {
            "component": {**main, "type": "application"},
            "tools": {"components": [{"type": "application", "name": root, "version": main["version"]}]},
        },
        "components": list(components.values()),
        "dependencies": [
            {"ref": _purl(each), "dependsOn": sorted(refs[name] for name in needed)}
            for each, needed in packages.items()
        ],
    }
    number = uuid.uuid5(_NAMESPACE, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": f"urn:uuid:{number}", "version": 1}
    return json.dumps({**head, **content}, indent=1, ensure_ascii=False) + "\n"


def _component(package: Distribution) -> dict[str, Any]:
    record = package.read_text("RECORD")
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": _purl(package),
        "name": str(canonicalize_name(package.name)),
        "version": package.version,
        "purl": _purl(package),
    }
    if licenses := _licenses(package):
        found["licenses"] = licenses
    if record:
        # Not a hash of the package's archive, which an installed package does not know. It covers all installed files.
        digest = hashlib.sha256(record.encode()).hexdigest()
        found["properties"] = [{"name": "partita:sha256-of-RECORD", "value": digest}]
    return found


@cache  # each look at a name or a version reads the package's metadata again
def _purl(package: Distribution) -> str:
    return f"pkg:pypi/{canonicalize_name(package.name)}@{quote(package.version, safe='')}"


def _licenses(package: Distribution) -> list[dict[str, Any]]:
    about = package.metadata
    if "License-Expression" in about:
        return [{"expression": about["License-Expression"]}]
    classified = [
        text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or () if text.startswith("License :: ")
    ]
    stated = re.sub(r"\s+", " ", " ".join(about.get_all("License") or ())).strip()
    names = classified or ([stated] if 0 < len(stated) <= _SHORT else [])
    return [{"license": {"name": name}} for name in names]
