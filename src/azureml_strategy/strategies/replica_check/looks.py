"""One look at what a rank has: taken without waiting for the device, reported to rank 0 as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from azureml_strategy.strategies.replica_check.copies import BUFFER, Copy
from azureml_strategy.strategies.replica_check.fingerprints import Fingerprints

# Stands for the value of a buffer that the training has just changed, and the strategy makes equal before it is used.
_CHANGING = "changing"
# With more names, neighbours are reported as one, so that the report of each rank stays small.
_MOST_NAMES = 512
# holders: values by kind and name
Report = dict[str, dict[str, str]]


class Look:
    """What this rank has at one moment.

    Args:
        name: the same on all ranks that look at this moment, and of no other look.
        copies: what it has.
        turn: see `Fingerprints`.
        batches: how many have been trained on.
    """

    def __init__(self, name: str, copies: Sequence[Copy], turn: int, batches: int) -> None:
        self.name, self.batches, self._copies = name, batches, copies
        self._prints = Fingerprints([each.value for each in copies if isinstance(each.value, Tensor)], turn)

    def is_ready(self) -> bool:
        """Whether its values can be read without waiting."""
        return self._prints.are_ready()

    def report(self, before: Report | None, changing: bool) -> tuple[Report, Report]:
        """Return all values; and what is reported of them, see `_CHANGING`.

        Args:
            before: all values of a look before further training; None at the first.
            changing: whether buffers may differ after a step that changes them.
        """
        prints = iter(self._prints.values())
        values: Report = {}
        reported: Report = {}
        for each in self._copies:
            value = f"{next(prints) & (1 << 64) - 1:016x}" if isinstance(each.value, Tensor) else repr(each.value)
            key = f"{each.kind} {each.name}"
            values.setdefault(each.holders, {})[key] = value
            moved = before is not None and before.get(each.holders, {}).get(key) != value
            hidden = changing and each.kind == BUFFER and moved
            reported.setdefault(each.holders, {})[key] = _CHANGING if hidden else value
        return values, {holders: _folded(of_holders) for holders, of_holders in reported.items()}


@dataclass(frozen=True)
class Difference:
    """Ranks that must have a value alike, and have not.

    Attributes:
        kind: of the value.
        names: of the values that differ.
        ranks: groups of ranks; those of a group have reported the same.
    """

    kind: str
    names: list[str]
    ranks: list[list[int]]


def digests(report: Report) -> str:
    """Return one hash for each of the holders, which rank 0 compares first."""
    return json.dumps({holders: _digest(values) for holders, values in report.items()})


def apart(digests_of: Mapping[int, str]) -> dict[str, list[list[int]]]:
    """Find holders whose ranks have reported different digests, and the ranks that have reported the same."""
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, text in sorted(digests_of.items()):
        for holders, digest in json.loads(text).items():
            groups.setdefault(holders, {}).setdefault(digest, []).append(rank)
    return {holders: list(each.values()) for holders, each in groups.items() if len(each) > 1}


def differences(groups: Sequence[list[int]], reports: Mapping[int, Mapping[str, str]]) -> list[Difference]:
    """Name what differs among ranks with the same holders.

    Args:
        groups: ranks that have reported the same.
        reports: what the first rank of each group has reported, by kind and name; some groups may be missing.
    """
    found: dict[tuple[str, tuple[tuple[int, ...], ...]], list[str]] = {}
    known = [group for group in groups if group[0] in reports]
    for key in dict.fromkeys(key for group in known for key in reports[group[0]]):
        by_value: dict[str, list[int]] = {}
        for group in known:
            value = reports[group[0]].get(key, _CHANGING)
            if value != _CHANGING:
                by_value.setdefault(value, []).extend(group)
        if len(by_value) > 1:
            kind, _, name = key.partition(" ")
            ranks = tuple(tuple(sorted(each)) for each in by_value.values())
            found.setdefault((kind, ranks), []).append(name)
    return [Difference(kind, names, [list(each) for each in ranks]) for (kind, ranks), names in found.items()]


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _folded(values: Mapping[str, str]) -> dict[str, str]:
    """Join neighbours of one kind under their first and last names, if there are too many."""
    if len(values) <= _MOST_NAMES:
        return dict(values)
    by_kind: dict[str, list[str]] = {}
    for key in values:
        by_kind.setdefault(key.partition(" ")[0], []).append(key)
    size = -(-len(values) // _MOST_NAMES) + 1
    folded = {}
    for keys in by_kind.values():
        for chunk in (keys[start : start + size] for start in range(0, len(keys), size)):
            name = chunk[0] if len(chunk) == 1 else f"{chunk[0]} to {chunk[-1].partition(' ')[2]}"
            joined = {str(i): values[key] for i, key in enumerate(chunk)}
            # What changes on one rank may rest on another, so that nothing can be said of the others beside it.
            folded[name] = _CHANGING if _CHANGING in joined.values() else _digest(joined)
    return folded
