"""Which layer feeds each BatchNorm.

A BatchNorm in training mode undoes any scaling of its input channels. A unit that feeds it is therefore scale-free:
doubling the unit's weights doubles some input channels of the BatchNorm, and its output stays as it is. That property,
not the order of the modules, makes the unit's norm a quantity of the theory, so it is what we look for in the graph.
"""

from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_normtheory.layers import FEEDING_LAYERS, batch_norm_layers
from lightning_normtheory.rng import isolated_rng
from lightning_normtheory.scaling import Flow, enter_batch_norm, enter_layer, merge, pass_operation
from lightning_normtheory.snapshot import Snapshot

__all__ = ["Feeding", "feeding_layers"]


class Feeding(NamedTuple):
    """What enters one BatchNorm.

    Attributes:
        layers: module names of the layers whose units it makes scale-free; more than one where it normalises a
            concatenation.
        unknown: why there is none, or where its other channels come from; empty when everything is accounted for.
    """

    layers: tuple[str, ...]
    unknown: str


def feeding_layers(model: nn.Module) -> dict[str, Feeding]:
    """The layers that feed each BatchNorm of a model, by the BatchNorm's module name.

    The graph is traced symbolically, without data. Where a forward pass cannot be traced (it branches on its input,
    say), the modules inside are traced one by one, and what lies between them stays unknown.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.BatchNorm2d(8))
        >>> feeding_layers(net)["1"]
        Feeding(layers=('0',), unknown='')
        >>> feeding_layers(net)["3"]
        Feeding(layers=(), unknown="it follows the BatchNorm '1'")
    """
    found = {path: Feeding((), "no forward pass that could be traced reaches it") for path in batch_norm_layers(model)}
    if not found:
        return found
    snapshot = Snapshot(model)
    try:
        with isolated_rng():
            _trace_all(model, found)
    finally:
        snapshot.restore()
    return found


def _trace_all(model: nn.Module, found: dict[str, Feeding]) -> None:
    roots = [""]
    while roots:
        root = roots.pop()
        if "_orig_mod" in model.get_submodule(root)._modules:
            root = f"{root}._orig_mod" if root else "_orig_mod"
        tracer = _Tracer()
        entering = tracer.batch_norm_inputs(model.get_submodule(root))
        prefix = root + "." if root else ""
        for path, flow in entering.items():
            if not found[prefix + path].layers:
                layers = tuple(dict.fromkeys(prefix + feeder.layer for feeder in flow.scaled.values()))
                found[prefix + path] = Feeding(layers, flow.unknown)
        for path in tracer.failed:
            outer = ".".join(part for part in (root, path) if part)
            children = model.get_submodule(outer).named_children()
            roots += [f"{outer}.{name}" if outer else name for name, _ in children]


class _Tracer(fx.Tracer):
    """Symbolic tracing that goes on where one module cannot be traced, and notes it in ``failed``."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (_BatchNorm, torch.jit.ScriptModule)):
            return True
        stock = type(m).forward.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return stock and not any(isinstance(inner, _BatchNorm) for inner in m.modules())

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        # torch.compile refuses to be traced; what it compiles does not.
        inner = m._modules.get("_orig_mod")
        if inner is not None:
            return inner(*args, **kwargs)
        if getattr(m, "_compiled_call_impl", None) is not None:
            forward = m._call_impl
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # noqa: BLE001  # any error of the user's code under symbolic values
            path = self.path_of_module(m)
            self.failed.append(path)
            return self.create_proxy("call_module", path, args, kwargs)

    def batch_norm_inputs(self, root: nn.Module) -> dict[str, Flow]:
        """Trace as far as possible, then follow the scalings through what was traced."""
        if self.is_leaf_module(root, ""):
            return {}
        try:
            self.trace(root)
        except Exception:  # noqa: BLE001
            self.failed.append("")
        entering: dict[str, Flow] = {}
        flows: dict[fx.Node, Flow] = {}
        for node in self.graph.nodes:
            flows[node] = self._flow(node, flows, entering)
        return entering

    def _flow(self, node: fx.Node, flows: dict[fx.Node, Flow], entering: dict[str, Flow]) -> Flow:
        inputs = [flows[argument] for argument in node.all_input_nodes]
        if node.op == "placeholder":
            return Flow(unknown=f"it is fed by the argument {node.target!r}")
        if node.op == "get_attr":
            value = _attribute(self.root, str(node.target))
            return Flow({}, frozenset({id(value)}), unknown="its weight is used outside of a layer")
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, _BatchNorm):
            path = str(node.target)
            entered, left = enter_batch_norm(path, module, inputs[0])
            entering[path] = merge([entering[path], entered]) if path in entering else entered
            return left
        if isinstance(module, FEEDING_LAYERS) and node.target not in self.failed:
            return enter_layer(str(node.target), module, inputs)
        return pass_operation(node, module, flows)


def _attribute(root: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)
