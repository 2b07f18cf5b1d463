"""Compare the descriptions of several sites, and name what disagrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from partita.site.description.describe import PARTS
from partita.site.description.record import Description, DescriptionError
from partita.site.description.tables import CLASSES, LARGEST, MODE, OR_MORE, SIDE, TOKENS

MAX_SITES = 1000
SHOWN = 3  # names in a sentence
OUT_OF_SCALE = 20.0  # times the median number of rows
FAR_LONGER = 3  # times the start of another median's bin
SKEWED = 0.5  # distance of a site's labels from those of all sites together
ONE_CLASS = 0.95  # share of the largest class


@dataclass(frozen=True)
class Disagreement:
    """Something in which sites disagree.

    Attributes:
        must_mend: Whether a run would fail or mislead. Otherwise it is something to know.
        sentence: What disagrees, and what to do.
    """

    must_mend: bool
    sentence: str


def compare(sites: Sequence[Description]) -> list[Disagreement]:
    """Return what disagrees between the sites, what must be mended first.

    Raises:
        DescriptionError: If two descriptions are of the same site, or there are too many.
    """
    if len(sites) > MAX_SITES:
        raise DescriptionError(f"there are {len(sites):,} descriptions; at most {MAX_SITES:,} can be compared")
    if repeated := [name for name, count in Counter(each.site for each in sites).items() if count > 1]:
        raise DescriptionError(f"two descriptions are of the site '{repeated[0]}'; name one file for each site")
    found = [*_kinds(sites), *_class_names(sites), *_sizes(sites), *_lengths(sites), *_modes(sites), *_skew(sites)]
    return sorted(found, key=lambda each: not each.must_mend)


def rows_of(site: Description) -> int:
    """Return the number of the site's rows."""
    return sum(count or 0 for count in site.counts.get(PARTS, {}).values())


def largest_class(site: Description) -> tuple[str, float]:
    """Return the largest class whose count is shown, and its share of all rows; ("", 0) if none is."""
    known = {name: count for name, count in site.counts.get(CLASSES, {}).items() if count}
    if not known:
        return "", 0.0
    largest = max(known, key=lambda name: known[name])
    return largest, min(1.0, known[largest] / max(1, rows_of(site)))


def _kinds(sites: Sequence[Description]) -> Iterator[Disagreement]:
    for what, values in (
        ("data.name", [each.data for each in sites]),
        ("the kind of task", [each.kind for each in sites]),
    ):
        if len(set(values)) > 1:
            yield Disagreement(True, f"{what} is {_by_value(sites, values)}; all sites need the same")
    for fact in sorted({name for each in sites for name in each.facts}):
        values = [str(each.facts.get(fact, "not set")) for each in sites]
        if len(set(values)) > 1:
            yield Disagreement(True, f"{fact} is {_by_value(sites, values)}; set it to the same at all sites")


def _class_names(sites: Sequence[Description]) -> Iterator[Disagreement]:
    if len({each.classes for each in sites}) == 1:
        return
    if len({frozenset(each.classes) for each in sites}) == 1:
        first = sites[0]
        other = next(each for each in sites if each.classes != first.classes)
        place = next(place for place, name in enumerate(first.classes) if other.classes[place] != name)
        yield Disagreement(
            True,
            f"the classes are the same, in another order: class {place} is '{first.classes[place]}' at {first.site} "
            f"and '{other.classes[place]}' at {other.site}; sort them in the same way, or labels would be mixed up",
        )
        return
    spelled = _spellings(sites)
    for names in spelled.values():
        if len(names) > 1:
            shown = ", ".join(f"'{name}' at {_listed(where)}" for name, where in sorted(names.items()))
            yield Disagreement(True, f"the same class seems to be spelled differently: {shown}; rename it")
    for names in spelled.values():
        have = {site for where in names.values() for site in where}
        if lack := [each.site for each in sites if each.site not in have]:
            yield Disagreement(
                True,
                f"the class '{min(names)}' is at {_listed(sorted(have))} and not at {_listed(lack)}; agree on one list "
                "of classes, or the models have different shapes",
            )


