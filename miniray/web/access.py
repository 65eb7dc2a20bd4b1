"""Who may use the page's port, checked before anything else is looked at.

A browser shows a cookie, which it got for a single-use code; programs show a bearer token. The
cluster's secret takes part in neither: both are derived from it.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse

from miniray.security.token import web_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.web.facts import WebFacts

#: Seconds for which a cookie is good.
_COOKIE_SECONDS = 7 * 24 * 3600
#: What everybody may fetch: it is the same for all clusters.
_OPEN = frozenset({("GET", "/"), ("HEAD", "/"), ("POST", "/api/login")})
#: Headers of each answer that restrict browsers.
HEADERS = [
    ("content-security-policy", "default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    ("x-frame-options", "DENY"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
]


class Access:
    """Lets requests through to an application, or answers 401 or 403.

    Args:
        app: The application.
        facts: What keys and names are made of.
        let_in: Called with the address and port of a client that has shown who it is.
    """

    def __init__(self, app: Any, facts: WebFacts, let_in: Callable[[Any], object]) -> None:
        self._app = app
        self._let_in = let_in
        self._key = facts.web_key
        self._name = f"mr_{facts.cluster}"
        self._secure = "; Secure" * bool(facts.certificate)
        self._only_here = not facts.certificate
        #: Where the page is to listen; this may be a name.
        self._host = facts.address.rpartition(":")[0].lower()
        self._tokens = {use: web_token(facts.web_key, use) for use in ("api", "metrics")}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        method, path = scope["method"], scope["path"]
        refusal = self.refusal(method, path, Headers(scope=scope))
        if refusal is not None:
            status, text = refusal
            await JSONResponse({"error": text}, status)(scope, receive, send)
            return
        if not _is_open(method, path):
            self._let_in(scope["client"])
        await self._app(scope, receive, send)

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None if the request may pass."""
        host = headers.get("host", "")
        if not self._is_own(host):
            return 403, f"This page is not at the host {host!r:.80}."
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"A page of {origin!r:.80} may not use this one."
        if _is_open(method, path):
            return None
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            good = _same(token, self._tokens["api"]) or (
                path == "/metrics" and _same(token, self._tokens["metrics"])
            )
        else:
            good = self._is_cookie(headers.get("cookie", ""))
        if good:
            return None
        return 401, (
            "Run `miniray dashboard` for an address that lets this browser in; programs need the "
            "token that `miniray dashboard --token` prints, as a bearer token."
        )

    def _is_own(self, host: str) -> bool:
        """Return whether this is a name of this machine: no other name can be made to lead here.

        A page of any name could lead to an address of this machine (DNS rebinding); it would be
        fetched with that name.
        """
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in ("localhost", self._host)
        return address.is_loopback or not self._only_here

    # --- cookies ---------------------------------------------------------------------------
    def cookie(self) -> str:
        """Return the header that gives a browser a cookie."""
        value = f"{int(time.time()) + _COOKIE_SECONDS}.{secrets.token_hex(16)}"
        return (
            f"{self._name}={value}.{self._signed(value)}; Path=/; Max-Age={_COOKIE_SECONDS}; "
            f"HttpOnly; SameSite=Strict{self._secure}"
        )

    def _signed(self, value: str) -> str:
        return hmac.digest(self._key, f"cookie {value}".encode(), "sha256").hex()

    def _is_cookie(self, header: str) -> bool:
        value, _, signature = cookie_parser(header).get(self._name, "").rpartition(".")
        until = value.partition(".")[0]
        return _same(signature, self._signed(value)) and int(until) > time.time()


def _is_open(method: str, path: str) -> bool:
    return (method, path) in _OPEN or (method in ("GET", "HEAD") and path.startswith("/static/"))


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
