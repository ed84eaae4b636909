"""Reads runs from MLflow's stores in bounded time: a database by SQL, any other store by MLflow's client.

A database sums millions of points up by itself, with their extremes. It is read without MLflow, whose import takes
longer than all that a page needs. A server gives points by pages until the time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.reporting.series import BUCKETS, Series, reduce_points
from azureml_strategy.tracking.run import describe_store

if TYPE_CHECKING:
    from sqlalchemy import Engine, TableClause

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# More points of one metric are summed up by the database.
_MOST_POINTS = 20_000
_CONNECTIONS = 8
# Nearly the largest float, which a database has in place of infinity.
_INFINITE = 1.79e308
_LONGEST_TEXT = 400  # characters of a store's error


class ReportError(ValueError):
    """There is nothing to report on; the message says what to type instead."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run as its store has it. The texts are the user's own and may hold anything.

    Attributes:
        run_id: its id.
        name: its name.
        experiment: the experiment's name.
        experiment_id: the experiment's id.
        status: MLflow's word: RUNNING, FINISHED, FAILED, KILLED, SCHEDULED.
        started_ms: start, in ms since 1970; None if unknown.
        ended_ms: end; None while it runs.
        artifact_uri: where its files are.
        tags: by name.
        params: by name.
        metrics: last value of each metric.
    """

    run_id: str
    name: str
    experiment: str
    experiment_id: str
    status: str
    started_ms: int | None
    ended_ms: int | None
    artifact_uri: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]


def open_store(uri: str) -> RunStore:
    """Open the store with this tracking URI of MLflow's for reading.

    Raises:
        ReportError: there is no such store.
    """
    is_database = uri.split(":")[0].split("+")[0] in _DATABASES
    return DatabaseStore(uri) if is_database else ServerStore(uri)


def _unknown_run(run_id: str, uri: str) -> ReportError:
    return ReportError(
        f"The store {describe_store(uri)} has no run {run_id}. Name the store that has it: --store URI, --store "
        "azureml for the workspace's, or MLFLOW_TRACKING_URI."
    )


def _no_answer(uri: str, error: Exception) -> ReportError:
    why = redact_text(" ".join(str(error).split()))[:_LONGEST_TEXT]
    return ReportError(
        f"The store {describe_store(uri)} does not answer: {type(error).__name__}: {why}. Check its address "
        "(--store URI or MLFLOW_TRACKING_URI), the network and your rights."
    )


class DatabaseStore:
    """MLflow's store in a database, read by SQL.

    The tables are those of mlflow.store.tracking.dbmodels.models, whose columns have been the same since MLflow 1.

    Args:
        uri: as SQLAlchemy takes it, such as `sqlite:///mlflow.db`.

    Raises:
        ReportError: the file does not exist.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        with self._errors():
            self._engine = _connect(uri)

    def run(self, run_id: str) -> StoredRun:
        """Return a run.

        Raises:
            ReportError: there is no such run, or the store does not answer.
        """
        from sqlalchemy import select

        runs = _table("runs", "run_uuid", "name", "experiment_id", "status", "start_time", "end_time", "artifact_uri")
        last = _points("latest_metrics")
        with self._errors():
            found = self._rows(select(runs).where(runs.c.run_uuid == run_id))
            if not found:
                raise _unknown_run(run_id, self._uri)
            (row,) = found
            tags, params = self._pairs("tags", run_id), self._pairs("params", run_id)
            latest = self._rows(select(last.key, last.value, last.is_nan).where(last.run_uuid == run_id))
            experiments = _table("experiments", "experiment_id", "name").c
            named = self._rows(select(experiments.name).where(experiments.experiment_id == row.experiment_id))
        return StoredRun(
            run_id=run_id,
            name=tags.get("mlflow.runName") or row.name or run_id,
            experiment=str(named[0][0]) if named else "",
            experiment_id=str(row.experiment_id),
            status=row.status,
            started_ms=row.start_time,
            ended_ms=row.end_time,
            artifact_uri=row.artifact_uri or "",
            tags=tags,
            params=params,
            metrics={each.key: float("nan") if each.is_nan else float(each.value) for each in latest},
        )

    def series(self, run_id: str, names: Sequence[str], budget_s: float) -> dict[str, Series]:
        """Return the histories of metrics; those for which the time does not suffice are missing or cut.

        Args:
            run_id: the run.
            names: the metrics, the most important ones first.
            budget_s: seconds after which no further metric is begun.

        Raises:
            ReportError: the store does not answer.
        """
        from sqlalchemy import func, select

        until, found = time.monotonic() + budget_s, {}
        points = _points("metrics")
        # An index of MLflow's answers it: run, metric, step.
        query = select(points.key, func.count(), func.min(points.step), func.max(points.step))
        with self._errors():
            sizes = {row[0]: row[1:] for row in self._rows(query.where(points.run_uuid == run_id).group_by(points.key))}
            for name in names:
                if name in sizes and time.monotonic() < until:
                    many = sizes[name][0] > _MOST_POINTS
                    found[name] = (
                        self._read_buckets(run_id, name, *sizes[name]) if many else self._read_points(run_id, name)
                    )
        return found

    def _read_points(self, run_id: str, name: str) -> Series:
        from sqlalchemy import select

        points = _points("metrics")
        query = select(points.step, points.timestamp, points.value, points.is_nan)
        rows = self._rows(query.where(points.run_uuid == run_id, points.key == name))
        steps, times, values, missing = zip(*rows, strict=True) if rows else ((), (), (), ())
        numbers = np.where(np.array(missing, bool), np.nan, np.array(values, np.float64))
        return reduce_points(np.array(steps, np.int64), np.array(times, np.int64), numbers)

    def _read_buckets(self, run_id: str, name: str, number: int, first_step: int, last_step: int) -> Series:
        from sqlalchemy import func, select

        points = _points("metrics")
        mine = (points.run_uuid == run_id, points.key == name)
        place, first, last = points.step, first_step, last_step
        if first == last:  # who logs without steps logs all at step 0
            place = points.timestamp
            ((first, last),) = self._rows(select(func.min(place), func.max(place)).where(*mine))
        width = (last - first) // BUCKETS + 1
        bucket = (place - first) - (place - first) % width
        columns = [
            *(func.min(points.step), func.max(points.step), func.min(points.timestamp), func.max(points.timestamp)),
            *(func.avg(points.value), func.min(points.value), func.max(points.value), func.count()),
        ]
        query = select(*columns).where(*mine, *_is_finite(points)).group_by(bucket).order_by(func.min(place))
        rows = np.array([tuple(map(float, row)) for row in self._rows(query)]).reshape(-1, 8)
        missing = number - int(rows[:, 7].sum())
        return Series(
            steps=rows[:, 0:2].mean(axis=1),
            times_ms=rows[:, 2:4].mean(axis=1),
            means=rows[:, 4],
            lows=rows[:, 5],
            highs=rows[:, 6],
            counts=rows[:, 7].astype(np.int64),
            missing=missing,
            first_missing=self._first_missing(run_id, name) if missing else None,
            last_step=last_step,
            last_ms=int(rows[:, 3].max()) if len(rows) else None,
        )

    def _first_missing(self, run_id: str, name: str) -> int | None:
        from sqlalchemy import and_, func, not_, select

        points = _points("metrics")
        query = select(func.min(points.step)).where(points.run_uuid == run_id, points.key == name)
        query = query.where(not_(and_(*_is_finite(points))))
        ((step,),) = self._rows(query)
        return None if step is None else int(step)

    def _pairs(self, name: str, run_id: str) -> dict[str, str]:
        from sqlalchemy import select

        pairs = _table(name, "key", "value", "run_uuid")
        rows = self._rows(select(pairs.c.key, pairs.c.value).where(pairs.c.run_uuid == run_id))
        return {str(key): str(value) for key, value in rows}

    def _rows(self, query: Any) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(query))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, ModuleNotFoundError) as error:
            raise _no_answer(self._uri, error) from None


