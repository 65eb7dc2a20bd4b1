"""Who may pass: decided by host, origin, cookie and token, before anything else."""

from __future__ import annotations

import time
from typing import Any

import pytest

from miniray.security.token import web_token
from miniray.web.access import Access
from miniray.web.facts import WebFacts

KEY = b"k" * 32


def access(certificate: str = "", key: bytes = KEY, address: str = "127.0.0.1:8265") -> Access:
    facts: dict[str, Any] = dict.fromkeys(WebFacts.__dataclass_fields__, "")
    facts |= {"web_key": key, "cluster": "abc", "certificate": certificate, "address": address}
    return Access(None, WebFacts(**facts), print)


def status(guard: Access, path: str = "/api/session", method: str = "GET", **headers: str) -> int:
    """The status of a refusal; 0 if it may pass."""
    sent = {"host": "127.0.0.1:8265", **headers}
    refused = guard.refusal(method, path, sent)
    return refused[0] if refused is not None else 0


def cookie_of(guard: Access) -> str:
    return guard.cookie().partition(";")[0]


def test_all_but_the_page_itself_needs_a_cookie_or_a_token() -> None:
    guard = access()
    for method, path in (("GET", "/"), ("GET", "/static/app.js"), ("POST", "/api/login")):
        assert status(guard, path, method) == 0
    for method, path in (
        ("POST", "/"),
        ("GET", "/api/login"),
        ("POST", "/static/app.js"),
        ("GET", "/metrics"),
        ("GET", "/api/jobs/"),
        ("GET", "/staticx"),
        ("GET", "//"),
    ):
        assert status(guard, path, method) == 401
        assert status(guard, path, method, cookie=cookie_of(guard)) == 0


def test_a_cookie_is_good_for_its_cluster_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = access()
    cookie = cookie_of(guard)
    assert status(guard, cookie=f"other=1; {cookie}") == 0
    assert status(access(key=b"x" * 32), cookie=cookie) == 401
    assert status(guard, cookie=cookie[:-1] + ("0" if cookie[-1] != "0" else "1")) == 401
    for text in ("mr_abc=", "mr_abc=..", "mr_abc=9999999999.x.", "mr_abc", ";;;", "mr_abc=é.é.é"):
        assert status(guard, cookie=text) == 401
    in_two_weeks = time.time() + 14 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: in_two_weeks)
    assert status(guard, cookie=cookie) == 401


def test_the_token_of_metrics_reads_metrics_only() -> None:
    guard = access()
    metrics = f"Bearer {web_token(KEY, 'metrics')}"
    assert status(guard, "/metrics", authorization=metrics) == 0
    assert status(guard, "/api/session", authorization=metrics) == 401
    for path in ("/metrics", "/api/session", "/api/jobs/"):
        assert status(guard, path, authorization=f"bearer {web_token(KEY, 'api')}") == 0
        assert status(guard, path, authorization="Bearer ") == 401
        assert status(guard, path, authorization="Basic eDp5") == 401


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("127.0.0.1:8265", True),
        ("127.0.0.1", True),
        ("localhost:9000", True),
        ("[::1]:8265", True),
        ("[::1]", True),
        ("", False),
        ("evil.example", False),
        ("localhost.evil.example:8265", False),
        ("10.0.0.1:8265", False),
        ("127.0.0.1.evil.example", False),
        ("[::1].evil.example", False),
    ],
)
def test_only_names_of_this_machine_lead_to_the_page(host: str, passes: bool) -> None:
    guard = access()
    assert status(guard, "/", host=host) == (0 if passes else 403)


def test_over_the_network_addresses_pass_and_of_names_only_the_one_to_listen_on() -> None:
    guard = access(certificate="/folder", address="Node1.example:8265")
    assert status(guard, "/", host="10.0.0.1:8265") == 0
    assert status(guard, "/", host="node1.example:8265") == 0
    assert status(guard, "/", host="evil.example:8265") == 403
    assert "; Secure" in guard.cookie()


def test_a_foreign_origin_is_refused_with_a_cookie_too() -> None:
    guard = access()
    cookie = cookie_of(guard)
    assert status(guard, cookie=cookie, origin="http://127.0.0.1:8265") == 0
    for origin in ("http://127.0.0.1:1", "https://evil.example", "null", ""):
        assert status(guard, cookie=cookie, origin=origin) == 403
