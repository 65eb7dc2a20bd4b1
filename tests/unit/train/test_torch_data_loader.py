from __future__ import annotations

import collections
import dataclasses
import pickle
import types

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils.rnn import pack_sequence  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch_helpers import session  # noqa: E402

from miniray.train.data.devices import move, moved_ahead, tensors_in  # noqa: E402
from miniray.train.torch import data_loader, prepare_data_loader  # noqa: E402
from miniray.train.torch.data_loader import (  # noqa: E402
    DeviceDataLoader,
    share_of,
)

META = torch.device("meta")


def shares(make_loader, epoch=None, world_size=2):
    """What each rank's loader yields, as lists of batches."""
    found = []
    for rank in range(world_size):
        loader = share_of(make_loader(), rank, world_size)
        if epoch is not None:
            sampler = loader.batch_sampler if loader.batch_size is None else loader.sampler
            sampler.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


def flat(batches):
    return [sample for batch in batches for sample in batch]


# --- shares ------------------------------------------------------------------------------------


def test_each_rank_gets_its_share_of_the_samples_in_order():
    first, second = shares(lambda: DataLoader(range(8), batch_size=2))
    assert (first, second) == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])


def test_a_loader_that_shuffles_still_does_and_in_a_new_order_each_epoch():
    def make():
        return DataLoader(range(64), batch_size=4, shuffle=True)

    first, second = shares(make, epoch=0)
    assert sorted(flat(first) + flat(second)) == list(range(64))
    assert flat(first) != list(range(0, 64, 2))
    assert shares(make, epoch=1)[0] != first
    assert shares(make, epoch=0)[0] == first


def test_what_else_a_loader_was_told_is_kept():
    def start(worker):
        pass

    loader = DataLoader(
        range(9),
        batch_size=2,
        drop_last=True,
        num_workers=2,
        collate_fn=list,
        timeout=3,
        worker_init_fn=start,
        generator=torch.Generator(),
        prefetch_factor=5,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    share = share_of(loader, 0, 2)
    names = (
        "batch_size drop_last num_workers collate_fn timeout worker_init_fn generator "
        "prefetch_factor persistent_workers multiprocessing_context pin_memory dataset"
    )
    for name in names.split():
        assert getattr(share, name) == getattr(loader, name), name


def test_a_loader_without_batches_is_shared_sample_by_sample():
    loader = share_of(DataLoader(range(4), batch_size=None), 1, 2)
    assert [int(sample) for sample in loader] == [1, 3]


def test_a_sampler_that_can_not_be_shared_is_replaced_with_a_warning(caplog):
    sampler = WeightedRandomSampler([0.5] * 8, 8)
    for rank in range(2):
        share = share_of(DataLoader(range(8), sampler=sampler), rank, 2)
        assert isinstance(share.sampler, DistributedSampler)
        assert share.sampler.shuffle
    assert caplog.text.count("replaces the WeightedRandomSampler") == 1


def test_a_loader_that_is_shared_already_stays_as_it_is():
    given = DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = DataLoader(range(8), sampler=given)
    assert share_of(loader, 0, 2) is loader


def test_an_iterable_dataset_is_left_to_its_user():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    loader = DataLoader(Stream())
    assert share_of(loader, 0, 2) is loader


class Reversed(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([3, 2, 1, 0])


def test_a_batch_sampler_of_ones_own_is_refused_with_what_it_can_do_itself():
    loader = DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"batches of a list\. .*add_dist_sampler=False"):
        share_of(loader, 0, 2)
    loader = DataLoader(range(4), batch_sampler=BatchSampler(Reversed(), 2, drop_last=False))
    with pytest.raises(ValueError, match=r"batches of a Reversed\. "):
        share_of(loader, 0, 2)


def test_torchs_own_batch_sampler_becomes_batches_of_the_share():
    def make():
        return DataLoader(
            range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 3, True)
        )

    assert shares(make) == [[[0, 2, 4]], [[1, 3, 5]]]
    shuffled = BatchSampler(RandomSampler(range(8)), 3, False)
    share = share_of(DataLoader(range(8), batch_sampler=shuffled), 0, 2)
    assert share.sampler.shuffle
    assert [len(batch) for batch in share] == [3, 1]


# --- the prepared loader ---------------------------------------------------------------------


