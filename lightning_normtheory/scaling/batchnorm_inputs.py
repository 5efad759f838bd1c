"""Find the layers that feed each BatchNorm.

A BatchNorm in training mode undoes any scaling of its input channels. A unit that feeds it is therefore scale-free:
doubling the unit's weights doubles some input channels of the BatchNorm, and its output does not change. The theory
uses the norm of a unit because of this property, so the search tests it in the graph and ignores the module order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.measuring.snapshot import Snapshot
from lightning_normtheory.model.layers import (
    FEEDING_LAYERS,
    batch_norm_layers,
    frozen_batch_norm_layers,
    is_batch_norm,
)
from lightning_normtheory.scaling.flow import Flow, enter_batch_norm, enter_layer, merge, obstruct
from lightning_normtheory.scaling.rules import may_alias, parameter_ids, pass_operation, written_node

__all__ = ["Feeding", "feeding_layers"]


_LAYER_FUNCTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d)
_UNREACHED = "no traceable forward pass reaches it"
_UNSEEN = "no batch_norm could be traced in its own forward pass"
_CONSTANT = "it applies constant statistics and normalizes no batch"


class Feeding(NamedTuple):
    """The input of one BatchNorm.

    Attributes:
        layers: module names of the layers whose units it makes scale-free; several if it normalizes a concatenation.
        unknown: why some or all channels come from no such layer; empty if all of them do.
    """

    layers: tuple[str, ...]
    unknown: str


def feeding_layers(model: nn.Module) -> dict[str, Feeding]:
    """Find the layers that feed each BatchNorm of a model, by the BatchNorm's module name.

    Subclasses of torch's BatchNorm and other classes are followed inside, down to ``functional.batch_norm``. A module
    that calls this function without being a BatchNorm is listed if a layer feeds the call.

    The graph is traced symbolically, without data. If a forward pass cannot be traced, for example because it branches
    on its input, its submodules are traced one by one, and the operations between them stay unknown.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.BatchNorm2d(8))
        >>> feeding_layers(net)["1"]
        Feeding(layers=('0',), unknown='')
        >>> feeding_layers(net)["3"]
        Feeding(layers=(), unknown="it follows the BatchNorm '1'")
    """
    found = {
        path: Feeding((), _UNREACHED if _is_stock(module) else _UNSEEN)
        for path, module in batch_norm_layers(model).items()
    }
    found |= {path: Feeding((), _CONSTANT) for path in frozen_batch_norm_layers(model)}
    snapshot = Snapshot(model)
    try:
        for module in model.modules():
            for key, hook in list(module._forward_hooks.items()):
                if (getattr(hook, "__module__", None) or "").startswith("wandb"):  # reads values, fails on symbols
                    del module._forward_hooks[key]
            if is_batch_norm(module):
                module.training = True  # does it use the statistics of the batch, in training?
        with isolated_rng(), _symbolic_batch_norm():
            _trace_all(model, found)
    finally:
        snapshot.restore()
    return found


def _trace_all(model: nn.Module, found: dict[str, Feeding]) -> None:
    names = {module: path for path, module in model.named_modules()}  # the first name of a shared module
    reached: set[str] = set()
    roots = [model]
    while roots:
        root = roots.pop(0)
        root = getattr(root, "_orig_mod", root)
        tracer = _Tracer()
        for path, flow in tracer.batch_norm_inputs(root).items():
            batch_norm = names[root.get_submodule(path)]
            listed = batch_norm in found or flow.scaled
            if listed and batch_norm not in reached:  # the outermost trace sees most of its input
                layers = dict.fromkeys(names[root.get_submodule(feeder.layer)] for feeder in flow.scaled.values())
                found[batch_norm] = Feeding(tuple(layers), flow.unknown)
                reached.add(batch_norm)
        for path in tracer.failed:
            roots += root.get_submodule(path).children()


@contextmanager
def _symbolic_batch_norm() -> Iterator[None]:
    """Let torch's own forward passes, which check the shape, accept symbolic values: a subclass may call them."""

    def symbolic(forward: Any) -> Any:
        def replacement(self: _BatchNorm, input: Any) -> Any:
            known = not isinstance(input, fx.Proxy)
            return forward(self, input) if known else F.batch_norm(input, None, None, training=True)

        return replacement

    with (
        patch.object(_BatchNorm, "forward", symbolic(_BatchNorm.forward)),
        patch.object(nn.SyncBatchNorm, "forward", symbolic(nn.SyncBatchNorm.forward)),
    ):
        yield


