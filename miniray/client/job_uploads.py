"""What the workers of a job need before they can run its calls: code and runtime environments."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.runtime import Exported
from miniray.messages.protocol import split
from miniray.values.closures import dumps_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.calls.context import ProcessFacts
    from miniray.objects.objects import ObjectTable
    from miniray.wire.node_link import NodeLink


@dataclasses.dataclass(eq=False, repr=False)
class JobUploads:
    """Functions, classes, and the files of environments, each made available once."""

    _link: NodeLink
    _facts: ProcessFacts
    _table: ObjectTable

    def __post_init__(self) -> None:
        #: Keys of the code that every worker can get.
        self.published: set[bytes] = set()
        self._environments: dict[str, dict[str, Any]] = {}

    # --- code --------------------------------------------------------------------
    def export(self, target: Callable[..., Any] | type, name: str) -> Exported:
        """Pickle a function or class; a warning names what drags in much data."""
        blob, refs = dumps_checked(target, name)
        for ref in refs:
            self._table.pin(ref.binary())  # the code lives as long as the job
        return Exported(hashlib.sha256(blob).digest()[:16], name, blob)

    def publish(self, code: Exported) -> None:
        """Make code available to every worker."""
        if code.key not in self.published:
            for name, part in split(code.key, code.blob):
                if len(part) <= config().inline_limit:
                    self._link.node_notice("put_code", name, part)
                else:  # waits, so that what other threads send passes between two pieces
                    self._link.head_request("put_code", self._facts.job_id, name, part)
            self.published.add(code.key)  # only now may another thread rely on it

    # --- environments --------------------------------------------------------------
    def environment(self, own: Mapping[str, Any] | None) -> str:
        """Return the job's environment with what a task or actor adds, as canonical JSON.

        Raises:
            TypeError, ValueError: What is added is not a valid environment.
            RuntimeEnvSetupError: Its files are too large or cannot be read.
        """
        if not own and not self._facts.runtime_env:
            return ""
        from miniray.runtime_env.validate import merge

        merged = merge(self._facts.runtime_env, self.upload(own) if own else None)
        return json.dumps(merged, sort_keys=True) if merged else ""

    def upload(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Validate an environment and upload the files that it names; raises as ``environment``."""
        from miniray.runtime_env.packages import upload
        from miniray.runtime_env.validate import validate

        key = json.dumps(spec, sort_keys=True, default=repr)
        known = self._environments.get(key)
        if known is None:
            known = upload(validate(spec), self._put_package, self._has_package)
            self._environments[key] = known
        return known

    def _has_package(self, uri: str) -> bool:
        """Return whether the cluster has a package, and have it kept for this job too."""
        return bool(self._link.head_request("use_code", self._facts.job_id, uri.encode()))

    def _put_package(self, uri: str, content: bytes) -> None:
        for name, part in split(uri.encode(), content):
            self._link.head_request("put_code", self._facts.job_id, name, part)
