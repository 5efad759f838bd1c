"""Explain in one line why an option of a recipe is refused.

jsonargparse prints its usage before every error, hundreds of lines here, and suggests no option. Its message about a
value differs between versions. The refused option can be found without it: the first one after the longest prefix of
the command line that it accepts.
"""

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lightning_normtheory.recipes.suggestions import did_you_mean, nearest_option

__all__ = ["OptionError", "explain", "normal_form"]

_PLAIN = frozenset({int, float, bool, str, NoneType})


class OptionError(ValueError):
    """An unknown option of a recipe, or an invalid value of an option."""


def normal_form(options: Sequence[str]) -> list[str]:
    """Write each option and its value in one word.

    Example:
        >>> normal_form(["--model.width", "64", "--trainer.logger=false", "--print_config"])
        ['--model.width=64', '--trainer.logger=false', '--print_config']
    """
    joined: list[str] = []
    for word in options:
        if joined and not word.startswith("--") and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def explain(parser: Any, config: Sequence[str], options: Sequence[str], message: str, own: Sequence[str] = ()) -> str:
    """Explain what is wrong with options that a parser of LightningCLI refused; the last line is a summary.

    Args:
        parser: raises `argparse.ArgumentError`.
        config: the arguments before the options, which name the recipe's file.
        options: in their `normal_form`.
        message: the parser's error message.
        own: options of the command itself, to suggest as well.
    """
    options = [option for option in options if not option.startswith("--print_config")]
    for end in reversed(range(len(options))):
        try:
            accepted = parser.parse_args([*config, *options[:end]])
        except argparse.ArgumentError:
            continue
        return _explain(options[end], _known(parser, accepted.as_dict()), message, own)
    return message  # the file itself is refused


def _explain(refused: str, known: Mapping[str, Any], message: str, own: Sequence[str]) -> str:
    option, equals, value = refused.partition("=")
    option = option.replace(".init_args", "").removesuffix("+")
    if not option.startswith("--"):
        return f"Expected options after the name of the recipe, such as --trainer.max_epochs=5, got {refused!r}."
    if option not in known:
        near = nearest_option(option, [*known, *own])
        hint = f"Did you mean {near}?" if near else _of_section(option, known)
        return f"There is no option {option}. {hint}".rstrip()
    if not equals:
        return f"{option} expects {_type(known[option]) or 'a value'}, got nothing."
    if choices := _choices(known[option]):
        return f"{option} expects one of {', '.join(choices)}, got {value!r}.{did_you_mean(value, choices)}"
    expected = _type(known[option])
    summary = f"{option} expects {expected}, got {value!r}." if expected else f"{option} does not accept {value!r}."
    return summary if _is_plain(known[option]) else f"{message.strip()}\n{summary}"


def _of_section(option: str, known: Mapping[str, Any]) -> str:
    section = option.rpartition(".")[0]
    names = [name.rpartition(".")[2] for name in known if section and name.rpartition(".")[0] == section]
    return f"Options of {section}: {', '.join(sorted(names))}." if names else ""


def _known(parser: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Map options to types: those of the parser, and of the classes in a configuration."""
    known = _types(parser)
    for key, class_path in _classes(config):
        module, _, name = class_path.rpartition(".")
        scratch = type(parser)(exit_on_error=False)
        scratch.add_class_arguments(getattr(import_module(module), name), key, fail_untyped=False)
        known = {**_types(scratch), **known}
    return known


def _types(parser: Any) -> dict[str, Any]:
    # Some actions of jsonargparse keep the type in `_typehint` and have `type` None.
    return {
        option: getattr(action, "_typehint", action.type)
        for option, action in parser._option_string_actions.items()
        if option.startswith("--") and not option.endswith((".help", "+"))
    }


def _classes(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the classes in a configuration with the options that set their arguments; of a list, only the last item.

    Example:
        >>> list(_classes({"trainer": {"callbacks": [{"class_path": "a.B"}, {"class_path": "a.C"}]}, "seed": 0}))
        [('trainer.callbacks', 'a.C')]
    """
    if isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, Mapping):
        return
    if isinstance(value.get("class_path"), str):
        yield key, value["class_path"]
    for name, item in value.items():
        yield from _classes(item, key if name == "init_args" else f"{key}.{name}".lstrip("."))


def _choices(annotation: Any) -> list[str]:
    """Return the values of a `Literal`, else nothing.

    Example:
        >>> _choices(Literal["mnist", "cifar10"]), _choices(int)
        (['mnist', 'cifar10'], [])
    """
    return [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else []


def _is_plain(annotation: Any) -> bool:
    """Tell whether naming the type explains enough why a value is refused.

    Example:
        >>> _is_plain(int), _is_plain(int | None), _is_plain(list[int])
        (True, True, False)
    """
    union = get_origin(annotation) in (Union, UnionType)
    return _PLAIN.issuperset(get_args(annotation) if union else [annotation])


def _type(annotation: Any) -> str:
    """Format a type for a user; empty if it is unknown.

    Example:
        >>> import pathlib
        >>> _type(int), _type(list[pathlib.Path]), _type(None)
        ('int', 'list[Path]', '')
    """
    if annotation is None:
        return ""
    return re.sub(r"(\w+\.)+", "", inspect.formatannotation(annotation))
