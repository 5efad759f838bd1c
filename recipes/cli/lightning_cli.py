"""Run a recipe on Lightning's command line: its YAML file, then the user's options."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from rich.console import Console

from lightning_normtheory.callbacks.output import run_file
from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.cli.option_errors import OptionError, explain, normal_form
from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.record.history import History, read_histories
from lightning_normtheory.view.terminal.epochs import epoch_table, legend

__all__ = ["check_options", "fit"]

_OUTPUT = "normtheory_runs"
_HERE = "."  # the default save_dir of WandbLogger


def fit(name: str, options: Sequence[str]) -> Trainer:
    """Train a recipe, then print its tables and draw its figure.

    Args:
        name: the recipe.
        options: command-line options, such as ``["--trainer.max_epochs=5"]``.

    Raises:
        ValueError: if there is no such recipe, or, as `OptionError`, an option is refused.
    """
    # Ask nobody for an account. WandbLogger(offline=True) would override the user's environment.
    if "WANDB_SWEEP_ID" not in os.environ:  # a W&B agent expects its runs online
        os.environ.setdefault("WANDB_MODE", "offline")
    cli = _RecipeCLI(name, options)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path)
    if cli.trainer.is_global_zero:
        _report(cli.trainer, cli.config_init.recipe, name)
    return cli.trainer


def check_options(name: str, options: Sequence[str], own: Sequence[str] = ()) -> None:
    """Read the options of a recipe as a run would, without running it.

    Args:
        name: the recipe.
        options: command-line options, such as ``["--trainer.max_epochs=5"]``.
        own: options of the command itself, to suggest for a misspelled one.

    Raises:
        ValueError: if there is no such recipe, or, as `OptionError`, an option is refused.

    Example:
        >>> check_options("quickstart", ["--model.widht=64"])
        Traceback (most recent call last):
        lightning_normtheory.recipes.cli.option_errors.OptionError: There is no option --model.widht. Did you mean ...
    """
    # The last value counts: no generator is seeded.
    _UnbuiltCLI(name, [*options, "--seed_everything=false"], own)


class _SaveConfig(SaveConfigCallback):
    """Save the configuration with the run's other files; the original uses trainer.log_dir, which is "." for W&B."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = run_file.folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / "config.yaml")
        self.parser.save(_without_output(self.config), path, skip_none=False, overwrite=True, multifile=False)
        # The configuration does not say whether the embedded images replaced the data set.
        source = getattr(trainer.datamodule, "source", "")  # type: ignore[attr-defined]
        if source:
            (folder / "source.txt").write_text(f"{source}\n", encoding="utf-8")


class _RecipeCLI(LightningCLI):
    """Lightning's command line with the options of a recipe."""

    def __init__(self, name: str, options: Sequence[str], own: Sequence[str] = ()) -> None:
        self._file = ["--config", str(registry.config_path(name))]
        self._options = normal_form(options)
        self._own = own
        super().__init__(
            run=False,
            args=[*self._file, *self._options],
            save_config_callback=_SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            # An abbreviation could be a misspelling that goes unnoticed.
            parser_kwargs={"prog": f"normtheory run {name}", "exit_on_error": False, "allow_abbrev": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Resume from this checkpoint.")
        parser.add_argument("--output", type=str, default=_OUTPUT, help="The folder of all runs.")
        parser.add_class_arguments(Recipe, "recipe")
        # Adapt the network to the data.
        parser.link_arguments("data.features", "model.init_args.inputs", apply_on="instantiate")
        parser.link_arguments("data.number_of_classes", "model.init_args.classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # The original warns if sys.argv has arguments, too. They must stay: Lightning starts other processes with them.
        try:
            self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            raise OptionError(explain(parser, self._file, self._options, str(error), self._own)) from None

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            cause = _innermost(error)
            if isinstance(cause, (ValueError, FileNotFoundError)) and _is_ours(cause):  # such as missing data
                raise OptionError(str(cause)) from error
            raise

    def before_instantiate_classes(self) -> None:
        trainer, output = self.config.trainer, self.config.output
        trainer.default_root_dir = trainer.default_root_dir or output
        for arguments in _loggers(self.config):
            if arguments.save_dir in (None, _HERE):
                arguments.save_dir = output
            # An older WandbLogger writes to a temporary folder if its folder does not exist.
            Path(arguments.save_dir).mkdir(parents=True, exist_ok=True)


def _loggers(config: Any) -> list[Any]:
    """Return the arguments of all loggers that have a folder."""
    loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
    arguments = [getattr(logger, "init_args", None) for logger in loggers]
    return [each for each in arguments if hasattr(each, "save_dir")]


def _without_output(config: Any) -> Any:
    """Return the settings without the folder of this run, for a repetition elsewhere."""
    copy = config.clone()
    copy.output = _OUTPUT
    if copy.trainer.default_root_dir == config.output:
        copy.trainer.default_root_dir = None
    for arguments in _loggers(copy):
        if arguments.save_dir == config.output:
            arguments.save_dir = _HERE
    return copy


def _innermost(error: BaseException) -> BaseException:
    """Return the first cause: jsonargparse wraps errors of the classes that it builds."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return error


def _is_ours(error: BaseException) -> bool:
    """Tell whether a class of the recipes raised it. Errors of the user's classes keep their traceback."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(Path(__file__).parent.parent)


class _UnbuiltCLI(_RecipeCLI):
    """Read the arguments and build nothing."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


def _report(trainer: Trainer, recipe: Recipe, name: str) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()  # Lightning does not
    path = run_file.folder(trainer) / "normtheory.jsonl"
    if not path.exists():
        return
    console = Console()
    histories = read_histories(path)
    console.print(epoch_table(histories[0]))
    console.print(legend(histories[0]), highlight=False)
    if report := _write_report(histories, path.parent):
        console.print(f"\nReport, for a browser: {report.resolve().as_uri()}", soft_wrap=True)
    console.print(f"Every number of this run: {path}", soft_wrap=True)
    if figure := _draw(recipe, name, histories[0], path.parent):
        console.print(f"Figure: {figure}", soft_wrap=True)


def _write_report(histories: Sequence[History], folder: Path) -> Path | None:
    from lightning_normtheory.view.html.report import write_report

    try:
        return write_report(histories, folder / "report.html")
    except Exception as error:  # noqa: BLE001  # as for the figure
        print(f"normtheory: the report could not be written: {error}", file=sys.stderr)
        return None


def _draw(recipe: Recipe, name: str, history: History, folder: Path) -> Path | None:
    """Draw the figure of a run and return its PNG; ``None`` if that fails."""
    from lightning_normtheory.recipes import figures  # matplotlib takes seconds to import

    try:
        return figures.draw(recipe, name, [history], folder)[0]
    except Exception as error:  # noqa: BLE001  # the run itself has succeeded
        print(f"normtheory: the figure could not be drawn: {error}", file=sys.stderr)
        return None
