"""The result of one check: its verdict, what was seen, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One fact with its verdict.

    Attributes:
        verdict: `ok`, `warning` (slower or at risk) or `problem` (does not work).
        subject: what it is about, such as `InfiniBand` or a variable's name.
        text: what was seen and what follows from it, with numbers.
        advice: what to do; None if nothing needs to be done.
    """

    verdict: Verdict
    subject: str
    text: str
    advice: str | None = None

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f" {self.advice}" if self.advice else "")
