"""Tell whether the first pass over the training data gives every sample once."""

from typing import Any

from pytorch_lightning import Trainer
from torch.utils._pytree import tree_flatten
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

__all__ = ["why_repeated"]


def why_repeated(trainer: Trainer) -> str:
    """Return why samples of the first pass may repeat, as a clause; empty if the samplers of torch do not repeat any.

    A custom sampler, a custom loader and a stream are trusted: they cannot be checked.
    """
    loaders, _ = tree_flatten(trainer.train_dataloader)
    if len(loaders) != 1:
        return f"there are {len(loaders)} training loaders, of which the shorter ones may start again"
    batch_sampler = getattr(loaders[0], "batch_sampler", None)
    return _why_sampler_repeats(getattr(loaders[0] if batch_sampler is None else batch_sampler, "sampler", None))


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
