"""`mtrain`, and `python -m mtrain_cli`."""

import sys

from mtrain_cli.commands.app import app
from mtrain_cli.launch import streams


def main() -> None:
    """Runs the command line; exits with its code, or with that of a standard output that takes no more."""
    streams.guard(output_required=True)
    try:
        try:
            app(prog_name="mtrain")
        finally:
            sys.stdout.flush()
    except streams.OutputLostError as lost:
        if lost.reader_left:
            sys.exit(streams.CLOSED_PIPE)
        print(f"error: {lost}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
