"""The kinds of messages that processes of one machine exchange, and their fields.

Every message is a tuple ``(kind, ...)``. Ids are bytes (``common/object_ref.py``). A *value*
is ``(form, payload, contained)``: see the VALUE_* constants; ``contained`` lists the
refs inside it as ``(object_id, owner_node)``.

Between a process and its node daemon (``NODE_*``), and between two processes that
call each other (``PEER_*``), the latter straight over a socket or wrapped in
NODE_RELAY when they are on different nodes.

Functions, classes and packages travel whole, or in pieces if large: a call or a heartbeat behind a
piece waits for that piece only. Under a content's name is the content, or its number of pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of one request or notice to the head. gRPC would refuse a message above its own limit
#: (``security/channels.py``), which leaves space for the envelope.
MAX_HEAD_REQUEST = 63 << 20

# --- values ----------------------------------------------------------------------
VALUE_PICKLE = 0  # payload: pickle bytes
VALUE_PACKED = 1  # payload: pickle and its out-of-band buffers in one block (serialization.py)
VALUE_SHARED = 2  # payload: a Location (value.py): a packed block in a node's shared memory
VALUE_ERROR = 3  # payload: pickle of the exception that `get` raises
VALUE_BYTES = 4  # payload: the bytes of a `bytes` object themselves
VALUE_TENSORS = 5  # as VALUE_PACKED, with tensors in it: each reader maps it for itself alone
#: In place of the number of memory: the value has to be written to disk.
ON_DISK = 0

# --- a process and its daemon ------------------------------------------------------
#: process → daemon, first: (kind, process_id, role, pid, job_id, {details})
NODE_HELLO = 1
#: daemon → process, answer: (kind, {facts}): node_id, config and what the role needs
NODE_WELCOME = 2
#: process → daemon: (kind, request, method, args tuple)
NODE_REQUEST = 3
#: daemon → process: (kind, request, error or None, result); a descriptor may come along
NODE_REPLY = 4
#: process → daemon, without an answer: (kind, method, args tuple)
NODE_NOTICE = 5
#: process → daemon → head: (kind, request, method, body)
HEAD_REQUEST = 6
#: head → daemon → process: (kind, request, error or None, body)
HEAD_REPLY = 7
#: head or daemon → process: (kind, topic, body tuple)
NODE_PUSH = 8
#: process → daemon: (kind, node_id, process_id, [messages]): to a process of another node
NODE_RELAY = 9
#: daemon → process: (kind, node_id, process_id, [messages]): from such a process
NODE_RELAYED = 10
#: process → daemon, without an answer, for the head: (kind, method, body)
HEAD_NOTICE = 11
#: daemon → process, last: (kind, reason): the daemon closes the connection for this reason
NODE_REFUSAL = 12

# --- two processes ---------------------------------------------------------------
#: first on a direct connection: (kind, node_id, process_id)
PEER_HELLO = 32
#: (kind, call, target, args value, refs, return_ids, how, stream): target is a method's name, or
#: the key of a task's function; how is (name, lease) of a task, of a method None, or (concurrency
#: group or None, name or None) as the call was given them; stream is None, or for generators how
#: many items may wait unread (-1: any)
PEER_CALL = 33
#: (kind, call, status, values, borrowed, seconds the task took, pin): the executor keeps the
#: refs in the values under the number ``pin`` until PEER_RELEASE; 0: there are none
PEER_REPLY = 34
#: worker → owner: (kind, [calls]): tasks that had not started come back
PEER_RECALLED = 36
#: caller → executor: (kind, call, force, recursive)
PEER_CANCEL = 37
#: executor → caller: (kind, call, index, value, pin): as for PEER_REPLY
PEER_STREAM = 38
#: caller → executor: (kind, call, consumed): backpressure; -1 closes the stream
PEER_STREAM_ACK = 39
#: borrower → owner: (kind, [(object_id, payload or None)]): send the values when they are there;
#: with the payload of one that is gone from shared memory, replace it
PEER_WANT = 40
#: owner → borrower: (kind, [(object_id, value)])
PEER_VALUE = 41
#: borrower → owner: (kind, request, [(object_id, borrower process, borrower node)])
PEER_BORROW = 42
#: borrower → owner: (kind, [object ids]): this process holds them no more
PEER_UNBORROW = 43
#: owner → borrower: (kind, request): the borrow of that number is counted
PEER_ACK = 44
#: receiver of a value → its sender: (kind, [pin]): the refs in that message are counted now
PEER_RELEASE = 45
#: owner → worker: (kind, lease): the lease goes back to the head
PEER_LEASE_END = 46
#: borrower → owner: (kind, object id, force, recursive): cancel the call that makes it
PEER_CANCEL_MAKER = 48

#: receiver of relayed messages → their sender: (kind, bytes taken): credits for more
PEER_CREDIT = 63

# --- what a call makes (``stream`` of PEER_CALL), if not as many results as it has ids:
# as many items as may wait unread (-1: any number), or these
STREAM_AGAIN = -2  # the first items of a stream, made once more as that many results

# --- how a call ended (PEER_REPLY status) ------------------------------------------
STATUS_OK = 0  # values: one per return id
STATUS_ERROR = 1  # values: one error value
STATUS_STREAM_END = 2  # values: (); all items were sent
STATUS_LOST = 3  # it did not run: values of its refs are gone: [(object_id, payload)]


#: Bytes of a piece at most.
PIECE = 4 * 1024 * 1024
_WHOLE, _IN_PIECES = b"\0", b"\1"


def split(name: bytes, content: bytes, piece: int = PIECE) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and bytes of each part; that of ``name`` is the last, as it lists the others."""
    if len(content) <= piece:
        yield name, _WHOLE + content
        return
    count = -(-len(content) // piece)
    for number in range(count):
        yield _piece_name(name, number), content[number * piece : (number + 1) * piece]
    yield name, _IN_PIECES + count.to_bytes(4, "big")


def pieces(name: bytes, part: bytes) -> list[bytes]:
    """Return the names of the pieces that belong to what is kept under ``name``."""
    if part[:1] == _WHOLE:
        return []
    return [_piece_name(name, number) for number in range(int.from_bytes(part[1:], "big"))]


def whole(part: bytes) -> bytes:
    """Return the content of a part that is all."""
    return part[1:]


def _piece_name(name: bytes, number: int) -> bytes:
    return b"%s#%d" % (name, number)
