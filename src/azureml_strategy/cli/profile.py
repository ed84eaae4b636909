"""profile FOLDER: asks a running job for a profile of its next steps, and waits for the answer."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_verb, fail, print_text
from azureml_strategy.files import write_atomically

_DESCRIPTION = "Profile the next steps of a training that has ProfileSteps, as every recipe has, without a restart."
_EPILOG = """\
examples:
  azureml-strategy profile outputs/my_run
  azureml-strategy profile outputs/my_run --steps 3 --ranks 0,8 --shapes
FOLDER is a recipe's output_dir, or default_root_dir of the Trainer. Run this where rank 0 sees the same folder.
"""
_PAUSE_SECONDS = 0.2


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    verb = add_verb(verbs, "profile", _run, "profile the next steps of a running job", _DESCRIPTION, _EPILOG)
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="the run's folder")
    verb.add_argument("--steps", type=int, metavar="N", help="how many steps (default: 5)")
    verb.add_argument("--ranks", metavar="R,R", help="global ranks, as 0,8 or 0-3 (default: as configured)")
    verb.add_argument("--shapes", action="store_true", help="record the shapes of inputs")
    verb.add_argument("--stacks", action="store_true", help="record Python's stacks")
    verb.add_argument("--memory", action="store_true", help="record what is allocated and freed")
    verb.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds to wait (default: 600)")


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.profiling.request import ANSWER, REQUEST

    request, answer = options.folder / REQUEST, options.folder / ANSWER
    if not options.folder.is_dir():
        return fail(f"There is no folder {options.folder}. Name the folder of the run, its output_dir.")
    if request.exists():
        return fail(f"{request} waits to be taken already. Delete it if no job runs there.")
    try:
        answer.unlink(missing_ok=True)
        given = {"steps": options.steps, "ranks": options.ranks}
        given |= {name: "true" for name in ("shapes", "stacks", "memory") if getattr(options, name)}
        words = [f"{name}={value}" for name, value in given.items() if value is not None]
        write_atomically(request, (" ".join(words) + "\n").encode())
    except OSError as error:
        return fail(f"{request} cannot be written ({error.strerror}). Run this where the folder can be written to.")
    deadline = time.monotonic() + options.timeout
    try:
        while not answer.exists() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
    finally:  # else the next job in this folder would take a request for which nobody waits any more
        withdrawn = _withdraw(request)
    if not answer.exists():
        why = "not been taken, and is withdrawn: does a job with ProfileSteps run there?"
        return fail(
            f"After {options.timeout:.0f} s the request has {why if withdrawn else 'been taken, but not answered.'}"
        )
    text = answer.read_text(encoding="utf-8").strip()
    print_text(text)
    return 1 if "refused:" in text else 0


def _withdraw(request: Path) -> bool:
    """Delete a request, and return whether it still existed."""
    try:
        request.unlink()
    except FileNotFoundError:
        return False
    return True
