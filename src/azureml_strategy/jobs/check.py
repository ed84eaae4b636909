"""Asks Azure, before anything is sent, whether a job could start: sign-in, workspace, compute, quota, data, image."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.client import WorkspaceSettings, connect, plain
from azureml_strategy.jobs.inputs import asset_of, check_data, datastore_of
from azureml_strategy.jobs.plan import JobPlan
from azureml_strategy.jobs.render import build_job
from azureml_strategy.jobs.service_errors import JobError, service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import AmlCompute

_MANAGEMENT = "https://management.azure.com/.default"
_REFERENCE = re.compile(r"(?:azureml:)?(?P<name>[^:@/]+)(?::(?P<version>[^:@]+)|@(?P<label>[^:@]+))")


@dataclass(frozen=True)
class Finding:
    """What one question found.

    Attributes:
        what: `login`, `workspace`, `compute`, `quota`, `data` or `image`.
        text: the answer; if it is no, with what to type instead.
        fits: whether the job can start as far as this goes; None if it could not be found out.
    """

    what: str
    text: str
    fits: bool | None = True

    def __str__(self) -> str:
        mark = {True: "ok", False: "NO", None: "?"}[self.fits]
        return f"{mark:<3} {self.what}: {self.text}"


def check_submission(plan: JobPlan, workspace: WorkspaceSettings | None = None) -> Iterator[Finding]:
    """Ask whether a job could start. Nothing is sent, made or changed.

    Args:
        plan: what the job would run.
        workspace: settings that take precedence over `job.workspace`.

    Yields:
        Each finding as soon as it is known. Without a sign-in or a workspace nothing further is asked.

    Raises:
        JobError: the job itself is invalid, or no workspace is configured.
    """
    job = build_job(plan, None)
    client = connect((workspace or WorkspaceSettings()).over(plan.job.workspace))
    signed_in = _ask("login", _sign_in)
    yield signed_in
    if not signed_in.fits:
        return
    found = _ask("workspace", lambda: _workspace(client))
    yield found
    if not found.fits:
        return
    if job.compute:
        yield _ask("compute", lambda: _compute(plan, client, str(job.compute).removeprefix("azureml:")))
    yield _ask("quota", lambda: _quota(plan, client))
    yield _ask("data", lambda: _data(plan, client))
    yield _ask("image", lambda: _image(job.environment, client))


def _ask(what: str, ask: Callable[[], str | Finding]) -> Finding:
    """The answer to one question as a finding; an error of Azure is a finding that the job cannot start."""
    try:
        with service_errors():
            answer = ask()
    except JobError as error:
        return Finding(what, str(error), fits=False)
    return answer if isinstance(answer, Finding) else Finding(what, answer)


def _sign_in() -> str:
    from azure.identity import DefaultAzureCredential

    DefaultAzureCredential().get_token(_MANAGEMENT)
    return "signed in"


def _workspace(client: MLClient) -> str:
    workspace = client.workspaces.get(client.workspace_name)
    return f"{workspace.name} in {workspace.location}"


def _compute(plan: JobPlan, client: MLClient, name: str) -> str | Finding:
    found: Any = client.compute.get(name)
    size, nodes = plan.size, plan.cluster.num_nodes
    if plain(found.type).lower() != "amlcompute":
        return f"{name}, {plain(found.type)}"
    cluster: AmlCompute = found
    text = f"{name}, {cluster.size}, up to {cluster.max_instances} node(s)"
    if size is not None and str(cluster.size).lower() != size.name.lower():
        return Finding("compute", f"{text}; the job is for {size.name}. Name another: cluster.compute=NAME.", False)
    if cluster.max_instances is not None and cluster.max_instances < nodes:
        advice = f"azureml-strategy cluster create {plan.cluster.vm_size or 'SIZE'} --max-nodes {nodes}"
        return Finding("compute", f"{text}; the job asks for {nodes}, and would wait for ever. {advice}", False)
    state = str(cluster.provisioning_state or "Succeeded")
    return Finding("compute", f"{text}; it is {state}", False) if state == "Failed" else text


def _quota(plan: JobPlan, client: MLClient) -> Finding:
    """Compare the cores of the nodes with what the size's family has left. Nodes that run already count as used."""
    size = plan.size
    if size is None or size.vcpus is None:
        return Finding("quota", "the cores of the nodes are not known; cluster=SIZE names their size", None)
    region = plan.cluster.region
    offered = [
        each for each in client.compute.list_sizes(location=region) if str(each.name).lower() == size.name.lower()
    ]
    if not offered:
        return Finding("quota", f"{size.name} is not offered in the workspace's region, or not to it", False)
    low = plan.cluster.tier == "low_priority"
    needed = size.vcpus * plan.cluster.num_nodes
    usages = map(_Usage.read, client.compute.list_usage(location=region))
    limits = [each for each in usages if each.limit >= 0 and each.counts(offered[0].family, low)]
    if not limits:
        return Finding("quota", f"{needed} cores; Azure does not say how many {size.name} may have", None)
    least = min(limits, key=lambda each: each.limit - each.used)
    text = f"{needed} cores, {least.limit - least.used} of {least.limit} are free ({least.name})"
    if least.limit < needed:
        return Finding("quota", f"{text}. Ask for more on the Quotas page of Azure ML Studio.", False)
    if least.limit - least.used < needed:
        return Finding("quota", f"{text}: the job waits until others end, unless the nodes run already", None)
    return Finding("quota", text)


@dataclass(frozen=True)
class _Usage:
    """How many cores of a kind are used, and how many may be used; a limit of -1 is none."""

    name: str
    used: int
    limit: int

    @classmethod
    def read(cls, usage: Any) -> _Usage:
        """Read azure-ai-ml's entity. Its version decides whether a name is `currentValue` or `current_value`."""
        given = {_plain_name(key): value for key, value in vars(usage).items() if value is not None}
        name = given.get("name")
        named = name if isinstance(name, dict) else vars(name) if hasattr(name, "__dict__") else {}
        shown = {_plain_name(key): value for key, value in named.items() if value is not None}
        text = shown.get("localizedvalue") or shown.get("value") or name
        return cls(str(text), int(given.get("currentvalue", 0)), int(given.get("limit", -1)))

    def counts(self, family: str | None, low: bool) -> bool:
        """Whether this limits the nodes. All low-priority nodes share one limit; dedicated ones have one per family."""
        name = _plain_name(self.name)
        return "lowpriority" in name if low else bool(family) and _plain_name(str(family)) in name


def _plain_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _data(plan: JobPlan, client: MLClient) -> str:
    check_data(plan.job.inputs, client)
    stores = sorted({store for each in plan.job.inputs.values() if (store := datastore_of(each)) is not None})
    for store in stores:
        client.datastores.get(store)
    assets = [str(each.path) for each in plan.job.inputs.values() if asset_of(each) is not None]
    return ", ".join([*assets, *(f"datastore {store}" for store in stores)]) or "the job names none"


def _image(environment: Any, client: MLClient) -> str | Finding:
    if not isinstance(environment, str):
        if getattr(environment, "build", None) is not None:
            return "Azure ML builds it when the job starts, unless it has it already"
        return Finding("image", f"{environment.image} is in a registry that only the nodes ask", None)
    found = _REFERENCE.fullmatch(environment)
    if found is None:
        return Finding("image", f"{environment} is in a registry, which is not asked", None)
    got = client.environments.get(found["name"], version=found["version"], label=found["label"])
    return f"environment {got.name}, version {got.version}"
