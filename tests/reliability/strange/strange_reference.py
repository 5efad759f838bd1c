"""Dense references for a strange model: every quantity from full Jacobians and Hessians of a second, plain copy of it.

Nothing here imports the code under test.
"""

from collections.abc import Collection
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from reliability.strange.strange_models import StrangeModel
from support.oracles import contract, role


class Plain(nn.Module):
    """w = g v/‖v‖ written out: PyTorch's own has a wrong second derivative."""

    def __init__(self, dim: int | None):
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        if self.dim in (None, -1):  # to PyTorch the same: one length for all
            return g * v / v.square().sum().sqrt()
        others = [axis for axis in range(v.dim()) if axis != self.dim % v.dim()]
        return g * v / v.square().sum(others, keepdim=True).sqrt()


def write_out_weight_norms(model: nn.Module) -> None:
    """Replace both forms of WeightNorm by `Plain`."""
    for module in list(model.modules()):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                plain, name = Plain(hook.dim), hook.name
                hook.compute_weight = lambda m, f=plain, n=name: f(getattr(m, n + "_g"), getattr(m, n + "_v"))
        for chain in getattr(module, "parametrizations", {}).values():
            if isinstance(chain[0], _WeightNorm):
                chain[0] = Plain(chain[0].dim)


class Dense:
    """The model with the weights and buffers of one moment, on the samples of its probe.

    Args:
        state: the module's `state_dict` of that moment.
        independent: as samples are to be independent, a BatchNorm has running statistics, where it keeps some.
        held: and these are those of the probe, unless the callback is told otherwise.
    """

    def __init__(
        self, model: StrangeModel, state: dict[str, Tensor], *, independent: bool = False, held: bool = False
    ) -> None:
        self.plan = model.plan
        self.model = model
        self.state = state
        self.module = model.build(checkpoints=False)
        self.module.load_state_dict(state)
        write_out_weight_norms(self.module)
        self.module.eval()
        self.batches = model.probe()
        batch_stats = self.plan.options["batch_stats"]
        if batch_stats is None:
            batch_stats = not (independent and self.plan.tracked)
            if held and self.plan.tracked:
                self._hold()
        for module in self.module.modules():
            if isinstance(module, _BatchNorm):
                module.training = batch_stats
        self.names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]

    def _hold(self) -> None:
        """Replace all running statistics by the means over the samples of those of each batch."""
        layers = {path: layer for path, layer in self.module.named_modules() if isinstance(layer, _BatchNorm)}
        calls: dict[str, list[Tensor]] = {}

        def see(path: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            values = args[0].transpose(0, 1).flatten(1)
            calls.setdefault(path, []).append(torch.stack([values.mean(1), values.var(1)]))

        hooks = [layer.register_forward_pre_hook(partial(see, path)) for path, layer in layers.items()]
        sums: dict[str, Tensor] = {}
        for batch in self.batches:
            for layer in layers.values():
                layer.training = True
            calls.clear()
            with torch.no_grad():
                self.outputs_of(batch)
            for path, seen in calls.items():
                sums[path] = sums.get(path, 0.0) + samples_of(batch) * torch.stack(seen).mean(0)
        for hook in hooks:
            hook.remove()
        self.state = dict(self.state)
        for path, total in sums.items():
            mean, variance = total / sum(map(samples_of, self.batches))
            self.state.update({f"{path}.running_mean": mean, f"{path}.running_var": variance})

    def _reset_buffers(self) -> None:
        """Every batch begins with the buffers as they were."""
        for path, module in self.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.state.get(f"{path}.{name}".lstrip("."), buffer).clone()

    def loss_of(self, batches: list[Any]) -> Tensor:
        """(1/n) Σ_b n_b L_b."""
        total: Tensor | float = 0.0
        for batch in batches:
            self._reset_buffers()
            with sdpa_kernel(SDPBackend.MATH):
                total = total + samples_of(batch) * self.module.loss_of(batch)
        return total / sum(map(samples_of, batches))

    def gradient_of(self, value: Tensor, **options: Any) -> Tensor:
        gradients = torch.autograd.grad(value, self.parameters, allow_unused=True, **options)
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, self.parameters)]
        return torch.cat([g.flatten() for g in filled])

    def outputs_of(self, batch: Any) -> Tensor:
        self._reset_buffers()
        with sdpa_kernel(SDPBackend.MATH):
            return self.module.outputs(batch)

    @cached_property
    def outputs(self) -> Tensor:
        """f (n, k)."""
        with torch.no_grad():
            return torch.cat([self.outputs_of(batch) for batch in self.batches])

    @cached_property
    def loss(self) -> float:
        with torch.no_grad():
            return float(self.loss_of(self.batches))

    @cached_property
    def gradient(self) -> Tensor:
        return self.gradient_of(self.loss_of(self.batches))

    def jacobian_of(self, batch: Any) -> Tensor:
        outputs = self.outputs_of(batch)
        rows = [self.gradient_of(value, retain_graph=True) for value in outputs.flatten()]
        return torch.stack(rows).reshape(*outputs.shape, -1)

    @cached_property
    def jacobian(self) -> Tensor:
        """∂f_h(x_i)/∂θ (n, k, p)."""
        return torch.cat([self.jacobian_of(batch) for batch in self.batches])

    def _hessian_of(self, value: Tensor) -> Tensor:
        gradient = self.gradient_of(value, create_graph=True)
        if not gradient.requires_grad:
            return torch.zeros(len(gradient), len(gradient), dtype=gradient.dtype)
        return torch.stack([self.gradient_of(entry, retain_graph=True) for entry in gradient])

    @cached_property
    def hessian(self) -> Tensor:
        return self._hessian_of(self.loss_of(self.batches))

    def predictor_hessians(self, samples: int) -> Tensor:
        """∇²f_h(x_i) of the first samples (samples, k, p, p)."""
        found: list[Tensor] = []
        for batch in self.batches:
            outputs = self.outputs_of(batch)
            found += [torch.stack([self._hessian_of(f) for f in row]) for row in outputs[: samples - len(found)]]
        return torch.stack(found)

    def input_jacobians(self) -> Tensor:
        """∂f_h(x_i)/∂x_i (n, k, inputs)."""
        found = []
        for batch in self.batches:
            key = "x" if isinstance(batch, dict) else 0
            x = batch[key].detach().requires_grad_()
            replaced = {**batch, "x": x} if isinstance(batch, dict) else [x, *batch[1:]]
            outputs = self.outputs_of(replaced)
            rows = [torch.autograd.grad(value, x, retain_graph=True)[0][i].flatten()
                    for i, row in enumerate(outputs) for value in row]  # fmt: skip
            found.append(torch.stack(rows).reshape(*outputs.shape, -1))
        return torch.cat(found)

    def moved(self, step: Tensor) -> float:
        """L at θ + step."""
        with torch.no_grad():
            pieces = step.split([p.numel() for p in self.parameters])
            for p, piece in zip(self.parameters, pieces):
                p += piece.view_as(p)
            value = float(self.loss_of(self.batches))
            for p, piece in zip(self.parameters, pieces):
                p -= piece.view_as(p)
        return value

    def batch_norm_roles(self, unknown: Collection[str]) -> dict[int, str]:
        """By the plan, the weights of layers before a BatchNorm and its scales, unless its input is not known."""
        found = {}
        for index, (block, strange) in enumerate(zip(self.plan.blocks, self.module.blocks)):
            if block.normalizes_layer and f"blocks.{index}.norm" not in unknown:
                found |= {id(strange.layer.weight): "direction", id(strange.norm.weight): "length"}
        return found

    def kernels(self, samples: int, outputs: str, unknown: Collection[str] = ()) -> dict[str, Tensor]:
        """The tangent kernel of the first samples, its parts, and those of each layer as ``"layer part"``."""
        roles = self.batch_norm_roles(unknown)
        jacobian = self.jacobian[:samples]
        found = {"kernel": contract(jacobian, outputs)}
        for part in ("direction", "length", "rest"):
            found[part] = torch.zeros_like(found["kernel"])
        first = 0
        for name, p in zip(self.names, self.parameters):
            piece = contract(jacobian[:, :, first : first + p.numel()], outputs)
            first += p.numel()
            part = roles.get(id(p), role(name))
            found[part] = found[part] + piece
            key = f"{layer_of(name)} {part}"
            found[key] = found.get(key, 0.0) + piece
        return found


def difference(dense: Dense, direction: Tensor, h: float) -> Tensor:
    """H·direction from two exact gradients, which err by h² times a fourth derivative and by rounding over h."""
    sides = []
    for sign in (1, -1):
        pieces = (sign * h * direction).split([p.numel() for p in dense.parameters])
        originals = [p.detach().clone() for p in dense.parameters]
        with torch.no_grad():
            for p, piece in zip(dense.parameters, pieces):
                p += piece.view_as(p)
        sides.append(dense.gradient_of(dense.loss_of(dense.batches)))
        with torch.no_grad():
            for p, original in zip(dense.parameters, originals):
                p.copy_(original)
    return (sides[0] - sides[1]) / (2 * h)


def layer_of(name: str) -> str:
    """The path of the layer that a parameter belongs to."""
    return name.split(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]


def samples_of(batch: Any) -> int:
    return len(batch["y"] if isinstance(batch, dict) else batch[-1])
