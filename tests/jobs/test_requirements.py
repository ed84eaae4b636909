from __future__ import annotations

import re
from pathlib import Path

import pytest
import setuptools  # noqa: F401 - before pip, which imports Python's own distutils: torch's compiler would meet both
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from pip._internal.network.session import PipSession
from pip._internal.req import req_file

from azureml_strategy.jobs.image import PACKAGE
from azureml_strategy.jobs.requirements import Requirements, read_lines, read_text, refuse_unfit
from azureml_strategy.jobs.service_errors import JobError

# Parts of lines, put together at random: most are nonsense, which pip must refuse or read as we do. An option without
# its value is left out: pip takes the next option for it.
_WORDS = st.sampled_from(
    [
        *("numpy", "torch==2.7.1", "rich[jupyter]>=13", "numpy==1.26 ", "./lib", "a @ https://x/a.whl"),
        *('; python_version < "3.12"', "#", " # why", "\\", "\\\n", "\n", "\r\n", "\t", " ", "'", '"', "ü", "${HOME}"),
        *("-r other.txt", "-rother.txt", "--requirement=other.txt", "--req other.txt", "-c limits.txt"),
        *(
            "-e .",
            "--editable=./lib",
            "-f wheels",
            "--find-links=./w",
            "--require-hashes",
            "--pre",
            "--no",
            "--no-index",
        ),
        *("--hash=sha256:" + "a" * 64, "--hash sha256:" + "b" * 64),
        *("-i https://x/simple", "--index-url=https://x/simple", "--extra-index-url https://y/simple"),
    ]
)
_SESSION = PipSession()
_FILES = st.lists(_WORDS, max_size=12).map("".join) | st.lists(_WORDS, max_size=12).map("\n".join)


def pips_reading(path: Path) -> list[tuple[object, ...]] | None:
    """Each line of a file as pip's own parser takes it; None for a file that it refuses."""
    try:
        parser = req_file.RequirementsFileParser(_SESSION, req_file.get_line_parser(None))
        lines = list(parser._parse_file(str(path), False))
    except Exception:
        return None
    found = []
    for line in lines:
        options = line.opts
        includes = options.requirements or options.constraints or []
        wanted = line.requirement.strip() if line.is_requirement else ""
        values = (
            line.lineno,
            wanted,
            includes[:1],
            bool(options.hashes),
            bool(options.require_hashes),
            options.index_url,
        )
        found.append((*values, (options.find_links or [])[:1]))
    return found


def our_reading(path: Path) -> list[tuple[object, ...]] | None:
    try:
        lines = list(read_lines("file", read_text(path)))
    except JobError:
        return None
    found = []
    for line in lines:
        options = line.options
        includes = options.requirement or options.constraint
        wanted = line.requirement or "".join(options.editable[:1])
        number = int(re.findall(r"\d+", line.place)[-1])
        values = (number, wanted, includes[:1], bool(options.hash))
        found.append((*values, options.require_hashes, options.index_url, options.find_links[:1]))
    return found


@given(text=_FILES, mark=st.sampled_from([b"", b"\xef\xbb\xbf"]))
@settings(max_examples=150, deadline=None)
def test_a_file_is_read_as_pip_reads_it(tmp_path_factory: pytest.TempPathFactory, text: str, mark: bytes) -> None:
    path = tmp_path_factory.mktemp("file") / "requirements.txt"
    path.write_bytes(mark + text.encode())
    expected = pips_reading(path)
    if "${HOME}" in text:  # pip puts the variable in, which the image's build does not have
        return
    found = our_reading(path)
    if expected is not None:
        assert found == expected


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("numpy  # für alle\r\n", encoding=encoding)
    assert [line.requirement for line in read_lines("file", read_text(path))] == ["numpy"]


def found_in(folder: Path, **texts: str) -> Requirements:
    """What is found after files have been written; the one to read is `main`."""
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    found = Requirements(root=folder, base=folder)
    found.read(folder / "main.txt")
    return found


def test_files_that_it_refers_to(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "a.whl").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.txt").write_text("-r ../main.txt\ntorch\n-c limits.txt\n")
    (tmp_path / "sub" / "limits.txt").write_text("numpy<3\n")
    main = '-r sub/more.txt\n-e ./lib[x]\n./a.whl ; python_version > "3"\n-f wheels\ngit+https://github.com/a/b\n'
    found = found_in(tmp_path, main=main)
    assert set(found.texts) == {"main.txt", "sub/more.txt", "sub/limits.txt"}
    assert found.copied == {"lib", "a.whl", "wheels"}
    assert sorted(each.name for each in found.packages.values()) == ["numpy", "torch"]
    assert not found.hashed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-r gone.txt", "line 1: there is no .*gone.txt"),
        ("numpy\n-r ../other.txt", r"line 2: .*other.txt lies outside of .*job\.code="),
        ("-e ..", "lies outside of"),
        ("./gone", "there is no"),
        ("torch=2.7", "'torch=2.7' is no requirement"),
        ("numpy @ file:///croot/numpy", "is a place on this machine.*pip list --format=freeze"),
        ("-e file:///home/me/lib", "is a place on this machine"),
        ("numpy --no='", "line 1, cannot be read"),
        ("--index-url https://me:hunter2hunter2@feed.example.com/simple", "line 1, looks like it holds a secret"),
        ("# HF_TOKEN=hf_abcdefghijklmnopqrstuvwx", "looks like it holds a secret"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path.parent / "other.txt").touch()
    with pytest.raises(JobError, match=words) as refused:
        found_in(tmp_path, main=text)
    assert "hunter2" not in str(refused.value)
    assert "hf_" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("torch==2.4.0", False),
        ("torch==2.11.0", True),
        ("torch==2.4.0; sys_platform == 'win32'", True),
        ("Torch==2.*", True),
        ("numpy==1.26", True),
        ("azureml-mlflow==1.50", False),
        ("azureml-strategy", True),
        ("azureml-strategy==0.0.1", False),
        ("unknown-to-us==1", True),
    ],
)
def test_versions_that_cannot_be_beside_ours(text: str, fits: bool) -> None:
    packages = {"requirements.txt, line 1": Requirement(text)}
    if fits:
        refuse_unfit(packages)
    else:
        with pytest.raises(JobError, match=f"line 1: a job runs with {PACKAGE} .* which needs"):
            refuse_unfit(packages)


def test_hashes_and_another_index(tmp_path: Path) -> None:
    found = found_in(tmp_path, main="-r more.txt\n", more=f"six==1.17.0 \\\n    --hash=sha256:{'a' * 64}\n")
    assert found.hashed
    assert found_in(tmp_path, main="--index-url https://download.pytorch.org/whl/cu126\ntorch\n").index