def _connect(uri: str) -> Engine:
    from sqlalchemy import create_engine, make_url

    url = make_url(uri)
    if url.get_backend_name() != "sqlite":
        return create_engine(url)
    # SQLite would create a file that does not exist.
    path = Path(url.database or "")
    if not path.is_file():
        raise ReportError(
            f"There is no store {path.absolute()}. Name the store of the run: --store URI, such as "
            "sqlite:////home/me/mlflow.db, or MLFLOW_TRACKING_URI."
        )
    return create_engine(url)


@cache
def _table(name: str, *columns: str) -> TableClause:
    from sqlalchemy import column, table

    return table(name, *map(column, columns))


def _points(name: str) -> Any:
    """The columns of a table of points."""
    return _table(name, "key", "value", "timestamp", "step", "is_nan", "run_uuid").c


def _is_finite(points: Any) -> list[Any]:
    from sqlalchemy import false

    return [points.is_nan == false(), points.value < _INFINITE, points.value > -_INFINITE]


class ServerStore:
    """Any other store, read by MLflow's client: a server, Azure ML, a folder of files.

    Args:
        uri: MLflow's tracking URI.

    Raises:
        ReportError: MLflow does not know such stores.
    """

    def __init__(self, uri: str) -> None:
        from azureml_strategy.tracking.store import one_attempt_client

        self._uri = uri
        self._client = self._ask(lambda: one_attempt_client(uri))

    def run(self, run_id: str) -> StoredRun:
        """See `DatabaseStore`."""
        run = self._ask(lambda: self._client.get_run(run_id), run_id)
        info, data = run.info, run.data
        experiment = self._ask(lambda: self._client.get_experiment(info.experiment_id))
        return StoredRun(
            run_id=run_id,
            name=info.run_name or run_id,
            experiment=experiment.name,
            experiment_id=str(info.experiment_id),
            status=info.status,
            started_ms=info.start_time,
            ended_ms=info.end_time,
            artifact_uri=info.artifact_uri or "",
            tags=dict(data.tags),
            params=dict(data.params),
            metrics=dict(data.metrics),
        )

    def series(self, run_id: str, names: Sequence[str], budget_s: float) -> dict[str, Series]:
        """See `DatabaseStore`."""
        until = time.monotonic() + budget_s
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            read = list(pool.map(lambda name: self._read(run_id, name, until), names))
        return {name: series for name, series in zip(names, read, strict=True) if series is not None}

    def _read(self, run_id: str, name: str, until: float) -> Series | None:
        from azureml_strategy.tracking.store import history_pages

        points: list[tuple[int, int, float]] = []
        left_out: int | None = 0
        pages = history_pages(self._client, run_id, name)
        while left_out == 0:
            if time.monotonic() > until:
                left_out = None
            else:
                page = self._ask(lambda: next(pages, None))
                if page is None:
                    break
                points += [(each.step, each.timestamp, each.value) for each in page]
        if not points:
            return None
        steps, times, values = zip(*points, strict=True)
        arrays = np.array(steps, np.int64), np.array(times, np.int64), np.array(values, np.float64)
        return reduce_points(*arrays, left_out=left_out)

    def _ask(self, question: Callable[[], Any], run_id: str | None = None) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return question()
        except Exception as error:  # whatever a store and its client raise
            unknown = isinstance(error, MlflowException) and error.error_code == "RESOURCE_DOES_NOT_EXIST"
            if run_id is not None and unknown:
                raise _unknown_run(run_id, self._uri) from None
            raise _no_answer(self._uri, error) from None


RunStore = DatabaseStore | ServerStore
