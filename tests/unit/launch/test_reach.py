"""Which of a head's addresses is taken, and for how long it is looked for."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest
from ports import refused_address

from miniray.launch.reach import (
    HeadOffer,
    NotReachedError,
    UnreachableError,
    first_to_answer,
    reach_head,
)
from miniray.security.certificates import Identity, make_head_identity
from miniray.security.token import JoinToken, make_secret

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def serve(identity: Identity, folder: Path) -> tuple[socket.socket, str]:
    """A server that shows a certificate, and says a byte to everybody, as heads do."""
    file = folder / f"{identity.fingerprint.hex()}.pem"
    file.write_bytes(identity.certificate + identity.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listening.accept()
                with context.wrap_socket(connection, server_side=True) as tls:
                    tls.sendall(b"x")
                    tls.recv(1)
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=answer, daemon=True).start()
    return listening, f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[JoinToken, str, str]]:
    """The token of a head, its address, and that of another head."""
    ours, other = make_head_identity(), make_head_identity()
    head, head_address = serve(ours, tmp_path)
    stranger, stranger_address = serve(other, tmp_path)
    yield JoinToken(ours.fingerprint, make_secret()), head_address, stranger_address
    for server in (head, stranger):
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with refused_address() as address:
        yield address


def test_of_all_addresses_the_one_with_the_pinned_certificate_is_taken(
    servers: tuple[JoinToken, str, str], nobody: str
) -> None:
    token, head, stranger = servers
    offer = HeadOffer((nobody, stranger, "no-such-host.invalid", head), token)
    assert first_to_answer(offer) == head


def test_another_head_is_not_taken_and_each_address_says_why(
    servers: tuple[JoinToken, str, str], nobody: str
) -> None:
    token, _, stranger = servers
    with pytest.raises(NotReachedError) as missed:
        first_to_answer(HeadOffer((stranger, nobody), token))
    assert f"The server at {stranger} is not the head that this join token is for" in str(
        missed.value
    )
    assert f"Nothing listens at {nobody}." in str(missed.value)


def test_a_head_that_comes_late_is_waited_for(
    servers: tuple[JoinToken, str, str], nobody: str
) -> None:
    token, head, _ = servers
    early = HeadOffer((nobody,), token, listens=False)
    doors = iter([None, early, early, HeadOffer((head,), token)])
    pauses: list[float] = []
    reasons: list[str] = []
    assert reach_head(lambda: next(doors), 60.0, pauses.append, reasons.append) == (head, token)
    assert len(pauses) == 3
    (reason,) = reasons  # that of both rounds
    assert f"Nothing listens at {early.addresses[0]}" in reason


def test_a_head_that_listens_where_nothing_leads_is_not_waited_for(
    servers: tuple[JoinToken, str, str], nobody: str
) -> None:
    token, _, stranger = servers
    door = HeadOffer((nobody, stranger, "no-such-host.invalid"), token)
    with pytest.raises(UnreachableError, match=r"Nothing listens at .* 'no-such-host"):
        reach_head(lambda: door, 300.0, lambda _: pytest.fail("It waits."))


def test_the_wait_for_a_head_has_an_end_and_a_reason(nobody: str) -> None:
    token = JoinToken(bytes(32), make_secret())
    with pytest.raises(NotReachedError, match="first host has not published its address"):
        reach_head(lambda: None, 0.0, lambda _: None)
    with pytest.raises(NotReachedError, match=f"within 0 s: Nothing listens at {nobody}"):
        reach_head(lambda: HeadOffer((nobody,), token, listens=False), 0.0, lambda _: None)
