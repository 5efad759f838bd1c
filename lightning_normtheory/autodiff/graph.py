"""Walk the autograd graph."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["leaves", "leaves_from", "nodes", "nodes_from", "refuse_reentrant_checkpoints", "stop_at_nodes"]


def nodes(value: Tensor) -> Iterator[Any]:
    """Iterate over the nodes of the graph of a value.

    Example:
        >>> import torch
        >>> x = torch.ones(1, requires_grad=True)
        >>> [node.name().rstrip("0123456789") for node in nodes((x * x).exp())]
        ['ExpBackward', 'MulBackward', 'torch::autograd::AccumulateGrad']
    """
    return nodes_from(value.grad_fn)


def nodes_from(*roots: Any) -> Iterator[Any]:
    """Iterate over nodes of the graph and all nodes that they depend on."""
    stack: list[Any] = list(roots)
    seen = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions)


def leaves(value: Tensor) -> Iterator[Tensor]:
    """Iterate over the tensors with respect to which a value can be differentiated.

    Example:
        >>> import torch
        >>> x = torch.ones(1, requires_grad=True)
        >>> [leaf is x for leaf in leaves((x * x).exp())]
        [True]
    """
    return leaves_from(value.grad_fn)


def leaves_from(node: Any) -> Iterator[Tensor]:
    """Iterate over the tensors with respect to which the value of a node can be differentiated."""
    for each in nodes_from(node):
        variable = getattr(each, "variable", None)
        if variable is not None:
            yield variable


def refuse_reentrant_checkpoints(value: Tensor) -> None:
    """Refuse reentrant checkpoints: autograd silently omits the parameters inside them.

    Raises:
        ValueError: if the graph has one; names the other kind.
    """
    if any(getattr(node, "_forward_cls", None) is CheckpointFunction for node in nodes(value)):
        raise ValueError(
            "Expected gradient checkpointing with use_reentrant=False, but the graph has a reentrant checkpoint, which"
            " hides its parameters from torch.autograd.grad. Pass use_reentrant=False to checkpoint()."
        )


def stop_at_nodes(values: Iterable[Tensor]) -> None:
    """Let Ctrl+C stop backward passes through the graph of ``values`` between its nodes, not only at their end.

    Python reacts to a signal when it runs, and torch's own nodes do not: each gets a hook in python that does nothing,
    for about a microsecond.
    """
    for node in nodes_from(*(value.grad_fn for value in values)):
        if not hasattr(node, "variable"):  # a leaf's node may belong to the user's training
            node.register_prehook(_let_python_run)


def _let_python_run(_: tuple[Tensor, ...]) -> None:
    pass
