"""HTTP requests whose failures are errors for the user, and tell if a retry makes sense."""

from __future__ import annotations

import http.client
import math
import platform
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fastfold._version import __version__
from fastfold.errors import ConfigError, NetworkError
from fastfold.utils.foreign_text import json_object_or_none

USER_AGENT = f"fastfold/{__version__} Python/{platform.python_version()}"
"""Name of FastFold in requests to servers."""
BROKEN = (OSError, http.client.HTTPException)  #: Exceptions of reading from a broken connection

TEMPORARY = frozenset((408, 425, 429, 500, 502, 503, 504))  #: Statuses of answers that may change soon
_REFUSALS = (403, 407)  #: Statuses by which a proxy refuses, too
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3}) ?(.*)")
_MAX_WAIT = 3600.0
_MAX_EXPLANATION = 10_000


def check_url(url: str, *, setting: str) -> str:
    """Return the http or https address of a server without a slash at its end, or raise ConfigError."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigError(
            f"{setting}: expected the address of a server that begins with https://, found {url!r}"
        )
    return url.rstrip("/")


def open_url(
    url: str,
    *,
    data: bytes | None = None,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> http.client.HTTPResponse:
    """Send a request; the caller reads and closes the answer.

    A GET follows redirects, except from https to http. A POST does not follow them, so that data reach only the server
    that they were sent to.

    Args:
        url: Address that begins with ``http://`` or ``https://``.
        data: Body of a POST; None for a GET.
        method: Method; None for GET or POST.
        headers: More headers of the request.
        secrets: Headers with credentials, which no redirect gets.
        timeout: Seconds that connecting and each wait for data may take.

    Raises:
        NetworkError: No answer came, or its status excludes any content.
    """
    request = urllib.request.Request(
        url,
        data=data,
        method=method,
        headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **(headers or {})},
    )
    for name, value in (secrets or {}).items():
        request.add_unredirected_header(name, value)
    try:
        return urllib.request.build_opener(_Redirects).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            proxy = _proxy_of(url) if error.code in _REFUSALS else ""
            raise NetworkError(
                f"{url}: the server answers {error.code} ({error.reason})"
                + (f", or the proxy {proxy} does: {_ask_for(url)}" if proxy else ""),
                status=error.code,
                temporary=error.code in TEMPORARY,
                retry_after=_seconds(error.headers.get("Retry-After") if error.headers else None),
                explanation=_explanation(error),
            ) from None
    except (*BROKEN, ValueError) as error:  # ValueError: an invalid header or port
        reason: Any = error.reason if isinstance(error, urllib.error.URLError) else error
        what = getattr(reason, "strerror", None) or reason or "the connection was closed"
        if (refusal := _TUNNEL.search(str(reason))) and int(refusal[1]) not in TEMPORARY:
            raise NetworkError(
                f"cannot reach {url}: the proxy {_proxy_of(url)} answers {refusal[1]} ({refusal[2]}): {_ask_for(url)}"
            ) from None
        raise NetworkError(f"cannot reach {url}: {what}", temporary=True) from None


def _proxy_of(url: str) -> str:
    """Return host and port of the proxy that the environment sets for an address; empty without one."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return urlsplit(proxy if "://" in proxy else f"//{proxy}").netloc.rpartition("@")[2]  # without a password


def _ask_for(url: str) -> str:
    host = urlsplit(url).hostname
    return f"ask its operator for access to {host}, or set no_proxy={host} if {host} is reached without it"


def _explanation(error: urllib.error.HTTPError) -> str:
    """Return the reason that a server gives as ``{"error": "..."}`` at once; empty if there is none."""
    try:
        body = error.read1(_MAX_EXPLANATION)
    except (*BROKEN, ValueError):
        return ""
    text = (json_object_or_none(body) or {}).get("error")
    return text if isinstance(text, str) else ""


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a ``Retry-After``; a date, which few servers send, is ignored."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return min(seconds, _MAX_WAIT) if math.isfinite(seconds) and seconds >= 0 else None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Handler that follows redirects of a GET, never to a less secure address."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if req.data is not None:
            raise NetworkError(
                f"{req.full_url}: the server redirects the request to {newurl}; nothing was sent there. Give that "
                "address instead if you trust it",
                status=code,
            )
        if new not in ("http", "https") or (old == "https" and new == "http"):
            raise NetworkError(
                f"{req.full_url}: the server redirects to {newurl}, which is not secure; the redirect was not followed",
                status=code,
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)