def test_a_prepared_loader_is_otherwise_the_loader(tmp_path):
    loader = DataLoader(range(10), batch_size=4)
    with session(tmp_path):
        prepared = prepare_data_loader(loader)
    assert isinstance(prepared, DataLoader)
    assert len(prepared) == 3
    assert prepared.batch_size == 4
    assert isinstance(prepared.sampler, SequentialSampler)
    assert [torch.cat(list(prepared)).tolist() for _ in range(2)] == [list(range(10))] * 2
    assert len(pickle.loads(pickle.dumps(prepared))) == 3


def test_a_new_epoch_is_told_to_the_sampler_of_a_prepared_loader(tmp_path):
    with session(tmp_path, rank=1, world_size=2):
        loader = prepare_data_loader(DataLoader(range(32), batch_size=2, shuffle=True))
    loader.sampler.set_epoch(1)
    first = torch.cat(list(loader)).tolist()
    loader.sampler.set_epoch(2)
    assert torch.cat(list(loader)).tolist() != first
    assert len(loader) == 8


def test_data_can_stay_unshared_and_where_it_is(tmp_path):
    loader = DataLoader(range(4))
    with session(tmp_path, world_size=2):
        assert prepare_data_loader(loader, add_dist_sampler=False, move_to_device=False) is loader


def test_a_single_worker_keeps_the_samplers_of_its_loader(tmp_path):
    loader = DataLoader(range(8), batch_sampler=[[0, 1], [2, 3]])
    with session(tmp_path):
        assert prepare_data_loader(loader).batch_sampler is loader.batch_sampler


def test_what_is_no_loader_is_refused(tmp_path):
    with session(tmp_path), pytest.raises(TypeError, match="DataLoader"):
        prepare_data_loader([1, 2])


def test_batches_for_a_gpu_go_through_pinned_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(data_loader, "get_device", lambda: torch.device("cuda", 1))
    loader = DataLoader(range(4))
    with session(tmp_path):
        assert prepare_data_loader(loader).pin_memory
        assert not prepare_data_loader(loader, auto_transfer=False).pin_memory
    assert not loader.pin_memory


# --- moving ------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Example:
    image: object
    label: str


def test_batches_of_any_shape_are_moved_and_keep_their_types():
    batch = collections.OrderedDict(
        x=[torch.ones(1), (torch.ones(1), "text")],
        y=Pair(torch.ones(1), 3),
        z=Example(torch.ones(1), "cat"),
        w=types.MappingProxyType({"inner": torch.ones(1)}),
    )
    moved = move(batch, META)
    assert type(moved) is collections.OrderedDict
    assert moved["x"][1][1] == "text"
    assert (type(moved["y"]), moved["y"].b) == (Pair, 3)
    assert (type(moved["z"]), moved["z"].label) == (Example, "cat")
    found = list(tensors_in(moved))
    assert len(found) == 5
    assert all(tensor.device == META for tensor in found)
    assert all(tensor.device.type == "cpu" for tensor in tensors_in(batch))


def test_a_packed_sequence_is_moved_as_one():
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    moved = move({"text": packed}, META)["text"]
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_an_object_that_can_move_itself_does():
    class Encoding:
        device = None

        def to(self, device):
            self.device = device
            return self

    assert move(Encoding(), META).device == META


class FakeStream:
    def __init__(self, log, name):
        self.log = log
        self.name = name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        return self

    def __exit__(self, *details):
        return None


@pytest.fixture
def streams(monkeypatch):
    """What is asked of CUDA's streams, without CUDA."""
    log = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, "copy"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(log, "loop"))
    return log


def test_the_next_batch_is_copied_while_one_is_used(streams):
    def batches():
        for number in range(3):
            streams.append(f"load {number}")
            yield {"n": torch.tensor(number), "packed": pack_sequence([torch.ones(1)])}

    for batch in moved_ahead(batches(), META):
        streams.append("use")
        assert batch["n"].device == META
    assert streams == [
        "load 0",
        "loop waits for copy",
        "load 1",
        "use",
        "loop waits for copy",
        "load 2",
        "use",
        "loop waits for copy",
        "use",
    ]


def test_a_loader_without_batches_yields_none(streams):
    assert list(moved_ahead([], META)) == []


def test_a_loader_goes_ahead_only_where_it_is_told_to(streams):
    loader = DataLoader(range(2))
    assert len(list(DeviceDataLoader(loader, META, ahead=True))) == 2
    assert streams
    streams.clear()
    assert len(list(DeviceDataLoader(loader, META, ahead=False))) == 2
    assert not streams
