"""Find the samples that a loader gives in training."""

import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.measuring.snapshot import Snapshot

__all__ = ["Population", "find_population"]

# A sampler that is run stops after this many indices per sample of the dataset: it may be endless.
_DRAWS_PER_SAMPLE = 10


class Population(NamedTuple):
    """The samples that a loader gives.

    Attributes:
        indices: what the dataset is asked for, without repetitions.
        weights: how often each one is drawn, relative to the others; ``None``: all equally often.
    """

    indices: list[Any]
    weights: Tensor | None = None

    def draw(self, samples: int, seed: int) -> list[Any]:
        """Draw indices without replacement, one after the other, each with a probability in proportion to its weight.

        Example:
            >>> Population([4, 5, 6]).draw(2, seed=0)
            [6, 4]
            >>> Population([4, 5, 6], torch.tensor([1e-9, 1.0, 1.0])).draw(2, seed=0)
            [6, 5]
        """
        generator = torch.Generator().manual_seed(seed)
        if self.weights is None:
            order = torch.randperm(len(self.indices), generator=generator, device="cpu")
        else:  # the first of independent exponential times with these rates, the second, …
            times = torch.empty(len(self.indices), dtype=torch.float64, device="cpu").exponential_(generator=generator)
            order = (times / self.weights).argsort()
        return [self.indices[i] for i in order[:samples].tolist()]


def find_population(loader: Any, batches: float, world_size: int) -> Population | None:
    """Return the samples that ``batches`` batches of every epoch are made of; ``None`` if they are unknown.

    * Of a sampler of torch that shuffles: every sample that it can draw, whatever the number of batches. Of a
      `WeightedRandomSampler`, those of positive weight.
    * Of any other sampler, which may have a fixed order: the samples of its first ``batches`` batches, in all
      processes. It is run once, and restored. If it holds an iterator, whose position cannot be restored, it is not.

    Every process must call it.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if not hasattr(loader.dataset, "__len__"):
        return None
    source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = source.sampler if _iterates_as(source, BatchSampler) else source
    # Lightning shares a user's sampler out over processes, in random order.
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    if inner is not None:
        source, sampler, batches = inner, inner, float("inf")
    known = _known(sampler)
    if known is not None:
        return known
    found = _run(source, sampler, loader, batches)
    if world_size > 1:
        parts: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(parts, found)
        found = None if any(part is None for part in parts) else [index for part in parts for index in part]
    if found is None:
        return None
    distinct = list(dict.fromkeys(found))
    # In order, so that the draw does not depend on the number of processes.
    return Population(sorted(distinct) if all(isinstance(index, int) for index in distinct) else distinct)


def _known(sampler: Any) -> Population | None:
    """The samples that a shuffling sampler of torch can draw."""
    if _iterates_as(sampler, RandomSampler):
        return Population(list(range(len(sampler.data_source))))
    if _iterates_as(sampler, DistributedSampler) and sampler.shuffle:
        return Population(list(range(len(sampler.dataset))))
    if _iterates_as(sampler, SubsetRandomSampler):
        return Population(list(dict.fromkeys(int(index) for index in sampler.indices)))
    if _iterates_as(sampler, WeightedRandomSampler):
        weights = torch.as_tensor(sampler.weights, dtype=torch.float64, device="cpu")
        positive = weights > 0
        return Population(positive.nonzero().flatten().tolist(), weights[positive])
    return None


def _iterates_as(sampler: Any, kind: type) -> bool:
    """Whether a sampler is of this class, or of a subclass that gives the same indices."""
    return isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _run(source: Any, sampler: Any, loader: DataLoader, batches: float) -> list[Any] | None:
    """Return the indices of the first batches; ``None`` if the sampler fails, or cannot be restored."""
    stateless = _iterates_as(sampler, SequentialSampler) or _iterates_as(sampler, DistributedSampler)
    if not stateless and any(map(_holds_iterator, (source, sampler, getattr(source, "sampler", None)))):
        return None
    size = len(loader.dataset)  # type: ignore[arg-type]
    before = [] if stateless else [Snapshot(source), Snapshot([loader.dataset], arrays=False)]
    found: dict[Any, None] = {}
    try:
        with isolated_rng():
            indices = _indices(source, batches, batched=source is loader.batch_sampler)
            for index in islice(indices, _DRAWS_PER_SAMPLE * size):
                found[index] = None
                if len(found) == size:
                    break
    except Exception:  # noqa: BLE001  # the batches that pass show what it gives
        return None
    finally:
        for snapshot in reversed(before):
            snapshot.restore()
    return list(found)


def _indices(source: Any, batches: float, *, batched: bool) -> Iterator[Any]:
    entries = iter(source)
    for entry in entries if batches == float("inf") else islice(entries, int(batches)):
        for index in entry if batched or isinstance(entry, list) else [entry]:
            try:
                yield operator.index(index)
            except TypeError:  # a custom dataset may be asked for anything
                yield index


def _holds_iterator(sampler: Any) -> bool:
    return any(isinstance(each, Iterator) for each in (sampler, *getattr(sampler, "__dict__", {}).values()))
