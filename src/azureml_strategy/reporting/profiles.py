"""Reads the small text files among a run's artifacts, and the traces and summaries that profiled ranks have left."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.profiling.kernel_names import printable, shorten

# A larger file is none of ours: `ranks/attempt_N.json` of 500 windows and 256 ranks has 5 MB.
_LARGEST = 32 * 2**20
# Attempts of a job whose files are read: the newest ones.
_ATTEMPTS = 20
FOLDER = "profile"
"""Where traces and summaries lie, among the artifacts and in the output folder alike."""
_SUMMARY = re.compile(r"summary_rank_(\d{1,7})\.json")
_TRACE = re.compile(r"trace_rank_(\d{1,7})_steps?_(\d+)(?:-(\d+))?\.json(?:\.gz)?")
# Of further ranks only the file names are shown: nobody would read a bar for each.
_MOST_RANKS = 8
_MOST_OPERATORS, _MOST_COLLECTIVES, _LONGEST_NAME = 12, 12, 60


class Artifacts:
    """The files of a run. What is missing, too large or unreadable is None, and `problems` says why.

    Args:
        uri: the run's artifact URI.
        tracking_uri: the store of the run, through which a server hands out files.
        since_ms: files of a folder that were written before are left out, as another run's; in ms since 1970.

    Attributes:
        problems: why files could not be read.
    """

    def __init__(self, uri: str, tracking_uri: str, since_ms: int = 0) -> None:
        self._uri = uri.rstrip("/")
        self._tracking_uri = tracking_uri
        parts = urlparse(uri)
        self._folder: Path | None = None  # None where a server hands out the files
        if parts.scheme == "file":
            self._folder = Path(unquote(parts.path))
        elif uri and not parts.scheme:
            self._folder = Path(uri)
        self._since_s = since_ms / 1000
        self.problems: list[str] = []

    def text(self, path: str) -> str | None:
        """Return the content of a file."""
        try:
            return self._local(self._folder / path) if self._folder else self._remote(path)
        except Exception as error:  # whatever a file system or a store of files raises
            self.problems.append(f"{path} could not be read ({type(error).__name__}).")
            return None

    def attempts(self, folder: str, suffix: str) -> Iterator[tuple[int, str]]:
        """Return the content of `FOLDER/attempt_N.SUFFIX` of each attempt N of a job, in order."""
        stems = [name.removeprefix("attempt_").removesuffix(f".{suffix}") for name in self.names(folder)]
        numbers = sorted(int(stem) for stem in stems if stem.isdecimal())
        if len(numbers) > _ATTEMPTS:
            self.problems.append(f"{folder} has files of {len(numbers):,} attempts; the newest {_ATTEMPTS} are read.")
        for number in numbers[-_ATTEMPTS:]:
            text = self.text(f"{folder}/attempt_{number}.{suffix}")
            if text is not None:
                yield number, text

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none if it is missing or unreadable."""
        try:
            if self._folder:
                found = (self._folder / folder).glob("*")
                return [path.name for path in found if path.stat().st_mtime >= self._since_s]
            from mlflow.artifacts import list_artifacts

            listed = list_artifacts(artifact_uri=f"{self._uri}/{folder}", tracking_uri=self._tracking_uri)
            return [Path(each.path).name for each in listed]
        except Exception as error:  # as above
            self.problems.append(f"{folder} could not be read ({type(error).__name__}).")
            return []

    def _local(self, path: Path) -> str | None:
        if not path.is_file() or self._is_too_large(path.name, path.stat().st_size):
            return None
        return path.read_text(encoding="utf-8", errors="replace")

    def _is_too_large(self, name: str, size: int) -> bool:
        if size > _LARGEST:
            self.problems.append(f"{name} has {size / 2**20:,.0f} MiB, and more than {_LARGEST >> 20} are not read.")
        return size > _LARGEST

    def _remote(self, path: str) -> str | None:
        from tempfile import TemporaryDirectory

        from mlflow.artifacts import download_artifacts, list_artifacts

        parent, name = f"{self._uri}/{path}".rsplit("/", 1)
        listed = list_artifacts(artifact_uri=parent, tracking_uri=self._tracking_uri)
        sizes = {Path(each.path).name: each.file_size or 0 for each in listed}
        if name not in sizes or self._is_too_large(name, sizes[name]):
            return None
        with TemporaryDirectory() as folder:
            found = download_artifacts(
                artifact_uri=f"{parent}/{name}", dst_path=folder, tracking_uri=self._tracking_uri
            )
            return self._local(Path(found))


