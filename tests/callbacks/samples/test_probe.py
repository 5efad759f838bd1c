"""`Probe`: the samples on which everything is measured."""

import math
from collections import UserDict
from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_normtheory.callbacks import NormTheory, Probe, RSCRatio
from lightning_normtheory.callbacks.samples.batch_contents import count_samples, describe

from support.lit import Augmented, Classifier, InWorkers, Stream, loader, tensors, trainer


def probe_of(data, samples=20, **arguments):
    """Return the probe after a fit, and the trained module."""
    probe = Probe(samples)
    trainer([RSCRatio(probe=probe, on_error="raise", **arguments)], max_epochs=1).fit(Classifier("bn"), data)
    return probe


def data_of(probe):
    return torch.cat([batch.data[0] for batch in probe.batches(0, 1)])


def indices_of(x, n=50):
    """Return the indices of these samples in `tensors()`, found by comparison."""
    return [int(torch.nonzero((tensors(n)[0] == row).all(1))) for row in x]


def test_draws_distinct_samples_whatever_the_order():
    drawn = indices_of(data_of(probe_of(loader(shuffle=False))))
    assert len(set(drawn)) == 20
    assert drawn != list(range(20))
    assert indices_of(data_of(probe_of(loader(shuffle=True)))) == drawn


def test_is_cut_at_the_loaders_batch_size_without_a_lonely_sample():
    sizes = [batch.samples for batch in probe_of(loader(batch_size=8), samples=20).batches(0, 1)]
    assert sizes == [8, 8, 4]
    sizes = [batch.samples for batch in probe_of(loader(batch_size=8), samples=17).batches(0, 1)]
    assert sizes == [8, 9]


def test_is_smaller_where_the_dataset_is():
    assert len(data_of(probe_of(loader(n=10), samples=512))) == 10


def test_the_seed_and_nothing_else_decides():
    torch.manual_seed(1)
    first = data_of(probe_of(DataLoader(Augmented(), 8)))
    torch.manual_seed(2)
    assert torch.equal(first, data_of(probe_of(DataLoader(Augmented(), 8))))
    other = Probe(20, seed=1)
    trainer([RSCRatio(probe=other)], max_epochs=1).fit(Classifier("bn"), DataLoader(Augmented(), 8))
    assert not torch.equal(first, data_of(other))


class Counting(TensorDataset):
    """Counts on the class, which snapshots do not restore."""

    reads = 0

    def __getitem__(self, index):
        Counting.reads += 1
        return super().__getitem__(index)


def test_reads_once_and_leaves_the_dataset_as_it_was():
    Counting.reads = 0
    fit = trainer([NormTheory(probe=20), RSCRatio(probe=20, prefix="again")], max_epochs=3)
    fit.fit(Classifier("bn"), DataLoader(Counting(*tensors()), 8))
    assert Counting.reads == 3 * 50 + 2 * 20 + 10  # the last ones outside of the probe, for λ_max
    data = Augmented()
    state = data.own["python"].getstate(), data.own["torch"].get_state(), data.own["numpy"].bit_generator.state
    probe = Probe(20)
    fit = trainer([RSCRatio(probe=probe)], max_epochs=1, limit_train_batches=1)
    fit.fit(Classifier("bn"), DataLoader(data, 8, num_workers=1))  # only the probe is read in this process
    assert data.asked == []
    assert data.cache == {}
    assert state[0] == data.own["python"].getstate()
    assert torch.equal(state[1], data.own["torch"].get_state())
    assert state[2] == data.own["numpy"].bit_generator.state


def test_a_shared_probe_is_read_once():
    Counting.reads = 0
    shared = Probe(20)
    fit = trainer([NormTheory(probe=shared), RSCRatio(probe=shared, prefix="again")], max_epochs=1)
    fit.fit(Classifier("bn"), DataLoader(Counting(*tensors()), 8))
    assert Counting.reads == 50 + 20 + 10


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_data_gives_copies_of_the_first_batches(workers):
    class Keep(pl.Callback):
        batches = ()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.batches += (batch[0].clone(),)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            batch[0].zero_()  # later changes of a batch must not reach the probe

    keep, probe = Keep(), Probe(20)
    fit = trainer([RSCRatio(probe=probe, on_error="raise"), keep], max_epochs=1)
    fit.fit(Classifier("bn"), DataLoader(Stream(), 8, num_workers=workers))
    assert [batch.samples for batch in probe.batches(0, 1)] == [8, 8, 8]
    assert torch.equal(data_of(probe), torch.cat(keep.batches[:3]))


