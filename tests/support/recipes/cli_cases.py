"""Helpers for tests of the command in this process."""

from lightning_normtheory.recipes.cli import main


def refusal(capsys, *arguments):
    """Run a command that must be refused, and return the last line of stderr."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]
