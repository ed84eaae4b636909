"""The errors of jobs, and the translation of Azure's errors into sentences that say what to do and what to try next."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.redaction import redact_text

if TYPE_CHECKING:
    from azure.core.exceptions import AzureError, HttpResponseError
UNREADABLE = "UnreadableAnswer"
_LONGEST = 400  # characters of a service message that are shown; some messages fill pages
# Codes of Azure Resource Manager and Azure ML that only wrap a more precise code.
_OUTER_CODES = ("UserError", "BadRequest", "DeploymentFailed", "InvalidTemplateDeployment", "ServiceError", "Failed")
# azure-ai-ml prints validation errors as a coloured, numbered list: the colours, and the number of the first item.
_DECORATION = re.compile(r"^(?:\s|\x1b\[[\d;]*m)*1\) |\x1b\[[\d;]*m")
# How azure-identity reports an absent credential, and a credential whose connection fails.
_ABSENT = re.compile(r"unavailable|not (?:found|installed)|could not be found|requires the|please run", re.I)
_UNREACHABLE = re.compile(r"connect|resolve|timed out", re.I)


@dataclass(frozen=True)
class Failure:
    """What is known of an error.

    Attributes:
        code: the service's name of the error, or the exception's name if there was no answer.
        status: HTTP status; None without an answer.
        url: address of the request; empty if unknown.
    """

    code: str
    message: str
    status: int | None = None
    url: str = ""


@dataclass(frozen=True)
class _Rule:
    """An advice and its conditions: one of `code`, `message` and `status` must match, and `url` too if it is given."""

    advice: str
    code: str | None = None
    message: str | None = None
    status: int | None = None
    url: str | None = None

    def fits(self, failure: Failure) -> bool:
        """Whether the rule applies to the failure."""
        fits = (
            (self.code is not None and re.search(self.code, failure.code, re.I))
            or (self.message is not None and re.search(self.message, failure.message, re.I))
            or (self.status is not None and self.status == failure.status)
        )
        return bool(fits) and (self.url is None or re.search(self.url, failure.url, re.I) is not None)


_UNKNOWN = "Look at the resource in https://portal.azure.com under Activity log, which has the whole error."
_RULES = (  # the first rule that fits is used, so precise rules stand before general ones
    _Rule(
        code=r"Quota",
        message=r"\bquota\b",
        url=r"/onlineEndpoints/",
        advice="Ask for more of this VM family in Azure ML Studio under Quota, or take another --instance-type or "
        "fewer by --instance-count. For its updates, an online endpoint needs a quota of 1.2 times its machines.",
    ),
    _Rule(
        code=r"Quota",
        message=r"\bquota\b",
        advice="Ask for more of this VM family in Azure ML Studio under Quota, take fewer nodes or another size, or "
        "--tier low_priority (cluster.tier=low_priority), whose quota is its own.",
    ),
    _Rule(
        code=r"AllocationFailed|SkuNotAvailable|OverconstrainedAllocation|NotEnoughCapacity",
        message=r"insufficient capacity|not enough capacity",
        advice="The region has none free now: wait, take fewer nodes, another size, or a workspace elsewhere.",
    ),
    _Rule(
        code=r"LocationNotAvailable|NotAvailableInRegion|NotAvailableForLocation|InvalidVMSize|VmSizeNotSupported"
        r"|UnsupportedVMSize|NoRegisteredProviderFound|InvalidLocation",
        message=r"not (?:available|supported|offered) in (?:the )?(?:region|location)|VM size .*not supported",
        advice="`az vm list-skus --location REGION --resource-type virtualMachines --all -o table` lists what a region "
        "has; take another size, or a workspace in another region.",
    ),
    _Rule(
        code=r"RequestDisallowedByPolicy",
        advice="A policy of the subscription forbids this. Its name is in the message: what it asks for is often "
        "--no-public-ip, a subnet, a tag or another region; its owner can exempt you.",
    ),
    _Rule(
        code=r"CredentialUnavailable|ClientAuthentication|AuthenticationFailed|ExpiredAuthenticationToken"
        r"|InvalidAuthenticationToken",
        status=401,
        advice="Sign in with `az login` (`az login --identity` on Azure), or set AZURE_TENANT_ID, AZURE_CLIENT_ID and "
        "AZURE_CLIENT_SECRET.",
    ),
    _Rule(
        url=r"\.(?:blob|dfs)\.",
        status=403,
        advice="Ask for the role Storage Blob Data Contributor on the storage account. If you have it, the account's "
        "firewall keeps this machine out: work from the workspace's network.",
    ),
    _Rule(
        status=403,
        code=r"AuthorizationFailed|Forbidden",
        advice="Ask an owner of the resource group for a role: AzureML Data Scientist for jobs and data, AzureML "
        "Compute Operator for clusters, Contributor for workspaces; then sign in again.",
    ),
    _Rule(
        code=r"AnotherOperationInProgress|OperationInProgress",
        message=r"another operation|operation (?:is )?in progress",
        advice="Something is being done with it already. Wait until that is over, and repeat the command.",
    ),
    _Rule(
        code=r"AlreadyExists|AlreadyInUse|NameUnavailable|AccountNameInvalid|Conflict|SoftDeleted",
        message=r"already exists|already (?:in use|taken)|cannot be changed",
        status=409,
        advice="The name is taken. Give another one, or see what has it (`azureml-strategy jobs show`, "
        "`cluster show`, `workspace show`, `data show`).",
    ),
    _Rule(
        code=r"SubscriptionNotFound|InvalidSubscriptionId",
        advice="Look the subscription's id up with `az account list -o table`, and sign in to its tenant "
        "(`az login --tenant ID`).",
    ),
    _Rule(
        code=r"ResourceGroupNotFound",
        advice="Make it with `az group create --name NAME --location REGION`, or type --resource-group.",
    ),
    _Rule(
        url=r"/computes/",
        status=404,
        message=r"compute .*(?:not found|does not exist)",
        advice="There is no such cluster in the workspace. Make it with `azureml-strategy cluster create`, or name "
        "another (cluster.compute=NAME).",
    ),
    _Rule(
        message=r"compute .*(?:not found|does not exist)|unknown compute target",
        code=r"ComputeNotFound",
        advice="Make the cluster with `azureml-strategy cluster create`, or name another (cluster.compute=NAME).",
    ),
    _Rule(
        url=r"/workspaces/[^/?]+(?:\?|$)",
        status=404,
        advice="Make it with `azureml-strategy workspace create`, or check --workspace and --resource-group.",
    ),
    _Rule(url=r"/jobs/|/runs/", status=404, advice="`azureml-strategy jobs list` shows the jobs there are."),
    _Rule(
        url=r"/(?:data|datastores)/",
        status=404,
        advice="`azureml-strategy data show` lists the data assets and datastores there are.",
    ),
    _Rule(
        status=404,
        message=r"not found|does not exist",
        advice="Check its name and version, and that it is in this workspace.",
    ),
    _Rule(
        status=429,
        code=r"TooManyRequests|Throttl",
        advice="The service was asked too often, and all retries were in vain: wait some minutes, and submit fewer "
        "jobs at a time.",
    ),
    _Rule(
        code=r"UnreadableAnswer",
        advice="Something on the way may have answered in its place, as a proxy or a sign-in page does, or cut the "
        "answer short: check the network and HTTPS_PROXY, and look before you repeat it.",
    ),
    _Rule(
        code=r"ServiceRequest",
        advice="No connection: check the network, HTTPS_PROXY, and for a private workspace that this machine is in its "
        "network.",
    ),
    _Rule(
        code=r"ServiceResponse|IncompleteRead",
        advice="The connection broke, and the request may have been carried out: look before you repeat it.",
    ),
    *(
        _Rule(
            status=status,
            advice="Azure itself failed, also when asked again: try later, and see https://status.azure.com.",
        )
        for status in (500, 502, 503, 504)
    ),
    _Rule(
        code=r"Validation|InvalidParameter|InvalidRequest",
        status=400,
        advice="Correct what it names; --dry-run shows what would be sent.",
    ),
    _Rule(code=r"Exception$|Error$", advice="Correct what it names; --dry-run shows what would be sent."),
)


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
        raise _service_error(_unreadable(f"{type(error).__name__}: {error}")) from error


def translate(error: AzureError) -> ServiceError:
    """Translate an error of azure-core, azure-identity, azure-storage or azure-ai-ml for the user.

    Returns:
        An error whose text contains no subscription ids, tokens or signatures.
    """
    return _service_error(_failure(error))


def _service_error(failure: Failure) -> ServiceError:
    status = f", HTTP {failure.status}" if failure.status else ""
    # Without a rule that fits, the advice says how to learn more.
    advice = next((rule.advice for rule in _RULES if rule.fits(failure)), _UNKNOWN)
    message = f"{failure.message} ({failure.code}{status}). {advice}"
    return ServiceError(message, code=failure.code, status=failure.status)


def _unreadable(why: str) -> Failure:
    return Failure(UNREADABLE, f"Azure's answer cannot be read ({_sentence(why)})")


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
            return Failure(code, _sentence(message), status, getattr(request, "url", ""))
        inner = inner.__cause__ or getattr(inner, "inner_exception", None)
    message = str(error.message)
    if message.startswith("DefaultAzureCredential"):
        return _failed_sign_in(type(error).__name__, message)
    return Failure(type(error).__name__, _sentence(message))


def _failed_sign_in(code: str, message: str) -> Failure:
    """Pick the first credential that was present but failed from azure-identity's list of all that it tried."""
    tried = [line.strip() for line in message.splitlines()[2:] if line.startswith("\t")]
    failed = [line for line in tried if not _ABSENT.search(line)]
    if failed and _UNREACHABLE.search(failed[0]):
        return Failure("ServiceRequestError", "Azure's sign-in cannot be reached")
    message = f"Signing in failed: {_sentence(failed[0])}" if failed else "Nobody is signed in to Azure here"
    return Failure(code, message)


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