def test_copies_are_taken_in_the_first_epoch_only():
    probe = Probe(512)
    trainer([RSCRatio(probe=probe, on_error="raise")]).fit(Classifier("bn"), DataLoader(Stream(), 8))
    assert len(data_of(probe)) == 50


def test_callbacks_that_share_a_probe_copy_a_passing_batch_once():
    shared = Probe(20)
    callbacks = [NormTheory(probe=shared, on_error="raise"), RSCRatio(probe=shared, prefix="again", on_error="raise")]
    trainer(callbacks, max_epochs=1).fit(Classifier("bn"), DataLoader(Stream(), 8))
    assert [batch.samples for batch in shared.batches(0, 1)] == [8, 8, 8]
    assert len(torch.unique(data_of(shared), dim=0)) == 24


def test_a_dataset_that_only_workers_can_read():
    probe = Probe(20)
    fit = trainer([RSCRatio(probe=probe, on_error="raise")], max_epochs=1)
    with pytest.warns(UserWarning, match="could not be read from the training set.*Copies of the first"):
        fit.fit(Classifier("bn"), DataLoader(InWorkers(*tensors()), 8, num_workers=1))
    assert [batch.samples for batch in probe.batches(0, 1)] == [8, 8, 8]


def test_a_second_fit_reads_its_own_data():
    probe, callback = Probe(50), None
    callback = RSCRatio(probe=probe, on_error="raise")
    trainer([callback], max_epochs=1).fit(Classifier("bn"), loader(n=50))
    first = data_of(probe)
    trainer([callback], max_epochs=1).fit(Classifier("bn"), DataLoader(TensorDataset(*tensors(seed=9)), 8))
    assert not torch.equal(first, data_of(probe))


def test_several_loaders_give_one_batch_of_batches():
    class Two(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    probe = Probe(20)
    callback = RSCRatio(probe=probe, on_error="raise", predict=lambda module, batch: module(batch["a"][0]))
    trainer([callback], max_epochs=1).fit(Two("bn"), {"a": loader(50, 8), "b": loader(10, 5)})
    shapes = [(len(batch.data["a"][0]), len(batch.data["b"][0])) for batch in probe.batches(0, 1)]
    assert shapes == [(8, 5), (8, 5), (4, 5)]


def whole_batches(**arguments):
    return DataLoader(TensorDataset(*(t.unflatten(0, (5, 10)) for t in tensors())), batch_size=None, **arguments)


def test_a_dataset_of_whole_batches_gives_samples_not_batches():
    assert len(data_of(probe_of(whole_batches(), samples=20))) == 20
    assert len(data_of(probe_of(whole_batches(), samples=512))) == 50


def test_a_dataset_that_is_asked_for_lists_of_indices():
    sampler = BatchSampler(SequentialSampler(range(50)), 8, drop_last=False)
    probe = probe_of(DataLoader(TensorDataset(*tensors()), sampler=sampler, batch_size=None))
    assert [batch.samples for batch in probe.batches(0, 1)] == [8, 8, 8]


def test_a_loader_that_changes_what_it_loads_is_listened_to():
    class Scaled(DataLoader):
        def __iter__(self):
            return iter([(100 * x, y) for x, y in super().__iter__()])

    assert data_of(probe_of(Scaled(TensorDataset(*tensors()), 8))).std() > 50


def test_mappings_that_are_no_dicts():
    def collate(samples):
        x, y = zip(*samples)
        return UserDict(image=torch.stack(x), label=torch.stack(y))

    class Mapped(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["image"], batch["label"]), batch_idx)

    probe = Probe(20)
    callback = RSCRatio(probe=probe, on_error="raise", predict=lambda module, batch: module(batch["image"]))
    trainer([callback], max_epochs=1).fit(Mapped("bn"), DataLoader(Stream(), 8, collate_fn=collate))
    assert [batch.samples for batch in probe.batches(0, 1)] == [8, 8, 8]


