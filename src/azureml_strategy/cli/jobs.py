"""jobs list|show|logs|cancel|download|upload-metrics: manages submitted jobs and their results."""

from __future__ import annotations

import argparse
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_azure_verb, add_group, add_workspace_options, client, print_text

_UPLOAD = """\
Send the metrics, parameters, tags and text files that MLflow has not taken while a run logged them. What stands \
already is not written again, and a file is removed once all of it stands."""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "jobs", "list, show, cancel or download jobs")
    listing = add_azure_verb(group, "list", _list, "list the newest jobs")
    listing.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default 20)")
    listing.add_argument("--experiment", metavar="NAME", help="only those of this experiment")
    listing.add_argument("--status", metavar="STATE", help="only those that are Running, Completed, Failed, ...")
    show = add_azure_verb(group, "show", _show, "show a job", "Show a job, and why it failed.")
    logs = add_azure_verb(group, "logs", _logs, "print a job's log", "Print what a job's first process prints.")
    which = logs.add_mutually_exclusive_group()
    which.add_argument("--file", metavar="LOG", help="another log: user_logs/std_log_process_1.txt, system_logs/...")
    which.add_argument("--list", action="store_true", help="name the logs there are")
    which.add_argument("--follow", action="store_true", help="go on until the job is over")
    cancel = add_azure_verb(group, "cancel", _cancel, "cancel a job")
    fetched = "Fetch the logs and files of a job."
    download = add_azure_verb(group, "download", _download, "fetch a job's files", fetched)
    what = download.add_mutually_exclusive_group()
    what.add_argument("--output", metavar="NAME", help="only this output, such as run")
    what.add_argument("--all", action="store_true", help="logs, ./outputs and every output")
    download.add_argument("--to", type=Path, default=Path("."), metavar="FOLDER", help="where to (default: here)")
    upload = add_azure_verb(group, "upload-metrics", _upload_metrics, "send what a run could not log", _UPLOAD)
    upload.add_argument(
        "folder", nargs="?", type=Path, default=Path("."), metavar="FOLDER", help="where *.unsent.jsonl lie (here)"
    )
    upload.add_argument("--tracking-uri", metavar="URI", help="the store, where the file does not name it in full")
    for verb in (show, logs, cancel, download):
        verb.add_argument("name", metavar="JOB", help="name of the job, as `jobs list` shows it")
    add_workspace_options(*group.choices.values())


def _list(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.listing import list_jobs
    from azureml_strategy.tracking.tables import render_table

    found = list_jobs(client(options), options.limit, options.experiment, options.status)
    rows = [(job.name, job.status, job.created, job.experiment, job.compute, job.nodes) for job in found]
    headings = ("job", "status", "created (UTC)", "experiment", "compute", "nodes")
    print_text(render_table(headings, rows, empty="There are no such jobs."))


def _show(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.listing import job_failure, show_job

    workspace = client(options)
    job = show_job(workspace, options.name)
    facts = {
        "job": job.name,
        "status": job.status,
        "reason": job_failure(workspace, job.name) if job.status == "Failed" else None,
        "experiment": job.experiment,
        "display name": job.display_name,
        "created": job.created and f"{job.created} UTC",
        "runs on": f"{job.nodes} node(s) of {job.compute or 'serverless compute'}",
        "outputs": ", ".join(job.outputs),
        "tags": ", ".join(f"{key}={value}" for key, value in job.tags.items()),
        "Studio": job.studio_url,
    }
    print_text("\n".join(f"{name:<14}{value}" for name, value in facts.items() if value))


def _logs(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.listing import log_files, read_log

    workspace = client(options)
    if options.list:
        print_text("\n".join(log_files(workspace, options.name)))
    elif options.follow:
        from azureml_strategy.jobs.follow import follow_job
        from azureml_strategy.jobs.listing import show_job
        from azureml_strategy.jobs.submit import SubmittedJob

        found = show_job(workspace, options.name)
        job = SubmittedJob(workspace, found.name, found.studio_url or "")
        return 0 if follow_job(job) == "Completed" else 1
    else:
        print_text(read_log(workspace, options.name, options.file).rstrip("\n"))
    return 0


def _cancel(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.listing import cancel_job

    job = cancel_job(client(options), options.name)
    print_text(f"{job.name}: {job.status}")


def _download(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.listing import download_job

    download_job(client(options), options.name, options.to, options.output, everything=options.all)
    print_text(f"{options.name}: fetched into {options.to}")


def _upload_metrics(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.listing import store_address
    from azureml_strategy.tracking.offline_queue import upload_all

    def address(store: str) -> str:
        return options.tracking_uri or store_address(store, lambda: client(options))

    return 0 if upload_all(options.folder, address, print_text) else 1
