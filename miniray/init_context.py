"""What ``init()`` returns."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType


class InitContext(Mapping[str, Any]):
    """The connection that ``init()`` made; used in ``with``, it shuts down at the end.

    It is a mapping too, that of ``address_info``, as in Ray.

    Attributes:
        address_info: ``address`` (what another driver passes to ``init``), ``node_id``,
            ``session_dir`` and more, by name.
        python_version: Version of Python, as text.
        miniray_version: Version of miniray, as text.
        dashboard_url: Always None: there is no dashboard; `miniray status` tells what runs.
    """

    def __init__(self, address_info: Mapping[str, Any], shutdown: Callable[[], None]) -> None:
        self._shutdown = shutdown
        self.address_info = dict(address_info)
        self.python_version = ".".join(map(str, sys.version_info[:3]))
        self.miniray_version = VERSION
        self.dashboard_url: str | None = None

    def __getitem__(self, key: str) -> Any:
        return self.address_info[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.address_info)

    def __len__(self) -> int:
        return len(self.address_info)

    def disconnect(self) -> None:
        """The same as ``miniray.shutdown()``."""
        self._shutdown()

    def __enter__(self) -> InitContext:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disconnect()

    def __repr__(self) -> str:
        folder = self.address_info.get("session_dir")
        logs = f", logs='{folder}/logs'" if folder else ""
        return f"InitContext(address={self.address_info.get('address')!r}{logs})"
