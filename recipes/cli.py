"""The command ``normtheory``."""

import argparse
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning_normtheory import __version__
from lightning_normtheory.recipes import registry

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0 if all went well.

    Example:
        >>> main(["list"])
        quickstart  A WeightNorm tanh network on the Fashion-MNIST images that come with this packag...
        0
    """
    parser = argparse.ArgumentParser(
        "normtheory", description="Training recipes with diagnostics of normalised networks."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the recipes")
    # Options behind the name belong to Lightning, --help among them.
    run = commands.add_parser("run", help="train a recipe", add_help=False)
    run.add_argument("name", nargs="?", help="of the recipe; then any option of it, for example --trainer.max_epochs 5")
    known, options = parser.parse_known_args(arguments)
    if known.command == "run":
        if known.name is None and {"-h", "--help"} & set(options):
            run.print_help()
            return 0
        if known.name is None:
            run.error(f"expected the name of a recipe: {', '.join(registry.names())}")
        return _run(known.name, options)
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    for name in registry.names():
        print(f"{name}  {_shorten(registry.description(name), 84)}")
    return 0


def _run(name: str, options: list[str]) -> int:
    try:
        config = registry.config_path(name)
    except ValueError as error:
        print(f"normtheory: {error}", file=sys.stderr)
        return 2
    # Nobody is asked for an account. WandbLogger(offline=True) would decide this for the whole process, whatever the
    # user's environment says.
    os.environ.setdefault("WANDB_MODE", "offline")
    trainer = _fit(config, options)
    if trainer.is_global_zero:
        _report(trainer)
    return 0


def _fit(config: Path, options: list[str]) -> Any:
    # Seconds to import: not for `normtheory list`.
    from pytorch_lightning.cli import LightningCLI, SaveConfigCallback

    from lightning_normtheory.callbacks import record

    class SaveConfig(SaveConfigCallback):
        """Beside the run's other files; the original writes to trainer.log_dir, which is "." for W&B."""

        def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
            folder = record.folder(trainer)
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, str(folder / "config.yaml"), overwrite=True, multifile=False)

    class RecipeCLI(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--ckpt_path", type=str | None, default=None, help="Resume from this checkpoint.")

        def before_instantiate_classes(self) -> None:
            # Older WandbLoggers write to a temporary folder if theirs does not exist.
            folder = getattr(getattr(self.config.trainer.logger, "init_args", None), "save_dir", None)
            if folder:
                Path(folder).mkdir(parents=True, exist_ok=True)

    # sys.argv stays as it is, since Lightning starts further processes with it.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    cli = RecipeCLI(
        run=False,
        args=["--config", str(config), *options],
        save_config_callback=SaveConfig,
        save_config_kwargs={"save_to_log_dir": False},
        parser_kwargs={"prog": f"normtheory run {config.stem}"},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path)
    return cli.trainer


def _report(trainer: Any) -> None:
    from rich.console import Console

    from lightning_normtheory.callbacks import record
    from lightning_normtheory.recipes.summary import bound_table, epoch_table, theorems

    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()  # Lightning leaves it open
    path = record.folder(trainer) / "normtheory.jsonl"
    if path.exists():
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without ‖ still gets its table
        console = Console()
        console.print(epoch_table(path))
        for part in (bound_table(path), theorems(path)):
            if part:
                console.print(part, soft_wrap=isinstance(part, str), highlight=False)
        console.print(f"Every number of this run: {path}", soft_wrap=True)


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
