"""The folder of a run: checkpoints, their manifests, and facts about the run.

A checkpoint is complete when its manifest exists, whole: one that was cut off anywhere is none, as
the beginning of a JSON object is not JSON. Manifests lie beside the checkpoints and are written
last. Which checkpoints are kept is not decided here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import secrets
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import RunTakenOverError, StorageUnusableError
from miniray.train.base.reports import Upload
from miniray.train.storage.checkpoint import METADATA_FILE, Checkpoint
from miniray.train.storage.filesystem import Store, list_files, merge, protocols, resolve, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)


_RUN_FILE = "run.json"
_PROBE = ".probe-"

#: What is wrong with the storage where a probe is not found.
NOT_SHARED = "not shared"

#: Folder of the manifests and marks in the run's folder.
_MANIFESTS = ".manifests"

_DEFAULT_NAME = re.compile(r"checkpoint_(?P<number>\d{6,})")
_MANIFEST, _PENDING = ".json", ".pending"


def check_folder_name(argument: str, name: str) -> None:
    """Raise ValueError if this can't be the name of one folder."""
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(
            f"{argument}={name!r}) must be the name of one folder: not empty, "
            f"without a slash, not beginning with a dot."
        )


def default_checkpoint_name(number: int) -> str:
    """Return the name of a checkpoint's folder when the train loop gives none."""
    return f"checkpoint_{number:06d}"


def _number_of(name: str) -> int | None:
    """Return the number in a default name; None for other names."""
    match = _DEFAULT_NAME.fullmatch(name)
    return int(match["number"]) if match else None


def _manifest_path(name: str) -> str:
    """Return where the manifest of a checkpoint lies; it exists once the checkpoint is complete."""
    return f"{_MANIFESTS}/{name}{_MANIFEST}"


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """A complete checkpoint, as its manifest describes it.

    Attributes:
        name: Name of its folder in the run's folder.
        number: Its place in the order of the run's reports.
        metrics: What rank 0 reported with it.
        size: Bytes of all its files.
        seconds: From the begin of its first upload until it was complete.
        time: When it was complete, in seconds since the epoch.
        files: Size in bytes of each file, by its path in the folder; only in the manifest.
    """

    name: str
    number: int
    metrics: Mapping[str, Any]
    size: int = 0
    seconds: float = 0.0
    time: int = 0
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def without_files(self) -> CheckpointRecord:
        return dataclasses.replace(self, files={})

    def text(self) -> str:
        """Return the manifest as it is stored; metrics that are not JSON become text."""
        return json.dumps(dataclasses.asdict(self), default=str)

    def missing(self, found: Mapping[str, int]) -> list[str]:
        """Return files that are not there, or have another size than they should.

        The user's metadata may have changed since.
        """
        return sorted(
            file
            for file, size in self.files.items()
            if found.get(file) != size and file != METADATA_FILE
        )


_FIELDS = {field.name for field in dataclasses.fields(CheckpointRecord)}


def _parse(text: str) -> CheckpointRecord | None:
    """Return the manifest in a file; None if it is no whole one."""
    try:
        facts = json.loads(text)
        # What a later version has added is left out.
        manifest = CheckpointRecord(**{name: facts[name] for name in _FIELDS & facts.keys()})
    except (ValueError, TypeError, AttributeError):
        return None
    whole = (
        "files" in facts
        and isinstance(manifest.name, str)
        and isinstance(manifest.number, int)
        and isinstance(manifest.files, dict)
        and isinstance(manifest.metrics, dict)
    )
    return manifest if whole else None


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
        """The run's folder for other processes: a local path, or a URL."""
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
        """Return what ``write_run_facts`` stored; empty if there are none, or broken ones."""
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
        if self.exists() or self.files.names(_MANIFESTS):
            return
        names = self.files.names()
        if strangers := sorted(each for each in names if _number_of(each) is not None):
            raise StorageUnusableError(
                f"The folder {self.path} is not that of a run of miniray, and has "
                f"{strangers[0]!r}, which a run would take for an incomplete checkpoint of its own "
                f"and delete. Give the run another name with RunConfig(name=...); to begin from "
                f"those files, pass their path in train_loop_config."
            )

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
        """Write a file that shows other machines that they share this storage.

        Its name is new each time: network filesystems remember for a while what was not there.
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
            ValueError: The files are elsewhere, or a complete checkpoint has that name.
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
            self.files.delete(_manifest_path(name))  # its files have been lost

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
        self.files.write(_manifest_path(name), record.text())
        self._unmark(name)
        return record.without_files()

    def revoke(self, name: str) -> None:
        """Make a checkpoint incomplete and leave its files; ``delete_incomplete`` deletes them."""
        self._mark(name)
        self.files.delete(_manifest_path(name))

    def delete(self, name: str) -> None:
        """Delete a checkpoint: first its manifest, so that it never looks complete.

        A delete that is cut off is finished by ``delete_incomplete``.
        """
        self.revoke(name)
        self.files.delete_folder(name)
        self._unmark(name)

    def committed(self) -> set[str]:
        """Return names of checkpoints with a manifest, also if files of theirs were lost."""
        return self._named(_MANIFEST)

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
        self.files.clear_parts(_MANIFESTS)
        names = self.files.names()
        with_manifest, marked = self.committed(), self._named(_PENDING)
        complete = {name for name in with_manifest if self._manifest(name) is not None}
        by_name = {name for name in names if _number_of(name) is not None}
        for name in sorted((by_name | marked | with_manifest) - complete):
            self.delete(name)
        for name in marked & complete:
            self._unmark(name)
        for name in names:
            if name.startswith(_PROBE):
                self.files.delete(name)
        numbers = [_number_of(name) or 0 for name in by_name]
        numbers += [record.number for record in self.records()]
        return max(numbers, default=-1) + 1

    def _manifest(self, name: str) -> CheckpointRecord | None:
        text = self.files.read(_manifest_path(name))
        manifest = None if text is None else _parse(text)
        return manifest if manifest is not None and manifest.name == name else None

    def _named(self, kind: str) -> set[str]:
        """Return the checkpoints that have a manifest, or a mark."""
        names = self.files.names(_MANIFESTS)
        return {name.removesuffix(kind) for name in names if name.endswith(kind)}

    def _mark(self, name: str) -> None:
        """Mark a checkpoint that is being written or deleted.

        The mark distinguishes it from other folders that a user puts beside it. Default names need
        no mark.
        """
        if _number_of(name) is None:
            self.files.write(f"{_MANIFESTS}/{name}{_PENDING}", "")

    def _unmark(self, name: str) -> None:
        if _number_of(name) is None:
            self.files.delete(f"{_MANIFESTS}/{name}{_PENDING}")
