"""Recipes and config groups, as they stand in their files: a key's comment is its description."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
# Their choices differ in one value; a table tells it.
_SHORT = {"cluster": "default"}


def recipes() -> str:
    """A section for each shipped recipe."""
    return "\n".join(_file(path, "##") for path in sorted((ROOT / "recipes").glob("*.yaml")))


def keys() -> str:
    """What every recipe starts from, and what a script's job does."""
    return "\n".join(_file(CONF / name, "###") for name in ("base.yaml", "program.yaml"))


def groups() -> str:
    """A section for each config group, with its choices."""
    folders = sorted({path.parent for path in CONF.rglob("*.yaml")} - {CONF})
    return "\n".join(_group(folder) for folder in folders)


def _group(folder: Path) -> str:
    name = str(folder.relative_to(CONF))
    shown = [path for path in sorted(folder.glob("*.yaml")) if _SHORT.get(name, path.stem) == path.stem]
    parts = [f"## {name}\n", *(_file(path, "###") for path in shown)]
    if name in _SHORT:
        rows = [
            f"| `{name}={path.stem}` | {_comment(path)} |"
            for path in sorted(folder.glob("*.yaml"))
            if path not in shown
        ]
        parts.append("\n".join([f"| choice of `{name}` | |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _comment(path: Path) -> str:
    """What the file says of itself in its first line."""
    first = path.read_text().partition("\n")[0]
    if not first.startswith("# "):
        raise ValueError(f"{path.relative_to(ROOT)} begins without a comment that says what it is.")
    return first.removeprefix("# ")


def _file(path: Path, heading: str) -> str:
    group = path.parent.relative_to(CONF) if path.is_relative_to(CONF) else Path()
    name = path.stem if group == Path() else f"{group}={path.stem}"
    body = path.read_text().partition("\n")[2]
    return f"{heading} {name}\n\n{_comment(path)}\n\n```yaml\n{body}```\n"
