"""The folder of a run: checkpoints, their manifests, and facts about the run.

A checkpoint is complete when its manifest exists. Manifests lie beside the
checkpoints, in ``.manifests/``, and are written last. Which checkpoints are kept
is not decided here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.checkpoint import Checkpoint
from miniray.train.checkpoint_book import CheckpointRecord
from miniray.train.config import check_folder_name
from miniray.train.filesystem import files_below, is_local, resolve
from miniray.train.reports import Upload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

_MANIFESTS = ".manifests"
_RUN_FILE = "run.json"
_DEFAULT_NAME = re.compile(r"checkpoint_\d{6,}")


def default_checkpoint_name(number: int) -> str:
    """The name of a checkpoint's folder when the train loop gives none."""
    return f"checkpoint_{number:06d}"


class RunStorage:
    """Reads and writes the folder of one run, on any fsspec filesystem. Picklable.

    Args:
        storage_path: Path or URL of the folder that holds the folders of runs.
        name: Name of the run.
        filesystem: An fsspec or pyarrow filesystem for ``storage_path``, or None.
    """

    def __init__(
        self, storage_path: str | os.PathLike[str], name: str, filesystem: Any = None
    ) -> None:
        self.filesystem, root = resolve(storage_path, filesystem)
        self.name = name
        #: Path of the run's folder on the filesystem.
        self.path = f"{root.rstrip('/')}/{name}"
        self._local = is_local(self.filesystem)

    # --- the run -------------------------------------------------------------------

    def write_run_facts(self, facts: Mapping[str, Any]) -> None:
        """Store what is known of the run itself, in place of earlier facts."""
        self._write(f"{self.path}/{_RUN_FILE}", json.dumps(dict(facts), default=str, indent=1))

    def run_facts(self) -> dict[str, Any]:
        """What ``write_run_facts`` stored; empty if there is nothing."""
        facts = self._read_json(f"{self.path}/{_RUN_FILE}")
        return facts if facts is not None else {}

    def exists(self) -> bool:
        """Whether this run was ever started."""
        return bool(self.filesystem.exists(f"{self.path}/{_RUN_FILE}"))

    # --- checkpoints ---------------------------------------------------------------

    def checkpoint(self, name: str) -> Checkpoint:
        """The checkpoint of this name."""
        return Checkpoint(f"{self.path}/{name}", self.filesystem)

    def upload(self, checkpoint: Checkpoint, name: str) -> Upload:
        """Copy a rank's files into the folder of a checkpoint; several ranks may add to one.

        Each file appears whole or not at all, also when ranks write the same one.

        Raises:
            FileNotFoundError: The checkpoint's folder does not exist.
            ValueError: The name can't be used, or a complete checkpoint has it.
        """
        check_folder_name("report(checkpoint_dir_name", name)
        if self.filesystem.exists(self._manifest_path(name)):
            raise ValueError(
                f"The run already has a complete checkpoint {name!r} in {self.path}. "
                f"Give each checkpoint a name of its own, for example with the epoch in it."
            )
        if _DEFAULT_NAME.fullmatch(name) is None:
            # Tells an incomplete checkpoint from other folders that a user puts here.
            self._write(self._pending_path(name), "")
        target = f"{self.path}/{name}"
        with checkpoint.as_directory() as folder:
            files = list_files(folder)
            for path in sorted(
                {target, *(f"{target}/{file}".rpartition("/")[0] for file in files)}
            ):
                self.filesystem.makedirs(path, exist_ok=True)
            if not self._local:
                for file in files:
                    self.filesystem.put_file(f"{folder}/{file}", f"{target}/{file}")
            elif not Path(folder).samefile(target):
                for file in files:
                    _copy_file(Path(folder, file), Path(target, file))
        return Upload(name, files)

    def commit(self, number: int, uploads: Sequence[Upload], metrics: Mapping[str, Any]) -> None:
        """Make a checkpoint complete, after every rank has uploaded its files."""
        name = uploads[0].name
        files: dict[str, int] = {}
        for upload in uploads:
            for file, size in upload.files.items():
                if files.setdefault(file, size) != size:
                    # Ranks wrote the same file differently; one of them was the last.
                    files[file] = self.filesystem.size(f"{self.path}/{name}/{file}")
        manifest = {"name": name, "number": number, "files": files, "metrics": dict(metrics)}
        self._write(self._manifest_path(name), json.dumps(manifest, default=str))
        if _DEFAULT_NAME.fullmatch(name) is None:
            self._delete(self._pending_path(name))

    def delete(self, name: str) -> None:
        """Delete a checkpoint: first its manifest, so that it never looks complete."""
        self._delete(self._manifest_path(name))
        self._delete(self._pending_path(name))
        self._delete(f"{self.path}/{name}", recursive=True)

    def records(self) -> list[CheckpointRecord]:
        """The run's checkpoints, oldest first.

        The last of them is checked file by file, and left out if something is missing.
        """
        manifests = [
            manifest
            for path in self._list(f"{self.path}/{_MANIFESTS}")
            if path.endswith(".json") and (manifest := self._read_json(path)) is not None
        ]
        manifests.sort(key=lambda manifest: manifest["number"])
        while manifests and not self._has_all_files(manifests[-1]):
            logger.warning(
                "Checkpoint %s in %s misses files of its manifest and is not used.",
                manifests[-1]["name"],
                self.path,
            )
            manifests.pop()
        return [CheckpointRecord(m["name"], m["number"], m["metrics"]) for m in manifests]

    def delete_incomplete(self) -> int:
        """Delete checkpoints that were never completed.

        Returns:
            The first number that no checkpoint of this run has had.
        """
        names = {path.rsplit("/", 1)[-1] for path in self._list(self.path)}
        marks = {path.rsplit("/", 1)[-1] for path in self._list(f"{self.path}/{_MANIFESTS}")}
        complete = {mark.removesuffix(".json") for mark in marks if mark.endswith(".json")}
        pending = {mark.removesuffix(".pending") for mark in marks if mark.endswith(".pending")}
        begun = {name for name in names if _DEFAULT_NAME.fullmatch(name)}
        for name in sorted((begun | pending) - complete):
            self.delete(name)
        numbers = [int(name.removeprefix("checkpoint_")) for name in begun]
        numbers += [record.number for record in self.records()]
        return max(numbers, default=-1) + 1

    # --- files ---------------------------------------------------------------------

    def append_lines(self, name: str, lines: Sequence[str]) -> bool:
        """Append to a file of the run's folder; False if this filesystem can't."""
        if not self._local:
            return False
        with Path(self.path, name).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        return True

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run's folder, whole or not at all."""
        self._write(f"{self.path}/{name}", text)

    def read_text(self, name: str) -> str:
        """A file of the run's folder; empty if there is none."""
        path = f"{self.path}/{name}"
        if not self.filesystem.exists(path):
            return ""
        return bytes(self.filesystem.cat_file(path)).decode()

    def _manifest_path(self, name: str) -> str:
        return f"{self.path}/{_MANIFESTS}/{name}.json"

    def _pending_path(self, name: str) -> str:
        return f"{self.path}/{_MANIFESTS}/{name}.pending"

    def _has_all_files(self, manifest: Mapping[str, Any]) -> bool:
        found = files_below(self.filesystem, f"{self.path}/{manifest['name']}")
        return all(found.get(file) == size for file, size in manifest["files"].items())

    def _list(self, path: str) -> list[str]:
        self.filesystem.invalidate_cache(path)
        try:
            return [str(entry).rstrip("/") for entry in self.filesystem.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _read_json(self, path: str) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads(self.filesystem.cat_file(path))
        except FileNotFoundError:
            return None
        except ValueError:
            logger.warning("%s is not JSON and is ignored.", path)
            return None
        return content

    def _write(self, path: str, text: str) -> None:
        """Write a small file so that it appears whole; object stores do so by themselves."""
        if not self._local:
            self.filesystem.pipe_file(path, text.encode())
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part-{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(target)

    def _delete(self, path: str, *, recursive: bool = False) -> None:
        try:
            self.filesystem.rm(path, recursive=recursive)
        except FileNotFoundError:
            logger.debug("%s is gone already.", path)


def list_files(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Size in bytes of every file below a local folder, by its path in the folder."""
    root = Path(folder)
    files: dict[str, int] = {}
    for parent, _, names in os.walk(root, followlinks=True):
        for name in names:
            file = Path(parent, name)
            files[file.relative_to(root).as_posix()] = file.stat().st_size
    return files


def _copy_file(source: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    shutil.copyfile(source, part)
    part.replace(target)
