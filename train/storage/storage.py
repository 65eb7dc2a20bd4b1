"""The folder of a run: checkpoints, their manifests, and facts about the run.

A checkpoint is complete when its manifest exists, whole. Manifests lie beside the
checkpoints and are written last. Which checkpoints are kept is not decided here.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import RunTakenOverError, StorageUnusableError
from miniray.train.base.reports import Upload
from miniray.train.storage import manifests
from miniray.train.storage.checkpoint import METADATA_FILE, Checkpoint
from miniray.train.storage.filesystem import protocols, resolve, shown
from miniray.train.storage.manifests import CheckpointRecord, check_folder_name
from miniray.train.storage.store import Store, list_files, merge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

_RUN_FILE = "run.json"
_PROBE = ".probe-"

#: What is wrong with the storage where a probe is not found.
NOT_SHARED = "not shared"


class RunStorage:
    """Reads and writes the folder of one run, on any fsspec filesystem. Picklable.

    Args:
        storage_path: Path or URL of the folder that holds the folders of runs.
        name: Name of the run.
        filesystem: An fsspec or pyarrow filesystem for ``storage_path``, or None.

    Attributes:
        path: Path of the run's folder on ``filesystem``.
        filesystem: The fsspec filesystem.
    """

    def __init__(
        self, storage_path: str | os.PathLike[str], name: str, filesystem: Any = None
    ) -> None:
        resolved, root = resolve(storage_path, filesystem)
        self._use(resolved, f"{root.rstrip('/')}/{name}", filesystem)

    @classmethod
    def of_run(cls, path: str | os.PathLike[str], filesystem: Any = None) -> RunStorage:
        """Open the storage of a run by the path or URL of its folder; ``~`` is the user's home."""
        if filesystem is None and os.fspath(path).startswith("~"):
            path = Path(path).expanduser()
        storage = cls.__new__(cls)
        resolved, folder = resolve(path, filesystem)
        storage._use(resolved, folder.rstrip("/"), filesystem)
        return storage

    def _use(self, filesystem: Any, path: str, given: Any) -> None:
        self.filesystem = filesystem
        self._given = given
        self.path = path
        self.name = PurePosixPath(path).name
        self.files = Store(filesystem, path)

    # --- Ray's names -----------------------------------------------------------------

    @property
    def storage_filesystem(self) -> Any:
        """The filesystem that holds the run's folder: the user's own, else one of pyarrow."""
        return shown(self.filesystem, self._given)

    @property
    def storage_fs_path(self) -> str:
        """Path of the folder that holds the folders of runs."""
        return self.path.rpartition("/")[0]

    @property
    def experiment_dir_name(self) -> str:
        """Name of the run's folder."""
        return self.name

    @property
    def experiment_fs_path(self) -> str:
        """Path of the run's folder."""
        return self.path

    @property
    def url(self) -> str:
        """The run's folder, by which other processes reach it: a local path, or a URL."""
        local = self.files.is_local
        return self.path if local else str(self.filesystem.unstrip_protocol(self.path))

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return the path of a checkpoint's folder: where a ``checkpoint_upload_fn`` writes to."""
        return self.files.at(checkpoint_name)

    # --- the run -------------------------------------------------------------------

    def write_run_facts(self, facts: Mapping[str, Any]) -> None:
        """Store what is known of the run itself, in place of earlier facts."""
        self.files.write(_RUN_FILE, json.dumps(dict(facts), default=str, indent=1))

    def run_facts(self) -> dict[str, Any]:
        """Return what ``write_run_facts`` stored; empty if there is nothing, or nothing whole."""
        try:
            facts = json.loads(self.files.read(_RUN_FILE) or "{}")
        except ValueError:
            logger.warning("%s is not JSON and is ignored.", self.files.at(_RUN_FILE))
            return {}
        return facts if isinstance(facts, dict) else {}

    def exists(self) -> bool:
        return self.files.exists(_RUN_FILE)

    def refuse_strangers(self) -> None:
        """Raise StorageUnusableError if a folder that is no run's has what a run would delete."""
        if self.exists() or self.files.names(manifests.FOLDER):
            return
        names = self.files.names()
        if strangers := sorted(each for each in names if manifests.number_of(each) is not None):
            raise StorageUnusableError(
                f"The folder {self.path} is not that of a run of miniray, and has "
                f"{strangers[0]!r}, which a run would take for an incomplete checkpoint of its own "
                f"and delete. Give the run another name with RunConfig(name=...); to begin from "
                f"those files, pass their path in train_loop_config."
            )

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run's folder in place of an older one."""
        self.files.write(name, text)

    def read_text(self, name: str) -> str:
        """Return a file of the run's folder; empty if there is none."""
        return self.files.read(name) or ""

    def owned_by(self, token: str) -> bool:
        """Return whether the run is that of the driver whose token this is, and of no later one.

        A run whose facts can't be read has had no other driver.
        """
        return bool(self.run_facts().get("token", token) == token)

    def require_owner(self, token: str) -> None:
        """Raise RunTakenOverError if another driver has started this run meanwhile."""
        if not self.owned_by(token):
            raise RunTakenOverError(
                f"Another driver has started a run named {self.name!r} in {self.storage_fs_path} "
                f"meanwhile. This run stops, so that the two do not mix their checkpoints. Give "
                f"runs that go on at the same time different names."
            )

    def write_probe(self, token: str) -> None:
        """Leave a file by which other machines see that they share this storage.

        A name that nobody has looked for before: network filesystems remember for a while what
        was not there.
        """
        self.files.write(f"{_PROBE}{token}", "")

    def problem_here(self, token: str, *, writes: bool) -> str:
        """Return why this process can't find the probe or, if it ``writes``, write; else ""."""
        if not self.files.exists(f"{_PROBE}{token}"):
            return NOT_SHARED
        if writes:
            own = f"{token}-{secrets.token_hex(4)}"
            try:
                self.write_probe(own)
                self.delete_probe(own)
            except Exception as error:  # noqa: BLE001 - clients of stores raise what they like
                return f"{type(error).__name__}: {error}"
        return ""

    def delete_probe(self, token: str) -> None:
        self.files.delete(f"{_PROBE}{token}")

    # --- checkpoints ---------------------------------------------------------------

    def checkpoint(self, name: str) -> Checkpoint:
        return Checkpoint.stored(self.files.at(name), self.filesystem, self._given)

    def upload(self, checkpoint: Checkpoint, name: str) -> Upload:
        """Copy a rank's files into the folder of a checkpoint; several ranks may add to one.

        Of files with the same name, the one that was written last stays.

        Raises:
            FileNotFoundError: The checkpoint's folder does not exist.
            ValueError: The name can't be used, or a complete checkpoint has it.
        """
        self.begin(name)
        with checkpoint.as_directory() as folder:
            files = list_files(folder)
            self.files.put(folder, files, name)
        return Upload(name, files)

    def adopt(self, checkpoint: Checkpoint) -> Upload:
        """Take files as a checkpoint that are in a folder of the run's folder already.

        Raises:
            ValueError: They are elsewhere, or a complete checkpoint has that name.
        """
        folder, _, name = checkpoint.path.rstrip("/").rpartition("/")
        # The same store may be reached by another client, such as one of pyarrow.
        same_kind = protocols(checkpoint.fsspec_filesystem) & protocols(self.filesystem)
        if folder.strip("/") != self.path.strip("/") or not same_kind:
            raise ValueError(
                f"{checkpoint!r} is not in a folder of its own in the run's folder {self.path}, so "
                f"the run can't keep it. Write it to get_context().get_storage()."
                f"build_checkpoint_path_from_name(name), or report a small checkpoint with a file "
                f"that says where the real one is."
            )
        self.begin(name)
        return Upload(name, {}, in_place=True)

    def begin(self, name: str) -> None:
        """Take a name for a checkpoint whose files are about to be written.

        Raises:
            ValueError: The name can't be used, or a complete checkpoint has it.
        """
        check_folder_name("report(checkpoint_dir_name", name)
        manifest = self._manifest(name)
        if manifest is not None and not manifest.missing(self.files.sizes(name)):
            raise ValueError(
                f"The run already has a complete checkpoint {name!r} in {self.path}. "
                f"Give each checkpoint a name of its own, for example with the epoch in it."
            )
        self._mark(name)
        if manifest is not None:
            self.files.delete(manifests.manifest_path(name))  # what it tells of has been lost

    def commit(
        self,
        number: int,
        uploads: Sequence[Upload],
        metrics: Mapping[str, Any],
        seconds: float = 0.0,
    ) -> CheckpointRecord:
        """Make a checkpoint complete, after every rank has uploaded its files.

        Args:
            seconds: How long that took.
        """
        name = uploads[0].name
        files, unclear = merge(upload.files for upload in uploads)
        if unclear or any(upload.in_place for upload in uploads):
            # Ranks wrote the same file differently, and one of them was the last; or they wrote
            # to the folder by themselves.
            files = self.files.sizes(name)
        files.pop(METADATA_FILE, None)
        size = sum(files.values())
        now = int(time.time())
        record = CheckpointRecord(name, number, dict(metrics), size, seconds, now, files)
        self.files.write(manifests.manifest_path(name), record.text())
        self._unmark(name)
        return record.without_files()

    def revoke(self, name: str) -> None:
        """Make a checkpoint incomplete and leave its files; ``delete_incomplete`` deletes them."""
        self._mark(name)
        self.files.delete(manifests.manifest_path(name))

    def delete(self, name: str) -> None:
        """Delete a checkpoint: first its manifest, so that it never looks complete.

        A delete that is cut off is finished by ``delete_incomplete``.
        """
        self.revoke(name)
        self.files.delete_folder(name)
        self._unmark(name)

    def committed(self) -> set[str]:
        """Return names of checkpoints with a manifest, also if files of theirs were lost."""
        with_manifest, _ = manifests.named(self.files.names(manifests.FOLDER))
        return with_manifest

    def records(self) -> list[CheckpointRecord]:
        """Return the run's checkpoints, oldest first.

        The last of them is checked file by file, and left out if something is missing.
        """
        found = [each for name in self.committed() if (each := self._manifest(name)) is not None]
        found.sort(key=lambda manifest: manifest.number)
        while found and (missing := found[-1].missing(self.files.sizes(found[-1].name))):
            logger.warning(
                "Checkpoint %s in %s misses files of its manifest, such as %s, and is not used.",
                found[-1].name,
                self.path,
                missing[0],
            )
            found.pop()
        return [each.without_files() for each in found]

    def delete_incomplete(self) -> int:
        """Delete checkpoints and files that are incomplete; return the first number free."""
        self.files.clear_parts()
        self.files.clear_parts(manifests.FOLDER)
        names = self.files.names()
        with_manifest, marked = manifests.named(self.files.names(manifests.FOLDER))
        complete = {name for name in with_manifest if self._manifest(name) is not None}
        by_name = {name for name in names if manifests.number_of(name) is not None}
        for name in sorted((by_name | marked | with_manifest) - complete):
            self.delete(name)
        for name in marked & complete:
            self._unmark(name)
        for name in names:
            if name.startswith(_PROBE):
                self.files.delete(name)
        numbers = [manifests.number_of(name) or 0 for name in by_name]
        numbers += [record.number for record in self.records()]
        return max(numbers, default=-1) + 1

    def _manifest(self, name: str) -> CheckpointRecord | None:
        text = self.files.read(manifests.manifest_path(name))
        manifest = None if text is None else manifests.parse(text)
        return manifest if manifest is not None and manifest.name == name else None

    def _mark(self, name: str) -> None:
        if manifests.number_of(name) is None:
            self.files.write(manifests.pending_path(name), "")

    def _unmark(self, name: str) -> None:
        if manifests.number_of(name) is None:
            self.files.delete(manifests.pending_path(name))
