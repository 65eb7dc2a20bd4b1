"""The runtime environment of a job: validated, uploaded, merged with those of tasks and actors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.core.cluster_runtime import ClusterRuntime

#: Packages travel in pieces of this size.
_PIECE = 8 * 1024 * 1024


class JobEnvironment:
    """Makes the environments that a process asks for known to the cluster."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        self._prepared: dict[str, dict[str, Any]] = {}

    def upload(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Validate an environment and upload the files that it names.

        Raises:
            TypeError, ValueError: it is not a valid environment.
            RuntimeEnvSetupError: its files are too large or cannot be read.
        """
        from miniray.runtime_env.packages import upload
        from miniray.runtime_env.validate import validate

        key = json.dumps(spec, sort_keys=True, default=repr)
        known = self._prepared.get(key)
        if known is None:
            known = self._prepared[key] = upload(validate(spec), self._put, self._has)
        return known

    def prepare(self, own: Mapping[str, Any] | None) -> str:
        """The job's environment with what a task or actor adds, as canonical JSON."""
        from miniray.runtime_env.merge import merge

        uploaded = self.upload(own) if own else None
        merged = merge(self._runtime.facts.runtime_env, uploaded)
        return json.dumps(merged, sort_keys=True) if merged else ""

    def _has(self, uri: str) -> bool:
        return bool(self._runtime.link.head_request("kv_exists", "packages", uri))

    def _put(self, uri: str, content: bytes) -> None:
        count = -(-len(content) // _PIECE)
        for number in range(count):
            piece = content[number * _PIECE : (number + 1) * _PIECE]
            self._runtime.link.head_request("kv_put", "packages", f"{uri}#{number}", piece, True)
        # The name itself last: a package exists when all of it is there.
        self._runtime.link.head_request("kv_put", "packages", uri, str(count).encode(), True)
