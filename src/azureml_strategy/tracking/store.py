"""Asks the tracking store without retries, so that the caller decides what to do after a failure."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.redaction import redact_text

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

# With these codes a store says that the request is wrong. A second attempt would fail too.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
# MLflow waits 120 s for an answer. A working store needs a second or two for a batch of our size.
_LONGEST_REQUEST_S = 30
# The longest Retry-After that is obeyed. The store may be back long before a longer one is over.
_LONGEST_PAUSE_S = 60.0
# Points of a metric in one answer; the most that MLflow's own client asks for (GET_METRIC_HISTORY_MAX_RESULTS).
_PAGE = 25_000


class StoreRefusedError(RuntimeError):
    """The store says that the request is wrong, and took nothing of it."""


class StoreAwayError(RuntimeError):
    """The store does not answer as it should, so it is unknown whether it took the request.

    It may have asked for a pause of `pause_s` seconds. The text has no secrets.
    """

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s


class TrackingError(RuntimeError):
    """The tracking store cannot be used as requested."""


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn any error of a store into one of this module's, without secrets in its text and traceback."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (StoreRefusedError, StoreAwayError, TrackingError):
        raise
    except Exception as error:
        text = redact_text(f"{type(error).__name__}: {error}")
        if isinstance(error, MlflowException) and error.error_code in _REFUSALS:
            raise StoreRefusedError(text) from None
        raise StoreAwayError(text, getattr(error, "pause_s", 0.0)) from None


def one_attempt_client(tracking_uri: str) -> MlflowClient:
    """MLflow's client without its own retries, which last minutes and may write a batch twice.

    A request whose answer was lost looks like one that never arrived. So the caller must look up what the store has
    before it sends a request again. Requests for artifacts keep the retries of the client.
    """
    from mlflow.store.tracking.rest_store import RestStore
    from mlflow.tracking import MlflowClient
    from mlflow.tracking._tracking_service.client import TrackingServiceClient

    client = MlflowClient(tracking_uri)
    shared = client._tracking_client.store
    if isinstance(shared, RestStore):
        once: Any = copy.copy(shared)  # all other clients of this process use the shared store
        once._call_endpoint = MethodType(_call_once, once)
        client._tracking_client = type("OneAttempt", (TrackingServiceClient,), {"store": once})(tracking_uri)
    return client


def history_pages(client: MlflowClient, run_id: str, name: str) -> Iterator[list[Metric]]:
    """The points of a metric, a page at a time, for callers that may stop before the end.

    MLflow's client can only return all points at once.

    Raises:
        Exception: whatever MLflow raises if the store does not answer.
    """
    token: str | None = ""
    while token is not None:
        store = client._tracking_client.store
        page = store.get_metric_history(run_id, name, max_results=_PAGE, page_token=token or None)
        yield page
        token = page.token or None


def _call_once(store: Any, api: Any, json_body: str | None = None, endpoint: str | None = None, **options: Any) -> Any:
    """Do what `RestStore._call_endpoint` does, with one attempt."""
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
    from mlflow.store.tracking import rest_store
    from mlflow.utils.proto_json_utils import parse_dict
    from mlflow.utils.rest_utils import http_request, verify_rest_response

    # MLflow 3 keeps the table in the class, MLflow 2 in the module
    table = getattr(store, "_METHOD_TO_INFO", None) or rest_store._METHOD_TO_INFO  # type: ignore[attr-defined]
    if api not in table:
        return type(store)._call_endpoint(store, api, json_body, endpoint, **options)
    path, method = table[api]
    body = json.loads(json_body) if json_body else None
    longest = MLFLOW_HTTP_REQUEST_TIMEOUT.get()  # type: ignore[no-untyped-call]
    response = http_request(  # type: ignore[no-untyped-call]
        store.get_host_creds(),
        endpoint or path,
        method,
        max_retries=0,
        raise_on_status=False,
        timeout=min(longest, _LONGEST_REQUEST_S),
        **{"params" if method == "GET" else "json": body},
    )
    try:
        verify_rest_response(response, endpoint or path)
    except Exception as error:
        retry_after = response.headers.get("Retry-After", "")
        pause_s = min(float(retry_after), _LONGEST_PAUSE_S) if retry_after.isdecimal() else 0.0
        error.pause_s = pause_s  # type: ignore[attr-defined]
        raise
    answer = options.get("response_proto") or api.Response()
    parse_dict(js_dict=json.loads(response.text or "{}"), message=answer)  # type: ignore[no-untyped-call]
    return answer
