"""Tell whether the first pass over the training data gives every sample once, in random order."""

from typing import Any

from pytorch_lightning import Trainer
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = ["why_not_fresh", "why_repeated"]


def why_repeated(trainer: Trainer) -> str:
    """Return why samples of the first pass may repeat, as a clause; empty if the samplers of torch do not repeat any.

    A custom sampler, a custom loader and a stream are trusted: they cannot be checked.
    """
    loaders, _ = tree_flatten(trainer.train_dataloader)
    if len(loaders) != 1:
        return f"there are {len(loaders)} training loaders, of which the shorter ones may start again"
    return _why_sampler_repeats(_samplers(loaders[0])[1])


def why_not_fresh(trainer: Trainer) -> str:
    """Return why the batches of the first pass may be no independent draws, as a clause: samples repeat, or they come
    in the order of the dataset, which may be sorted. What cannot be checked is trusted, as in `why_repeated`.
    """
    why = why_repeated(trainer)
    if why:
        return why
    batches, sampler = _samplers(tree_flatten(trainer.train_dataloader)[0][0])
    if _keeps_order(sampler) and not _is_one_batch(batches, sampler):
        return f"the {type(sampler).__name__} keeps the order of the dataset, so batches may be no independent draws"
    return ""


def _samplers(loader: Any) -> tuple[Any, Any]:
    """Return what a loader has to draw batches and samples."""
    batches = getattr(loader, "batch_sampler", None)
    return batches, getattr(loader if batches is None else batches, "sampler", None)


def _keeps_order(sampler: Any) -> bool:
    if isinstance(sampler, DistributedSampler):
        inner = getattr(sampler.dataset, "_sampler", None)  # of a user's sampler that Lightning shares out
        return not sampler.shuffle if inner is None else _keeps_order(inner)
    return isinstance(sampler, SequentialSampler)


def _is_one_batch(batches: Any, sampler: Any) -> bool:
    """Return whether a batch of each process is all that the sampler gives."""
    return bool(len(sampler) <= getattr(batches, "batch_size", 1))


def _why_sampler_repeats(sampler: Any) -> str:
    """
    Example:
        >>> _why_sampler_repeats(RandomSampler(range(5))), _why_sampler_repeats(None)
        ('', '')
        >>> _why_sampler_repeats(RandomSampler(range(5), replacement=True))
        'the RandomSampler draws with replacement'
    """
    # Lightning shares a user's sampler out over processes.
    sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    name = type(sampler).__name__
    if isinstance(sampler, WeightedRandomSampler):
        return f"the {name} draws by weights"
    if isinstance(sampler, RandomSampler):
        if sampler.replacement:
            return f"the {name} draws with replacement"
        if sampler.num_samples > len(sampler.data_source):
            return f"the {name} draws more samples than there are"
    if isinstance(sampler, SubsetRandomSampler) and len(set(sampler.indices)) < len(sampler.indices):
        return f"the {name} names samples twice"
    return ""
