"""Addresses of heads: what is one, and which are the same."""

from __future__ import annotations

import socket

import pytest

from miniray.common.host_port import full_address, parse_address, same_address


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("[::1]:1", ("::1", 1)),
        ("a.b:65535", ("a.b", 65535)),
        ("10.0.0.1", ("10.0.0.1", 6379)),
        ("[::1]", ("::1", 6379)),
        ("head", ("head", 6379)),
    ],
)
def test_an_address_is_a_host_and_maybe_a_port(text: str, parts: tuple[str, int]) -> None:
    assert parse_address(text) == parts


@pytest.mark.parametrize(
    "text",
    ["", ":1", "host:", "host:0", "host:65536", "host:x", "::1:6379", "::1", "h:²", "[]:1", "a b",
     "tcp://h:1", "unix:/tmp/head.sock"],
)  # fmt: skip
def test_another_text_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


def test_an_address_is_completed_with_its_port() -> None:
    assert full_address("10.0.0.1") == "10.0.0.1:6379"
    assert full_address("[::1]") == "[::1]:6379"
    assert full_address("h:1") == "h:1"


def test_all_names_of_this_machine_lead_to_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("localhost", "127.0.0.1", "LOCALHOST", "[::1]", "127.0.0.2"):
        assert same_address(f"{name}:7203", "127.0.0.1:7203"), name
        assert not same_address(f"{name}:7203", "127.0.0.1:7204"), name
    assert same_address("localhost", "127.0.0.1:6379")


def test_other_hosts_are_the_same_if_they_are_found_at_the_same_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"head": "203.0.113.1", "head.lab": "203.0.113.1", "203.0.113.1": "203.0.113.1"}

    def look_up(host: str, *_: object, **__: object) -> list[object]:
        if host not in known:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert same_address("head:1", "head.lab:1")
    assert same_address("head:1", "203.0.113.1:1")
    assert not same_address("head:1", "elsewhere:1")
    assert not same_address("elsewhere:1", "nowhere:1")
    assert same_address("elsewhere:1", "ELSEWHERE:1")


def test_the_socket_of_an_embedded_cluster_is_only_itself() -> None:
    assert same_address("unix:/tmp/mr-0-1/head.sock", "unix:/tmp/mr-0-1/head.sock")
    assert not same_address("unix:/tmp/mr-0-1/head.sock", "127.0.0.1:6379")
