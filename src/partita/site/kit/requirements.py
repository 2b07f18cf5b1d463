"""The versions of partita and of all that it needs, as installed here, for pip."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from partita.site.toml_tables import SiteError

ROOT = "partita"
EXTRAS = ("data", "flower", "lora", "privacy", "text")  # what a site or a server may need; not what a desk needs


def requirements(root: str = ROOT, extras: Iterable[str] = EXTRAS) -> str:
    """Return the versions of all that a package needs as a file for pip, without the package, which is a wheel.

    A local version, such as torch's "+cpu", is left out: each platform finds its own build.

    Args:
        root: The package.
        extras: Its optional parts to follow.

    Raises:
        SiteError: If a needed package is not installed.
    """
    waiting, seen, versions = [(root, extra) for extra in ("", *extras)], set[tuple[str, str]](), dict[str, str]()
    while waiting:
        name, extra = waiting.pop()
        key = canonicalize_name(name)
        if (key, extra) in seen:
            continue
        seen.add((key, extra))
        try:
            package = distribution(name)
        except PackageNotFoundError as error:
            remedy = f"install all that a site needs: pip install '{root}[{','.join(extras)}]'"
            raise SiteError(f"{name} is not installed; {remedy}") from error
        versions[key] = Version(package.version).public
        for found in map(Requirement, package.requires or ()):
            if found.marker is None or found.marker.evaluate({"extra": extra}):
                waiting += [(found.name, each) for each in ("", *found.extras)]
    versions.pop(canonicalize_name(root))
    return "".join(f"{name}=={found}\n" for name, found in sorted(versions.items()))
