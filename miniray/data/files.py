"""Files as a source: found at paths, cut into pieces; all kinds but Parquet are read here."""

from __future__ import annotations

import dataclasses
import inspect
import io
import itertools
import json
import operator
import os
import urllib.parse
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from miniray.data.blocks import column, from_file, no_rows
from miniray.data.sources import (
    ENDLESS,
    Content,
    Datasource,
    ReadUnit,
    between,
    items_to_table,
    overlapping,
)
from miniray.data.tables import concat
from miniray.data.transforms import DataError
from miniray.system.option_checks import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from miniray.data.sources import CutWish

T = TypeVar("T")
#: Arguments of Ray's that only advise.
_ADVICE = {
    "concurrency",
    "num_cpus",
    "override_num_blocks",
    "parallelism",
    "ray_remote_args",
    "try_create_dir",
}
#: The value of folders such as ``year=2024`` where it is null, as all who write them have it.
NULL = "__HIVE_DEFAULT_PARTITION__"
#: Compressions by the ends of files' names.
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".br": "brotli", ".lz4": "lz4", ".zst": "zstd"}
#: Bytes of a file in which the end of its first line, and types of its columns, are looked for.
_FIRST = 4 * 2**20


class FileKind(NamedTuple):
    """A kind of files.

    Attributes:
        name: Of the source in a plan.
        called: In errors.
        table: Makes rows of the bytes of a piece; the arguments that it has defaults for are
            options of the read. None: files are not read by their bytes.
        extensions: How the files' names end; None: anyhow.
        lines: Whether a file that begins so may be cut at ends of lines; None: it has no lines.
        inflates: How many times its size a file takes in memory.
        spare: How many times smaller units are than blocks: functions make more of the rows.
    """

    name: str
    called: str
    table: Callable[..., Any] | None
    extensions: tuple[str, ...] | None = None
    lines: Callable[[bytes], bool] | None = None
    inflates: int = 1
    spare: int = 1


class Piece(NamedTuple):
    """A part of a file: the lines that begin within some bytes, or rows of a row group."""

    path: str
    start: int = 0
    stop: int = ENDLESS
    group: int | None = None

    @property
    def label(self) -> str:
        """Its name in messages."""
        if self.group is not None:
            return f"{self.path} (row group {self.group}, from row {self.start})"
        return f"{self.path} (from byte {self.start})" if self.start else self.path

    @property
    def whole(self) -> bool:
        """Whether it is the whole file."""
        return self == (self.path, 0, ENDLESS, None)


