"""The new process of a node: the daemon; forks the template and, for a new cluster, the head."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miniray.system.boot_options import BootError, BootOptions
from miniray.wire.poller import PacedSelector, run_in_loop

if TYPE_CHECKING:
    import socket

    from miniray.system.session import Session

logger = logging.getLogger(__name__)

#: Modules of both daemon and workers: loaded once, before the template is forked.
_OF_BOTH = [
    "miniray.client.init_options",
    "miniray.common.state_types",
    "miniray.messages.plain",
    "miniray.wire.peers",
]
#: What each worker runs, and what user code in it uses first: workers share its memory.
_OF_WORKERS = [
    "miniray.worker.main",
    "miniray.api",
    "miniray.actor",
    "miniray.decorator",
    "miniray.runtime_context",
]
#: Modules of both daemon and head: loaded once, before the head is forked.
_OF_DAEMON_AND_HEAD = [
    "miniray._proto.head_pb2_grpc",
    "miniray.common.series",
    "miniray.messages.value",
]


def main() -> NoReturn:
    """Run the new process."""
    gc.disable()  # until all is imported
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    from miniray.system.session import Session, kill_program

    id, folder, socket_dir = request["session"]
    session = Session(id, Path(folder), Path(socket_dir))
    options = BootOptions(**request["options"])
    answer = os.fdopen(request["answer"], "w")
    control, template_pid = _fork_template(session, answer)
    code = 1
    try:
        code = _run(options, session, answer, control, template_pid)
    except BaseException as error:
        logger.exception("the node could not start")
        with contextlib.suppress(BrokenPipeError):  # its starter is gone
            _answer_error(answer, error)
    if options.parent_pid not in (None, os.getppid()):  # it was killed, and its program was not
        kill_program(session)
    logging.shutdown()
    os._exit(code)


def _answer_error(answer: Any, error: BaseException) -> None:
    if answer.closed:
        return
    try:
        data = pickle.dumps(error, 5)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an error that cannot be pickled becomes text
        data = pickle.dumps(BootError(f"{type(error).__name__}: {error}"), 5)
    if not isinstance(error, Exception):
        data = pickle.dumps(BootError(f"The start was interrupted: {error!r}"), 5)
    answer.write(json.dumps({"error": data.hex()}))
    answer.close()


def _load(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _fork_template(session: Session, answer: Any) -> tuple[socket.socket, int]:
    """Fork the template before anything heavy is imported and any thread runs."""
    from miniray.node.base.control_socket import control_pair
    from miniray.node.workers.template import run_template
    from miniray.system.session import remove_session

    _load(_OF_BOTH)
    ours, theirs = control_pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(answer.fileno())
        run_template(theirs, _OF_WORKERS, lambda: remove_session(session))
    theirs.close()
    return ours, pid


def _run(
    options: BootOptions,
    session: Session,
    answer: Any,
    control: socket.socket,
    template_pid: int,
) -> int:
    from miniray.common.process_state import raise_limit, set_title
    from miniray.node.workers.template import set_subreaper
    from miniray.system.log_file import log_to

    set_title("node")
    log_to(session.logs / "node.log")
    set_subreaper()
    raise_limit()
    from miniray.node.process_setup import keep_freed_buffers, set_up_core

    set_up_core()
    from miniray.node.node_main import NodeStart

    _load(_OF_DAEMON_AND_HEAD)
    start = NodeStart(options, session, control, template_pid)
    start.fork_head(answer.fileno())
    _load(["miniray.node.daemon"])  # while the head loads its own modules
    gc.freeze()  # what is imported is not garbage
    gc.enable()
    keep_freed_buffers()
    return run_in_loop(
        start.run(answer), lambda: asyncio.SelectorEventLoop(PacedSelector(start.pace))
    )
