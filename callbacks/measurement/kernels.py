"""The tangent kernel on the first samples of the probe."""

import gc
import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.smaller_batches import all_agree
from lightning_normtheory.callbacks.measurement.theory import KnownFacts
from lightning_normtheory.callbacks.output.messages import warn
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.workspace import drop_free_memory
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.ntk.empirical import effort_for_batches, tangent_kernel_of_batches
from lightning_normtheory.ntk.rank import fingerprint_samples
from lightning_normtheory.ntk.result import Outputs, TangentKernel
from lightning_normtheory.ntk.strategies import Effort
from lightning_normtheory.scaling.split import BatchNormSplit, batch_norm_split

__all__ = ["Kernels", "Predictor"]

# Above this number of samples, the matrices of the single layers are not kept.
_SAMPLES_WITH_LAYERS = 512
# The most that a kernel may cost, in gradients of the loss on the whole probe, by counts, a repetition in float64
# included.
_MOST_GRADIENTS = 12.0
# A kernel begins in float64 in at most so many measurements, with the first.
_COMPARED_AFTER = 16


class Predictor(nn.Module):
    """A module whose forward pass computes the outputs of a measured function from its inputs."""

    def __init__(self, function: MeasuredFunction) -> None:
        super().__init__()
        self.module = function.model
        self._outputs = function.outputs

    def forward(self, inputs: Any) -> Tensor:
        return self._outputs(self.module, inputs)


