"""Choose the parameters θ that a callback measures."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["ParameterChoice", "check_choice", "choose_parameters", "describe_choice"]

ParameterChoice = Callable[[Any], Iterable[nn.Parameter]] | int | str | Sequence[str]


def choose_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer], choice: ParameterChoice | None
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that are chosen, by name.

    Args:
        choice: the index of an optimizer, name patterns (``"generator"`` is everything in that submodule,
            ``"*.bias"`` every bias), or a function that returns parameters of the module; ``None``: all.

    Raises:
        ValueError: if it chooses no trainable parameter.

    Example:
        >>> net = nn.ModuleDict({"generator": nn.Linear(2, 1), "critic": nn.Linear(1, 1)})
        >>> list(choose_parameters(net, [], "generator"))
        ['generator.weight', 'generator.bias']
        >>> list(choose_parameters(net, [], ["*.bias"]))
        ['generator.bias', 'critic.bias']
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if choice is None:
        return named
    if isinstance(choice, int):
        if not 0 <= choice < len(optimizers):
            raise ValueError(
                f"Expected parameters to be the index of an optimizer, but got {choice} and"
                f" configure_optimizers returns {len(optimizers)}."
            )
        ids = {id(p) for group in optimizers[choice].param_groups for p in group["params"]}
    elif callable(choice):
        ids = {id(p) for p in choice(model)}
    else:
        patterns = [choice] if isinstance(choice, str) else list(choice)
        ids = {id(p) for name, p in named.items() if any(_matches(name, pattern) for pattern in patterns)}
    chosen = {name: p for name, p in named.items() if id(p) in ids}
    if not chosen:
        raise ValueError(
            f"Expected parameters={describe_choice(choice)} to choose a trainable parameter, but it chooses none of the"
            f" {len(named)} there are: {', '.join(list(named)[:4])}{', …' if len(named) > 4 else ''}."
        )
    return chosen


def check_choice(choice: Any) -> None:
    """Check the type of a choice.

    Raises:
        TypeError: with what was expected.
    """
    patterns = [choice] if isinstance(choice, str) else choice
    named = isinstance(patterns, (list, tuple)) and all(isinstance(each, str) for each in patterns)
    if isinstance(choice, bool) or not (choice is None or named or isinstance(choice, int) or callable(choice)):
        raise TypeError(
            "Expected parameters to be the index of an optimizer, name patterns, or a function of the module that"
            f" returns parameters, but got {choice!r}."
        )


def describe_choice(choice: ParameterChoice | None) -> str:
    """Describe the choice for messages and settings.

    Example:
        >>> describe_choice(None), describe_choice(1), describe_choice(["a", "b.*"])
        ('all', 'optimizer 1', "'a', 'b.*'")
    """
    if choice is None:
        return "all"
    if isinstance(choice, int):
        return f"optimizer {choice}"
    if callable(choice):
        return f"{getattr(choice, '__module__', '')}.{getattr(choice, '__qualname__', type(choice).__name__)}"
    return ", ".join(map(repr, [choice] if isinstance(choice, str) else choice))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
