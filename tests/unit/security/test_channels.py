from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from miniray.security.certificates import (
    Credentials,
    Identity,
    make_credentials,
    make_head_identity,
)
from miniray.security.channels import (
    AddressInUseError,
    authorization,
    channel,
    listen_tcp,
    listen_unix,
    server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from pathlib import Path

SECRET = "a1" * 32
MEMBER = make_credentials(b"k" * 32)
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


class Service:
    """Echoes, in the four kinds of RPC, and counts what reached it."""

    def __init__(self) -> None:
        self.parsed = 0
        self.handled = 0

    def parse(self, data: bytes) -> bytes:
        self.parsed += 1
        return data

    async def unary_unary(self, request: bytes, _context: Any) -> bytes:
        self.handled += 1
        return request

    async def unary_stream(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        self.handled += 1
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], _context: Any) -> bytes:
        self.handled += 1
        return b"".join([request async for request in requests])

    async def stream_stream(
        self, requests: AsyncIterator[bytes], _context: Any
    ) -> AsyncIterator[bytes]:
        self.handled += 1
        async for request in requests:
            yield request

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods = {
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(
                getattr(self, kind), request_deserializer=self.parse
            )
            for kind in KINDS
        }
        return grpc.method_handlers_generic_handler("test.Echo", methods)


async def call(to: grpc.aio.Channel, kind: str, timeout: float = 5) -> bytes:
    """Send b"hello" by one kind of RPC and return the answer."""
    start: Callable[..., Any] = getattr(to, kind)(f"/test.Echo/{kind}")
    request: Any = b"hello" if kind.startswith("unary") else iter([b"hello"])
    rpc = start(request, timeout=timeout)
    if kind.endswith("unary"):
        return bytes(await rpc)
    return b"".join([answer async for answer in rpc])


async def refusal(to: grpc.aio.Channel, kind: str = "unary_unary") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(to, kind)
    error = caught.value
    if kind.startswith("stream") and error.details() == "Internal error from Core":
        # grpc.aio puts this in the place of the server's status if a write fails because the
        # server has ended the call (github.com/grpc/grpc/issues/36066)..
        return grpc.StatusCode.UNAUTHENTICATED
    return error.code()


@contextlib.asynccontextmanager
async def serving(
    identity: Identity | None, path: str = "", port: int = 0, secret: str = SECRET
) -> AsyncIterator[tuple[Service, str]]:
    service = Service()
    running = server(secret)
    running.add_generic_rpc_handlers((service.handler(),))
    if identity is None:
        listen_unix(running, path)
        address = f"unix:{path}"
    else:
        address = f"127.0.0.1:{listen_tcp(running, '127.0.0.1', port, identity, MEMBER.authority)}"
    await running.start()
    try:
        yield service, address
    finally:
        await running.stop(None)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tcp", [True, False], ids=["tls", "unix"])
def test_a_client_with_the_secret_is_served(
    head: Identity, tmp_path: Path, kind: str, tcp: bool
) -> None:
    async def test() -> None:
        identity = head if tcp else None
        async with (
            serving(identity, str(tmp_path / "s")) as (service, address),
            channel(address, SECRET, MEMBER, head.certificate) as to,
        ):
            assert await call(to, kind) == b"hello"
            assert service.handled == 1

    run(test)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("secret", ["b2" * 32, SECRET[:-1], SECRET + "0", ""])
def test_a_wrong_secret_is_refused_before_a_request_is_parsed(
    head: Identity, kind: str, secret: str
) -> None:
    async def test() -> None:
        async with (
            serving(head) as (service, address),
            channel(address, secret, MEMBER, head.certificate) as to,
        ):
            assert await refusal(to, kind) == grpc.StatusCode.UNAUTHENTICATED
            assert (service.parsed, service.handled) == (0, 0)

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_is_refused_on_a_unix_socket_too(tmp_path: Path, kind: str) -> None:
    async def test() -> None:
        async with (
            serving(None, str(tmp_path / "s")) as (service, address),
            grpc.aio.insecure_channel(address) as to,
        ):
            assert await refusal(to, kind) == grpc.StatusCode.UNAUTHENTICATED
            assert (service.parsed, service.handled) == (0, 0)

    run(test)


