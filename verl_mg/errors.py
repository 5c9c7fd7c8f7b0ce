"""The one exception for input that its writer can mend."""

EXIT_CODE = 2
"""With which every rank leaves after a `UserError`."""


class UserError(Exception):
    """Bad configuration, layout, data or model directory: one line that names it and the remedy.

    The command line prints it on one rank, without a traceback, and every rank leaves with code 2.
    """

    def __str__(self) -> str:
        return " ".join(line.strip() for line in super().__str__().splitlines())  # what it quotes may have several
