"""report: shows a run, several, a study or a benchmark on one page."""

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.cli.verbs import Verbs, add_verb, fail, print_text

if TYPE_CHECKING:
    from azureml_strategy.reporting.collect import RunRecord
    from azureml_strategy.reporting.page import Page

_DESCRIPTION = "Write one HTML page: what a run waited for most, why, what to try and what that would gain."
_EPILOG = """\
examples:
  azureml-strategy report outputs/resnet50_ddp-1 # the output folder of a recipe's run
  azureml-strategy report 0a1b2c3d4e5f           # a run of MLFLOW_TRACKING_URI, or of mlflow.db here
  azureml-strategy report JOB --store azureml    # a job of the configured workspace
  azureml-strategy report RUN RUN RUN            # side by side
  azureml-strategy report outputs/study.json     # what `study` or `bench` wrote
The page is one file that needs no network and holds no script: mail it, print it, open it anywhere.
"""
_DEFAULT = "report.html"


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    summary = "show on one page what a run waits for, or what a study or bench measured"
    verb = add_verb(verbs, "report", _run, summary, _DESCRIPTION, _EPILOG)
    verb.add_argument("runs", nargs="+", metavar="RUN", help="run id, run folder, or JSON file of `study` or `bench`")
    verb.add_argument("--store", metavar="URI", help="where the runs are; azureml is the configured workspace")
    verb.add_argument("--output", type=Path, metavar="FILE.html", help=f"default: {_DEFAULT}, in a run's own folder")
    # At the end of a run, its store still says that it runs. So the run passes its status by these.
    verb.add_argument("--status", help=argparse.SUPPRESS)
    verb.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.service_errors import JobError
    from azureml_strategy.lazy import require_library
    from azureml_strategy.reporting.page import render
    from azureml_strategy.reporting.stores import ReportError
    from azureml_strategy.tracking.store import TrackingError

    for library in ("matplotlib", "jinja2"):
        require_library(library)
    gc.disable()  # nearly all objects live until the end; collecting the rest takes a fifth of the time
    try:
        page = _page(options)
        path = options.output
        if path is None:
            only = Path(options.runs[0])
            path = only / _DEFAULT if len(options.runs) == 1 and only.is_dir() else Path(_DEFAULT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page), encoding="utf-8")
    except (ReportError, TrackingError, JobError, OSError) as error:
        return fail(error)
    finally:
        gc.enable()
    print_text(f"{page.headline}\n{path.absolute()}")
    return 0


def _page(options: argparse.Namespace) -> Page:
    files = [Path(each) for each in options.runs if Path(each).is_file()]
    if files:
        return _page_of_file(files[0], alone=len(options.runs) == 1)
    from azureml_strategy.reporting.run_page import run_page

    records = [_collect(each, options) for each in options.runs]
    if len(records) == 1:
        return run_page(records[0])
    from azureml_strategy.reporting.comparison import compare_page

    return compare_page(records)


def _collect(run: str, options: argparse.Namespace) -> RunRecord:
    from azureml_strategy.reporting.collect import collect_run

    run_id, store = find_run(run, options.store)
    folder = Path(run) if Path(run).is_dir() else None
    record = collect_run(run_id, store, options.seconds, folder=folder)
    if options.status:
        return replace(record, run=replace(record.run, status=options.status))
    return _with_plan(record)  # a run that makes its own page has been told what to expect, if anybody knew


def _with_plan(record: RunRecord) -> RunRecord:
    """Add what the planner expects of a run that was not submitted with it."""
    from azureml_strategy.tracking.expected import may_expect

    run = record.run
    if record.rate_check is not None or not may_expect(run.tags, run.metrics):
        return record
    from azureml_strategy.planning.past_run import expect_run

    return replace(record, planned=expect_run(run.tags, run.params, run.metrics))


def find_run(run: str, store: str | None) -> tuple[str, str]:
    """The id of a run and the address of its store.

    Args:
        run: its id, or the output folder of a recipe's run.
        store: URI of the store, or `azureml`; None for that of the environment or the folder.

    Raises:
        ReportError: it names no run.
        TrackingError: the store needs a package that is not installed.
        JobError: the workspace does not answer.
    """
    from azureml_strategy.reporting.stores import ReportError
    from azureml_strategy.tracking.run import resolve_tracking_uri

    if not run.isprintable():
        raise ReportError(f"{run[:60]!a} is no run id, folder or file. Name one of these.")
    folder = Path(run)
    if not folder.is_dir():
        if "/" in run or run.endswith((".json", ".html", ".yaml")):
            raise ReportError(f"There is no {run}. Name a run id, the output folder of a run, or a JSON file.")
        if store == "azureml":
            from azureml_strategy.jobs import connect
            from azureml_strategy.jobs.listing import tracking_uri

            store = tracking_uri(connect())
        return run, resolve_tracking_uri(store)
    file = folder / "run.json"
    if not file.is_file():
        raise ReportError(
            f"{run} has no run.json, which a recipe's run leaves in its output folder. Name the run by its id: "
            "azureml-strategy report RUN_ID --store URI."
        )
    found = _read_json(file)
    if not isinstance(found, dict) or not {"run_id", "store"} <= found.keys():
        raise ReportError(f"{file} does not name a run: it needs run_id and store.")
    return str(found["run_id"]), resolve_tracking_uri(store or _store_of(str(found["store"])))


def _store_of(store: str) -> str | None:
    """The address of a store, which a file names without the secrets in it."""
    from azureml_strategy.cluster.redaction import REDACTED
    from azureml_strategy.tracking.run import describe_store

    configured = os.environ.get("MLFLOW_TRACKING_URI", "")
    if configured and (REDACTED in store or describe_store(configured) == store):
        return configured
    return store


def _page_of_file(path: Path, alone: bool) -> Page:
    from azureml_strategy.reporting.stores import ReportError

    content = _read_json(path)
    keys = content.keys() if isinstance(content, dict) else set()
    if not alone:
        raise ReportError(f"{path} is a file, and several are compared by run ids or folders only. Name it alone.")
    if {"base", "runs"} <= keys:
        from azureml_strategy.study.page import study_page

        return study_page(content)
    if "conditions" in keys and keys & {"collectives", "pairs"}:
        from azureml_strategy.bench.page import bench_page

        return bench_page(content)
    raise ReportError(
        f"{path} is neither the JSON file of `study` nor of `bench`, which are what a report can show of files; there "
        "are no plans in this version. A run is named by its id or its output folder."
    )


def _read_json(path: Path) -> Any:
    from azureml_strategy.reporting.stores import ReportError

    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is no JSON file ({error}).") from None