@pytest.mark.parametrize("given", [[SECRET, "guess"], ["guess", SECRET], [SECRET, SECRET]])
def test_more_than_one_secret_is_refused(tmp_path: Path, given: list[str]) -> None:
    async def test() -> None:
        async with (
            serving(None, str(tmp_path / "s")) as (_, address),
            grpc.aio.insecure_channel(address) as to,
        ):
            proofs = tuple(authorization(secret) for secret in given)
            rpc = to.unary_unary("/test.Echo/unary_unary")(b"", metadata=proofs, timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED

    run(test)


def test_metadata_of_the_caller_travels_beside_the_secret(tmp_path: Path) -> None:
    async def test() -> None:
        seen: dict[str, Any] = {}

        async def look(request: bytes, context: Any) -> bytes:
            seen.update(context.invocation_metadata())
            return request

        running = server(SECRET)
        method = grpc.unary_unary_rpc_method_handler(look)
        running.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Echo", {"look": method}),)
        )
        listen_unix(running, str(tmp_path / "s"))
        await running.start()
        async with channel(f"unix:{tmp_path / 's'}", SECRET) as to:
            await to.unary_unary("/test.Echo/look")(b"", metadata=(("epoch", "7"),), timeout=5)
        await running.stop(None)
        assert seen["epoch"] == "7"

    run(test)


