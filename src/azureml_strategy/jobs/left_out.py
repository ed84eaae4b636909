"""What stays here when a folder of code is sent: as `.amlignore` asks, and before it what no job's code should hold."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from azure.ai.ml._utils._asset_utils import IgnoreFile, get_ignore_file

# In the notation of .gitignore. A line that the user's own file has later, such as `!.env`, goes before these.
NO_CODE = (
    *(".git/", ".hg/", ".svn/", "__pycache__/", "*.py[cod]", ".DS_Store", ".idea/", ".vscode/", "node_modules/"),
    *(".cache/", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", ".ipynb_checkpoints/", ".tox/"),
    *("/outputs/", "multirun/", "mlruns/", "mlartifacts/", "lightning_logs/", "mlflow.db*"),  # what a run writes
)
SECRETS = (
    *("credentials", "!credentials/"),  # the file of aws, and not a package of that name
    *(".env", ".env.*", "*.env", ".envrc", "!.env.example", "!.env.sample", "!.env.template", "!.env.dist"),
    *("*.pem", "*.key", "*.pfx", "*.p12", "*.p8", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.asc"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", ".ssh/", ".gnupg/"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".pgpass", ".my.cnf", ".htpasswd", ".dockercfg"),
    *(".aws/", ".azure/", ".kube/", ".docker/", "kubeconfig", "*.kubeconfig", "*.publishsettings", "*.tfstate*"),
    *("credentials.json", "credentials.yaml", "credentials.yml", "credentials.toml", "credentials.ini"),
    *("secrets.json", "secrets.yaml", "secrets.yml", "secrets.toml", "secrets.ini", "client_secret*.json"),
    *("service_account*.json", "service-account*.json"),
)


class LeftOut(IgnoreFile):
    """The rules for one folder, as azure-ai-ml asks for them.

    Virtual environments stay here wherever they are and whatever they are called.

    Args:
        folder: the folder of code; its `.amlignore`, or else `.gitignore`, goes on from our own rules.
        secrets: whether files that look like secrets stay here.
    """

    def __init__(self, folder: str, *, secrets: bool = True) -> None:
        super().__init__()
        self._folder = Path(folder).resolve()
        self._path = self._folder / ".amlignore"  # to whose folder azure-ai-ml takes the rules to be relative
        self._own = (*NO_CODE, *(SECRETS if secrets else ()))

    def _get_ignore_list(self) -> list[str]:
        return [*self._own, *get_ignore_file(self._folder)._get_ignore_list()]

    def is_file_excluded(self, file_path: str | os.PathLike[str]) -> bool:
        """Whether a file stays here."""
        parent = os.path.dirname(os.path.abspath(file_path))
        return _in_environment(parent, str(self._folder)) or bool(super().is_file_excluded(file_path))

    def __deepcopy__(self, memo: dict[int, Any]) -> LeftOut:
        return self  # azure-ai-ml copies its entities; there is nothing to change here


@lru_cache(100_000)
def _in_environment(directory: str, root: str) -> bool:
    """Whether a directory below the root, or one that a link leads to, is in a virtual environment."""
    if directory == root or os.path.dirname(directory) == directory:
        return False
    return os.path.exists(os.path.join(directory, "pyvenv.cfg")) or _in_environment(os.path.dirname(directory), root)
