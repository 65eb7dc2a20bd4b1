"""What a manifest says, and how the files that tell of checkpoints are named.

Pure: text to facts and back. A manifest that was cut off anywhere is no manifest, because
the beginning of a JSON object is not JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from miniray.train.storage.checkpoint import METADATA_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Folder of the manifests and marks in the run's folder.
FOLDER = ".manifests"

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


def number_of(name: str) -> int | None:
    """Return the number in a default name; None for other names."""
    match = _DEFAULT_NAME.fullmatch(name)
    return int(match["number"]) if match else None


def manifest_path(name: str) -> str:
    """Return where the manifest of a checkpoint lies; it exists once the checkpoint is complete."""
    return f"{FOLDER}/{name}{_MANIFEST}"


def pending_path(name: str) -> str:
    """Return the mark of a checkpoint that is being written or deleted.

    It tells an incomplete checkpoint from other folders that a user puts beside it. Default
    names tell that by themselves and have no mark.
    """
    return f"{FOLDER}/{name}{_PENDING}"


def named(entries: set[str]) -> tuple[set[str], set[str]]:
    """Return the checkpoints with a manifest, and those with a mark, among names of files."""
    return (
        {entry.removesuffix(_MANIFEST) for entry in entries if entry.endswith(_MANIFEST)},
        {entry.removesuffix(_PENDING) for entry in entries if entry.endswith(_PENDING)},
    )


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """A complete checkpoint, as its manifest tells of it.

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


def parse(text: str) -> CheckpointRecord | None:
    """Return what the manifest in a file tells; None if it is no whole one."""
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