def test_an_unknown_method_is_not_disclosed_to_an_unproven_client(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(None, str(tmp_path / "s")) as (_, address):
            for secret, code in [
                ("wrong", grpc.StatusCode.UNAUTHENTICATED),
                (SECRET, grpc.StatusCode.UNIMPLEMENTED),
            ]:
                async with channel(address, secret) as to:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await to.unary_unary("/test.Echo/nothing")(b"", timeout=5)
                    assert caught.value.code() == code

    run(test)


def test_a_plain_text_client_gets_nothing_from_a_tls_port(head: Identity) -> None:
    async def test() -> None:
        async with (
            serving(head) as (service, address),
            grpc.aio.insecure_channel(address) as to,
        ):
            assert await refusal(to) == grpc.StatusCode.UNAVAILABLE
            assert (service.parsed, service.handled) == (0, 0)

    run(test)


def test_one_who_takes_over_the_port_never_learns_the_secret(head: Identity) -> None:
    async def test() -> None:
        async with serving(head) as (_, address):
            pass
        port = int(address.rpartition(":")[2])
        stolen: list[Any] = []

        class Thief(Service):
            async def unary_unary(self, request: bytes, context: Any) -> bytes:
                stolen.append(context.invocation_metadata())
                return request

        thief = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        thief.add_generic_rpc_handlers((Thief().handler(),))
        listen_tcp(thief, "127.0.0.1", port, make_head_identity(), MEMBER.authority)
        await thief.start()
        async with channel(address, SECRET, MEMBER, head.certificate) as to:
            assert await refusal(to) == grpc.StatusCode.UNAVAILABLE
        await thief.stop(None)
        assert stolen == []

    run(test)


def test_a_node_cannot_pose_as_the_head(head: Identity) -> None:
    async def test() -> None:
        async with serving(MEMBER.identity) as (_, address):
            async with channel(address, SECRET, MEMBER) as to:
                assert await call(to, "unary_unary") == b"hello"
            async with channel(address, SECRET, MEMBER, head.certificate) as to:
                assert await refusal(to) == grpc.StatusCode.UNAVAILABLE

    run(test)


def test_one_without_a_members_certificate_reaches_no_http(head: Identity) -> None:
    """The secret alone is not enough, and not one byte after the handshake is answered."""
    other = make_credentials(b"o" * 32)

    async def test() -> None:
        async with serving(head) as (service, address):
            for shown in (other, None):
                async with _showing(shown, head, address) as to:
                    assert await refusal(to) == grpc.StatusCode.UNAVAILABLE
            host, _, port = address.rpartition(":")
            assert await asyncio.to_thread(_answer_to_a_stranger, host, int(port)) == b""
            assert (service.parsed, service.handled) == (0, 0)

    run(test)


def test_who_connects_is_logged_with_the_address(
    head: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def test() -> None:
        async with serving(head) as (_, address):
            host, _, port = address.rpartition(":")
            for _ in range(2):  # gRPC does not tell of the first one
                await asyncio.to_thread(_answer_to_a_stranger, host, int(port))
            told = f"127.0.0.1 connected to port {port}; without the cluster's secret it gets no"
            assert [line for line in caplog.messages if line.startswith("127.0.0.1")] == [
                f"{told} further"
            ]

    run(test)


def test_a_wrong_secret_is_logged_with_the_address(
    head: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with (
            serving(head) as (_, address),
            channel(address, "b2" * 32, MEMBER, head.certificate) as to,
        ):
            for _ in range(3):
                await refusal(to)

    run(test)
    assert (
        caplog.messages.count("127.0.0.1 was refused: it does not have the cluster's secret") == 1
    )


def _showing(shown: Credentials | None, head: Identity, address: str) -> grpc.aio.Channel:
    """A channel with the secret, and with another certificate or none."""
    if shown is not None:
        return channel(address, SECRET, shown, head.certificate)
    tls = grpc.ssl_channel_credentials(head.certificate)
    options = [("grpc.ssl_target_name_override", "miniray-head")]
    return grpc.aio.secure_channel(address, tls, options=options)


def _answer_to_a_stranger(host: str, port: int) -> bytes:
    """What a server says after the handshake; its HTTP/2 would begin by itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=10) as sock,
        context.wrap_socket(sock) as tls,
    ):
        try:
            return tls.recv(100)
        except OSError:
            return b""


def test_a_tcp_channel_without_an_authority_is_refused() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.1:6379"):
        channel("10.0.0.1:6379", SECRET)


def test_a_proxy_of_the_environment_is_not_used(
    head: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)

        async def test() -> None:
            async with (
                serving(head) as (_, address),
                channel(address, SECRET, MEMBER, head.certificate) as to,
            ):
                assert await call(to, "unary_unary") == b"hello"

        run(test)


def try_to_listen(host: str, port: int, identity: Identity) -> None:
    async def test() -> None:
        running = server(SECRET)
        try:
            listen_tcp(running, host, port, identity, MEMBER.authority)
        finally:
            await running.stop(None)

    run(test)


def test_a_taken_port_is_an_error_that_names_it(head: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port}: another process"):
            try_to_listen("127.0.0.1", port, head)


def test_a_port_of_another_server_of_ours_is_taken_too(head: Identity) -> None:
    async def test() -> None:
        async with serving(head) as (_, address):
            port = int(address.rpartition(":")[2])
            with pytest.raises(AddressInUseError):
                listen_tcp(server(SECRET), "127.0.0.1", port, head, MEMBER.authority)

    run(test)


def test_no_other_process_can_share_the_port(head: Identity) -> None:
    async def test() -> None:
        async with serving(head) as (_, address):
            port = int(address.rpartition(":")[2])
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                with pytest.raises(OSError, match="in use"):
                    thief.bind(("127.0.0.1", port))

    run(test)


def test_a_foreign_host_is_an_error_that_names_it(head: Identity) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is no address of this machine"):
        try_to_listen("192.0.2.1", 0, head)


def test_a_port_is_free_again_when_its_server_has_stopped(head: Identity) -> None:
    async def test() -> None:
        async with (
            serving(head) as (_, address),
            channel(address, SECRET, MEMBER, head.certificate) as to,
        ):
            await call(to, "unary_unary")
        port = int(address.rpartition(":")[2])
        async with serving(head, port=port) as (_, again):
            assert again == address

    run(test)


def test_a_channel_finds_a_restarted_server_within_seconds(head: Identity) -> None:
    async def test() -> None:
        async with serving(head) as (_, address):
            to = channel(address, SECRET, MEMBER, head.certificate)
            await call(to, "unary_unary")
        assert await refusal(to) == grpc.StatusCode.UNAVAILABLE
        port = int(address.rpartition(":")[2])
        async with serving(head, port=port):
            await asyncio.wait_for(to.channel_ready(), 5)
            assert await call(to, "unary_unary") == b"hello"
        await to.close()

    run(test)


def test_a_message_of_forty_mebibytes_passes(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            serving(None, str(tmp_path / "s")) as (_, address),
            channel(address, SECRET) as to,
        ):
            message = bytes(40 * 1024 * 1024)
            answer: Awaitable[bytes] = to.unary_unary("/test.Echo/unary_unary")(message)
            assert len(await answer) == len(message)

    run(test)
