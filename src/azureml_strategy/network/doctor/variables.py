"""Checks the environment variables: launch, job and NCCL settings."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.cluster.environ import in_azure_ml
from azureml_strategy.cluster.job import Job
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.hardware import find_faults


def check_launch(facts: Facts) -> Iterator[Finding]:
    """Report how the process was launched, and in which job."""
    if facts.launch_error:
        yield Finding("problem", "launch", facts.launch_error)
    elif facts.launch:
        yield Finding("ok", "launch", _describe_launch(facts.launch))
    elif in_azure_ml(facts.environ):
        yield Finding("ok", "launch", "one process, without a launcher: Lightning's own defaults hold.")
    else:
        yield Finding("ok", "launch", "not in an Azure ML job: Lightning's own defaults hold.")
    if facts.job:
        yield Finding("ok", "job", _describe_job(facts.job))


def _describe_launch(launch: Launch) -> str:
    return (
        f"{launch.launcher}: global rank {launch.rank} of {launch.world_size}, local rank {launch.local_rank} of "
        f"{launch.local_world_size}, node {launch.node_rank} of {launch.num_nodes}; rank 0 at "
        f"{launch.main_address}:{launch.main_port}"
    )


def _describe_job(job: Job) -> str:
    """The job without its subscription."""
    parts = {
        "experiment": job.experiment,
        "workspace": job.workspace,
        "compute": job.compute,
        "priority": job.priority,
        "attempt": str(job.attempt + 1),
    }
    return ", ".join([job.run_id, *(f"{name} {value}" for name, value in parts.items() if value)])


def check_settings(facts: Facts) -> Iterator[Finding]:
    """Report each variable with its value and reason, then the variables that contradict the hardware."""
    for setting in facts.plan.settings:
        yield Finding("ok", setting.variable, f"{setting.value}  {setting.reason}")
    faults = tuple(find_faults(facts.node))
    conflicts = [finding for finding in facts.plan.findings if finding not in faults]
    wrong = {finding.subject.partition("=")[0] for finding in conflicts}
    for setting in facts.plan.kept:
        if setting.variable not in wrong:
            text = f"{setting.value}  Set already, in {_describe_source(setting.source)}; it stays."
            yield Finding("ok", setting.variable, text)
    yield from conflicts


def _describe_source(source: str) -> str:
    return "the environment" if source == "environment" else source
