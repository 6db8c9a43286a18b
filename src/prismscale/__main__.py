"""Entry point of ``prismscale`` and ``python -m prismscale``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; from its first moment on Ctrl-C ends without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command line sets its own handler
    from prismscale.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
