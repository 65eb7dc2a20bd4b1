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
    """Let gRPC's core use the threads that wait for it and no others, and log nothing.

    What the user has chosen stays; a core that does not know these names logs that.
    """
    # Strangers could fill the disk with lines about their handshakes, in which no address is. What
    # fails of this cluster's is an exception where it was asked for, and is told there.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_EXPERIMENTS", ",".join(f"-{name}" for name in _OFF))