class Kernels:
    """Tangent kernels of one epoch, each computed once.

    Args:
        facts: what earlier epochs found out; completed here.

    Attributes:
        trained_fingerprint: identifies the set of parameters in which the last kernel was differentiated, by names.
    """

    def __init__(self, function: MeasuredFunction, facts: KnownFacts) -> None:
        self._function, self._facts = function, facts
        self.trained_fingerprint = 0
        self._found: dict[tuple[int, Outputs, int | None, bool], TangentKernel] = {}

    def effort(self, samples: int, outputs: Outputs) -> Effort:
        """Choose directions and samples for a kernel, from counts alone: two runs of one training choose the same."""
        function = self._function
        with function.measuring(independent=True):  # counts do not depend on the statistics of BatchNorm
            return effort_for_batches(
                Predictor(function),
                function.first_samples(samples),
                outputs=outputs,
                probe=sum(batch.samples for batch in function.all_batches),
                most=_MOST_GRADIENTS,
                processes=function.processes,
            )

    def tangent_kernel(
        self, samples: int, outputs: Outputs, directions: int | None = None, *, refine: bool = True
    ) -> TangentKernel:
        """Return the kernel of the first samples of the probe. Every process runs all of them forward, since a kernel
        is about pairs, and computes its share of the rows.

        Args:
            directions: the number of random directions over the outputs; ``None``: exact.
            refine: whether to repeat it in float64 if λ_min comes near its floor.
        """
        key = (samples, outputs, directions, refine)
        if key not in self._found:
            if outputs == "full" and refine:  # from the next measurement on it comes along with that of more samples
                self._facts.full_samples = samples
            found = self._found[key] = self._precise(samples, outputs, directions) if refine else self._compute(*key)
            # In all processes, whose rounding may differ.
            if found.full is not None and all_agree(self._function, _is_final(found.full)):
                self._found.setdefault((self._facts.full_samples, "full", None, True), found.full)
        return self._found[key]

    def known(self, samples: int, outputs: Outputs, directions: int | None) -> TangentKernel | None:
        """Return a kernel of this measurement if it was computed already."""
        return self._found.get((samples, outputs, directions, True))

    def _precise(self, samples: int, outputs: Outputs, directions: int | None) -> TangentKernel:
        """Return a kernel in float64 if λ_min comes near its floor otherwise: where it did, the next ones begin there.

        The result is the same as without that, where both precisions judge alike whether it does. That they measure the
        same function is compared again after so many measurements.
        """
        facts, kind = self._facts.in_float64, f"{samples} {outputs} {directions}"
        left = facts.get(kind, 0)
        found = self._in_float64(samples, outputs, directions) if left else None
        if found is None or all_agree(self._function, self._float32_would_do(found)):
            left, found = _COMPARED_AFTER, self._compute(samples, outputs, directions, True)
        if left == 1 or all_agree(self._function, not self._is_repeated(found)):
            facts.pop(kind, None)
        else:
            facts[kind] = left - 1
        return found

    def _in_float64(self, samples: int, outputs: Outputs, directions: int | None) -> TangentKernel | None:
        """Return the kernel in float64, or nothing if that fails, as it would not in the first precision."""
        try:
            return self._compute(samples, outputs, directions, False, torch.float64)
        except Exception as error:  # noqa: BLE001  # told, and computed otherwise
            warn(f"The tangent kernel could not begin in float64: {type(error).__name__}: {error}")
            out_of_memory = is_out_of_memory(error)
        if out_of_memory:  # outside the except clause, where the traceback still holds the memory
            gc.collect()
            drop_free_memory()
        return None

    def _float32_would_do(self, kernel: TangentKernel) -> bool:
        return bool(kernel.deficiency) or not replace(kernel, dtype=torch.float32).near_floor

    def _is_repeated(self, kernel: TangentKernel) -> bool:
        return kernel.dtype == torch.float64 and any(p.dtype != kernel.dtype for p in self._function.theta.values())

    def _compute(
        self,
        samples: int,
        outputs: Outputs,
        directions: int | None,
        refine: bool,
        dtype: torch.dtype | None = None,
    ) -> TangentKernel:
        function = self._function
        full = self._facts.full_samples if outputs == "trace" and directions is None else 0
        with function.measuring():
            split = function.processes.run_on_all(self._split)
            batches = function.first_samples(samples)
            held = function.hold_statistics()  # after the inputs, which need resets of the model
            self.trained_fingerprint = zlib.crc32("\n".join(function.theta).encode())
            found = tangent_kernel_of_batches(
                Predictor(function),
                batches,
                outputs=outputs,
                dtype=dtype,
                layers=outputs != "full" and samples <= _SAMPLES_WITH_LAYERS,
                directions=directions,
                refine=refine,
                split=split.inside("module"),
                reset_state=None if held else function.reset_state,  # that would end what is held
                full=full if full < samples else 0,
                processes=function.processes,
            )
        return _inside(found, "module")

    def _split(self) -> BatchNormSplit:
        """Return the split of BatchNorm; the module is traced once, and again when its structure has changed."""
        model = self._function.model
        modules = ((path, type(module)) for path, module in model.named_modules())
        structure = (*modules, *(name for name, _ in model.named_parameters()))
        if structure not in self._facts.split:
            self._facts.split = {structure: batch_norm_split(model)}
        return self._facts.split[structure]

    def fingerprint(self, samples: int) -> int:
        """Return a number that identifies the first samples of the probe."""
        first = self._function.first(samples)
        return fingerprint_samples(SampleBatch(batch.data, batch.samples, asked) for batch, asked in first)


def _is_final(kernel: TangentKernel) -> bool:
    """Whether a kernel would not be repeated in float64."""
    return kernel.dtype == torch.float64 or bool(kernel.deficiency) or not kernel.near_floor


def _inside(kernel: TangentKernel, name: str) -> TangentKernel:
    """Return a kernel with the names of parameters and layers as in a submodule of this name."""
    return replace(
        kernel,
        one_by_one=tuple(each.removeprefix(f"{name}.") for each in kernel.one_by_one),
        part_of={each.removeprefix(f"{name}."): part for each, part in kernel.part_of.items()},
        layers={f"{each}.".removeprefix(f"{name}.").strip("."): x for each, x in kernel.layers.items()},
        full=None if kernel.full is None else _inside(kernel.full, name),
    )
