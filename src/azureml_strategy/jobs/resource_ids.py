"""Ids of resources in Azure, as the portal shows them under "Resource ID"."""

from __future__ import annotations

import re

from azureml_strategy.jobs.errors import JobError

_RESOURCE_ID = re.compile(r"/subscriptions/[0-9a-f-]{36}/resourcegroups/[^/]+/providers/[\w.]+(?:/[^/]+/[^/]+)+", re.I)


def check_resource_id(option: str, value: str | None) -> None:
    """Refuse a name where an id is needed.

    Args:
        option: what was typed before it.
        value: what was typed; None is none.

    Raises:
        JobError: it is no id of a resource.
    """
    if value is not None and not _RESOURCE_ID.fullmatch(value):
        raise JobError(
            f"{option} {value} is no resource id. It is written "
            "/subscriptions/ID/resourceGroups/NAME/providers/KIND/TYPE/NAME: `az resource list --name NAME --query "
            "'[].id' -o tsv` shows it, and so does the resource's page in the portal."
        )
