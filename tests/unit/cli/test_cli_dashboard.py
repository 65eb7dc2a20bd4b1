"""`miniray dashboard`, and what `miniray start` says of the page."""

from __future__ import annotations

import stat
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from miniray.client.command_connection import Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result
    from tests_cli_support import Boot

URL = "http://127.0.0.1:8265/#k=abc"


class Connection:
    def page(self) -> Page:
        return Page(URL, "token-of-programs")

    def close(self) -> None:
        pass


@pytest.fixture
def dashboard(
    miniray: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Result, list[str]]]:
    """Runs the command; returns its result and what was opened in a browser."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> tuple[Result, list[str]]:
        return miniray("dashboard", *args, connect=lambda *_: Connection()), opened

    return run


def test_the_address_is_printed_and_opened_where_there_is_a_screen(
    dashboard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, opened = dashboard()
    assert (result.output, opened) == (f"{URL}\n", [])
    monkeypatch.setenv("DISPLAY", ":0")
    assert dashboard("--no-open")[1] == []
    result, [opened] = dashboard()
    assert result.output == f"{URL}\n"
    leads = Path(opened.removeprefix("file://"))
    assert f'content="0; url={URL}"' in leads.read_text()
    assert stat.S_IMODE(leads.stat().st_mode) == 0o600  # unlike a command line, which all can read


def test_the_token_alone_is_printed_for_programs(
    dashboard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    result, opened = dashboard("--token")
    assert (result.output, opened) == ("token-of-programs\n", [])


def test_where_to_listen_for_browsers_is_passed_on(
    miniray: Callable[..., Result], boot: Boot
) -> None:
    given = ("--dashboard-host", "0.0.0.0", "--dashboard-port", "9000", "--include-dashboard", "no")
    assert miniray("start", "--head", "--port", "0", *given).exit_code == 0
    (options,) = boot.asked
    assert (options.dashboard_host, options.dashboard_port) == ("0.0.0.0", 9000)
    assert not options.opens_dashboard
    result = miniray("start", "--head", "--port", "0", "--dashboard-port", "70000")
    assert result.exit_code == 2
    assert "dashboard_port must be from 0 (any free one) to 65535, not 70000" in result.output
