"""The runtime environment of a job: validated, uploaded, merged with those of tasks and actors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from miniray.messages.code_pieces import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.client.cluster_runtime import ClusterRuntime


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
        from miniray.runtime_env.validate import merge

        uploaded = self.upload(own) if own else None
        merged = merge(self._runtime.facts.runtime_env, uploaded)
        return json.dumps(merged, sort_keys=True) if merged else ""

    def _has(self, uri: str) -> bool:
        """Whether the cluster has a package; it keeps it for this job too then."""
        job_id = self._runtime.facts.job_id
        return bool(self._runtime.link.head_request("use_code", job_id, uri.encode()))

    def _put(self, uri: str, content: bytes) -> None:
        for name, part in split(uri.encode(), content):
            self._runtime.link.head_request("put_code", self._runtime.facts.job_id, name, part)
