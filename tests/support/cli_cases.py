"""For the tests of the command in this process."""

from lightning_normtheory.recipes.cli import main


def refusal(capsys, *arguments):
    """The last line on stderr of a command that is refused."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]
