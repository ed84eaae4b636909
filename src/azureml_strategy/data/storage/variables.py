"""The environment variables that decide what an address in Azure leads to, and who reads it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from typing_extensions import override

from azureml_strategy.cluster.environ import copied

# What this package reads, azure-identity (`EnvironmentVariables` of azure.identity._constants), and azure-ai-ml's own
# credential for the user of a job.
_READ = re.compile(r"(?:AZURE|AZUREML|MSI|IDENTITY|OBO|DEFAULT_IDENTITY)_\w+|IMDS_ENDPOINT|OID|TID")


class Variables(dict[str, str]):
    """Environment variables by name. What shows this object, such as a traceback with its variables, shows no value."""

    @override
    def __repr__(self) -> str:
        return f"<{len(self)} environment variables>"

    __str__ = __repr__

    @property
    def mark(self) -> str:
        """A hash of all names and values. It is kept in memory only."""
        return hashlib.sha256(json.dumps(sorted(self.items())).encode()).hexdigest()


def storage_variables(environ: Mapping[str, str]) -> Variables:
    """Return those variables that storage reads.

    Args:
        environ: environment variables.
    """
    return Variables({name: value for name, value in copied(environ).items() if _READ.fullmatch(name)})
