from __future__ import annotations

from pathlib import Path

import pytest

from azureml_strategy.jobs.dockerfiles import (
    Instruction,
    copied_paths,
    is_below,
    last_user,
    read_instructions,
    write_dockerfile_context,
)
from azureml_strategy.jobs.service_errors import JobError


def read(text: str) -> list[Instruction]:
    return list(read_instructions(text))


def test_instructions_of_all_forms() -> None:
    text = (
        "# FROM nothing\nFROM python:3.12 AS base\nrun pip install \\\n  # USER nobody\n\n  numpy\n"
        "RUN python - <<EOF\nfrom os import path\nUSER x\nEOF\nENV A=b\n"
    )
    assert read(text) == [
        Instruction("FROM", "python:3.12 AS base"),
        Instruction("RUN", "pip install    numpy"),
        Instruction("RUN", "python - <<EOF"),
        Instruction("ENV", "A=b"),
    ]
    assert read("# escape=`\nFROM a\nRUN x `\n y\nRUN dir C:\\\n")[1:] == [
        Instruction("RUN", "x   y"),
        Instruction("RUN", "dir C:\\"),
    ]
    assert read("FROM a\nRUN cat <<<word\nUSER b")[-1] == Instruction("USER", "b")


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("COPY requirements.txt ./", {"requirements.txt"}),
        ("COPY --chown=me a.txt ./lib/ /opt/", {"a.txt", "lib"}),
        ('COPY --link ["my file.txt", "/x/"]', {"my file.txt"}),
        ("COPY file[0-9].txt /", {"file[0-9].txt"}),
        ("COPY . .", {"."}),
        ("ADD $WHAT /", {"."}),
        ("ADD https://x/a.tar /", set()),
        ("COPY --from=build /x /y", set()),
        ("COPY <<EOF /a\nb\nEOF", set()),
        ("RUN --mount=type=bind,source=a,target=b x", {"."}),
        ("RUN --mount=type=cache,target=b x", set()),
        ("RUN pip install numpy", set()),
    ],
)
def test_what_an_image_is_built_from(text: str, paths: set[str]) -> None:
    assert copied_paths(read(f"FROM a\n{text}")) == paths


def test_files_below_a_path() -> None:
    files = ("a.txt", "lib/x/y.py", "library.py", "file1.txt")
    assert [file for file in files if is_below(file, {"lib", "file[0-9].txt"})] == ["lib/x/y.py", "file1.txt"]
    assert all(is_below(file, {"."}) for file in files)


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("FROM a", None),
        ("FROM a\nUSER me\nUSER you:staff", "you:staff"),
        ("FROM a\nUSER me\nFROM b", None),
        ("FROM a AS Base\nUSER me\nFROM c\nFROM --platform=linux/amd64 base", "me"),
    ],
)
def test_whom_the_last_stage_ends_as(text: str, user: str | None) -> None:
    assert last_user(read(text)) == user


def written(folder: Path, text: str) -> dict[str, str]:
    """The texts of the context that a Dockerfile gives."""
    (folder / "Dockerfile").write_text(text)
    target = folder.parent / "context"
    target.mkdir()
    write_dockerfile_context(folder / "Dockerfile", target)
    files = [path for path in target.rglob("*") if path.is_file()]
    return {path.relative_to(target).as_posix(): path.read_text("latin-1") for path in files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of code with what must not go up."""
    folder = tmp_path / "code"
    for name in ("train.py", "lib/a.py", "requirements.txt", ".env", ".gitignore", "venv/pyvenv.cfg", "venv/b.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / ".gitignore").write_text("*.whl\n")
    return folder


def test_the_package_is_added_to_the_last_stage(folder: Path) -> None:
    found = written(folder, "FROM python:3.12\nCOPY requirements.txt /\nUSER me\n")
    (wheel,) = (name for name in found if name.endswith(".whl"))
    assert found.keys() == {"Dockerfile", "requirements.txt", wheel}
    assert found["Dockerfile"].splitlines() == [
        *("FROM python:3.12", "COPY requirements.txt /", "USER me", "", "USER root"),
        f"COPY {wheel} /opt/azureml-strategy/",
        "RUN python -m pip uninstall --yes azureml-strategy \\",
        "    && python -m pip list --format=freeze > /opt/azureml-strategy/installed.txt \\",
        "    && python -m pip install --no-cache-dir --constraint /opt/azureml-strategy/installed.txt "
        f'"/opt/azureml-strategy/{wheel}[tracking]" \\',
        "    && azureml-strategy --version",
        "USER me",
    ]


def test_all_of_its_folder_but_secrets_and_environments(folder: Path) -> None:
    (folder / ".dockerignore").write_text("*.whl")
    found = written(folder, "FROM python:3.12\nCOPY . /code\n")
    (wheel,) = (name for name in found if name.endswith(".whl"))
    assert found.keys() == {"Dockerfile", ".dockerignore", "train.py", "lib/a.py", "requirements.txt", wheel}
    assert found[".dockerignore"] == f"*.whl\n!{wheel}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM a\nENV HF_TOKEN=hunter2hunter2", "line 2, looks like it holds a secret"),
        ("FROM a\nENV DB_PASSWORD hunter2hunter2", "sets DB_PASSWORD"),
        ("FROM a\nRUN pip install -i https://me:hunter2hunter2@x.com/simple y", "line 2, looks like it holds a secret"),
        ("FROM a\nCOPY .env /", r"copies \.env, which looks like a secret"),
        ("FROM a\nRUN x \\\n", "ends within an instruction"),
        ("RUN x", "has no FROM"),
    ],
)
def test_what_is_refused(folder: Path, text: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as refused:
        written(folder, text)
    assert "hunter2" not in str(refused.value)
