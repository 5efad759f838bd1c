"""One recorded call of a torch function."""

from typing import Any

from torch import Tensor

from lightning_normtheory.architecture.operations import Opaque, Operation, opaque

__all__ = ["Sources", "TorchCall", "opaque_result", "per_axis", "tracked_tensors"]

# The arguments of a call that depend on the samples, each with the operation that computed it.
Sources = list[tuple[Tensor, Operation]]


class TorchCall:
    """One call of a torch function, which can be repeated with other values."""

    def __init__(self, func: Any, args: tuple, kwargs: dict[str, Any], sources: Sources) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = getattr(func, "__name__", str(func))
        self.sources = sources
        self.nodes = tuple(node for _, node in sources)
        self._ids = [id(tensor) for tensor, _ in sources]

    def tracked(self, value: Any) -> bool:
        """Whether a value is an argument that depends on the samples."""
        return isinstance(value, Tensor) and id(value) in self._ids

    def arguments(self, names: tuple[str, ...]) -> list[Any]:
        """Return the first arguments, passed by position or name."""
        return [self.args[i] if i < len(self.args) else self.kwargs.get(name) for i, name in enumerate(names)]

    def option(self, position: int, name: str, default: Any) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def replay(self, *values: Tensor) -> Tensor:
        fresh = {key: value.clone() for key, value in zip(self._ids, values)}  # the function may work in place

        def put(item: Any) -> Any:
            if isinstance(item, (tuple, list)):
                return type(item)(put(part) for part in item) if type(item) in (tuple, list) else item
            return fresh.get(id(item), item) if isinstance(item, Tensor) else item

        return self.func(*put(self.args), **{key: put(value) for key, value in self.kwargs.items()})


def tracked_tensors(arguments: Any, operations: dict[int, Operation]) -> Sources:
    """Return the tensors among some arguments that depend on the samples, each once."""
    found: dict[int, tuple[Tensor, Operation]] = {}
    stack = [arguments]
    while stack:
        item = stack.pop(0)
        if isinstance(item, Tensor):
            if id(item) in operations:
                found[id(item)] = (item, operations[id(item)])
        elif isinstance(item, (tuple, list)):
            stack = [*item, *stack]
        elif isinstance(item, dict):
            stack = [*item.values(), *stack]
    return list(found.values())


def opaque_result(sources: Sources, result: Tensor, reason: str) -> Opaque:
    return opaque(reason, tuple(node for _, node in sources), tuple(result.shape[1:]))


def per_axis(value: Any, axes: int) -> list[int]:
    """Return one number per axis; torch also accepts a single number for all axes."""
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return [int(v) for v in (values * axes if len(values) == 1 else values)]
