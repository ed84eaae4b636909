"""Collects what is known of a run from its MLflow store and its files, whichever logger has written them."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from azureml_strategy.cluster.redaction import redact, redact_text, without_secrets
from azureml_strategy.reporting.profiles import Artifacts, RankProfile, read_profiles
from azureml_strategy.reporting.series import Series
from azureml_strategy.reporting.stores import RunStore, StoredRun, open_store
from azureml_strategy.tracking.events import Event, Kind
from azureml_strategy.tracking.expected import ExpectedRate, RateCheck, expected_of_run
from azureml_strategy.tracking.run import describe_store, locate
from azureml_strategy.tracking.verdict import NAMES, PHASES, whole_shares

# Charts of a run's own metrics, and of its counters. Nobody would read more, and the page has to stay small.
_MOST_OWN, _MOST_SYSTEM = 16, 48
# Where the time goes comes first: what is read last may be cut.
_OURS = ("step/", "time/", "ranks/", "throughput/")
_SUMMED_UP = ("summary/", "cost/", "bench/")
_SYSTEM = "system/"
_FIRST_OWN = re.compile(r"loss|acc|top|perplexity|error|score", re.I)
_READ_S = 60.0


@dataclass(frozen=True)
class Ranks:
    """What each rank measured in each window of an attempt of the job."""

    ranks: list[dict[str, Any]]  # rank, host, node and device of each
    windows: list[dict[str, Any]]  # step, time, seconds and slow ranks of each, in order


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that a page shows of a run. Texts are as they were logged and must be escaped.

    Attributes:
        run: the run as its store has it.
        store: its store, without secrets.
        open_with: command or address that shows the run in MLflow.
        series: histories of metrics by name.
        events: what happened, in order.
        attempts: numbers of the attempts of the job that left events.
        ranks: of each attempt.
        network: content of `network.json`; empty if there is none.
        config: content of `config.yaml`.
        profiles: of the ranks that were profiled.
        notes: what was left out of this record, and why.
        planned: the rate that the planner expects of a run that was not compared with one at its end.
    """

    run: StoredRun
    store: str
    open_with: str
    series: Mapping[str, Series]
    events: list[Event] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    ranks: list[Ranks] = field(default_factory=list)
    network: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    profiles: list[RankProfile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    planned: ExpectedRate | None = None

    @property
    def rate_check(self) -> RateCheck | None:
        """The measured rate beside the expected one; None if nothing was expected, or measured."""
        expected, rate = expected_of_run(self.run.tags) or self.planned, self.measured("samples_per_second")
        return RateCheck(expected, rate) if expected is not None and rate is not None and rate > 0 else None

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The windows of the ranks of all attempts, in order."""
        return [window for each in self.ranks for window in each.windows]

    @property
    def shares(self) -> dict[str, float]:
        """Parts of a step by the names in `verdict.NAMES`: those of the whole run, else the mean of its windows.

        They add up to 1. If what the run logged does not, only its wait for data is known.
        """
        whole = {name: share for name in NAMES if (share := self.metric(f"summary/step/{name}_share")) is not None}
        found = whole_shares(whole) or whole_shares({name: self._mean_of(name, 1) for name in self._share_series})
        waited = self.measured("data_wait_share")
        return found if found or waited is None else {"data_wait": waited}

    @property
    def share_errors(self) -> dict[str, float]:
        """The standard error of each of `shares`, by how much the run's windows differ."""
        buckets = max((len(each.means) for each in self._share_series.values()), default=0)
        if buckets < 2:
            return {}
        variances = {name: self._mean_of(name, 2) - self._mean_of(name, 1) ** 2 for name in self._share_series}
        return {name: math.sqrt(max(each, 0.0) / (buckets - 1)) for name, each in variances.items()}

    @property
    def times(self) -> dict[str, float]:
        """Seconds of the parts of the run by the names in `verdict.PHASES`, of all attempts, as far as it has come."""
        return {name: seconds for name in PHASES if (seconds := self._seconds(name)) is not None}

    @property
    def ended_ms(self) -> float | None:
        """The end, or the last sign of life of a run that has none, in ms since 1970."""
        signs = [float(each.last_ms) for each in self.series.values() if each.last_ms is not None]
        signs += [float(event.time_ms) for event in self.events]
        return self.run.ended_ms or max(signs, default=None)

    @property
    def last_step(self) -> int | None:
        """The largest step of which anything was logged; None if nothing was."""
        # System metrics count steps of their own, and the last values of ours are logged beyond the last step.
        other = (_SYSTEM, "time/", "ranks/")
        steps = [each.last_step for name, each in self.series.items() if not name.startswith(other)]
        return max((step for step in steps if step is not None), default=None)

    @property
    def steps(self) -> int | None:
        """Number of steps that the training has done; None if it logged none."""
        counted = self.metric("time/steps")
        if counted is not None:
            return round(counted)
        return None if self.last_step is None else self.last_step + 1

    def metric(self, *names: str) -> float | None:
        """The last value of the first of these metrics that the run has, without those that are NaN or infinite."""
        values = (self.run.metrics[name] for name in names if name in self.run.metrics)
        return next((value for value in values if abs(value) < sys.float_info.max), None)

    def measured(self, name: str) -> float | None:
        """What the run measured in the end, else in its last window: `summary/NAME` or `throughput/NAME`."""
        return self.metric(f"summary/{name}", f"throughput/{name}")

    @property
    def currency(self) -> str:
        """Of the run's costs."""
        return self.run.tags.get("cost.currency", "USD")

    def param(self, *names: str) -> str:
        """The first of these parameters that the run has; empty if it has none."""
        return next((self.run.params[name] for name in names if name in self.run.params), "")

    def _seconds(self, name: str) -> float | None:
        """Seconds of a part of the run, summed over its attempts, each of which begins at zero again."""
        series = self.series.get(f"time/{name}_s")
        if series is None or not series.points:
            return self.metric(f"time/{name}_s")
        order = np.argsort(series.times_ms, kind="stable")
        times, seconds = series.times_ms[order], series.highs[order]
        restarts = np.empty(0)  # when the time that was trained began at zero again, in ms since 1970
        trained = self.series.get("time/training_s")
        if trained is not None:
            order = np.argsort(trained.times_ms, kind="stable")
            restarts = trained.times_ms[order][1:][np.diff(trained.highs[order]) < 0]
        ends = np.unique(np.searchsorted(times, restarts) - 1)
        return float(seconds[ends[ends >= 0]].sum() + seconds[-1])

    @property
    def _share_series(self) -> dict[str, Series]:
        """The histories of the shares of a step, by the names in `verdict.NAMES`."""
        named = {name: self.series.get(f"step/{name}_share") for name in NAMES}
        return {name: series for name, series in named.items() if series is not None and series.points}

    def _mean_of(self, name: str, power: int) -> float:
        """The mean over all windows of a share to a power. A window that did not log the share counts as zero."""
        series = self._share_series[name]
        points = max(each.points for each in self._share_series.values())
        return float((series.means**power * series.counts).sum() / points)


def collect_run(
    run_id: str,
    tracking_uri: str,
    read_s: float = _READ_S,
    store: RunStore | None = None,
    folder: Path | None = None,
) -> RunRecord:
    """Read a run. Only a run that cannot be found is an error; whatever else is missing stays out.

    Args:
        run_id: the run.
        tracking_uri: its store.
        read_s: seconds for reading metrics; what they do not suffice for is left out, and a note says so.
        store: the store, if it is open already.
        folder: the run's output folder, if it is known: it may hold profiles that are not among the artifacts.

    Raises:
        ReportError: the store does not have the run, or does not answer.
    """
    store = store or open_store(tracking_uri)
    run = store.run(run_id)
    wanted, unwanted = choose_metrics(run.metrics)
    series = store.series(run_id, wanted, read_s)
    artifacts = Artifacts(run.artifact_uri, tracking_uri)
    places = [artifacts, *([Artifacts(str(folder.absolute()), "", run.started_ms or 0)] if folder is not None else [])]
    unread: list[str] = []
    events = [(number, _read_events(number, text, unread)) for number, text in artifacts.attempts("events", "jsonl")]
    ranks = [_read_ranks(number, text, unread) for number, text in artifacts.attempts("ranks", "json")]
    place = locate(tracking_uri, run.experiment, run.experiment_id, run.run_id, run.name)
    return RunRecord(
        run=_redact_run(run),
        store=describe_store(tracking_uri),
        open_with=without_secrets(place.open_with),
        series={redact_text(name): each for name, each in series.items()},
        events=sorted((each for _, some in events for each in some), key=lambda event: event.time_ms),
        attempts=[number for number, _ in events],
        ranks=[each for each in ranks if each is not None],
        network=_read_network(artifacts.text("network.json"), unread),
        config=redact_text(artifacts.text("config.yaml") or ""),
        profiles=read_profiles(places),
        notes=[*_notes(series, wanted, unwanted), *(text for place in places for text in place.problems), *unread],
    )


def _redact_run(run: StoredRun) -> StoredRun:
    """The run without secrets: any logger may have recorded some, in names too."""
    return replace(
        run,
        name=redact_text(run.name),
        experiment=redact_text(run.experiment),
        tags=_redact_values(run.tags),
        params=_redact_values(run.params),
        metrics={redact_text(name): value for name, value in run.metrics.items()},
    )


def _redact_values(values: Mapping[str, str]) -> dict[str, str]:
    return {redact_text(name): redact_text(str(redact(name, value))) for name, value in values.items()}


def choose_metrics(names: Iterable[str]) -> tuple[list[str], int]:
    """Of all metrics, those to read, the most important ones first, and how many others there are."""
    histories = [name for name in names if not name.startswith(_SUMMED_UP)]
    ours = [name for name in histories if name.startswith(_OURS)]
    system = [name for name in histories if name.startswith(_SYSTEM)]
    own = [name for name in histories if name not in {*ours, *system, "epoch"}]
    own.sort(key=lambda name: (not _FIRST_OWN.search(name), name))
    wanted = [*ours, *own[:_MOST_OWN], *sorted(system)[:_MOST_SYSTEM]]
    return wanted, len(own[_MOST_OWN:]) + len(system[_MOST_SYSTEM:])


def _notes(series: Mapping[str, Series], wanted: list[str], unwanted: int) -> Iterator[str]:
    if unwanted:
        yield f"{unwanted} further metrics are in the store and not on this page."
    unread = [name for name in wanted if name not in series]
    if unread:
        yield f"Not read, as the time for reading was up: {', '.join(unread[:5])}{' ...' * (len(unread) > 5)}."
    cut = [name for name, each in series.items() if each.left_out is None]
    if cut:
        yield f"Read from the beginning only, as the store answered slowly: {', '.join(cut[:5])}."
    if any(not each.exact for each in series.values()):
        yield "A band in a chart joins several points: it reaches from their smallest to their largest value."


def _read_events(attempt: int, text: str, unread: list[str]) -> list[Event]:
    """Read the lines that are whole; a run that was killed may have left half of one."""
    lines = text.splitlines()
    events = [event for line in lines if (event := _parse_event(line)) is not None]
    _note_unread(unread, f"events/attempt_{attempt}.jsonl", len(lines) - len(events), len(lines), "lines")
    return events


def _parse_event(line: str) -> Event | None:
    with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        content = json.loads(line)
        if content["kind"] in get_args(Kind):
            shown = redact_text(str(content["text"]))
            return Event(content["kind"], shown, int(content["step"]), int(content["time_ms"]))
    return None


def _read_ranks(attempt: int, text: str, unread: list[str]) -> Ranks | None:
    file, content = f"ranks/attempt_{attempt}.json", _mapping(text)
    ranks, windows = content.get("ranks"), content.get("windows")
    if not isinstance(ranks, list) or not isinstance(windows, list):
        unread.append(f"{file} is no table of ranks, or was cut off: it is left out.")
        return None
    whole = [_readable_window(each) for each in windows if isinstance(each, dict) and _is_number(each.get("step"))]
    known = _dicts(ranks)
    _note_unread(unread, file, len(ranks) - len(known), len(ranks), "ranks")
    seconds = sum(bool(each["compute_s"]) for each in whole)
    _note_unread(unread, file, len(windows) - seconds, len(windows), "windows, or their seconds,")
    return Ranks(known, whole)


def _note_unread(unread: list[str], file: str, lost: int, of: int, what: str) -> None:
    if lost:
        unread.append(f"{file}: {lost:,} of {of:,} {what} cannot be read and are left out.")


def _readable_window(given: dict[str, Any]) -> dict[str, Any]:
    """The window without slow ranks or seconds that cannot be read."""
    slow, seconds, waits = given.get("slow"), given.get("compute_s"), given.get("data_wait_s")
    readable = isinstance(seconds, list) and all(map(_is_number, seconds))
    return {
        **given,
        "slow": slow if isinstance(slow, dict) else {},
        "compute_s": seconds if readable else [],
        "data_wait_s": waits if isinstance(waits, list) else [],
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _read_network(text: str | None, unread: list[str]) -> dict[str, Any]:
    """The content of `network.json`, without nodes and settings that cannot be read."""
    content = redact("", _mapping(text))
    given = content.get("nodes")
    nodes = [dict(each) for each in _dicts(given)]
    if text is not None and not nodes:
        unread.append("network.json names no nodes, or was cut off: it is left out.")
    elif isinstance(given, list):
        _note_unread(unread, "network.json", len(given) - len(nodes), len(given), "nodes")
    for node in nodes:
        node |= {name: _dicts(node.get(name)) for name in ("settings", "kept")}
    return {**content, "nodes": nodes} if nodes else {}


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _mapping(text: str | None) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        content = json.loads(text or "{}")
        return content if isinstance(content, dict) else {}
    return {}