@dataclasses.dataclass(frozen=True)
class FileRows(Content):
    """Pieces of files, read one after another by a source without its list of files."""

    source: FilesDatasource
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        first, last = self.pieces[0].label, self.pieces[-1].label
        return first if first == last else f"{first} up to {last}"

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        if not self.source.counted:
            return between(self._tables(self.pieces), start, stop)
        return self._tables(self.within(start, stop))

    def within(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield what pieces, which have row counts, have of a range of rows."""
        found = overlapping(self.pieces, lambda piece: piece.stop - piece.start, start, stop)
        for piece, low, high in found:
            yield piece._replace(start=piece.start + low, stop=piece.start + high)

    def _tables(self, pieces: Iterable[Piece]) -> Iterator[Any]:
        """Yield the rows of pieces.

        Raises:
            DataError: One can't be read, or lines of two files do not go together.
        """
        source, kind = self.source, self.source.kind
        seen: list[tuple[str, Any]] = []  # the first path, and the schema of all
        try:
            for path, own in itertools.groupby(pieces, operator.attrgetter("path")):
                file = source.open(path)
                for piece in own:
                    for table in source.read(file, piece):
                        if kind.lines is not None:
                            seen.append((path, table.schema))
                            seen = [(seen[0][0], together(kind.called, seen))]
                        yield table
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{piece.label} can't be read as {kind.called}: {error}") from error


def _csv(
    data: bytes,
    piece: Piece,
    read_options: Any = None,
    parse_options: Any = None,
    convert_options: Any = None,
) -> Any:
    """Read CSV that begins with a header."""
    read_options = read_options or pyarrow.csv.ReadOptions(use_threads=False)
    if parse_options is None and piece.path.lower().endswith(_packed(".tsv")):
        parse_options = pyarrow.csv.ParseOptions(delimiter="\t")
    options = (read_options, parse_options)
    try:
        return pyarrow.csv.read_csv(pa.BufferReader(data), *options, convert_options)
    except pa.ArrowInvalid:
        if piece.whole:
            raise
        return pyarrow.csv.read_csv(pa.BufferReader(data), *options)  # of other types than before


def _has_names(head: bytes) -> bool:
    """Return whether a CSV file begins with its names, which are looked for in the first line."""
    return not head[:1].isspace()


def _json(data: bytes, piece: Piece, parse_options: Any = None) -> Any:
    """Read an object in each line, or a list of objects."""
    begin = data.strip()[:1]
    if not begin:
        return None
    if begin != b"{":
        found = json.loads(data)
        return items_to_table(found if isinstance(found, list) else [found])
    read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    try:
        return pyarrow.json.read_json(io.BytesIO(data), read, parse_options)
    except pa.ArrowInvalid as error:
        if piece.whole:
            raise
        raise ValueError(f"{error}. Each object of a large file must be a line.") from error


def _has_objects(head: bytes) -> bool:
    """Return whether a JSON file has an object in each line, and not a list or one object."""
    line, end, _ = head.strip().partition(b"\n")
    return bool(end) and line.startswith(b"{") and line.rstrip().endswith(b"}")


def _text(data: bytes, piece: Piece, encoding: str = "utf-8", drop_empty_lines: bool = True) -> Any:
    """Make a row of each line."""
    lines = data.decode(encoding).splitlines()
    kept = [line for line in lines if line.strip() or not drop_empty_lines]
    return pa.table({"text": pa.array(kept, pa.string())})


def _bytes(data: bytes, piece: Piece) -> Any:
    """Make a row of each file."""
    return pa.table({"bytes": pa.array([data], pa.binary())})


def _image(data: bytes, piece: Piece, size: Any = None, mode: str | None = None) -> Any:
    """Make a row of each image, decoded by Pillow."""
    from PIL import Image

    image: Any = Image.open(io.BytesIO(data))
    if size is not None:
        height, width = size
        image = image.resize((width, height), Image.Resampling.BILINEAR)  # as in Ray
    return pa.table({"image": column([np.asarray(image.convert(mode) if mode else image)])})


def _numpy(data: bytes, piece: Piece) -> Any:
    """Make a row of each entry of the first axis. Python objects are refused: they are pickled."""
    found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return pa.table({"data": column(np.atleast_1d(found))})


def _packed(*extensions: str) -> tuple[str, ...]:
    """Return how names of files end that may be compressed."""
    return tuple(map("".join, itertools.product(extensions, ("", *_PACKED))))


_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_OBJECTS = _packed(".json", ".jsonl", ".ndjson")
CSV = FileKind("ReadCSV", "CSV", _csv, _packed(".csv", ".tsv"), _has_names)
JSON = FileKind("ReadJSON", "JSON", _json, _OBJECTS, _has_objects, inflates=2)
TEXT = FileKind("ReadText", "text", _text, lines=bool)
BINARY = FileKind("ReadBinary", "binary", _bytes)
IMAGES = FileKind("ReadImage", "image", _image, _PICTURES, inflates=8, spare=8)
NUMPY = FileKind("ReadNumpy", "NumPy", _numpy, (".npy",))


@dataclasses.dataclass(frozen=True, eq=False)
class FilesDatasource(Datasource):
    """Files of a kind.

    Attributes:
        filesystem: Of fsspec.
        options: Of the function that makes rows of bytes.
        folders: The columns from paths.
        found: Paths and sizes; none in read units.
        codec: Compression of all files. Default: the one that the name of each tells.
    """

    kind: FileKind
    filesystem: Any
    options: Mapping[str, Any]
    folders: Sequence[str]
    found: Sequence[tuple[str, int]]
    name: str
    codec: str | None = None

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield units: parts of large files, small files together."""
        inflates = self.kind.inflates
        total = sum(size for _, size in self.found) * inflates
        # Pixels become floats, and a call pauses at its second block until it is read.
        most = wish.target // self.kind.spare
        target = max(1, min(most, -(-total // wish.parts)) // inflates)
        files = [(Piece(path), size, size * inflates) for path, size in self.found]
        return self.cut(files, target, 2 * target, target)

    def cut(
        self, pieces: Iterable[tuple[Piece, int, int]], together: int, large: int, step: int
    ) -> Iterator[ReadUnit]:
        """Yield units of pieces.

        Args:
            pieces: Each with its weight and its bytes in memory.
            together: The weight of those that are read together, at most.
            large: The weight above which one is cut, if it can be.
            step: The weight of its parts.
        """
        for some in bunched(pieces, operator.itemgetter(1), together):
            piece, weight, size = some[0]
            source = self.of_parts(piece.path, weight) if weight > large else None
            if source is None:
                yield self._unit([each for each, _, _ in some], sum(size for _, _, size in some))
                continue
            for start in range(0, weight, step):
                stop = piece.stop if start + step >= weight else start + step
                part = piece._replace(start=start, stop=stop)
                yield source._unit([part], size * min(step, weight - start) // weight)

    def _unit(self, pieces: Iterable[Piece], size: int) -> ReadUnit:
        rows = sum(piece.stop - piece.start for piece in pieces) if self.counted else None
        return ReadUnit(FileRows(dataclasses.replace(self, found=()), tuple(pieces)), rows, size)

    def of_parts(self, path: str, size: int) -> FilesDatasource | None:
        """Return what reads parts of a file, each from a line on; None if that can't be.

        Parts of a CSV file are read with the types that its beginning tells, if they have such.
        """
        if self.kind.lines is None or self.options or self._codec(path):
            return None
        head = self.filesystem.head(path, _FIRST)
        if not self.kind.lines(head):
            return None
        if self.kind != CSV:
            return self
        try:
            fields = _csv(head if size <= _FIRST else head[: head.rfind(b"\n")], Piece(path)).schema
        except pa.ArrowException:  # a task says what is wrong
            return self
        types = {field.name: field.type for field in fields if not pa.types.is_null(field.type)}
        options = {"convert_options": pyarrow.csv.ConvertOptions(column_types=types)}
        return dataclasses.replace(self, options=options)

    def open(self, path: str) -> Any:
        """Open a file of which several pieces are read, where that helps."""

    def read(self, file: Any, piece: Piece) -> Iterator[Any]:
        """Yield the rows of a piece of a file that was opened."""
        path = piece.path
        data = self.filesystem.cat_file(path) if piece.whole else self._lines(piece)
        if data or not piece.start:
            assert self.kind.table is not None
            if codec := self._codec(path):
                data = pa.input_stream(pa.BufferReader(data), codec).read()
            table = self.kind.table(data, piece, **self.options)
            if table is not None:
                yield self.beside(table, path)

    def _codec(self, path: str) -> str | None:
        return self.codec or _PACKED.get(PurePosixPath(path).suffix.lower())

    def _lines(self, piece: Piece) -> bytes:
        """Return the lines that begin within a piece, with the names of CSV's columns above."""
        from fsspec.utils import read_block

        size = None if piece.stop == ENDLESS else piece.stop - piece.start
        # Filesystems have a method for it that needs the size of files, which not all have.
        with self.filesystem.open(piece.path, "rb") as file:
            data = bytes(read_block(file, piece.start, size, b"\n"))
            if data and piece.start and self.kind == CSV:
                data = read_block(file, 0, 1, b"\n") + data
        return data

    def beside(self, table: Any, path: str) -> Any:
        """Return a table of a file with the columns of its path; a column of the file wins."""
        table = from_file(table)
        texts = {"path": path, **_folders(path)}
        for name in self.folders:
            if name in texts and name not in table.column_names:
                value = pa.scalar(None if texts[name] == NULL else texts[name], pa.string())
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table


def checked_options(
    caller: str, given: Mapping[str, Any], takers: Iterable[Callable[..., Any]]
) -> dict[str, Any]:
    """Return options without those of Ray's that only advise.

    Args:
        caller: In messages.
        given: The options.
        takers: Functions whose arguments with defaults they are.

    Raises:
        TypeError: One is not known.
    """
    found = {name: value for name, value in given.items() if name not in _ADVICE}
    parameters = [each for taker in takers for each in inspect.signature(taker).parameters.values()]
    known = {each.name for each in parameters if each.default is not each.empty}
    for name in found.keys() - known:
        raise TypeError(f"{caller}() has no argument {name!r}.{suggestion(name, known)}")
    return found


# --- paths ------------------------------------------------------------------------------


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[Any, str]:
    """Return the fsspec filesystem of a path or URL, and the path on it."""
    import fsspec

    text = os.fspath(path)
    if filesystem is None:
        url = text.replace("s3://anonymous@", "s3://", 1)
        found: tuple[Any, str] = fsspec.core.url_to_fs(url, **{} if url == text else {"anon": True})
        return found
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        return filesystem, filesystem._strip_protocol(text)
    from fsspec.implementations.arrow import ArrowFSWrapper

    # Its own method takes "?" for the end of a path, and the first folder of some URLs for a host.
    return ArrowFSWrapper(filesystem), text.partition("://")[2] or text


def is_local(filesystem: Any) -> bool:
    """Return whether a filesystem is that of the machine."""
    return type(filesystem).__name__ == "LocalFileSystem"


def find_files(
    paths: Any, filesystem: Any, extensions: Sequence[str] | None, what: str, *, some: bool = False
) -> tuple[Any, list[tuple[str, int]]]:
    """Return the filesystem of paths, and the files there with their sizes.

    Paths and the filesystem are as of ``read_parquet``; in folders, files with one of the
    extensions are looked for. With ``some``, not all paths need to exist.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: The paths are on different filesystems.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    given = [] if given is None else list(given)
    if not given:
        raise ValueError(f"No path of {what} files was given.")
    places = [resolve(each, filesystem) for each in given]
    fs = places[0][0]
    if any(other != fs for other, _ in places):
        raise ValueError(f"The paths are on different filesystems: {given}.")
    found = [_below(fs, path, extensions) for _, path in places]
    missing = [each for each, files in zip(given, found, strict=True) if not files]
    if len(missing) > (len(given) - 1 if some else 0):
        text = f"There is no {what} file at {os.fspath(missing[0])!r}."
        if extensions is not None:
            text += f" In folders, file_extensions={list(extensions)} are looked for; None: all."
        raise FileNotFoundError(text)
    return fs, list(itertools.chain(*found))


def _below(fs: Any, path: str, extensions: Sequence[str] | None) -> list[tuple[str, int]]:
    if fs.isdir(path):
        details = {
            name: info
            for name, info in fs.find(path, detail=True).items()
            if not any(part.startswith((".", "_")) for part in name.removeprefix(path).split("/"))
            and (extensions is None or name.lower().endswith(tuple(extensions)))
        }
    else:  # a file, or a pattern
        details = {path: fs.info(path)} if fs.isfile(path) else fs.glob(path, detail=True)
    return sorted(
        (name, int(info["size"] or 0)) for name, info in details.items() if info["type"] == "file"
    )


def folder_columns(files: Iterable[tuple[str, int]]) -> list[str]:
    """Return the names of columns that folders such as ``year=2024`` make."""
    return list(dict.fromkeys(itertools.chain.from_iterable(_folders(path) for path, _ in files)))


def _folders(path: str) -> dict[str, str]:
    """Return names and values of the folders on a path."""
    parts = (part.partition("=") for part in path.split("/")[:-1])
    return {name: urllib.parse.unquote(value) for name, sign, value in parts if sign and name}


def together(called: str, found: Sequence[tuple[str, Any]]) -> Any:
    """Return what files, given with their schemas, have together.

    Raises:
        DataError: Two do not go together, or columns of one have the same name.
    """
    first, schema = found[0]
    for path, other in found:
        if len(set(other.names)) < len(other.names):
            raise DataError(f"{path} can't be read as columns have the same name: {other.names}")
        if not other.equals(schema):
            try:
                schema = concat([no_rows(schema), no_rows(other)]).schema
            except ValueError as error:
                text = f"The {called} files {first} and {path} do not go together: {error}"
                raise DataError(text) from error
    return schema


def bunched(items: Iterable[T], weight: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items that follow each other, as many together as weigh ``most``; at least one."""
    held: list[T] = []
    have = 0
    for item in items:
        if held and have + weight(item) > most:
            yield held
            held, have = [], 0
        held.append(item)
        have += weight(item)
    if held:
        yield held
