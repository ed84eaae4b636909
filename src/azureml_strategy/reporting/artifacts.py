"""Reads the small text files that a run keeps among its artifacts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

# A larger file is none of ours: `ranks/attempt_N.json` of 500 windows and 256 ranks has 5 MB.
_LARGEST = 32 * 2**20
# Attempts of a job whose files are read: the newest ones.
_ATTEMPTS = 20


class Artifacts:
    """The files of a run. What is missing, too large or unreadable is None, and `problems` says why.

    Args:
        uri: the run's artifact URI.
        tracking_uri: the store of the run, through which a server hands out files.
        since_ms: files of a folder that were written before are left out, as another run's; in ms since 1970.

    Attributes:
        problems: why files could not be read.
    """

    def __init__(self, uri: str, tracking_uri: str, since_ms: int = 0) -> None:
        self._uri = uri.rstrip("/")
        self._tracking_uri = tracking_uri
        parts = urlparse(uri)
        self._folder: Path | None = None  # None where a server hands out the files
        if parts.scheme == "file":
            self._folder = Path(unquote(parts.path))
        elif uri and not parts.scheme:
            self._folder = Path(uri)
        self._since_s = since_ms / 1000
        self.problems: list[str] = []

    def text(self, path: str) -> str | None:
        """Return the content of a file."""
        try:
            return self._local(self._folder / path) if self._folder else self._remote(path)
        except Exception as error:  # whatever a file system or a store of files raises
            self.problems.append(f"{path} could not be read ({type(error).__name__}).")
            return None

    def attempts(self, folder: str, suffix: str) -> Iterator[tuple[int, str]]:
        """Return the content of `FOLDER/attempt_N.SUFFIX` of each attempt N of a job, in order."""
        stems = [name.removeprefix("attempt_").removesuffix(f".{suffix}") for name in self.names(folder)]
        numbers = sorted(int(stem) for stem in stems if stem.isdecimal())
        if len(numbers) > _ATTEMPTS:
            self.problems.append(f"{folder} has files of {len(numbers):,} attempts; the newest {_ATTEMPTS} are read.")
        for number in numbers[-_ATTEMPTS:]:
            text = self.text(f"{folder}/attempt_{number}.{suffix}")
            if text is not None:
                yield number, text

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none if it is missing or unreadable."""
        try:
            if self._folder:
                found = (self._folder / folder).glob("*")
                return [path.name for path in found if path.stat().st_mtime >= self._since_s]
            from mlflow.artifacts import list_artifacts

            listed = list_artifacts(artifact_uri=f"{self._uri}/{folder}", tracking_uri=self._tracking_uri)
            return [Path(each.path).name for each in listed]
        except Exception as error:  # as above
            self.problems.append(f"{folder} could not be read ({type(error).__name__}).")
            return []

    def _local(self, path: Path) -> str | None:
        if not path.is_file() or self._is_too_large(path.name, path.stat().st_size):
            return None
        return path.read_text(encoding="utf-8", errors="replace")

    def _is_too_large(self, name: str, size: int) -> bool:
        if size > _LARGEST:
            self.problems.append(f"{name} has {size / 2**20:,.0f} MiB, and more than {_LARGEST >> 20} are not read.")
        return size > _LARGEST

    def _remote(self, path: str) -> str | None:
        from tempfile import TemporaryDirectory

        from mlflow.artifacts import download_artifacts, list_artifacts

        parent, name = f"{self._uri}/{path}".rsplit("/", 1)
        listed = list_artifacts(artifact_uri=parent, tracking_uri=self._tracking_uri)
        sizes = {Path(each.path).name: each.file_size or 0 for each in listed}
        if name not in sizes or self._is_too_large(name, sizes[name]):
            return None
        with TemporaryDirectory() as folder:
            found = download_artifacts(
                artifact_uri=f"{parent}/{name}", dst_path=folder, tracking_uri=self._tracking_uri
            )
            return self._local(Path(found))
