"""The description of a run, which MLflow shows at the top of the run's page, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE_TAG = "mlflow.note.content"  # mlflow.utils.mlflow_tags.MLFLOW_RUN_NOTE
# MLflow's limit of a tag's value up to 2.x; newer servers take 8,000 characters.
NOTE_LENGTH = 5000
# Around our part, so that it can be replaced. Markdown does not show them.
_BEGIN, _END = "<!-- azureml-strategy -->", "<!-- end of azureml-strategy -->"


def markdown_table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """The lines of a table of names and values, neither of which is taken for Markdown. It has no header."""
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows]
    return ["| | |", "|---|---|", *lines] if lines else []


def merge_description(present: str, lines: Sequence[str], limit: int) -> str | None:
    """The description with our part put below what others wrote, or in place of our part of a previous attempt.

    Args:
        present: the run's description now.
        lines: of our part, the most important ones first. The last ones are left out if all exceed the limit.
        limit: how many characters the store takes.

    Returns:
        The new description; None if there is no room for any line.
    """
    above, begin, rest = present.partition(_BEGIN)
    _, end, below = rest.partition(_END)
    if begin and not end:  # somebody has cut it
        below = rest
    # Blank lines between the text of others and ours.
    before = [above.strip(), ""] if above.strip() else []
    after = ["", below.strip()] if below.strip() else []
    room = limit - len("\n".join([*before, _BEGIN, _END, *after]))
    kept = []
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return "\n".join([*before, _BEGIN, *kept, _END, *after]) if kept else None


def _cell(text: str) -> str:
    for special in "\\`*_|<[":
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())
