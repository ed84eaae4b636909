"""Lists and uploads a job's folder of code, without secrets, environments, caches and results."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.azure_internals import IgnoreFile, get_ignore_file, ignore_rules
from azureml_strategy.jobs.service_errors import JobError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

# In the notation of .gitignore. The user's own rules come later, so that a line such as `!.env` overrides these.
NO_CODE = (
    *(".git/", ".hg/", ".svn/", "__pycache__/", "*.py[cod]", ".DS_Store", ".idea/", ".vscode/", "node_modules/"),
    *(".cache/", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", ".ipynb_checkpoints/", ".tox/"),
    *("/outputs/", "multirun/", "mlruns/", "mlartifacts/", "lightning_logs/", "mlflow.db*"),  # results of a run
)
SECRETS = (
    *("credentials", "!credentials/"),  # the AWS credentials file, but not a folder or package of that name
    *(".env", ".env.*", "*.env", ".envrc", "!.env.example", "!.env.sample", "!.env.template", "!.env.dist"),
    *("*.pem", "*.key", "*.pfx", "*.p12", "*.p8", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.asc"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", ".ssh/", ".gnupg/"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".pgpass", ".my.cnf", ".htpasswd", ".dockercfg"),
    *(".aws/", ".azure/", ".kube/", ".docker/", "kubeconfig", "*.kubeconfig", "*.publishsettings", "*.tfstate*"),
    *("credentials.json", "credentials.yaml", "credentials.yml", "credentials.toml", "credentials.ini"),
    *("secrets.json", "secrets.yaml", "secrets.yml", "secrets.toml", "secrets.ini", "client_secret*.json"),
    *("service_account*.json", "service-account*.json"),
)

# Above these limits, an upload takes minutes, and each start of the job unpacks the code again. Our choice.
MANY_FILES = 2000
MANY_BYTES = 100 * 2**20
# Names that hardly ever belong to a job's code, wherever they stand in a path.
_UNWANTED = (".git", ".venv", "venv", "site-packages", "__pycache__", "outputs")
_SHOWN = 5  # most names in a line


class LeftOut(IgnoreFile):
    """The ignore rules for one folder, in the form that azure-ai-ml takes.

    They exclude virtual environments of any name and place.

    Args:
        folder: the folder of code. Its `.amlignore`, or else its `.gitignore`, adds to the rules of this module.
        secrets: whether to exclude files that look like secrets.
    """

    def __init__(self, folder: str, *, secrets: bool = True) -> None:
        super().__init__()
        self._folder = Path(folder).resolve()
        self._path = self._folder / ".amlignore"  # azure-ai-ml reads the rules relative to the folder of this file
        self._own = (*NO_CODE, *(SECRETS if secrets else ()))

    def _get_ignore_list(self) -> list[str]:
        return [*self._own, *ignore_rules(get_ignore_file(self._folder))]

    def is_file_excluded(self, file_path: str | os.PathLike[str]) -> bool:
        """Whether the upload leaves a file out."""
        parent = os.path.dirname(os.path.abspath(file_path))
        return _in_environment(parent, str(self._folder)) or bool(super().is_file_excluded(file_path))

    def __deepcopy__(self, memo: dict[int, Any]) -> LeftOut:
        return self  # azure-ai-ml copies its entities; the rules never change


@lru_cache(100_000)
def _in_environment(directory: str, root: str) -> bool:
    """Whether a directory below the root, or the target of a link, is in a virtual environment."""
    if directory == root or os.path.dirname(directory) == directory:
        return False
    return os.path.exists(os.path.join(directory, "pyvenv.cfg")) or _in_environment(os.path.dirname(directory), root)


@dataclass(frozen=True)
class Snapshot:
    """The files of a folder of code that a job gets.

    Attributes:
        files: paths of the uploaded files in the folder, with slashes.
        size: bytes of all these files.
        secrets: files that are left out only because they look like secrets.
    """

    folder: str
    files: tuple[str, ...]
    size: int
    secrets: tuple[str, ...] = ()

    def unwanted(self) -> list[str]:
        """The names that are probably there by mistake: version control, installed packages, results."""
        parts = {part for file in self.files for part in file.split("/")}
        return [name for name in _UNWANTED if name in parts]

    def describe(self) -> str:
        """Describe the size of the upload, and the secrets that are left out, in one line."""
        size = f"code: {self.folder}, {describe_files(len(self.files), self.size)}"
        if not self.secrets:
            return size
        shown = ", ".join(self.secrets[:_SHOWN]) + (", ..." if len(self.secrets) > _SHOWN else "")
        return (
            f"{size}; kept here, as secrets by their names: {shown}. To send one all the same, write "
            f"!{self.secrets[0]} into {self._rules()}"
        )

    def advice(self) -> str | None:
        """What to leave out of a large or unusual upload; None if there is nothing to advise."""
        unwanted = self.unwanted()
        if not unwanted and len(self.files) <= MANY_FILES and self.size <= MANY_BYTES:
            return None
        what = f", {', '.join(unwanted)} among them" if unwanted else ""
        return f"The job gets all of it{what}. Name what it does not need in {self.folder}/.amlignore."

    def report(self) -> str:
        """The description and the advice."""
        return ". ".join(filter(None, [self.describe(), self.advice()]))

    def _rules(self) -> str:
        """The file for the user's own rules. With an `.amlignore`, azure-ai-ml does not read `.gitignore`."""
        file = f"{self.folder}/.amlignore"
        only_git = os.path.exists(f"{self.folder}/.gitignore") and not os.path.exists(file)
        return f"{file}, below the lines of .gitignore, which it replaces" if only_git else file


