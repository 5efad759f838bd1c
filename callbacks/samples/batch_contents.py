"""Look into batches, and outputs of models, of any form."""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_normtheory.model.checks import map_leaves
from lightning_normtheory.record.wording import join_names

__all__ = [
    "Keys",
    "count_samples",
    "describe",
    "get_item",
    "is_plain",
    "key_path",
    "same_batches",
    "tensors_in",
    "to_cpu",
]

# A key of a mapping, an index of a sequence, or the name of an attribute with a dot in front.
Keys = tuple[Any, ...]
# How deep to look into objects for tensors.
_DEPTH = 4


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch, which is the weight of its loss in means over batches.

    It is the length of the first tensor in the lists, tuples and mappings of the batch. In a batch without such a
    tensor, it is the first of these that some object or list in it has:

    * an integer ``num_graphs`` or ``batch_size``, as of batched graphs;
    * the length of the first tensor in the attributes;
    * the length of a list, as of strings;
    * 1.

    Example:
        >>> count_samples({"image": torch.zeros(5, 3), "name": ["a"] * 5})
        5
        >>> count_samples({"text": ["one", "two"]})
        2
    """
    held = list(_contents(batch))
    objects = [each for each in held if not isinstance(each, (Tensor, list, tuple, Mapping))]
    inside = (leaf for each in objects for leaf in _contents(each, attributes=4))
    candidates = chain(
        (len(each) for each in held if isinstance(each, Tensor) and each.dim() > 0),
        (_attribute(each, name) for each in objects for name in ("num_graphs", "batch_size")),
        (len(each) for each in inside if isinstance(each, Tensor) and each.dim() > 0),
        (len(each) for each in held if type(each) is list),
    )
    return next((n for n in candidates if type(n) is int), 1)


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001  # a property of the user's that cannot tell
        return None


def _contents(value: Any, attributes: int = 0) -> Iterator[Any]:
    """A value and everything in its lists, tuples and mappings, and in the attributes of objects to some depth."""
    yield value
    inside: Any = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (list, tuple)):
        inside = value
    elif attributes and not isinstance(value, Tensor):
        inside = (getattr(value, "__dict__", None) or {}).values()
        attributes -= 1
    for each in inside:
        yield from _contents(each, attributes)


def describe(batch: Any) -> str:
    """Describe the structure of a batch in a few words, for messages.

    Example:
        >>> describe({"x": torch.zeros(2, 3), "y": [1, 2]})
        "a dict {'x': Tensor (2, 3), 'y': list}"
    """

    def short(value: Any) -> str:
        return f"Tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

    if isinstance(batch, Mapping):
        entries = join_names((f"{key!r}: {short(value)}" for key, value in batch.items()), most=8)
        return f"a {type(batch).__name__} {{{entries}}}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} ({join_names(map(short, batch), most=8)})"
    return f"a {short(batch)}"


def tensors_in(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Tensor]]:
    """Iterate over the tensors in lists, mappings and objects, each with the keys that lead to it.

    Example:
        >>> [keys for keys, _ in tensors_in({"logits": torch.ones(2), "states": [torch.ones(2), "x"]})]
        [('logits',), ('states', 0)]
    """
    if isinstance(value, Tensor):
        yield keys, value
    elif len(keys) < _DEPTH:
        if isinstance(value, Mapping):
            inside = value.items()
        elif isinstance(value, (tuple, list)):
            inside = enumerate(value)  # type: ignore[assignment]
        elif (
            (hasattr(value, "__dict__") or dataclasses.is_dataclass(value))
            and not isinstance(value, (type, nn.Module))
            and not callable(value)
        ):
            # A dataclass with slots, as those of darts, has no __dict__.
            names = vars(value) if hasattr(value, "__dict__") else [each.name for each in dataclasses.fields(value)]
            inside = ((f".{name}", getattr(value, name, None)) for name in names)  # type: ignore[assignment]
        else:
            return
        for key, item in inside:
            yield from tensors_in(item, (*keys, key))


def get_item(value: Any, keys: Keys) -> Any:
    """Return what the keys of `tensors_in` lead to."""
    for key in keys:
        value = getattr(value, key[1:]) if isinstance(key, str) and key.startswith(".") else value[key]
    return value


def key_path(keys: Keys) -> str:
    """Write keys as python does: ``['states'][0]``, ``.loc``."""
    return "".join(key if isinstance(key, str) and key.startswith(".") else f"[{key!r}]" for key in keys)


def to_cpu(batch: Any) -> Any:
    """Move all tensors to the CPU, and all objects that have a method ``to``."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) and callable(getattr(leaf, "to", None)):
            return leaf.to(torch.device("cpu"))
        return map_leaves(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, leaf)

    return tree_map(move, batch)


def same_batches(first: Any, second: Any) -> bool:
    """Return whether two batches are equal, bit by bit."""
    (leaves, structure), (others, other_structure) = tree_flatten(first), tree_flatten(second)
    return structure == other_structure and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(leaves, others)
    )


def is_plain(batch: Any) -> bool:
    """Return whether a checkpoint can hold the batch and be read back without executing code."""
    if type(batch) in (list, tuple):
        return all(map(is_plain, batch))
    if type(batch) is dict:
        return all(map(is_plain, (*batch.keys(), *batch.values())))
    return type(batch) in (Tensor, int, float, bool, str, bytes, type(None))
