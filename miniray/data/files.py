"""Paths as files on a filesystem; all files but Parquet: CSV, JSON, text, images, NumPy, bytes."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import operator
import os
import urllib.parse
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from miniray.data.blocks import column, from_file
from miniray.data.sources import ENDLESS, Content, Datasource, ReadUnit, between, items_to_table
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
#: Bytes of a file in which the end of its first line is looked for.
_FIRST = 2**16
#: Bytes of a CSV file that is looked through for the types of its columns before it is cut.
_TYPED = 4 * 2**20


class FileKind(NamedTuple):
    """A kind of files.

    Attributes:
        name: Of the source in a plan.
        called: In errors.
        table: Makes rows of bytes of a file, given its path, options, and if they are a part of it.
        extensions: How the files' names end; None: anyhow.
        options: What ``table`` can be told.
        lines: Whether a file may be cut at ends of lines.
        inflates: How many times its size a file takes in memory.
    """

    name: str
    called: str
    table: Callable[[bytes, str, Mapping[str, Any], bool], Any]
    extensions: tuple[str, ...] | None = None
    options: tuple[str, ...] = ()
    lines: bool = False
    inflates: int = 1


@dataclasses.dataclass(frozen=True)
class FileRows(Content):
    """Some bytes of a file, or several whole files.

    Attributes:
        filesystem: Of fsspec.
        paths: The columns that paths tell of.
        spans: Paths and where to begin and end in them; none in what units are made of.
    """

    kind: FileKind
    filesystem: Any
    options: Mapping[str, Any]
    paths: PathColumns
    spans: tuple[tuple[str, int, int], ...] = ()

    @property
    def label(self) -> str:
        path, start, _ = self.spans[0]
        if len(self.spans) > 1:
            return f"{path} up to {self.spans[-1][0]}"
        return f"{path} (from byte {start})" if start else path

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        return between(self._all_tables(), start, stop)

    def _all_tables(self) -> Iterator[Any]:
        """Yield the rows of all files.

        Raises:
            DataError: A file is not of this kind, or does not go with the first one.
        """
        first: tuple[str, Any] | None = None
        for path, start, stop in self.spans:
            for table in self._tables(path, start, stop):
                first = first or (path, table.slice(0, 0))
                if self.kind.lines:
                    try:
                        concat([first[1], table.slice(0, 0)])
                    except ValueError as error:
                        raise _apart(self.kind.called, first[0], path, error.__cause__) from error
                yield table

    def can_be_cut(self, path: str) -> bool:
        """Return whether parts of a file can be read, each from a line on."""
        if not self.kind.lines or self.options or path.endswith(".gz"):
            return False
        if self.kind == CSV:  # its names are looked for in the first line
            return not self.filesystem.head(path, 1).isspace()
        if not path.endswith(".json"):
            return True
        # An object in each line, or a list.
        line, end, _ = self.filesystem.head(path, _FIRST).strip().partition(b"\n")
        return bool(end) and line.startswith(b"{") and line.rstrip().endswith(b"}")

    def typed(self, path: str, size: int) -> FileRows:
        """Return what reads parts of a file with the types of the whole, if that is a small CSV."""
        if self.kind != CSV or size > _TYPED:
            return self
        try:
            fields = _csv(self.read(path), path, {}, False).schema
        except pa.ArrowException:  # a task says what is wrong
            return self
        types = {field.name: field.type for field in fields if not pa.types.is_null(field.type)}
        options = {"convert_options": pyarrow.csv.ConvertOptions(column_types=types)}
        return dataclasses.replace(self, options=options)

    def read(self, path: str, start: int = 0, stop: int = ENDLESS) -> bytes:
        """Return the lines of a file that begin within these bytes, or all of it."""
        from fsspec.utils import read_block

        if start == 0 and stop == ENDLESS:
            return bytes(self.filesystem.cat_file(path))
        size = None if stop == ENDLESS else stop - start
        # Filesystems have a method for it that wants files to tell their size, which not all do.
        with self.filesystem.open(path, "rb") as file:
            return bytes(read_block(file, start, size, b"\n"))

    def _tables(self, path: str, start: int, stop: int) -> Iterator[Any]:
        """Yield the rows of a file, if there are any.

        Raises:
            DataError: It is not of this kind, or can't be read.
        """
        try:
            data = self.read(path, start, stop)
            if start and not data:
                return
            if start and self.kind == CSV:  # the names are at the beginning
                data = self.read(path, 0, 1) + data
            table = self.kind.table(data, path, self.options, start > 0 or stop < ENDLESS)
            if table is not None:
                yield self.paths.beside(from_file(table), path)
        except (pa.ArrowException, OSError, ValueError) as error:
            kind = self.kind.called
            article = "an" if kind == "image" else "a"
            raise DataError(f"{path} can't be read as {article} {kind} file: {error}") from error


def _csv(data: bytes, path: str, options: Mapping[str, Any], part: bool) -> Any:
    """Read CSV that begins with a header."""
    options = {"read_options": pyarrow.csv.ReadOptions(use_threads=False), **options}
    if path.endswith(".tsv"):
        options.setdefault("parse_options", pyarrow.csv.ParseOptions(delimiter="\t"))
    stream = pa.BufferReader(data)
    packed = pa.CompressedInputStream(stream, "gzip") if path.endswith(".gz") else stream
    return pyarrow.csv.read_csv(packed, **options)


def _json(data: bytes, path: str, options: Mapping[str, Any], part: bool) -> Any:
    """Read an object in each line, or a list of objects."""
    if not data.strip():
        return None
    read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    try:
        return pyarrow.json.read_json(io.BytesIO(data), read_options=read, **options)
    except pa.ArrowInvalid as error:
        if part:
            raise ValueError(f"an object of a part does not end with its line: {error}") from error
        try:
            found = json.loads(data)
        except json.JSONDecodeError as other:
            # More follows the first object: these are lines, and Arrow says which one is wrong.
            raise (error if other.msg == "Extra data" else other) from None
        return items_to_table(found if isinstance(found, list) else [found])


def _text(data: bytes, path: str, options: Mapping[str, Any], part: bool) -> Any:
    """Make a row of each line."""
    lines = data.decode(options.get("encoding", "utf-8")).splitlines()
    if options.get("drop_empty_lines", True):
        lines = [line for line in lines if line.strip()]
    return pa.table({"text": pa.array(lines, pa.string())})


def _bytes(data: bytes, path: str, options: Mapping[str, Any], part: bool) -> Any:
    """Make a row of each file."""
    return pa.table({"bytes": pa.array([data], pa.binary())})


def _image(data: bytes, path: str, options: Mapping[str, Any], part: bool) -> Any:
    """Make a row of each image, decoded by Pillow."""
    from PIL import Image

    image: Any = Image.open(io.BytesIO(data))
    if (size := options.get("size")) is not None:
        height, width = size
        image = image.resize((width, height))
    if (mode := options.get("mode")) is not None:
        image = image.convert(mode)
    return pa.table({"image": column([np.asarray(image)])})


def _numpy(data: bytes, path: str, options: Mapping[str, Any], part: bool) -> Any:
    """Make a row of each entry of the first axis. Python objects are refused: they are pickled."""
    return pa.table({"data": column(np.atleast_1d(np.load(io.BytesIO(data), allow_pickle=False)))})


_PARTS_OF_CSV = ("read_options", "parse_options", "convert_options")
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
CSV = FileKind("ReadCSV", "CSV", _csv, (".csv", ".csv.gz", ".tsv"), _PARTS_OF_CSV, lines=True)
_NAMES_OF_JSON = (".json", ".jsonl", ".ndjson")
JSON = FileKind("ReadJSON", "JSON", _json, _NAMES_OF_JSON, ("parse_options",), True, 2)
TEXT = FileKind("ReadText", "text", _text, None, ("encoding", "drop_empty_lines"), lines=True)
BINARY = FileKind("ReadBinary", "binary", _bytes)
IMAGES = FileKind("ReadImage", "image", _image, _PICTURES, ("size", "mode"), inflates=8)
NUMPY = FileKind("ReadNumpy", "NumPy", _numpy, (".npy",))


@dataclasses.dataclass(frozen=True)
class FilesDatasource(Datasource):
    """Files of a kind."""

    rows: FileRows
    found: Sequence[tuple[str, int]]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.rows.kind.name

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield units: parts of large files, small files together."""
        inflates = self.rows.kind.inflates
        total = sum(size for _, size in self.found) * inflates
        target = max(1, min(wish.target, -(-total // wish.parts)) // inflates)
        for some in bunched(self.found, operator.itemgetter(1), target):
            path, size = some[0]
            if size <= 2 * target or not self.rows.can_be_cut(path):
                spans = [(each, 0, ENDLESS) for each, _ in some]
                yield _unit(self.rows, spans, sum(each for _, each in some))
                continue
            rows = self.rows.typed(path, size)
            for start in range(0, size, target):  # a file that is larger is alone
                stop = ENDLESS if start + target >= size else start + target
                yield _unit(rows, [(path, start, stop)], target)


def _unit(rows: FileRows, spans: Sequence[tuple[str, int, int]], size: int) -> ReadUnit:
    content = dataclasses.replace(rows, spans=tuple(spans))
    return ReadUnit(content, size=size * rows.kind.inflates)


def checked_options(
    caller: str, given: Mapping[str, Any], known: Iterable[str], named: Iterable[str] = ()
) -> dict[str, Any]:
    """Return options without those of Ray's that only advise.

    Raises:
        TypeError: One is not known; the message may suggest arguments that are ``named``.
    """
    found = {name: value for name, value in given.items() if name not in _ADVICE}
    for name in found.keys() - set(known):
        hint = suggestion(name, {*known, *named})
        raise TypeError(f"{caller}() has no argument {name!r}.{hint}")
    return found


# --- paths ------------------------------------------------------------------------------


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[Any, str]:
    """Return the fsspec filesystem of a path or URL, and the path on it."""
    import fsspec

    text = os.fspath(path)
    if filesystem is None:
        bucket = text.removeprefix("s3://anonymous@")
        found: tuple[Any, str] = (
            fsspec.core.url_to_fs(text)
            if bucket == text
            else fsspec.core.url_to_fs(f"s3://{bucket}", anon=True)
        )
        return found
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        return filesystem, filesystem._strip_protocol(text)
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(filesystem), text.partition("://")[2] or text


def is_local(filesystem: Any) -> bool:
    """Return whether a filesystem is that of the machine."""
    return type(filesystem).__name__ == "LocalFileSystem"


def find_files(
    paths: Any, filesystem: Any, extensions: Sequence[str] | None, what: str
) -> tuple[Any, list[tuple[str, int]]]:
    """Return the filesystem of paths, and the files there with their sizes.

    Paths and the filesystem are as of ``read_parquet``; in folders, files with one of the
    extensions are looked for.

    Raises:
        FileNotFoundError: There is nothing at a path.
        ValueError: The paths are on different filesystems.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise ValueError(f"No path of {what} files was given.")
    places = [resolve(each, filesystem) for each in given]
    fs = places[0][0]
    if any(other != fs for other, _ in places):
        raise ValueError(f"The paths are on different filesystems: {given}.")
    files: list[tuple[str, int]] = []
    for each, (_, path) in zip(given, places, strict=True):
        found = _below(fs, path, extensions)
        if not found:
            raise FileNotFoundError(f"There is no {what} file at {os.fspath(each)!r}.")
        files += found
    return fs, files


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


class PathColumns(NamedTuple):
    """The columns that paths tell of: folders such as ``year=2024``.

    Attributes:
        path: Whether "path" is one.
        texts: Those that are texts, as one of their values is no whole number.
    """

    path: bool = False
    texts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, files: Iterable[tuple[str, int]], *, path: bool) -> PathColumns:
        """Return those of files, given with their sizes."""
        named = itertools.chain.from_iterable(_folders(each) for each, _ in files)
        return cls(path, frozenset(name for name, value in named if not value.isdecimal()))

    def beside(self, table: Any, path: str) -> Any:
        """Return a table of a file with these columns; one that is there stays."""
        new: dict[str, Any] = {
            name: urllib.parse.unquote(value) if name in self.texts else int(value)
            for name, value in _folders(path)
        }
        if self.path:
            new["path"] = path
        for name, value in new.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table


def _folders(path: str) -> list[tuple[str, str]]:
    """Return names and values of the folders on a path."""
    parts = (part.partition("=") for part in path.split("/")[:-1])
    return [(name, value) for name, sign, value in parts if sign and name]


def unified(called: str, found: Sequence[tuple[str, Any]]) -> Any:
    """Return what files, given with their schemas, have together.

    Raises:
        DataError: Two do not go together.
    """
    first_path, schema = found[0]
    for path, other in found[1:]:
        if other.equals(schema):
            continue
        try:
            schema = pa.unify_schemas([schema, other], promote_options="permissive")
        except pa.ArrowException as error:
            raise _apart(called, first_path, path, error) from error
    return schema


def _apart(called: str, first: str, path: str, why: BaseException | None) -> DataError:
    """Return the error of two files that do not go together."""
    return DataError(f"The {called} files {first} and {path} do not go together: {why}")


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
