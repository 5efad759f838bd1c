"""Find every use of a parameter in the autograd graph, with a rule that gives the gradient of each sample.

The graph contains all uses of a parameter, also those outside of layers, and the tensors that their gradients need. A
rule exists if the gradient of each sample follows from the gradient B at the output of one operation. To support
another operation, write a rule and add it to ``_RULES``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_normtheory.autodiff.graph import nodes
from lightning_normtheory.ntk.sample_axis import SampleAxis

__all__ = ["Convolution", "Elementwise", "Lookup", "Outer", "Site", "Use", "light_leaf", "parameter_uses", "passes_on"]

# The operation for the gradients of all samples at once pays from this many positions on; in a loop over the groups, as
# torch has it on CPUs for all but float32, from this many.
_MANY, _MANY_IN_LOOP = 16, 64
_PATCHES = 2**25  # the most bytes of patches, where gradients are formed from them


class Site:
    """One use of a parameter: how the gradient of a sample follows from B."""

    def axes(self, ndim: int) -> Sequence[int]:
        """The axes of B, out of ``ndim``, where the samples may be."""
        return (0,)


class Outer(Site):
    """A weight whose gradient is Σ_p r_p c_pᵀ (G, d, d') over the positions p, for each of G groups of channels.

    One of the two factors comes from the forward pass, the other from B.

    Attributes:
        moving_rows: whether r is the factor that comes from B.
    """

    moving_rows: bool = True

    def fixed(self, axis: SampleAxis, n: int) -> Tensor:
        """The factor from the forward pass (n, T, G, ·)."""
        raise NotImplementedError

    def moving(self, axis: SampleAxis, n: int, b: Tensor) -> Tensor:
        """The factor from B (n, T, G, ·)."""
        raise NotImplementedError

    def entering(self, axis: SampleAxis, n: int) -> Tensor:
        """The input of the operation, with the samples in front."""
        raise NotImplementedError


@dataclass
class Product(Outer):
    """A matrix that multiplies rows of activations (…, d)."""

    node: Any
    saved: str
    scale: float
    moving_rows: bool

    def axes(self, ndim: int) -> Sequence[int]:
        return range(ndim - 1)

    def fixed(self, axis: SampleAxis, n: int) -> Tensor:
        rows = self.moving(axis, n, getattr(self.node, self.saved))
        return rows if self.scale == 1 else self.scale * rows

    def moving(self, axis: SampleAxis, n: int, b: Tensor) -> Tensor:
        return axis.in_front(b, n).flatten(1, -2)[:, :, None]

    def entering(self, axis: SampleAxis, n: int) -> Tensor:
        return axis.in_front(getattr(self.node, self.saved), n)


@dataclass
class Convolution(Outer):
    """A convolution of any dimension, with stride, dilation, padding and groups, also transposed.

    Position by position a convolution multiplies patches of its input with the weight (out, in/G, …), and a transposed
    one adds pixels of its input, times the weight (in, out/G, …), to patches of its output.
    """

    node: Any

    @property
    def moving_rows(self) -> bool:  # type: ignore[override]
        return not self.node._saved_transposed

    def fixed(self, axis: SampleAxis, n: int) -> Tensor:
        return self._fixed(axis, n, self.node._saved_input)

    def _fixed(self, axis: SampleAxis, n: int, images: Tensor) -> Tensor:
        return self._pixels(axis, n, images) if self.node._saved_transposed else self._patches(axis, n, images)

    def moving(self, axis: SampleAxis, n: int, b: Tensor) -> Tensor:
        return self._patches(axis, n, b) if self.node._saved_transposed else self._pixels(axis, n, b)

    def entering(self, axis: SampleAxis, n: int) -> Tensor:
        return axis.in_front(self.node._saved_input, n)

    def forms_gradients(self, axis: SampleAxis, b: Tensor) -> bool:
        """Whether the groups are so small that the gradient of a sample has fewer entries than its two factors.

        Then it also has the cheaper Gram matrix. Depthwise convolutions are always of this kind.
        """
        weight, groups = self.node._saved_weight, self.node._saved_groups
        rows, cols = len(weight) // groups, weight[0].numel()
        return groups > 1 and rows * cols <= self._count(axis, b) * (rows + cols)

    def multiplications(self, axis: SampleAxis, b: Tensor) -> int:
        """In a forward pass of a sample, and to form its gradient."""
        return self._count(axis, b) * self.node._saved_weight.numel()

    def gradients(self, axis: SampleAxis, n: int, bs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of all samples (n, entries), for each B."""
        positions, exact = self._count(axis, bs[0]), bs[0].dtype != torch.float32
        if bs[0].device.type == "cpu" and positions < (_MANY_IN_LOOP if exact else _MANY):
            return self._from_patches(axis, n, bs)
        return [self._with_own_groups(axis, n, b) for b in bs]

    def _from_patches(self, axis: SampleAxis, n: int, bs: Sequence[Tensor]) -> list[Tensor]:
        """Some samples at a time: patches have more entries than gradients."""
        weight, first = self.node._saved_weight, SampleAxis(0, axis.entries, major=True)
        images, *results = (axis.in_front(x, n) for x in (self.node._saved_input, *bs))
        entries = self._count(axis, bs[0]) * self.node._saved_groups * weight[0].numel()
        out = [b.new_empty(n, weight.numel()) for b in bs]
        for some in torch.arange(n, device="cpu").split(max(1, _PATCHES // (entries * weight.element_size()))):
            which = slice(int(some[0]), int(some[-1]) + 1)
            fixed = self._fixed(first, len(some), images[which].flatten(0, 1))
            for found, result in zip(out, results):
                moving = self.moving(first, len(some), result[which].flatten(0, 1))
                rows, cols = (moving, fixed) if self.moving_rows else (fixed, moving)
                found[which] = torch.einsum("ntgd,ntge->ngde", rows, cols).flatten(1)
        return out

    def _with_own_groups(self, axis: SampleAxis, n: int, b: Tensor) -> Tensor:
        """The gradients by torch's own operation: each sample has groups of its own."""
        node = self.node
        # (t, n·channels, …)
        b, images = (axis.in_front(x, n).transpose(0, 1).flatten(1, 2) for x in (b, node._saved_input))
        weight = node._saved_weight  # only the shape counts
        return torch.ops.aten.convolution_backward(
            b,
            images,
            weight.new_empty(1).expand(n * len(weight), *weight.shape[1:]),
            None,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            n * node._saved_groups,
            (False, True, False),
        )[1].reshape(n, -1)

    def _count(self, axis: SampleAxis, b: Tensor) -> int:
        """T."""
        return axis.entries * math.prod((self.node._saved_input if self.node._saved_transposed else b).shape[2:])

    def _pixels(self, axis: SampleAxis, n: int, images: Tensor) -> Tensor:
        pixels = axis.in_front(images, n).flatten(3).movedim(2, 3)  # (n, t, positions, channels)
        return pixels.unflatten(3, (self.node._saved_groups, -1)).flatten(1, 2)

    def _patches(self, axis: SampleAxis, n: int, images: Tensor) -> Tensor:
        node = self.node
        positions = node._saved_input.shape[2:] if node._saved_transposed else self._positions(images)
        kernel = node._saved_weight.shape[2:]
        windows = _windows(images, kernel, positions, node._saved_stride, node._saved_padding, node._saved_dilation)
        spatial = len(kernel)
        # (images, channels, positions…, kernel…) -> (images, groups, channels/groups · kernel, positions), since whole
        # rows of positions are copied faster than small kernels
        positions_last = windows.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
        unfolded = positions_last.reshape(len(images), node._saved_groups, -1, math.prod(positions))
        return axis.in_front(unfolded.permute(0, 3, 1, 2), n).flatten(1, 2)

    def _positions(self, images: Tensor) -> tuple[int, ...]:
        node = self.node
        return tuple(
            (size + 2 * padding - dilation * (width - 1) - 1) // stride + 1
            for size, width, stride, padding, dilation in zip(
                images.shape[2:],
                node._saved_weight.shape[2:],
                node._saved_stride,
                node._saved_padding,
                node._saved_dilation,
            )
        )


def _windows(
    images: Tensor,
    kernel: Sequence[int],
    positions: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """A view (…, positions…, kernel…) of the padded images (…, sizes…)."""
    if any(padding):
        images = torch.nn.functional.pad(images, [p for size in reversed(padding) for p in (size, size)])
    lead = images.dim() - len(kernel)
    steps = images.stride()[lead:]
    strides = [*images.stride()[:lead], *(s * step for s, step in zip(stride, steps))]
    strides += [d * step for d, step in zip(dilation, steps)]
    return images.as_strided([*images.shape[:lead], *positions, *kernel], strides)


@dataclass
class Lookup(Site):
    """A table with ``entries`` entries whose rows ``indices`` were looked up; the row ``padding`` has no gradient."""

    indices: Tensor
    padding: int
    entries: int

    def axes(self, ndim: int) -> Sequence[int]:
        return range(self.indices.dim())

    def rows(self, axis: SampleAxis, n: int) -> Tensor:
        """The indices (n, T)."""
        return axis.in_front(self.indices, n).flatten(1)

    def moving(self, axis: SampleAxis, n: int, b: Tensor) -> Tensor:
        """The gradients of the rows (n, T, d)."""
        b = torch.where((self.indices == self.padding)[..., None], 0.0, b)
        return axis.in_front(b, n).flatten(1, -2)


@dataclass
class Elementwise(Site):
    """A tensor that was added, or multiplied by ``factor``, with the sizes ``shape`` on the last axes of the result.

    ``factor`` is ``None`` for 1. ``scale`` multiplies it entry by entry of the tensor.
    """

    shape: tuple[int, ...]
    factor: Callable[[], Tensor | float] | None
    scale: Tensor | None = None

    def axes(self, ndim: int) -> Sequence[int]:
        return [axis for axis, size in enumerate(self._aligned(ndim)) if size == 1]

    def gradient(self, axis: SampleAxis, n: int, b: Tensor, factor: Tensor | float | None) -> Tensor:
        """The gradient of each sample (n, entries), with the value of ``factor()``."""
        each = axis.in_front(b if factor is None else b * factor, n)  # (n, …, t, …)
        # The sum includes the t entries. A sum over an axis of length one would be a slow copy.
        summed = [i for i, size in enumerate(self._aligned(b.dim()), 1) if size == 1 and each.shape[i] > 1]
        found = (each.sum(summed) if summed else each).reshape(n, -1)
        return found if self.scale is None else found * self.scale

    def _aligned(self, ndim: int) -> tuple[int, ...]:
        return (1,) * (ndim - len(self.shape)) + self.shape


class Use(NamedTuple):
    """A leaf of the graph, the operation that uses it, and its rule; ``None`` if there is no rule."""

    leaf: Tensor
    edge: GradientEdge
    site: Site | None


def parameter_uses(output: Tensor, leaves: Sequence[Tensor], *, light: Sequence[Tensor] = ()) -> Iterator[Use]:
    """Find all uses of the leaves in the graph of ``output``, in an order that depends on the graph alone.

    Args:
        light: those of the leaves that are added to their values (see `WeightNormMap`), which counts as no use.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> for use in parameter_uses(layer(torch.ones(1, 3)), list(layer.parameters())):
        ...     print(tuple(use.leaf.shape), type(use.site).__name__)
        (2,) Elementwise
        (2, 3) Product
    """
    wanted, added = {id(leaf) for leaf in leaves}, {id(leaf) for leaf in light}
    last: Any = output.grad_fn
    for node in nodes(output):
        passed_on = _leaf_behind(node, wanted, added)
        if passed_on is not None:
            if node is last:  # the output is the parameter itself
                yield Use(passed_on[0], GradientEdge(node, 0), None)
            continue
        for index, (source, _) in enumerate(node.next_functions):
            behind = _leaf_behind(source, wanted, added)
            if behind is not None:
                rule = _RULES.get(node.name())
                yield Use(behind[0], GradientEdge(node, 0), rule(node, index, *behind) if rule else None)


def _leaf_behind(node: Any, wanted: set[int], light: set[int]) -> tuple[Tensor, bool] | None:
    """The leaf that a node passes on, and whether it is transposed."""
    transposed = False
    while node is not None:
        variable = getattr(node, "variable", None)
        if variable is not None:
            return (variable, transposed) if id(variable) in wanted else None
        if (leaf := light_leaf(node)) is not None and id(leaf) in light:
            return leaf, transposed
        if not passes_on(node):
            return None
        transposed = transposed != (node.name() == "TBackward0")
        node = node.next_functions[0][0]
    return None


def light_leaf(node: Any) -> Tensor | None:
    """The leaf that an operation adds to a tensor without a gradient, or ``None``."""
    if node.name() != "AddBackward0" or node.next_functions[0][0] is not None:
        return None
    return getattr(node.next_functions[1][0], "variable", None)


def passes_on(node: Any) -> bool:
    """Whether an operation returns its argument, at most transposed, as happens to weights before they are used."""
    return node.name() in ("CloneBackward0", "TBackward0")


# -- one rule for each operation, called with the node, the argument's index, the leaf, and whether it is transposed ---


def _addmm(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    if index == 2:
        return Product(node, "_saved_mat1", float(node._saved_alpha), transposed)
    return _added(leaf, transposed, float(node._saved_beta)) if index == 0 else None


def _mm(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    return Product(node, "_saved_self", 1.0, transposed) if index == 1 else None


def _linear(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    if index == 1:
        return Product(node, "_saved_input", 1.0, not transposed)
    return _added(leaf, transposed, 1.0) if index == 2 else None


def _convolution(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    if index == 1:
        return Convolution(node)
    return _on_channels(node._saved_weight.dim() - 2, leaf, None) if index == 2 else None


def _embedding(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    # Scaling by frequencies in the batch makes samples depend on each other.
    return (
        None
        if transposed or node._saved_scale_grad_by_freq
        else Lookup(node._saved_indices, _signed(node._saved_padding_idx), leaf.numel())
    )


def _batch_norm(node: Any, index: int, leaf: Tensor, transposed: bool, epsilon: str = "_saved_epsilon") -> Site | None:
    if node._saved_training or node._saved_running_mean is None:
        return None

    spatial = node._saved_input.dim() - 2

    def centered() -> Tensor:
        return node._saved_input - node._saved_running_mean.view(-1, *[1] * spatial)

    if index != 1:
        return _on_channels(spatial, leaf, None)
    return _on_channels(spatial, leaf, centered, (node._saved_running_var + getattr(node, epsilon)).rsqrt())


def _layer_norm(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    def normalized() -> Tensor:
        return (node._saved_input - node._saved_result1) * node._saved_result2

    return None if transposed else Elementwise(tuple(leaf.shape), normalized if index == 1 else None)


def _rms_norm(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    return None if transposed else Elementwise(tuple(leaf.shape), lambda: node._saved_input * node._saved_result1)


def _group_norm(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    def normalized() -> Tensor:
        x = node._saved_input
        groups = x.reshape(node._saved_N, node._saved_group, -1)
        centered = groups - node._saved_result1.reshape(node._saved_N, node._saved_group, 1)
        return (centered * node._saved_result2.reshape(node._saved_N, node._saved_group, 1)).view(x.shape)

    return _on_channels(node._saved_input.dim() - 2, leaf, normalized if index == 1 else None)


def _addition(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    return _added(leaf, transposed, float(node._saved_alpha) if index == 1 else 1.0)


def _multiplication(node: Any, index: int, leaf: Tensor, transposed: bool) -> Site | None:
    if transposed:
        return None
    return Elementwise(tuple(leaf.shape), lambda: node._saved_self if index == 1 else node._saved_other)


def _added(leaf: Tensor, transposed: bool, scale: float) -> Site | None:
    return None if transposed else Elementwise(tuple(leaf.shape), None if scale == 1 else lambda: scale)


def _on_channels(spatial: int, leaf: Tensor, factor: Callable[[], Tensor] | None, scale: Tensor | None = None) -> Site:
    return Elementwise((len(leaf), *[1] * spatial), factor, scale)


def _signed(index: int) -> int:
    return index - 2**64 if index >= 2**63 else index


# Some operations have a node of their own on MPS (Linear), with cuDNN or MIOpen (BatchNorm), or on all devices but the
# CPU (RMSNorm).
_RULES: dict[str, Callable[[Any, int, Tensor, bool], Site | None]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "LinearBackward0": _linear,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "NativeBatchNormBackward0": partial(_batch_norm, epsilon="_saved_eps"),
    "CudnnBatchNormBackward0": _batch_norm,
    "MiopenBatchNormBackward0": _batch_norm,
    "FusedRmsNormBackward0": _rms_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "AddBackward0": _addition,
    "MulBackward0": _multiplication,
}
