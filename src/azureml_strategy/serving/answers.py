"""Answers one HTTP request of an online endpoint."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, Protocol

from azureml_strategy.serving.inputs import MAX_BYTES, BadInputError, read_body
from azureml_strategy.serving.predictor import ModelFaultError, Predictor

log = logging.getLogger(__name__)
_PIECE = 2**20


class Body(Protocol):
    """The stream of a request's body."""

    def read(self, size: int, /) -> bytes:
        """Read at most so many bytes; none are left at the end."""
        ...


def answer(predictor: Predictor, method: str, body: Body) -> tuple[int, dict[str, Any]]:
    """Answer a request with a method of HTTP and a body.

    Returns:
        The status, and what to send as JSON: the result of `Predictor.predict`, or `error` with one sentence. What was
        wrong with the model goes to the log, and not to the client.
    """
    if method != "POST":
        return HTTPStatus.METHOD_NOT_ALLOWED, {"error": 'Send a POST request with JSON: {"data": [SAMPLE, ...]}.'}
    try:
        return HTTPStatus.OK, predictor.predict(predictor.expected.checked(read_body(_read(body))))
    except BadInputError as error:
        return HTTPStatus.BAD_REQUEST, {"error": str(error)}
    except ModelFaultError as error:
        log.error("%s", error, exc_info=error.__cause__)
        return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}


def _read(body: Body) -> bytes:
    """Read a body. One that is too long is read to its end and dropped: the client sees no answer before that."""
    pieces, size = [], 0
    while piece := body.read(_PIECE):
        size += len(piece)
        if size <= MAX_BYTES:
            pieces.append(piece)
    if size > MAX_BYTES:
        raise BadInputError(
            f"The request has {size / 2**20:,.1f} MiB, and at most {MAX_BYTES / 2**20:.0f} are taken. Send fewer "
            "samples at a time, or the bytes of a .npy file, which are fewer than those of JSON."
        )
    return b"".join(pieces)
