"""What a task of a dataset does with the units that it is given."""

import dataclasses

import pytest

from miniray import data
from miniray.data.exchange import together
from miniray.data.sources import Content, ReadUnit
from miniray.data.transforms import Where
from miniray.data.work import StageWork

pa = pytest.importorskip("pyarrow")


@dataclasses.dataclass(frozen=True, eq=False)
class Remote(Content):
    """Two tables, before the second of which connections are lost."""

    first: int
    losses: list[str]
    label = "a remote file"

    def tables(self, start, stop, *values):
        yield pa.table({"id": [self.first]})
        if self.losses:
            raise OSError(self.losses.pop())
        yield pa.table({"id": [self.first + 1]})


def ids(*contents):
    unit = together([[ReadUnit(content) for content in contents]])
    work = StageWork((), 0, data.DataContext().retried_io_errors)
    tables = work.tables(Where("here", 0), unit, ())
    return [number for table in tables for number in table.column("id").to_pylist()]


LOST = "AWS Error NETWORK_CONNECTION"


def test_each_of_several_files_that_are_read_together_is_read_again_where_its_connection_was_lost():
    assert ids(Remote(0, []), Remote(2, [LOST] * 2), Remote(4, [LOST] * 2)) == list(range(6))


def test_a_file_is_not_read_again_without_end_nor_after_other_errors():
    lost, gone = [LOST] * 9, ["gone"] * 2
    with pytest.raises(OSError, match=LOST):
        ids(Remote(0, []), Remote(2, lost))
    assert len(lost) == 6
    with pytest.raises(OSError, match="gone"):
        ids(Remote(0, []), Remote(2, gone))
    assert len(gone) == 1
