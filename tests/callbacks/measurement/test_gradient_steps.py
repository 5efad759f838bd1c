"""Whether the steps of a run are gradient descent on the whole training set."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from lightning_normtheory.callbacks.measurement.gradient_steps import gradient_steps
from lightning_normtheory.recipes.datasets.full_batch import full_batch_loader

from support.lit import Classifier


def steps(module=None, batch=4, sampler=None, accumulated=1, world=1, chosen=""):
    """The steps of SGD on four samples."""
    data = TensorDataset(torch.zeros(4, 1))
    loader = DataLoader(data, batch, sampler=sampler)
    module = Classifier("plain") if module is None else module
    trainer = SimpleNamespace(
        optimizers=[torch.optim.SGD(module.parameters(), 0.1)],
        gradient_clip_val=None,
        train_dataloader=loader,
        num_training_batches=len(loader),
        world_size=world,
        accumulate_grad_batches=accumulated,
    )
    theta = {name: p for name, p in module.named_parameters() if name.endswith(chosen)}
    function = {"trainer": trainer, "model": module, "theta": theta, "training_samples": 4, "chosen": bool(chosen)}
    return gradient_steps(SimpleNamespace(**function))


@pytest.mark.parametrize("options", [{}, {"batch": 9}, {"batch": 2, "accumulated": 2}], ids=str)
def test_gradient_descent_on_the_whole_set(options):
    assert steps(**options) == (0.1, "", "", 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch": 2}, "mini-batches of 2 of 4 samples"),
        ({"batch": 3, "accumulated": 2}, "batches of different sizes count equally"),
        ({"batch": 2, "accumulated": 5}, "the gradients of 2 batches are divided by 5"),
        ({"accumulated": 2}, "the gradients of 1 batch are divided by 2"),
        ({"sampler": RandomSampler(range(4), replacement=True)}, "the RandomSampler draws with replacement"),
        ({"sampler": WeightedRandomSampler([1.0, 1.0, 1.0, 5.0], 4)}, "the WeightedRandomSampler draws by weights"),
        ({"sampler": [0, 1, 2, 3, 3], "batch": 5}, "5 draws of 4 samples"),
        ({"sampler": [0, 1, 3], "batch": 3, "world": 2}, "6 draws of 4 samples"),  # as after padding
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_without_the_gradient_of_the_whole_set(options, reason):
    assert steps(**options).batches == reason


def test_a_sampler_that_repeats_the_whole_set():
    """Only one that says so: the first four of eight indices need not be all four samples."""
    repeated = full_batch_loader(range(4), steps=2).sampler
    assert steps(sampler=repeated, batch=4).batches == ""
    assert steps(sampler=repeated, batch=8).batches == "8 draws of 4 samples"
    assert steps(sampler=[0, 1, 2, 3] * 2, batch=4).batches == "8 draws of 4 samples"


@pytest.mark.parametrize(
    "hook", ["configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step"]
)
def test_a_module_that_may_change_its_steps(hook):
    module = type("Own", (Classifier,), {hook: lambda self, *args, **kwargs: None})("plain")
    found = steps(module)
    assert found.other == f"the module may change its steps: it has its own {hook}"
    assert found.rate == 0.1


def test_steps_on_more_than_the_chosen_parameters():
    found = steps(chosen="bias")
    assert found.other.endswith("weight' is trained, too, but is not among the chosen parameters")


def test_the_steps_of_manual_optimization_are_not_known():
    module = Classifier("plain")
    module.automatic_optimization = False
    assert "manual optimization" in steps(module).other
