"""The REST of jobs, with Ray's paths and fields: Ray's own ``JobSubmissionClient`` drives it.

Requests are carried out by ``miniray.job_submission``. Files that a client uploads are kept until
the cluster ends, in the session's folder.
"""

from __future__ import annotations

import asyncio
import functools
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from miniray.common.names import format_bytes
from miniray.job_submission import JobSubmissionClient
from miniray.web.answers import pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from miniray.web.answers import JsonAnswers
    from miniray.web.facts import WebFacts

#: The release of Ray whose paths these are, which clients compare.
_RAY = "2.60.0"
_PACKAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.(zip|whl|jar)")
#: Bytes of one package, and of all that are kept.
_LARGEST_PACKAGE, _MOST_PACKAGES = 512 << 20, 2 << 30
_TOO_LARGE = (
    f"The package is too large: one may have {format_bytes(_LARGEST_PACKAGE)}, all of a cluster "
    f"{format_bytes(_MOST_PACKAGES)}."
)
_GCS = "gcs://"


class JobRoutes:
    """Routes for jobs and their packages."""

    def __init__(self, facts: WebFacts, answers: JsonAnswers) -> None:
        self._address = facts.cluster_address
        self._packages = Path(facts.logs).parent / "packages_of_jobs"
        jobs, one, package = "/api/jobs/", "/api/jobs/{job}", "/api/packages/gcs/{package}"
        route = answers.route
        self.routes = [
            Route("/api/version", self._version),
            Route(package, self._has_package, methods=["GET"]),
            Route(package, self._put_package, methods=["PUT"]),
            route(jobs, "POST", self._submit, posted=True),
            route(jobs, "GET", lambda _: [*map(asdict, self._client.list_jobs())]),
            route(one, "GET", lambda of: asdict(self._client.get_job_info(of["job"]))),
            route(one, "DELETE", lambda of: {"deleted": self._client.delete_job(of["job"])}),
            route(f"{one}/stop", "POST", lambda of: {"stopped": self._client.stop_job(of["job"])}),
            route(f"{one}/logs", "GET", lambda of: {"logs": self._client.get_job_logs(of["job"])}),
        ]

    @functools.cached_property
    def _client(self) -> JobSubmissionClient:
        return JobSubmissionClient(self._address)

    def _version(self, _request: Request) -> Response:
        return JSONResponse(
            {"version": "4", "ray_version": _RAY, "ray_commit": "", "session_name": self._address}
        )

    # --- jobs ------------------------------------------------------------------------------
    def _submit(self, posted: Mapping[str, Any]) -> dict[str, str]:
        # Its fields are the arguments of `submit_job`, which says what is missing or not known.
        given = {name: value for name, value in posted.items() if value is not None}
        asked = {"entrypoint": "", **given}
        environment = self._with_packages(dict(asked.pop("runtime_env", {})))
        id = self._client.submit_job(**asked, runtime_env=environment)
        return {"job_id": id, "submission_id": id}

    # --- packages --------------------------------------------------------------------------
    def _path(self, name: str) -> Path:
        if _PACKAGE.fullmatch(name) is None:
            raise HTTPException(400, f"A package is a file such as name.zip, not {name!r:.80}.")
        return self._packages / name

    async def _has_package(self, request: Request) -> Response:
        is_there = self._path(request.path_params["package"]).is_file()
        return JSONResponse({}, 200 if is_there else 404)

    async def _put_package(self, request: Request) -> Response:
        path = self._path(request.path_params["package"])
        self._packages.mkdir(mode=0o700, exist_ok=True)
        kept = sum(each.stat().st_size for each in self._packages.iterdir())
        draft = path.with_name(f".{path.name}.{id(request)}")
        most = min(_LARGEST_PACKAGE, _MOST_PACKAGES - kept)
        try:
            with draft.open("wb") as file:
                async for piece in pieces(request, most, _TOO_LARGE):
                    await asyncio.to_thread(file.write, piece)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return JSONResponse({})

    def _with_packages(self, environment: dict[str, Any]) -> dict[str, Any]:
        """Return an environment with the files of packages in place of their names."""
        own = ("_ray_release", "_ray_commit")
        found = {name: value for name, value in environment.items() if name not in own}
        if "working_dir" in found:
            found["working_dir"] = self._file_of(found["working_dir"])
        if "py_modules" in found:
            found["py_modules"] = [self._file_of(each) for each in found["py_modules"]]
        return found

    def _file_of(self, uri: Any) -> Any:
        if not isinstance(uri, str) or not uri.startswith(_GCS):
            raise ValueError(f"{uri!r:.80} is no package that was uploaded, as {_GCS}NAME.zip is.")
        path = self._path(uri[len(_GCS) :])
        if not path.is_file():
            raise ValueError(f"The package {uri} was not uploaded.")
        return str(path)
