"""Code and packages that processes of this node make known or ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.exceptions import RuntimeEnvSetupError
from miniray.messages import code_pieces
from miniray.node.code_cache import CodeCache

if TYPE_CHECKING:
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.head_client import HeadClient


class CodeRequests:
    """Answers from what the node has seen, else from what the head keeps."""

    def __init__(self, clients: ClientServer, head: HeadClient) -> None:
        self._head = head
        self.cache = CodeCache(lambda name: head.ask("get_code", name), config().code_cache)
        clients.requests["get_code"] = self._get_code
        clients.quick["get_code"] = self._known_code
        clients.notices["put_code"] = self._put_code

    def _known_code(self, client: Client, name: bytes) -> tuple[bytes, int] | None:
        content = self.cache.known(client.job_id, name)
        return (content, -1) if content is not None else None

    def _put_code(self, client: Client, name: bytes, content: bytes) -> None:
        if self.cache.put(client.job_id, name, content):
            self._head.notify("put_code", client.job_id, name, content)

    async def _get_code(self, client: Client, name: bytes) -> tuple[bytes | None, int]:
        return await self.cache.get(client.job_id, name), -1

    async def package(self, uri: str) -> bytes:
        """A package of a runtime environment.

        Raises:
            RuntimeEnvSetupError: the cluster does not know it.
        """
        name = uri.encode()
        part = await self._head.ask("get_code", name)
        if part is None:
            raise RuntimeEnvSetupError(
                f"The package {uri} is not known to the cluster: the job that brought it is over."
            )
        names = code_pieces.pieces(name, part)
        if not names:
            return code_pieces.whole(part)
        return b"".join([await self._head.ask("get_code", each) for each in names])
