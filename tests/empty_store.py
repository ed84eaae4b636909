"""MLflow makes the tables of a new SQLite store by all its migrations, a second's work; tests have them made once.

Programs that are forked, and the workers that fork them, write what the migrations lead to.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

_statements: list[str] = []


def make() -> None:
    """Have MLflow make a store, and do as it did from now on, in this process and in those that are forked from it."""
    reader, writer = os.pipe()
    child = os.fork()  # what MLflow keeps of a store does not stay here
    if not child:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as told:
                json.dump(_of_mlflow(), told)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        _statements[:] = json.loads(told.read() or "[]")
    os.waitpid(child, 0)
    if not _statements:
        raise RuntimeError("MLflow made no store: its error is above")
    _use()


def _of_mlflow() -> list[str]:
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # in a process of its own
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mlflow.db"
        MlflowClient(f"sqlite:///{path}").search_experiments()
        with closing(sqlite3.connect(path)) as store:
            said = [each for each in store.iterdump() if each not in ("BEGIN TRANSACTION;", "COMMIT;")]
    # The first experiment has a time and a folder: MLflow writes it into each store, once there are tables.
    return [each for each in said if not each.startswith('INSERT INTO "experiments"')]


def _use() -> None:
    """Take the place of MLflow's own function for stores in SQLite files."""
    from mlflow.store.db import utils

    own: Callable[[Any], None] = utils._initialize_tables

    def write(engine: Any) -> None:
        in_a_file = engine.url.get_backend_name() == "sqlite" and engine.url.database not in (None, "", ":memory:")
        if in_a_file:
            _write(engine.url.database)
        else:
            own(engine)

    utils._initialize_tables = write


def _write(path: str) -> None:
    """In one transaction: of several processes that find no tables, one writes them; no other's rows are lost."""
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as store:
        store.execute("BEGIN IMMEDIATE")
        if not store.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _statements:
                store.execute(statement)
        store.execute("COMMIT")