class Spent(NamedTuple):
    """What one name took within the profiled steps."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Summary:
    """What the profiled steps of a rank spent their time on; see `profiling.trace_summary`.

    Attributes:
        device: `gpu` or `cpu`, on which the times were taken.
        steps: numbers of the steps.
        window_s: seconds of all steps.
        parts: seconds by the names in `verdict.NAMES`; they add up to `window_s`. `forward` is all that computes.
        collectives: exposed seconds of each collective, most first.
        operators: seconds of the operators' own, most first.
    """

    device: str
    steps: Sequence[int]
    window_s: float
    parts: Mapping[str, float]
    collectives: Sequence[Spent]
    operators: Sequence[Spent]

    @property
    def idle(self) -> float:
        """The part of the steps in which nothing runs on the device, 0 to 1."""
        return (self.parts["data_wait"] + self.parts["other"]) / self.window_s

    @property
    def span(self) -> str:
        """The steps in words."""
        first, last = self.steps[0], self.steps[-1]
        return f"{first}" if first == last else f"{first} to {last}"


@dataclass(frozen=True)
class RankProfile:
    """The profile of a rank.

    Attributes:
        rank: global rank.
        traces: names of its traces, those of the later steps last.
        summary: of the newest trace; None where there is none, or none that can be read.
        problem: why there is no summary.
    """

    rank: int
    traces: Sequence[str]
    summary: Summary | None
    problem: str = ""

    @property
    def trace(self) -> str:
        """The trace that the summary is of; empty if it is not among the files."""
        if self.summary is None:
            return self.traces[-1] if self.traces else ""
        return next((each for each in self.traces if _last_step(each) >= self.summary.steps[-1]), "")


def read_profiles(places: Iterable[Artifacts]) -> list[RankProfile]:
    """Read what profiled ranks have left, in the order of the ranks.

    Of places with files of one rank the first counts, unless only a later one has its summary.
    """
    found: dict[int, RankProfile] = {}
    for place in places:
        names = place.names(FOLDER)
        traces: dict[int, list[str]] = {}
        for name in sorted(names, key=_last_step):
            if match := _TRACE.fullmatch(name):
                traces.setdefault(int(match[1]), []).append(name)
        with_summary = {int(match[1]) for name in names if (match := _SUMMARY.fullmatch(name))}
        for rank in sorted({*traces, *with_summary}):
            known = found.get(rank)
            if known is None or (known.summary is None and rank in with_summary):
                read = rank in with_summary and sum(each.summary is not None for each in found.values()) < _MOST_RANKS
                found[rank] = _rank_profile(place, rank, traces.get(rank, []), rank in with_summary, read)
    return [found[rank] for rank in sorted(found)]


def _last_step(trace: str) -> int:
    match = _TRACE.fullmatch(trace)
    return int(match[3] or match[2]) if match else -1


def _rank_profile(place: Artifacts, rank: int, traces: list[str], is_there: bool, read: bool) -> RankProfile:
    if not is_there:
        return RankProfile(rank, traces, None, "It has no summary; the trace alone is there.")
    if not read:
        return RankProfile(rank, traces, None, f"Its summary is among the files of the run; {_MOST_RANKS} are shown.")
    text = place.text(f"{FOLDER}/summary_rank_{rank}.json")
    summary = None if text is None else read_summary(text)
    return RankProfile(rank, traces, summary, "" if summary else "Its summary cannot be read: it may be half written.")


def read_summary(text: str) -> Summary | None:
    """Read a summary as `trace_summary` writes it; None for any other text."""
    with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        content = json.loads(text)
        steps = sorted(int(each) for each in content["steps"])
        window, waited = _seconds(content, "window_s"), _seconds(content, "data_wait_s")
        if not steps or not window:
            return None
        parts = {
            "data_wait": waited,
            "copy": _seconds(content, "copy_s"),
            "forward": _seconds(content, "compute_s"),
            "communication": _seconds(content, "exposed_communication_s"),
            "other": max(0.0, _seconds(content, "idle_s") - waited),
        }
        collectives = [_spent(each, "exposed_s") for each in content["collectives"][:_MOST_COLLECTIVES]]
        operators = [_spent(each, "self_s") for each in content["operators"][:_MOST_OPERATORS]]
        return Summary("gpu" if content["device"] == "gpu" else "cpu", steps, window, parts, collectives, operators)
    return None


def _seconds(content: Mapping[str, Any], name: str) -> float:
    seconds = float(content[name])
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} is {seconds}")
    return seconds


def _spent(content: Mapping[str, Any], name: str) -> Spent:
    shown = shorten(printable(redact_text(str(content["name"])[:4000])), _LONGEST_NAME)
    return Spent(shown, _seconds(content, name), int(content["calls"]))
