"""``get_node_ip_address``: where other nodes reach the machine of this process."""

from __future__ import annotations

from miniray.common.runtime import current_runtime


def get_node_ip_address() -> str:
    """The address of this process's node, as the others reach it.

    A cluster that only this machine has, as ``init()`` starts it, has a loopback address.
    """
    runtime = current_runtime()
    own = runtime.context().node_id
    [address] = [node["NodeManagerAddress"] for node in runtime.nodes() if node["NodeID"] == own]
    return str(address)
