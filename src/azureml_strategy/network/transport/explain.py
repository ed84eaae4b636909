"""From a message of NCCL or torch to what it means: the first rule that matches explains it."""

from __future__ import annotations

from azureml_strategy.network.transport.completion import explain_completion
from azureml_strategy.network.transport.errors import UNKNOWN, LogError, Severity
from azureml_strategy.network.transport.network_rules import NETWORK_RULES
from azureml_strategy.network.transport.process_rules import PROCESS_RULES


def explain(text: str) -> LogError:
    """The error that a message reports; one that no rule knows is named `unknown`."""
    if completion := explain_completion(text):
        # Status 5 is a consequence of another error.
        severity: Severity = "warning" if completion.status == 5 else "problem"
        return LogError(f"completion {completion.status}", text, completion.explanation, completion.fix, severity)
    for rule in (*NETWORK_RULES, *PROCESS_RULES):
        if rule.pattern.search(text):
            return LogError(rule.name, text, rule.explanation, rule.fix, rule.severity)
    return LogError(
        UNKNOWN,
        text,
        "This reader does not know the message.",
        "Search NVIDIA's NCCL issues for its text, and look for an earlier error in the log.",
        "warning",
    )
