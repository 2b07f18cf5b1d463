"""Compare the descriptions of several sites, and name what would make a run fail or mislead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from partita.site.description.record import Description, DescriptionError
from partita.site.description.tables import CLASSES, ROWS

SHOWN = 3  # names in a sentence


def compare(sites: Sequence[Description]) -> list[str]:
    """Return what disagrees between the sites and must be mended.

    Raises:
        DescriptionError: If two descriptions are of the same site.
    """
    if repeated := [name for name, count in Counter(each["site"] for each in sites).items() if count > 1]:
        raise DescriptionError(f"two descriptions are of the site '{repeated[0]}'; name one file for each site")
    return [*_settings(sites), *_class_names(sites)]


def rows_of(site: Description) -> int:
    """Return the number of the site's rows."""
    return sum(count or 0 for count in site["counts"].get(ROWS, {}).values())


def largest_class(site: Description) -> tuple[str, float]:
    """Return the largest class whose count is shown, and its share of all rows; ("", 0) if none is."""
    known = {name: count for name, count in site["counts"].get(CLASSES, {}).items() if count}
    largest = max(known, key=lambda name: known[name], default="")
    return largest, min(1.0, known.get(largest, 0) / max(1, rows_of(site)))


def _settings(sites: Sequence[Description]) -> Iterator[str]:
    values = {"data.name": [each["data"] for each in sites], "the kind of task": [each["kind"] for each in sites]}
    facts = sorted({name for each in sites for name in each["facts"]})
    values |= {name: [str(each["facts"].get(name, "not set")) for each in sites] for name in facts}
    for what, found in values.items():
        if len(set(found)) > 1:
            places = {each: _listed([s["site"] for s, value in zip(sites, found, strict=True) if value == each])
                      for each in found}  # fmt: skip
            shown = ", ".join(f"'{value}' at {where}" for value, where in places.items())
            yield f"{what} is {shown}; all sites need the same"


def _class_names(sites: Sequence[Description]) -> Iterator[str]:
    """Compare names without case, spaces and signs, so that other spellings of a class are named as such."""
    first, found = sites[0], dict[str, dict[str, list[str]]]()
    for each in sites:
        for name in each["classes"]:
            plain = "".join(char for char in name.casefold() if char.isalnum()) or name
            found.setdefault(plain, {}).setdefault(name, []).append(each["site"])
    for names in found.values():
        have = {site for where in names.values() for site in where}
        shown = ", ".join(f"'{name}' at {_listed(where)}" for name, where in sorted(names.items()))
        if len(names) > 1:
            yield f"the same class seems to be spelled differently: {shown}; rename it"
        if lack := [each["site"] for each in sites if each["site"] not in have]:
            yield f"a class is {shown} and not at {_listed(lack)}; agree on one list of classes"
    for each in sites[1:]:
        if each["classes"] != first["classes"] and set(each["classes"]) == set(first["classes"]):
            yield f"{each['site']} has the classes in another order than {first['site']}; sort them in the same way"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
