"""Parts of batches."""

from itertools import chain

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from entame_hf.errors import InputError
from entame_hf.trainer.sampler import GlobalBatchSampler, count_stream, share_evenly, share_order


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [8, 17, 22, 48, 49])
def test_every_process_has_a_part_of_every_batch(rows, processes):
    samplers = [GlobalBatchSampler(SequentialSampler(range(rows)), 4, processes, rank) for rank in range(processes)]
    parts = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(part) for part in parts}
    together = [list(chain(*batch)) for batch in zip(*parts, strict=True)]
    whole = list(BatchSampler(range(rows), 4 * processes, drop_last=False))
    assert together == whole[: len(together)]
    assert len(list(chain(*together))) > rows - processes
    for batch in zip(*parts, strict=True):
        assert max(map(len, batch)) - min(map(len, batch)) <= 2
        assert 0 < min(map(len, batch)) <= max(map(len, batch)) <= 4
        # Each begins with a pair.
        assert len(list(chain(*batch))) < 2 * processes - 1 or not any(part[0] % 2 for part in batch)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("rows", [7, 8, 9, 13, 17, 25])
def test_no_process_gets_a_single_row_if_batches_are_joined(rows, batch_size, processes):
    seen, sizes = [], []
    for rank in range(processes):
        made = DataLoader(range(rows), batch_size)
        prepared = prepare_data_loader(made, num_processes=processes, process_index=rank)
        share_evenly(prepared, avoids_single_rows=True)
        batches = [batch.tolist() for batch in prepared]
        assert len(batches) == len(prepared)
        seen += chain(*batches)
        sizes.append([len(batch) for batch in batches])
    if rows < 2 * processes:
        return
    if rows >= batch_size * processes:
        assert sorted(seen) == [*range(rows)]
        assert min(chain(*sizes)) >= 2
    assert len({len(of_one) for of_one in sizes}) == 1


def test_a_last_batch_of_two_rows_stays_on_its_own():
    prepared = prepare_data_loader(DataLoader(range(10), 4))
    share_evenly(prepared, avoids_single_rows=True)
    assert [batch.tolist() for batch in prepared][-1] == [8, 9]


def loader(rows, rank, **options):
    return prepare_data_loader(DataLoader(range(rows), 4, **options), num_processes=3, process_index=rank)


def test_an_epoch_has_each_example_once():
    batches = []
    for rank in range(3):
        prepared = loader(22, rank)
        assert share_evenly(prepared)
        assert len(prepared) == 2
        batches.append([batch.tolist() for batch in prepared])
    assert batches == [[[0, 1, 2, 3], [12, 13]], [[4, 5, 6, 7], [14, 15, 16, 17]], [[8, 9, 10, 11], [18, 19, 20, 21]]]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(range(24)),
        lambda: WeightedRandomSampler(torch.ones(24), 24, replacement=False),
        lambda: LengthGroupedSampler(4, lengths=[*range(24)]),
    ],
    ids=["random", "weighted", "by-length"],
)
def test_the_order_is_one_whatever_random_numbers_a_process_has(sampler):
    prepared = []
    for rank in range(3):
        torch.manual_seed(rank)
        made = DataLoader(range(24), 4, sampler=sampler())
        prepared.append(prepare_data_loader(made, num_processes=3, process_index=rank, use_seedable_sampler=True))
        share_order(prepared[-1], 0)
    orders = []
    for _ in range(2):
        rows = []
        for rank, part in enumerate(prepared):
            torch.manual_seed(rank)
            rows += [torch.cat([*part])]
        orders.append(torch.cat(rows).tolist())
        assert sorted(orders[-1]) == [*range(24)]
    assert orders[0] != orders[1]


def test_whole_batches_and_those_of_others_stay_as_they_are():
    assert not share_evenly(loader(24, 0))
    assert not share_evenly(loader(22, 0, drop_last=True))
    assert not share_evenly(DataLoader(range(22), 4))


@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_stay_as_they_are(drop_last):
    assert not share_evenly(DataLoader(Rows(), 4, drop_last=drop_last))


def test_fewer_examples_than_processes_are_refused():
    with pytest.raises(InputError, match=r"2 examples are too few for 3 processes: start at most 2\."):
        share_evenly(loader(2, 0))


class Rows(IterableDataset):
    epochs = 0

    def __iter__(self):
        return iter(range(22))

    def set_epoch(self, epoch):
        self.epochs += 1


@pytest.mark.parametrize(("split", "remainder"), [(False, 10), (True, 4)], ids=["batches", "parts-of-batches"])
def test_a_stream_that_was_read_tells_what_fills_its_last_batch_up(split, remainder):
    rows = Rows()
    prepared = prepare_data_loader(
        DataLoader(rows, 6 if split else 4), num_processes=3, process_index=2, split_batches=split
    )
    count_stream(prepared)
    for _ in range(2):
        *_, last = prepared
        assert prepared.remainder == remainder
        assert last.tolist() == ([0, 1] if split else [20, 21, 0, 1])
    assert rows.epochs == 2
