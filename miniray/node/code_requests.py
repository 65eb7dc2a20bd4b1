"""Code and packages that processes of this node make known or ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.exceptions import RuntimeEnvSetupError
from miniray.node.code_cache import CodeCache

if TYPE_CHECKING:
    from miniray.node.clients import Client, ClientServer
    from miniray.node.head_client import HeadClient


class CodeRequests:
    """Answers from what the node has seen, else from what the head keeps."""

    def __init__(self, clients: ClientServer, head: HeadClient) -> None:
        self._head = head
        self._code = CodeCache(lambda key: head.ask("get_code", key))
        clients.requests["get_code"] = self._get_code
        clients.quick["get_code"] = self._known_code
        clients.notices["put_code"] = self._put_code

    def _known_code(self, _client: Client, key: bytes) -> tuple[bytes, int] | None:
        blob = self._code.known(key)
        return (blob, -1) if blob is not None else None

    def _put_code(self, _client: Client, key: bytes, blob: bytes) -> None:
        if self._code.put(key, blob):
            self._head.notify("put_code", key, blob)

    async def _get_code(self, _client: Client, key: bytes) -> tuple[bytes | None, int]:
        return await self._code.get(key), -1

    async def package(self, uri: str) -> bytes:
        """A package of a runtime environment.

        Raises:
            RuntimeEnvSetupError: the cluster does not know it.
        """
        pieces = await self._head.ask("kv_get", "packages", uri)
        if pieces is None:
            raise RuntimeEnvSetupError(f"The package {uri} is not known to the cluster.")
        return b"".join(
            [
                await self._head.ask("kv_get", "packages", f"{uri}#{number}")
                for number in range(int(pieces))
            ]
        )
