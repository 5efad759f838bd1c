"""Full-batch gradient descent in Lightning: each step of an epoch uses all samples."""

from collections.abc import Callable, Iterator

from pytorch_lightning import Trainer
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["full_batch_loader"]


class _Repeated(Sampler[int]):
    """Yield 0 … n − 1 in this order, ``times`` times."""

    # Tells the callbacks that n consecutive indices are the whole set, so that a step on them is gradient descent.
    repeats_the_set = True

    def __init__(self, n: int, times: int) -> None:
        self.n, self.times = n, times

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.times):
            yield from range(self.n)

    def __len__(self) -> int:
        return self.n * self.times


def full_batch_loader(
    dataset: Dataset, steps: int, trainer: Trainer | None = None, loader: Callable[..., DataLoader] = DataLoader
) -> DataLoader:
    """Return a loader whose epoch has ``steps`` batches, each the whole data set in its order.

    With one step per epoch, most time would go into Lightning's epochs and into measurements after every step.

    Raises:
        ValueError: if the trainer has several processes, since Lightning would split the samples among them.

    Example:
        >>> loader = full_batch_loader([3, 1, 2], steps=2)
        >>> [batch.tolist() for batch in loader]
        [[3, 1, 2], [3, 1, 2]]
    """
    if type(steps) is not int or steps < 1:
        raise ValueError(f"Expected a positive number of steps per epoch, but got {steps!r}.")
    if trainer is not None and trainer.world_size > 1:
        raise ValueError(
            "Expected one process for full-batch gradient descent, since each step uses all samples, but there are"
            f" {trainer.world_size}. Use --trainer.devices 1 --trainer.num_nodes 1"
        )
    n = len(dataset)  # type: ignore[arg-type]
    return loader(dataset, batch_size=n, sampler=_Repeated(n, steps))