class _Tracer(fx.Tracer):
    """Trace symbolically; treat a module that cannot be traced as one node and list it in ``failed``."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, torch.jit.ScriptModule):
            return True
        if not _is_stock(m) or isinstance(m, nn.Sequential):
            return False
        return isinstance(m, _BatchNorm) or not any(is_batch_norm(inner) for inner in m.modules())

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        # A compiled module cannot be traced; the original module can.
        inner = m._modules.get("_orig_mod")
        if inner is not None:
            return inner(*args, **kwargs)
        if getattr(m, "_compiled_call_impl", None) is not None:
            forward = m._call_impl
        path = self.path_of_module(m)
        try:
            if self.is_leaf_module(m, path) and (m._forward_hooks or m._forward_pre_hooks):
                # A hook may change inputs or outputs: run it on the symbolic values, around the leaf.
                with patch.object(m, "forward", lambda *a, **k: self.create_proxy("call_module", path, a, k)):
                    return forward(*args, **kwargs)
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # noqa: BLE001  # any error of user code on symbolic values
            self.failed.append(path)
            return self.create_proxy("call_module", path, args, kwargs)

    def batch_norm_inputs(self, root: nn.Module) -> dict[str, Flow]:
        """Trace as far as possible, then follow the scalings through the traced graph."""
        if self.is_leaf_module(root, ""):
            return {}
        try:
            self.trace(root)
        except Exception:  # noqa: BLE001
            self.failed.append("")
        entering: dict[str, Flow] = {}
        flows: dict[fx.Node, Flow] = {}
        sharing: list[tuple[fx.Node, fx.Node]] = []  # nodes that may share memory with their first input, with it
        for node in self.graph.nodes:
            flows[node] = self._flow(node, [flows[argument] for argument in node.all_input_nodes], entering)
            if node.all_input_nodes and self._shares_memory(node):
                sharing.append((node, node.all_input_nodes[0]))
            written = written_node(node, self._module(node))
            if written is not None:
                _overwrite(written, node, flows, sharing)
        return entering

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _flow(self, node: fx.Node, inputs: list[Flow], entering: dict[str, Flow]) -> Flow:
        path, module = str(node.target), self._module(node)
        if node.op == "placeholder":
            return Flow(unknown=f"it is fed by the argument {path!r}")
        if node.op == "get_attr":
            return Flow({}, self._weights_behind(path), unknown="a weight is used outside a layer")
        if module is not None and path in self.failed:
            tainted = parameter_ids(module).union(*(flow.depends_on for flow in inputs))
            return Flow({}, tainted, unknown=f"{type(module).__name__} {path!r} could not be traced")
        if isinstance(module, _BatchNorm):
            return self._normalize(path, inputs[0], entering)
        if node.target in (F.batch_norm, torch.batch_norm) and inputs:
            return self._normalize_by_function(node, inputs, entering)
        if isinstance(module, FEEDING_LAYERS):
            return enter_layer(path, module, inputs)
        if node.target in _LAYER_FUNCTIONS:
            owner = self._owners(node)[-1]
            layer = self.root.get_submodule(owner)
            # A layer with a forward pass of its own, but only its own weight, as one that pads its input.
            own = [f"{owner}.{name}".lstrip(".") for name in ("weight", "bias")]
            operands = [str(operand.target) for operand in node.all_input_nodes[1:]]
            if isinstance(layer, FEEDING_LAYERS) and operands in (own, own[:1]):
                return enter_layer(owner, layer, inputs[:1])
        return pass_operation(node, module, inputs)

    def _owners(self, node: fx.Node) -> list[str]:
        """The paths of the modules whose forward pass calls a function, from the root to the innermost."""
        return ["", *(path for path, _ in node.meta.get("nn_module_stack", {}).values())]

    def _normalize(self, path: str, flow: Flow, entering: dict[str, Flow]) -> Flow:
        entered, left = enter_batch_norm(path, self.root.get_submodule(path), flow)
        entering[path] = merge([entering[path], entered]) if path in entering else entered
        return left

    def _normalize_by_function(self, node: fx.Node, inputs: list[Flow], entering: dict[str, Flow]) -> Flow:
        """Assign a call of ``batch_norm`` to the BatchNorm whose forward pass makes it, or else to its module."""
        owners = self._owners(node)
        path = ([path for path in owners if is_batch_norm(self.root.get_submodule(path))] or owners)[-1]
        training = node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
        if training is not True:
            entering.setdefault(path, Flow(unknown=_CONSTANT))
            return obstruct(inputs, _CONSTANT)
        left = self._normalize(path, inputs[0], entering)
        return replace(left, tainted=left.tainted.union(*(flow.depends_on for flow in inputs[1:])))

    def _weights_behind(self, path: str) -> frozenset[int]:
        owner, _, name = path.rpartition(".")
        value = getattr(self.root.get_submodule(owner), name)
        if isinstance(value, nn.Parameter):
            return frozenset({id(value)})
        constant = isinstance(value, Tensor) and not value.requires_grad
        # A tensor computed from parameters, as by a WeightNorm hook, may depend on any of them.
        return frozenset() if constant else parameter_ids(self.root)

    def _shares_memory(self, node: fx.Node) -> bool:
        return may_alias(node, self._module(node), traced=str(node.target) not in self.failed)


def _overwrite(
    written: fx.Node, node: fx.Node, flows: dict[fx.Node, Flow], sharing: list[tuple[fx.Node, fx.Node]]
) -> None:
    """Update every alias of a tensor that an operation overwrites in place."""
    aliases = {written}
    grown = True
    while grown:
        more = {end for pair in sharing if aliases.intersection(pair) for end in pair} - aliases
        aliases |= more
        grown = bool(more)
    for alias in aliases - {node}:
        same = alias is written
        flows[alias] = flows[node] if same else obstruct([flows[alias], flows[node]], "it is modified in place")


# Attributes that a subclass may define without changing what the layer computes, and those that do change it.
_KEEPS_OUTPUT = frozenset({"extra_repr", "reset_parameters", "train", "eval"})
_CHANGES_OUTPUT = frozenset({"__call__", "__getattr__", "__getattribute__", "weight", "bias"})


def _is_stock(module: nn.Module) -> bool:
    """Whether a module computes what its torch.nn class computes, also if a user's class derives from it."""
    if "forward" in vars(module):  # replaced on the instance
        return False
    classes = type(module).__mro__
    torch_class = next(base for base in classes if base.__module__.startswith("torch.nn.modules"))
    for base in classes[: classes.index(torch_class)]:
        if base.__module__ == "torch.nn.utils.parametrize":
            continue  # the class that a parametrization derives from the original
        for name in vars(base):
            special = name.startswith("__") and name.endswith("__")
            if name in _CHANGES_OUTPUT or (not special and name not in _KEEPS_OUTPUT and hasattr(torch_class, name)):
                return False
    return torch_class is not nn.Module
