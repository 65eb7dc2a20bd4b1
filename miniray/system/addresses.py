"""Where a daemon can be dialled: by Unix socket on its own machine, by TLS from others.

As text, ``machine|socket path|host:port``; the last part is empty in a cluster
without a network (an embedded one).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DaemonAddress:
    """A daemon's address."""

    #: Tells machines and containers apart.
    machine: str
    socket_path: str
    host_port: str = ""

    def __str__(self) -> str:
        return f"{self.machine}|{self.socket_path}|{self.host_port}"

    @classmethod
    def parse(cls, text: str) -> DaemonAddress:
        """The inverse of ``str``."""
        machine, socket_path, host_port = text.rsplit("|", 2)
        return cls(machine, socket_path, host_port)

    def target_from(self, machine: str) -> str:
        """What a daemon on ``machine`` gives to gRPC; "" if it cannot dial this one."""
        return f"unix:{self.socket_path}" if machine == self.machine else self.host_port
