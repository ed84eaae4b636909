"""What pyproject.toml has no words for: README with links for PyPI, and a source archive that is the same each time.

A link to a file of the repository leads nowhere on PyPI: it becomes one to the file at GitHub, as of this version.

The archive has the same bytes whoever builds it, wherever and whenever: setuptools takes the time, the owner and the
access rights of each file from the disk, and the time of day into the archive's head.
https://reproducible-builds.org/docs/archives/ says what to write instead.
"""

import gzip
import os
import re
import tarfile
import time
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class SameEachTime(sdist):
    """Writes the archive with SOURCE_DATE_EPOCH as the time of all files, no owner, and the rights that git knows."""

    def make_archive(self, base_name: str, kind: str, root_dir: None = None, base_dir: str = "", **_: object) -> str:
        """Pack the folder that is ready, as the one kind that the standards of packaging allow."""
        assert kind == "gztar", kind
        moment = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
        name = f"{base_name}.tar.gz"
        os.makedirs(os.path.dirname(name), exist_ok=True)
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", mtime=moment, fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=lambda member: _plain(member, moment))
        return name


def _plain(member: tarfile.TarInfo, moment: int) -> tarfile.TarInfo:
    member.mtime = moment
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


def readme() -> str:
    """README.md with the whole address in each link to a file."""
    here = Path(__file__).parent
    project = tomllib.loads((here / "pyproject.toml").read_text())["project"]
    files = f"{project['urls']['Source']}/blob/v{project['version']}/"
    return re.sub(r"\]\((?!https?:|#)", f"]({files}", (here / "README.md").read_text())


os.umask(0o022)  # the rights of what setuptools itself writes into the wheel
setup(
    cmdclass={"sdist": SameEachTime},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
