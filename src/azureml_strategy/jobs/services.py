"""The ways into a running job, which its page in Studio shows: SSH, VS Code, JupyterLab and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import ServiceSettings

SERVICES = ("ssh", "vs_code", "jupyter_lab", "tensor_board")
_PUBLIC_KEYS = ("ssh-", "ecdsa-", "sk-")


def services_of(services: Mapping[str, ServiceSettings]) -> dict[str, Any]:
    """The ways into the running job as azure-ai-ml's classes.

    Raises:
        JobError: a type is unknown, a setting is another type's, or ssh has no public key.
    """
    return {name: _service(f"job.services.{name}", each.type or name, each) for name, each in services.items()}


def _service(place: str, kind: str, given: ServiceSettings) -> Any:
    from azure.ai.ml.entities import JupyterLabJobService, SshJobService, TensorBoardJobService, VsCodeJobService

    if given.nodes not in (None, "all"):
        raise JobError(f"{place}.nodes is {given.nodes!r}. Write all for every node, or null for the first one.")
    if given.ssh_public_keys and kind != "ssh":
        raise JobError(f"{place}.ssh_public_keys is for type ssh, and this one is {kind}.")
    if given.log_dir and kind != "tensor_board":
        raise JobError(f"{place}.log_dir is for type tensor_board, and this one is {kind}.")
    nodes: Any = given.nodes  # azure-ai-ml annotates the one word it takes
    if kind == "ssh":
        return SshJobService(nodes=nodes, ssh_public_keys=_read_public_key(place, given.ssh_public_keys))
    if kind == "tensor_board":
        return TensorBoardJobService(nodes=nodes, log_dir=given.log_dir)
    if kind == "vs_code":
        return VsCodeJobService(nodes=nodes)
    if kind == "jupyter_lab":
        return JupyterLabJobService(nodes=nodes)
    raise JobError(f"{place} has type {kind!r}. Known: {', '.join(SERVICES)}.")


def _read_public_key(place: str, given: str | None) -> str:
    """The text of a public key, which the user gives as text or as a file."""
    if given is None:
        raise JobError(
            f"{place} needs {place}.ssh_public_keys: a public key, or its file, such as ~/.ssh/id_ed25519.pub."
        )
    if given.startswith(_PUBLIC_KEYS):
        return given
    file = Path(given).expanduser()
    text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    if not text.startswith(_PUBLIC_KEYS):
        raise JobError(
            f"{place}.ssh_public_keys is neither a public key nor the file of one. Give ~/.ssh/id_ed25519.pub, say; "
            "the file beside it without .pub is the private key and stays here."
        )
    return text
