"""How the core of gRPC waits in the head and the daemons, and what it logs.

Called before gRPC is imported.
"""

from __future__ import annotations

import os

#: With its newer "event engine", a message on a stream goes through three or four threads of
#: gRPC's before it reaches the one that waits for it; without, that one reads the socket itself.
#: A call between nodes is a third faster so, and a transfer too.
_OFF = (
    "event_engine_client",
    "event_engine_listener",
    "event_engine_for_all_other_endpoints",
)


def set_up_core() -> None:
    """Let gRPC's core use the threads that wait for it and no others, and log errors only.

    What the user has chosen stays; a core that does not know these names logs that.
    """
    # A line for each handshake that fails, without an address or an end, would fill the disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_EXPERIMENTS", ",".join(f"-{name}" for name in _OFF))
