"""What the tests of the command line share."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from miniray.node.boot_options import BootOptions, BootResult
from miniray.security.token import JoinToken

if TYPE_CHECKING:
    from click.testing import Result

TOKEN = str(JoinToken(b"f" * 32, b"s" * 32))


@dataclasses.dataclass
class Boot:
    """Stands for the code that starts nodes: keeps what was asked, answers or raises."""

    asked: list[BootOptions] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    address: str = "127.0.0.1:6379"
    pid: int = dataclasses.field(default_factory=os.getpid)

    def start_node(self, options: BootOptions) -> BootResult:
        self.asked.append(options)
        if self.error is not None:
            raise self.error
        return BootResult(
            address=self.address,
            node_id="abcdef0123456789",
            token=TOKEN,
            socket_path="/tmp/mr/node.sock",
            session_dir="/tmp/miniray/session_x",
            pids={"boot": self.pid},
            resources={"CPU": 8.0, "GPU": 2.0, "node:127.0.0.1": 1.0, "memory": 3 * 2.0**30},
        )


def one_line(result: Result) -> str:
    """The single line of a failed command's stderr; nothing may be on stdout."""
    assert result.exit_code != 0, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()
