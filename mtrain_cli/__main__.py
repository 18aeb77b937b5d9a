"""Entry point of `mtrain` and `python -m mtrain_cli`."""

import sys


def main() -> None:
    """Run the command line and exit with its status, or with an error if stdout fails."""
    try:
        _main()
    except KeyboardInterrupt:  # before a command starts; commands handle it themselves
        sys.exit(130)  # 128 + SIGINT


def _main() -> None:
    # Import late so that Ctrl-C during the imports prints no traceback.
    from mtrain_cli.commands.app import app
    from mtrain_cli.launch import guarded_streams

    guarded_streams.guard_streams(output_required=True)
    try:
        try:
            app(prog_name="mtrain")
        finally:
            sys.stdout.flush()
    except guarded_streams.OutputLostError as lost:
        if lost.reader_left:
            sys.exit(guarded_streams.CLOSED_PIPE)
        print(f"error: {lost}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
