"""doctor: examines this machine, its job, or an NCCL log for problems."""

from __future__ import annotations

import argparse
import shutil

from azureml_strategy.cli.verbs import Verbs, add_verb, fail, print_text

_DESCRIPTION = "Examine this machine and the job it runs: each fact with a verdict, and what to do."
_EPILOG = """\
examples:
  azureml-strategy doctor                     # here, or as the command of a job
  azureml-strategy doctor --json > report.json
  azureml-strategy doctor --log user_logs/std_log.txt
exit code: 0, or 1 if there is a problem
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    verb = add_verb(verbs, "doctor", _run, "examine this machine, its job, or an NCCL log", _DESCRIPTION, _EPILOG)
    verb.add_argument("--json", action="store_true", help="print the report as a JSON document")
    verb.add_argument("--log", metavar="FILE", help="explain an NCCL log instead; - reads standard input")


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.network.doctor import UnreadableLog, examine, explain_log, render

    try:
        report = explain_log(options.log) if options.log else examine()
    except UnreadableLog as error:
        return fail(error)
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    print_text(report.to_json() if options.json else render(report, width))
    return report.exit_code
