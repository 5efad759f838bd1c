"""Read samples of a loader's dataset in batches, at given indices and without a trace."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_normtheory.callbacks.samples.batch_contents import count_samples
from lightning_normtheory.callbacks.samples.population import Population
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.measuring.snapshot import Snapshot

__all__ = ["Chunks", "count_training_samples", "cut_indices", "has_index", "read_batches"]

Chunks = list[list[Any]]


def count_training_samples(loaders: list[Any], populations: list[Population | None]) -> int | None:
    """The number of samples in the first loader, which counts the samples of a batch of batches."""
    if not loaders or populations[0] is None:
        return None
    loader = loaders[0]
    whole_batches = loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler)
    return None if whole_batches else len(populations[0].indices)


def has_index(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:
        return False  # a custom loader may change what it loads
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return False  # the dataset is asked for lists of indices
    return hasattr(loader.dataset, "__getitem__") and hasattr(loader.dataset, "__len__")


def cut_indices(loader: DataLoader, indices: list[Any]) -> Chunks:
    """Cut indices into batches."""
    if loader.batch_sampler is None:  # the dataset gives whole batches; their size is known after reading
        return [[index] for index in indices]
    size = _batch_size(loader)
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    if len(chunks) > 1 and len(chunks[-1]) == 1:
        lonely = chunks.pop()
        chunks[-1] += lonely
    return chunks


def _batch_size(loader: DataLoader) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:  # a custom sampler: the size of its first batch
        before = Snapshot(loader.batch_sampler)
        with isolated_rng():
            size = len(next(iter(loader.batch_sampler)))  # type: ignore[arg-type]
        before.restore()
    return int(size)


def read_batches(loader: DataLoader, chunks: Chunks, wanted: int, seed: int) -> Iterator[tuple[Any, int]]:
    """Read the batches at these indices, and restore the dataset (its caches, counters, generators)."""
    source = [loader.dataset]  # may be a large list, of which a snapshot lends a copy
    before = Snapshot(source, loader.collate_fn, arrays=False)
    samples = 0
    batched = loader.batch_sampler is not None
    limit = sum(map(len, chunks)) if batched else wanted
    reader: DataLoader = DataLoader(
        source[0],
        batch_sampler=chunks if batched else None,
        batch_size=1 if batched else None,
        sampler=None if batched else [chunk[0] for chunk in chunks],
        collate_fn=loader.collate_fn,
    )
    try:
        with isolated_rng(seed):
            for i, batch in enumerate(reader):
                n = len(chunks[i]) if batched else count_samples(batch)
                yield batch, n
                samples += n
                if samples >= limit:
                    break
    finally:
        before.restore()
