"""The web process: serves the page's clients until the last one has left for a while.

Forked from the template when the first client connects. It attaches to the node as commands do;
no part of the cluster depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from miniray.common.process_state import set_title
from miniray.node.base import control_socket
from miniray.system.log_file import log_to
from miniray.web.facts import WebFacts

logger = logging.getLogger(__name__)

#: Added to the nice value: programs go first.
_NICE = 10
#: Objects made since the last collection; most are rows, which go by themselves.
_COLLECT_AFTER = 20_000
#: Threads that wait for answers of the cluster.
_THREADS = 24


def serve(control: socket.socket) -> None:
    """Be the web process of the daemon at the other end."""
    set_title("web page")
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    data, fds = control_socket.receive(control)
    if not data or not fds:
        return  # the node ends, or has too many files open
    facts = WebFacts(**marshal.loads(data))
    log_to(Path(facts.logs) / "web.log")
    try:
        asyncio.run(_run(control, facts, socket.socket(fileno=fds[0])))
    except BaseException:
        logger.exception("the web process failed")
        raise


async def _run(control: socket.socket, facts: WebFacts, listener: socket.socket) -> None:
    import gc

    from miniray.web.server import WebServer
    from miniray.web.topics import Topics

    gc.set_threshold(_COLLECT_AFTER)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    topics = Topics(facts, ended.set)
    control.setblocking(False)
    loop.add_reader(control.fileno(), ended.set)  # the daemon only ever hangs up
    server = WebServer(facts, topics)
    control.send(marshal.dumps("serves"))
    await server.run(listener, ended)
    topics.close()
    logging.shutdown()
    os._exit(0)  # threads that still wait for an answer hold up nothing