def test_processes_share_the_batches_out():
    probe = probe_of(loader(batch_size=4), samples=20)
    parts = [probe.batches(rank, 3) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 2]  # the same number of steps for all
    together = torch.cat([batch.data[0] for part in parts for batch in part if batch.counts])
    assert sorted(indices_of(together)) == sorted(indices_of(data_of(probe)))


@pytest.mark.parametrize("samples", [0, -1, 2.5, True, "many"])
def test_refuses_a_number_that_is_none(samples):
    with pytest.raises(ValueError, match="positive integer, but got"):
        Probe(samples)


@dataclass
class Pairs:
    x: torch.Tensor
    y: torch.Tensor


class Storage(UserDict):
    pass


class Graphs:
    """A batch as of a graph library: tensors over nodes, in a mapping that is an attribute."""

    def __init__(self, **tensors):
        self.store = Storage(tensors)

    def to(self, device):
        self.store = Storage({name: x.to(device) for name, x in self.store.items()})
        self.moved_to = str(device)
        return self


class Counted(Graphs):
    num_graphs = 3


class Puzzled(Graphs):
    @property
    def num_graphs(self):
        raise ValueError("cannot tell")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.tensor(3.0), {"x": torch.zeros(4, 2)}], 4),
        ([UserDict(ids=torch.zeros(5, 2))], 5),
        (Pairs(torch.zeros(7, 2), torch.zeros(7)), 7),
        (Counted(x=torch.zeros(20, 2)), 3),
        ((Counted(x=torch.zeros(20, 2)), torch.zeros(6)), 6),
        (Graphs(x=torch.zeros(20, 2)), 20),
        (Puzzled(x=torch.zeros(20, 2)), 20),
        ({"text": ["a", "b"]}, 2),
        ("text", 1),
        (None, 1),
    ],
)
def test_counts_the_samples_of_any_batch(batch, expected):
    assert count_samples(batch) == expected


def test_describes_batches():
    assert describe((torch.zeros(2, 3), "a")) == "a tuple (Tensor (2, 3), str)"


def test_objects_from_an_iterable_dataset_are_copied_to_the_cpu():
    def collate(samples):
        x, y = zip(*samples)
        return Graphs(x=torch.stack(x), y=torch.stack(y))

    class Mapped(Classifier):
        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self(batch.store["x"]), batch.store["y"])

    probe = Probe(20)
    callback = RSCRatio(probe=probe, on_error="raise", predict=lambda module, batch: module(batch.store["x"]))
    run = trainer([callback], max_epochs=1)
    run.fit(Mapped("bn"), DataLoader(Stream(), 8, collate_fn=collate))
    assert [batch.samples for batch in probe.batches(0, 1)] == [8, 8, 8]
    assert [batch.data.moved_to for batch in probe.batches(0, 1)] == ["cpu"] * 3
    assert math.isfinite(run.callback_metrics["normtheory/rsc_ratio"])


@pytest.mark.filterwarnings("ignore")
def test_batches_that_cannot_be_copied_do_not_end_the_training():
    class Uncopied(Pairs):
        def __deepcopy__(self, memo):
            raise RuntimeError("of one kind")

    class Mapped(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch.x, batch.y), batch_idx)

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    def collate(samples):
        return Uncopied(*map(torch.stack, zip(*samples)))

    callback = RSCRatio(probe=20, predict=lambda module, batch: module(batch.x))
    run = trainer([callback], max_epochs=1)
    with pytest.warns(UserWarning, match="training batch could not be copied .RuntimeError: of one kind"):
        run.fit(Mapped("bn"), DataLoader(Stream(), 8, collate_fn=collate))
    assert math.isnan(run.callback_metrics["normtheory/rsc_ratio"])
