"""`Probe`: the fixed training samples on which everything is measured."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any, ClassVar

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_warn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from lightning_normtheory.callbacks.samples.batch_contents import count_samples, is_plain, same_batches, to_cpu
from lightning_normtheory.callbacks.samples.population import Population, find_population
from lightning_normtheory.callbacks.samples.reading import (
    Chunks,
    count_training_samples,
    cut_indices,
    has_index,
    read_batches,
)
from lightning_normtheory.model.checks import some_samples

__all__ = ["Probe", "ProbeBatch"]


@dataclass(frozen=True)
class ProbeBatch:
    """One batch of the probe, as the loader would have given it.

    Attributes:
        data: the batch, on the CPU.
        samples: the number of samples in it.
        transferred: whether the module's batch-transfer hooks have been applied to it.
        counts: whether it belongs to this process's share, or only keeps the processes in step.
        first: the number of samples of the probe before it.
        index: its number among the batches of this process.
    """

    data: Any
    samples: int
    transferred: bool = False
    counts: bool = True
    first: int = 0
    index: int = 0

    def halves(self) -> list["ProbeBatch"]:
        """Return the same samples in two batches; a single sample stays one batch."""
        middle = self.samples // 2
        if middle == 0:
            return [self]
        return [
            replace(
                self,
                data=some_samples(self.data, self.samples, slice(begin, end)),
                samples=end - begin,
                first=self.first + begin,
            )
            for begin, end in ((0, middle), (middle, self.samples))
        ]


class Probe:
    """A fixed set of training samples, the same in every epoch, for any number of processes, and after a resume.

    * A dataset with an index is read once, at fixed indices, when the training starts. They are drawn without
      replacement from the samples that are trained on: those that a `SubsetRandomSampler` names, or, if the order is
      fixed, those of the first batches under ``overfit_batches`` and ``limit_train_batches``. A custom sampler is run
      for one epoch, and restored. Augmentation is done once, under a private seed.
    * The draw is uniform, except that each draw follows the weights of a `WeightedRandomSampler`: the trained loss is
      the mean with these weights, and a uniform draw would estimate another one. No sample is drawn twice, since the
      tangent kernel of equal samples is singular. So the more of the samples of positive weight the probe takes, the
      more evenly it takes them.
    * From an iterable dataset, and where the samples of a sampler are unknown (it holds an iterator), the first
      training batches are copied as they pass. No second iterator is created.

    Batches are cut at the training loader's batch size, since the statistics of a BatchNorm depend on the cut. A last
    batch of a single sample, for which BatchNorm has no variance, joins the batch before it.

    Args:
        samples: the number of samples, in total over all processes.
        seed: the seed of the draw and of the augmentation. Probes with equal arguments hold equal samples.

    Attributes:
        training_samples: n, the number of samples that are trained on, of which the probe holds some; ``None`` if it is
            unknown: before `prepare`, for an iterable dataset, a custom loader, and a dataset of whole batches.
        weighted: whether samples are drawn with different probabilities.

    Example:
        >>> Probe(samples=128)
        Probe(samples=128, seed=0)
        >>> Probe(samples=0)
        Traceback (most recent call last):
        ValueError: Expected probe samples to be a positive integer, but got 0.
    """

    # The name of the dataset, for messages.
    _part: ClassVar[str] = "training"

    def __init__(self, samples: int = 512, seed: int = 0) -> None:
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
            raise ValueError(f"Expected probe samples to be a positive integer, but got {samples!r}.")
        self.samples = samples
        self.seed = seed
        self.collecting = False
        self.training_samples: int | None = None
        self.weighted = False
        self._several = False
        self._batches: list[ProbeBatch] = []
        self._chunks: list[Chunks] = []
        # Training samples outside of the probe: their indices, and once they are asked for, the batches.
        self._other_chunks: Chunks = []
        self._others: list[ProbeBatch] | None = None
        self._source: Any = None
        self._loaders: Any = None
        self._restored = False
        self._collected: tuple[int, int] | None = None
        # Copies from a checkpoint saved while collecting: a loader may give these batches again.
        self._restored_data: list[Any] = []
        self._alone = True

    def __repr__(self) -> str:
        return f"Probe(samples={self.samples}, seed={self.seed})"

    @property
    def used(self) -> int:
        """The number of samples that it holds: fewer than asked for in a small dataset, more after whole batches."""
        return sum(batch.samples for batch in self._batches)

    @property
    def left_out(self) -> float:
        """The fraction of the training set that it does not hold: 1 if their number is unknown, or those of several
        loaders are combined, as for an endless set."""
        if self.training_samples is None or self._several:
            return 1.0
        return max(1 - self.used / self.training_samples, 0.0)

    def prepare(self, trainer: Trainer) -> None:
        """Read the samples, or get ready to copy them from the passing batches."""
        source, iterables, limit = self._find(trainer)
        if source is self._source:
            return  # prepared by another callback that shares this probe
        self._source, self._loaders = source, iterables
        restored, self._restored = self._restored, False
        self.collecting = False
        loaders, structure = tree_flatten(iterables)
        populations = [find_population(loader, limit, trainer.world_size) for loader in loaders]
        self.weighted = any(each is not None and each.weights is not None for each in populations)
        self._several = len(loaders) > 1
        before = self.training_samples if restored else None
        self.training_samples = count_training_samples(loaders, populations)
        if before is not None and self.training_samples is not None:
            # A sampler resumed in mid-epoch gives the rest of it only.
            self.training_samples = max(before, self.training_samples)
        if restored and self._batches:
            self.collecting = bool(self._restored_data)
            return  # the checkpoint holds copies
        known = [each for each in populations if each is not None]
        if len(known) < len(loaders) or not all(has_index(loader) for loader in loaders):
            self._start_collecting()
            return
        if not (restored and self._fits(loaders)):
            draws = [population.draw(self.samples, self.seed) for population in known]
            self._chunks = [cut_indices(loader, indices) for loader, indices in zip(loaders, draws)]
            self._other_chunks = []
        self._draw_others(loaders, known)
        read = self._read_all(loaders, trainer)
        if read is None:
            self._start_collecting()
            return
        if not read or not all(sum(samples for _, samples in batches) for batches in read):
            self._batches = []
            self._on_empty()
            return
        # Several loaders give one batch of batches. The first loader counts the samples; shorter ones start again.
        self._batches = [
            ProbeBatch(tree_unflatten([batches[i % len(batches)][0] for batches in read], structure), samples)
            for i, (_, samples) in enumerate(read[0])
        ]

    def _find(self, trainer: Trainer) -> tuple[Any, Any, float]:
        """Return an object that identifies the source of the samples, its loaders, and the batches of an epoch."""
        return trainer.fit_loop._combined_loader, trainer.train_dataloader, trainer.num_training_batches

    def _read_all(self, loaders: list[DataLoader], trainer: Trainer) -> list[list[tuple[Any, int]]] | None:
        """Read the batches of every loader; ``None`` if a process could not."""
        problem, read = "", []
        try:
            read = [
                list(read_batches(loader, chunks, self.samples, self.seed))
                for loader, chunks in zip(loaders, self._chunks)
            ]
        except Exception as error:  # noqa: BLE001  # for example, a dataset that can only be read in a worker
            problem = f" ({type(error).__name__}: {error})"
        if _mean(float(bool(problem)), trainer) == 0:  # all processes copy, or none does
            return read
        rank_zero_warn(
            f"The probe could not be read from the {self._part} set{problem}. Copies of the first {self._part} batches"
            " are used instead."
        )
        return None

    def _draw_others(self, loaders: list[DataLoader], populations: list[Population]) -> None:
        """Draw half as many samples of the only loader again, from those that the probe does not hold."""
        self._others = None
        if self._other_chunks or len(loaders) != 1 or loaders[0].batch_sampler is None:
            return
        drawn = {index for chunk in self._chunks[0] for index in chunk}
        wanted = max(self.samples // 2, 1)
        others = [index for index in populations[0].draw(len(drawn) + wanted, self.seed) if index not in drawn]
        self._other_chunks = cut_indices(loaders[0], others[:wanted])

    def other_batches(self, rank: int, world_size: int) -> list[ProbeBatch]:
        """Return this process's batches of training samples that are not in the probe, half as many, or as there are;
        none for an iterable dataset, several loaders, and a probe that holds all. They are read when first asked for.
        All processes call it together."""
        if self._others is None:
            loader = tree_flatten(self._loaders)[0] if self._other_chunks and self._source is not None else []
            read = list(read_batches(loader[0], self._other_chunks, self.samples, self.seed)) if loader else []
            self._others = [ProbeBatch(data, samples) for data, samples in read]
        return _shared_out(self._others, rank, world_size)

    def _on_empty(self) -> None:
        raise ValueError(
            "Expected a training set with samples to measure on, but the training loader's dataset is empty. "
            "Check the dataset's folder, split and filters."
        )

    def _start_collecting(self) -> None:
        self.collecting, self._collected = True, None
        self._batches, self._chunks, self._restored_data = [], [], []
        self._other_chunks, self._others = [], []

    def collect(self, batch: Any, batch_idx: int, trainer: Trainer) -> None:
        """Copy a passing batch, and complete the probe as soon as all processes together have enough samples.

        A batch that cannot be copied is left out.

        Args:
            batch_idx: each callback that shares the probe passes the batch on.
        """
        position, world_size = (trainer.current_epoch, batch_idx), trainer.world_size
        if position == self._collected:
            return
        self._collected, self._alone = position, world_size == 1
        self._copy(batch)
        if _mean(float(self.used * world_size >= self.samples), trainer) == 1:  # batches may differ in size
            self.complete(world_size)

    def _copy(self, batch: Any) -> None:
        try:
            copied = to_cpu(copy.deepcopy(batch))
        except Exception as error:  # noqa: BLE001  # does not stop the training
            rank_zero_warn(
                f"A {self._part} batch could not be copied ({type(error).__name__}: {error}). Nothing is measured on"
                " it."
            )
            return
        if not any(same_batches(copied, restored) for restored in self._restored_data):
            self._batches.append(ProbeBatch(copied, count_samples(copied), transferred=True))

    def complete(self, world_size: int) -> None:
        """End the collecting, at the latest after the first epoch or validation, and share the copies with all
        processes. If no process has a copy yet, continue."""
        if not self.collecting:
            return
        if world_size > 1:
            parts: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(parts, self._batches)
            rounds = zip_longest(*parts)
            self._batches = [batch for batches in rounds for batch in batches if batch is not None]
        self.collecting = not self._batches

    def release(self) -> None:
        """Drop the reference to the loader; keep the samples."""
        self._source = self._loaders = None

    def batches(self, rank: int, world_size: int) -> list[ProbeBatch]:
        """Return this process's batches: every ``world_size``-th, or those copied so far."""
        if self.collecting:
            return [replace(batch, index=index) for index, batch in enumerate(self._batches)]
        return _shared_out(self._batches, rank, world_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the indices; for an iterable dataset, which has none, the samples themselves."""
        state: dict[str, Any] = {
            "samples": self.samples,
            "seed": self.seed,
            "chunks": copy.deepcopy(self._chunks),
        }
        if self._other_chunks:
            state["other_chunks"] = copy.deepcopy(self._other_chunks)
        if self.training_samples is not None:
            state["training_samples"] = self.training_samples
        # While collecting, one process of several does not know the copies of the other ones.
        if self._batches and not self._chunks and (not self.collecting or self._alone):
            if all(is_plain(batch.data) for batch in self._batches):
                state["batches"] = [(batch.data, batch.samples) for batch in self._batches]
                state["collecting"] = self.collecting
            else:
                rank_zero_warn(
                    "The probe was copied from an iterable dataset whose batches are not made of tensors, lists and"
                    " dicts: it is not saved in the checkpoint, and a resumed run will measure on different samples."
                )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (state["samples"], state["seed"]) != (self.samples, self.seed):
            rank_zero_warn(
                f"The checkpoint was made with Probe(samples={state['samples']}, seed={state['seed']}), this run uses"
                f" {self!r}: its numbers are measured on different samples."
            )
            return
        self._chunks = copy.deepcopy(state["chunks"])
        self._other_chunks = copy.deepcopy(state.get("other_chunks", []))
        self.training_samples = state.get("training_samples")
        self._batches = [ProbeBatch(data, samples, transferred=True) for data, samples in state.get("batches", [])]
        self._restored_data = [batch.data for batch in self._batches] if state.get("collecting") else []
        self._restored, self._source = True, None

    def _fits(self, loaders: list[DataLoader]) -> bool:
        fits = len(loaders) == len(self._chunks) and all(
            max((index for chunk in chunks for index in chunk if isinstance(index, int)), default=-1)
            < len(loader.dataset)  # type: ignore[arg-type]
            for loader, chunks in zip(loaders, self._chunks)
        )
        if not fits:
            rank_zero_warn(
                f"The {self._part} set is smaller than the one of the checkpoint: the probe is drawn again, and its"
                " numbers cannot be compared with the earlier ones."
            )
        return fits


def _shared_out(batches: list[ProbeBatch], rank: int, world_size: int) -> list[ProbeBatch]:
    """Return the batches of one process."""
    firsts = accumulate((batch.samples for batch in batches), initial=0)
    own = [replace(batch, first=first) for batch, first in zip(batches, firsts)][rank::world_size]
    # Every process takes the same number of steps, as in training: a step may wait for the other processes.
    if batches and len(own) * world_size < len(batches):
        own.append(replace(batches[0], counts=False))
    return [replace(batch, index=index) for index, batch in enumerate(own)]


def _mean(value: float, trainer: Trainer) -> float:
    """The mean of a number over all processes."""
    if trainer.world_size == 1:
        return value
    return float(trainer.strategy.reduce(torch.tensor(value, device=trainer.strategy.root_device), reduce_op="mean"))