def describe_files(number: int, size: int) -> str:
    """The number of files and the size of all of them, which is given in bytes: `6 files, 1.2 MB`."""
    shown = f"{size / 2**20:,.1f} MB" if size >= 2**20 / 10 else "less than 0.1 MB"
    return f"{number:,} file{'' if number == 1 else 's'}, {shown}"


def list_snapshot(folder: str) -> Snapshot:
    """List the files that are uploaded as a job's code, with azure-ai-ml's own walk through the folder.

    The folder's `.amlignore`, or else its `.gitignore`, and `LeftOut` exclude files.

    Raises:
        JobError: no file is left to upload, or a file cannot be read.
    """
    files = _walk(folder, LeftOut(folder))
    if not files:
        raise JobError(f"job.code is {folder}, which holds no file, or only such as its .amlignore or we leave out.")
    for name, path in files.items():
        if not os.access(path, os.R_OK):
            where = os.path.join(folder, name)
            link = f"is a link to {os.readlink(where)}, which is not there" if os.path.islink(where) else None
            raise JobError(
                f"{where} {link or 'cannot be read'}, so that no job was made. Mend it, remove it, or name it in "
                f"{folder}/.amlignore."
            )
    secrets = tuple(sorted(_walk(folder, LeftOut(folder, secrets=False)).keys() - files.keys()))
    return Snapshot(folder, tuple(files), sum(map(os.path.getsize, files.values())), secrets)


def upload_snapshot(client: MLClient, folder: str) -> str:
    """Upload the files of `list_snapshot`, unless the workspace already has the same files.

    Returns:
        The id of the code in the workspace, which a job takes in place of a folder.
    """
    from azureml_strategy.jobs.azure_internals import Code, code_id

    # azure-ai-ml makes the same entity for a job with a folder, but without these rules.
    code = Code(path=os.path.abspath(folder), ignore_file=LeftOut(folder))
    return code_id(client, code)


def _walk(folder: str, rules: Any) -> dict[str, str]:
    """The path of each file by its name in the snapshot."""
    from azureml_strategy.jobs.azure_internals import get_upload_files_from_folder

    try:
        # It is annotated as a list of str, but returns pairs of local path and name in the snapshot.
        pairs: Any = get_upload_files_from_folder(folder, ignore_file=rules)
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a cycle of links
        raise JobError(f"job.code is {folder}, which cannot be read: {error}. Remove the link, or mend it.") from error
    return {name: path for path, name in pairs}