def _spellings(sites: Sequence[Description]) -> dict[str, dict[str, list[str]]]:
    """Return the sites that have each class, by what is left of its name without case, spaces and signs."""
    found: dict[str, dict[str, list[str]]] = {}
    for each in sites:
        for name in each.classes:
            plain = "".join(char for char in name.casefold() if char.isalnum()) or name
            found.setdefault(plain, {}).setdefault(name, []).append(each.site)
    return found


def _sizes(sites: Sequence[Description]) -> Iterator[Disagreement]:
    middle = median(rows_of(each) for each in sites)
    for each in sites:
        rows = rows_of(each)
        if rows > OUT_OF_SCALE * middle or rows * OUT_OF_SCALE < middle:
            yield Disagreement(
                False,
                f"{each.site} has {rows:,} rows and the median site {middle:,.0f}; a mean weighted by rows follows the "
                "large sites",
            )


def _lengths(sites: Sequence[Description]) -> Iterator[Disagreement]:
    for each in sites:
        typical = each.typical.get(TOKENS, {})
        if typical.get("90%", "").endswith(OR_MORE):
            yield Disagreement(
                False,
                f"at least 10% of the texts of {each.site} reach data.max_length = "
                f"{each.facts.get('data.max_length', 0)}, where they are cut; raise it, or set data.long_texts to "
                "'windows'",
            )
        if typical.get("10%") == "0":
            yield Disagreement(False, f"at least 10% of the texts of {each.site} are empty; remove them")
    for what, table in (("text", TOKENS), ("image", SIDE)):
        medians = [
            (each.site, _start(each.typical[table]["50%"])) for each in sites if "50%" in each.typical.get(table, {})
        ]
        if len(medians) > 1:
            (shorter, low), (longer, high) = (pick(medians, key=lambda each: each[1]) for pick in (min, max))
            if high > FAR_LONGER * max(low, 1):
                yield Disagreement(
                    False, f"the median {what} of {longer} is far larger than that of {shorter}; are they the same?"
                )


def _start(cell: str) -> int:
    """Return the start of a bin. The name comes from another party."""
    digits = cell.partition(" ")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


def _modes(sites: Sequence[Description]) -> Iterator[Disagreement]:
    common = [each.typical.get(MODE, {}).get(LARGEST, "") for each in sites]
    if len({mode for mode in common if mode}) > 1:
        yield Disagreement(
            False,
            f"most images are {_by_value(sites, [mode or 'hidden' for mode in common])}; data.channels converts them "
            "all, but the contents may differ",
        )


def _skew(sites: Sequence[Description]) -> Iterator[Disagreement]:
    tables = {each.site: each.counts[CLASSES] for each in sites if each.counts.get(CLASSES)}
    # A class that one site hides would make the others look skewed.
    shown = [name for name in next(iter(tables.values()), {}) if all(table.get(name) for table in tables.values())]
    pooled = {name: sum(table[name] or 0 for table in tables.values()) for name in shown}
    for each in sites:
        largest, share = largest_class(each)
        if share > ONE_CLASS and len(each.classes) > 1:
            yield Disagreement(
                False, f"{share:.0%} of the rows of {each.site} are '{largest}'; is that so, or an error?"
            )
        elif shown and each.site in tables:
            own = {name: tables[each.site][name] or 0 for name in shown}
            distance = (
                sum(abs(own[name] / sum(own.values()) - pooled[name] / sum(pooled.values())) for name in shown) / 2
            )
            if distance > SKEWED:
                yield Disagreement(
                    False,
                    f"the labels of {each.site} differ from those of all sites (total variation {distance:.2f}); "
                    "consider a personalized method",
                )


def _by_value(sites: Sequence[Description], values: Sequence[str]) -> str:
    groups: dict[str, list[str]] = {}
    for each, value in zip(sites, values, strict=True):
        groups.setdefault(value, []).append(each.site)
    return ", ".join(f"'{value}' at {_listed(names)}" for value, names in groups.items())


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
