"""A real HTTP server behind the seams of detection."""

from __future__ import annotations

import http.server
import threading
from typing import TYPE_CHECKING

import pytest

from miniray.accelerators import host as host_module
from miniray.accelerators.host import (
    DetectionError,
    Host,
    read_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        key = self.path.rpartition("/")[2]
        ok = self.headers.get("Metadata-Flavor") == "Google"
        status = {"accelerator-type": 200, "refused": 500}.get(key, 404) if ok else 403
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"v4-16\n" if status == 200 else b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/computeMetadata/v1/instance/attributes/"
    monkeypatch.setattr(host_module, "_METADATA_URL", url)
    # A proxy that nobody listens at: the server is asked directly.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("metadata_server")
def test_metadata_is_read_with_the_header_that_the_server_wants() -> None:
    assert read_metadata("accelerator-type", 5) == "v4-16"


@pytest.mark.usefixtures("metadata_server")
def test_a_key_that_the_machine_does_not_have_is_none() -> None:
    assert read_metadata("tpu-env", 5) is None


@pytest.mark.usefixtures("metadata_server")
def test_a_refusing_server_is_an_error() -> None:
    with pytest.raises(DetectionError, match="refused 'refused'"):
        read_metadata("refused", 5)


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = http.server.HTTPServer(("127.0.0.1", 0), _Metadata)  # accepts, never answers
    monkeypatch.setattr(host_module, "_METADATA_URL", f"http://127.0.0.1:{listener.server_port}/")
    try:
        with pytest.raises(DetectionError, match="did not answer"):
            read_metadata("accelerator-type", 0.05)
    finally:
        listener.server_close()


def test_numbered_names_are_sorted_by_number_and_others_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0", "null"):
        (tmp_path / "dev" / name).touch()
    assert Host(tmp_path).numbered("/dev", "nvidia") == [0, 2, 10]
    assert Host(tmp_path).numbered("/no/such/folder", "nvidia") == []
