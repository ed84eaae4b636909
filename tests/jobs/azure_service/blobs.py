"""Blob Storage: containers made when they are first used."""

from __future__ import annotations

import base64
import hashlib
import re
from email.utils import formatdate
from xml.sax.saxutils import escape

from tests.jobs.azure_service.exchange import Reply, Request

SUFFIX = ".blob.core.windows.net"
ACCOUNT_KEY = base64.b64encode(b"the key of the storage account..").decode()


class Blobs:
    """What the storage accounts hold, by `account/container/name`."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self._blocks: dict[tuple[str, str], bytes] = {}

    def answer(self, request: Request) -> Reply:
        key = request.host.removesuffix(SUFFIX) + request.path
        match (request.method, request.query.get("comp"), request.query.get("restype")):
            case ("GET", "list", "container"):
                return self._list(key, request.query)
            case ("PUT", "block", _):
                self._blocks[key, request.query["blockid"]] = request.body
            case ("PUT", "blocklist", _):
                names = re.findall(r"<Latest>(.*?)</Latest>", request.body.decode())
                return self._put(key, b"".join(self._blocks[key, name] for name in names), request)
            case ("PUT", "metadata", _):
                self.metadata[key] = _metadata(request)
                return Reply()
            case ("PUT", None, None):
                return self._put(key, request.body, request)
            case ("GET" | "HEAD", None, None):
                return self._get(key, request)
        return Reply(status=201)

    def _put(self, key: str, content: bytes, request: Request) -> Reply:
        if request.headers.get("if-none-match") == "*" and key in self.content:
            return _error(409, "BlobAlreadyExists", "The specified blob already exists.")
        self.content[key], self.metadata[key] = content, _metadata(request)
        return Reply(status=201, headers=_properties(content))

    def _get(self, key: str, request: Request) -> Reply:
        if key not in self.content:
            return _error(404, "BlobNotFound", "The specified blob does not exist.")
        content = self.content[key]
        headers = _properties(content) | {f"x-ms-meta-{name}": text for name, text in self.metadata[key].items()}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("x-ms-range", ""))
        if request.method == "HEAD" or not asked:
            return Reply(content, headers=headers)
        if not content:
            return _error(416, "InvalidRange", "The range specified is invalid.")
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return Reply(content[first : last + 1], 206, headers)

    def _list(self, container: str, query: dict[str, str]) -> Reply:
        prefix = f"{container}/{query.get('prefix', '')}"
        items = "".join(
            f"<Blob><Name>{escape(key.removeprefix(container + '/'))}</Name><Properties>"
            f"<Content-Length>{len(content)}</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for key, content in sorted(self.content.items())
            if key.startswith(prefix)
        )
        document = f"<EnumerationResults><Blobs>{items}</Blobs><NextMarker/></EnumerationResults>"
        return Reply(document, headers={"Content-Type": "application/xml"})


def _metadata(request: Request) -> dict[str, str]:
    prefix = "x-ms-meta-"
    return {name.removeprefix(prefix): text for name, text in request.headers.items() if name.startswith(prefix)}


def _properties(content: bytes) -> dict[str, str]:
    digest = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    headers = {"ETag": f'"{digest}"', "Last-Modified": formatdate(usegmt=True), "x-ms-blob-type": "BlockBlob"}
    return headers | {"Content-MD5": digest, "Content-Type": "application/octet-stream"}


def _error(status: int, code: str, message: str) -> Reply:
    document = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Reply(document, status, {"x-ms-error-code": code, "Content-Type": "application/xml"})
