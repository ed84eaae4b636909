"""What a job's folder of code holds: the files that are about to be uploaded, and the upload itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.errors import JobError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

# Beyond these an upload takes minutes, and each start of the job unpacks it again: choices of ours.
MANY_FILES = 2000
MANY_BYTES = 100 * 2**20
# What hardly ever belongs to a job's code and is sent all the same; the first part of a path, or any.
_UNWANTED = (".git", ".venv", "venv", "site-packages", "__pycache__", "outputs")
_SHOWN = 5  # names in a line


@dataclass(frozen=True)
class Snapshot:
    """The files of a folder of code.

    Attributes:
        folder: the folder.
        files: their paths in it, with slashes, without what stays here.
        size: all of them together, in bytes.
        secrets: those that stay here because they look like secrets, and for no other reason.
    """

    folder: str
    files: tuple[str, ...]
    size: int
    secrets: tuple[str, ...] = ()

    def unwanted(self) -> list[str]:
        """What of it is likely to be there by mistake: version control, installed packages, results."""
        parts = {part for file in self.files for part in file.split("/")}
        return [name for name in _UNWANTED if name in parts]

    def describe(self) -> str:
        """How much it is and which secrets stay here, in one line."""
        size = f"code: {self.folder}, {len(self.files):,} files, {self.size / 2**20:,.1f} MB"
        if not self.secrets:
            return size
        shown = ", ".join(self.secrets[:_SHOWN]) + (", ..." if len(self.secrets) > _SHOWN else "")
        return (
            f"{size}; kept here, as secrets by their names: {shown}. To send one all the same, write "
            f"!{self.secrets[0]} into {self._rules()}"
        )

    def advice(self) -> str | None:
        """What to do where something should be left out; None where nothing is to be said."""
        unwanted = self.unwanted()
        if not unwanted and len(self.files) <= MANY_FILES and self.size <= MANY_BYTES:
            return None
        what = f", {', '.join(unwanted)} among them" if unwanted else ""
        return f"The job gets all of it{what}. Name what it does not need in {self.folder}/.amlignore."

    def _rules(self) -> str:
        """Where the user's own rules belong; with an `.amlignore`, azure-ai-ml no longer reads `.gitignore`."""
        file = f"{self.folder}/.amlignore"
        only_git = os.path.exists(f"{self.folder}/.gitignore") and not os.path.exists(file)
        return f"{file}, below the lines of .gitignore, which it replaces" if only_git else file


def list_snapshot(folder: str) -> Snapshot:
    """List what is uploaded as a job's code, by azure-ai-ml's own walk through the folder.

    Args:
        folder: whose `.amlignore`, or else `.gitignore`, says what stays here, besides what `left_out` names.

    Raises:
        JobError: nothing is left to upload, or a file cannot be read.
    """
    from azureml_strategy.jobs.left_out import LeftOut

    files = _walk(folder, LeftOut(folder))
    if not files:
        raise JobError(f"job.code is {folder}, which holds no file, or only such as its .amlignore or we leave out.")
    for name, path in files.items():
        _check_readable(folder, name, path)
    secrets = tuple(sorted(_walk(folder, LeftOut(folder, secrets=False)).keys() - files.keys()))
    return Snapshot(folder, tuple(files), sum(map(os.path.getsize, files.values())), secrets)


def upload_snapshot(client: MLClient, folder: str) -> str:
    """Upload the files of `list_snapshot`, unless the workspace has the same already.

    Returns:
        The code's id in the workspace, which a job takes in place of a folder.
    """
    from azure.ai.ml.constants._common import AzureMLResourceType
    from azure.ai.ml.entities._assets._artifacts.code import Code

    from azureml_strategy.jobs.left_out import LeftOut

    # What a job with a folder would make of it, but for the rules.
    code = Code(path=os.path.abspath(folder), ignore_file=LeftOut(folder))
    return str(client.jobs._orchestrators.get_asset_arm_id(code, azureml_type=AzureMLResourceType.CODE))


def _walk(folder: str, rules: Any) -> dict[str, str]:
    """Each file's path by its name in the snapshot."""
    from azure.ai.ml._utils._asset_utils import get_upload_files_from_folder

    try:
        # Its annotation says a list of texts; it returns a path here and a name in the snapshot for each file.
        pairs: Any = get_upload_files_from_folder(folder, ignore_file=rules)
    except (OSError, RuntimeError) as error:  # pathlib's error for links in a circle
        raise JobError(f"job.code is {folder}, which cannot be read: {error}. Remove the link, or mend it.") from error
    return {name: path for path, name in pairs}


def _check_readable(folder: str, name: str, path: str) -> None:
    if os.access(path, os.R_OK):
        return
    where = os.path.join(folder, name)
    what = f"is a link to {os.readlink(where)}, which is not there" if os.path.islink(where) else "cannot be read"
    raise JobError(f"{where} {what}, so that no job was made. Mend it, remove it, or name it in {folder}/.amlignore.")
