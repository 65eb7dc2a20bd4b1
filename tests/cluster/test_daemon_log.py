"""What a daemon or a head writes, and where it goes when its log file is full."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

from miniray.cluster_utils import Cluster

PROGRAM = """
import logging, os, sys
from pathlib import Path
from miniray.system.log_file import log_to

log_to(Path(sys.argv[1]))
for _ in range(100):
    logging.warning("a line")
os.write(1, b"from C\\n")
"""


def test_what_native_code_prints_goes_to_the_newest_file(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "node.log"
    limits = {"MINIRAY_LOG_FILE_BYTES": "500", "MINIRAY_LOG_FILES": "3"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)], env={**os.environ, **limits}, check=True
    )
    assert sorted(file.name for file in log.parent.iterdir()) == [
        "node.log",
        "node.log.1",
        "node.log.2",
    ]
    assert log.read_text().endswith("from C\n")


def test_handshakes_of_strangers_are_no_lines_of_native_code(session_root: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        host, port = cluster.address.rsplit(":", 1)
        for _ in range(20):
            context = ssl.create_default_context()
            with (
                socket.create_connection((host, int(port)), 10) as sock,
                contextlib.suppress(OSError),
            ):
                context.wrap_socket(sock, server_hostname="another.name.example")
        for log in (Path(cluster.head_node.session_dir) / "logs").glob("*.log"):
            assert "ssl" not in log.read_text()
    finally:
        cluster.shutdown()
