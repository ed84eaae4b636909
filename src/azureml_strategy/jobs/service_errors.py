"""The errors of jobs, and the translation of Azure's errors into sentences that say what to do."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.jobs.advice import Failure, advice_for

if TYPE_CHECKING:
    from azure.core.exceptions import AzureError, HttpResponseError

UNREADABLE = "UnreadableAnswer"
_LONGEST = 400  # characters kept of a service message; some messages fill pages
# Codes of Azure Resource Manager and Azure ML that only wrap a more precise code.
_OUTER_CODES = ("UserError", "BadRequest", "DeploymentFailed", "InvalidTemplateDeployment", "ServiceError", "Failed")
# azure-ai-ml prints validation errors as a coloured, numbered list: the colours, and the number of the first item.
_DECORATION = re.compile(r"^(?:\s|\x1b\[[\d;]*m)*1\) |\x1b\[[\d;]*m")
# How azure-identity reports a credential that is absent, and one that is there but has no connection.
_ABSENT = re.compile(r"unavailable|not (?:found|installed)|could not be found|requires the|please run", re.I)
_UNREACHABLE = re.compile(r"connect|resolve|timed out", re.I)


class JobError(ValueError):
    """A job, or something that it needs, is not possible as asked. The message says what to type instead."""


class ServiceError(JobError):
    """Azure refused, failed, or could not be reached.

    Attributes:
        code: the service's name of the error, such as `AuthorizationFailed`.
        status: the HTTP status; None if there was no answer, or if an accepted operation failed later.
    """

    def __init__(self, message: str, *, code: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@contextmanager
def service_errors() -> Iterator[None]:
    """Raise `ServiceError` for errors of azure-ai-ml in this context, and for answers that it cannot read."""
    from azure.core.exceptions import AzureError

    try:
        yield
    except AzureError as error:
        raise translate(error) from error
    # azure-ai-ml raises these when an answer is not JSON, or has null in place of an object.
    except (json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if not any(str(frame.f_globals.get("__name__")).startswith("azure.") for frame in frames):
            raise
        failure = _unreadable(f"{type(error).__name__}: {error}")
        raise ServiceError(_describe(failure), code=failure.code) from error


def translate(error: AzureError) -> ServiceError:
    """Translate an Azure error for the user.

    Args:
        error: an error of azure-core, azure-identity, azure-storage or azure-ai-ml.

    Returns:
        An error whose text contains no subscription ids, tokens or signatures.
    """
    failure = _failure(error)
    return ServiceError(_describe(failure), code=failure.code, status=failure.status)


def _describe(failure: Failure) -> str:
    status = f", HTTP {failure.status}" if failure.status else ""
    return f"{failure.message} ({failure.code}{status}). {advice_for(failure)}"


def _unreadable(why: str) -> Failure:
    message = f"Azure's answer cannot be read ({_sentence(why)})"
    return Failure(code=UNREADABLE, status=None, message=message, url="")


def _failure(error: AzureError) -> Failure:
    from azure.core.exceptions import DecodeError, HttpResponseError

    inner: BaseException | None = error
    while inner is not None:  # azure-ai-ml wraps some of the service's errors in its own exceptions
        if isinstance(inner, DecodeError):  # raised also for a truncated answer
            return _unreadable(str(inner.message))
        if isinstance(inner, HttpResponseError) and inner.response is not None:
            code, message = _innermost(inner)
            request: Any = getattr(inner.response, "request", None)
            # The service reports an operation that it accepted and that then failed with status 200.
            status = inner.status_code if inner.status_code and inner.status_code >= 400 else None
            return Failure(code=code, status=status, message=_sentence(message), url=getattr(request, "url", ""))
        inner = inner.__cause__ or getattr(inner, "inner_exception", None)
    message = str(error.message)
    if message.startswith("DefaultAzureCredential"):
        return _failed_sign_in(type(error).__name__, message)
    return Failure(code=type(error).__name__, status=None, message=_sentence(message), url="")


def _failed_sign_in(code: str, message: str) -> Failure:
    """Pick the first credential that was present but failed from azure-identity's list of all that it tried."""
    tried = [line.strip() for line in message.splitlines()[2:] if line.startswith("\t")]
    failed = [line for line in tried if not _ABSENT.search(line)]
    if failed and _UNREACHABLE.search(failed[0]):
        return Failure(code="ServiceRequestError", status=None, message="Azure's sign-in cannot be reached", url="")
    message = f"Signing in failed: {_sentence(failed[0])}" if failed else "Nobody is signed in to Azure here"
    return Failure(code=code, status=None, message=message, url="")


def _innermost(error: HttpResponseError) -> tuple[str, str]:
    """Code and message of the cause. Azure Resource Manager nests errors in `details`, Azure ML in `innererror`."""
    outer: Any = error.error
    precise: Any = None
    inner = getattr(outer, "innererror", None)
    while isinstance(inner, dict):
        precise, inner = inner.get("code") or precise, inner.get("innererror") or inner.get("innerError")
    # Blob Storage answers in XML, which azure-storage has already parsed into `error_code`.
    code = getattr(outer, "code", None) or getattr(error, "error_code", None) or error.reason or "Unknown"
    message = getattr(outer, "message", None) or error.message
    while outer is not None and code in _OUTER_CODES:
        details = getattr(outer, "details", None)
        outer = details[0] if details else None
        if outer is not None:
            code, message = outer.code or code, outer.message or message
    return str(precise if code in _OUTER_CODES and precise else code), str(message)


def _sentence(text: str) -> str:
    """The first paragraph on one line, without its full stop, azure-core's appendix and azure-ai-ml's colours."""
    text = redact_text(_DECORATION.sub("", text))  # before the cut: half a secret is not recognised
    paragraph = re.split(r"\n\s*\n|\n(?:Code|Message|RequestId|Exception Details|Content|Time):", text.strip())[0]
    line = " ".join(re.sub(r"^\(\w+\) ", "", paragraph).split())
    return line[:_LONGEST].rstrip(" .") if len(line) <= _LONGEST else line[:_LONGEST].rstrip() + " ..."
