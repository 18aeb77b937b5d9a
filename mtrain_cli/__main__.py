"""Entry point of `mtrain` and `python -m mtrain_cli`."""

import sys

from mtrain_cli.launch import stop_request


def main() -> None:
    """Run the command line and exit with its status, or with an error if stdout fails."""
    try:
        words = [word for word in sys.argv[1:] if not word.startswith("-")]
        if words[:1] == ["train"]:  # the workers answer requests that come before their first step
            stop_request.remember(stop_request.SAVE, stop_request.SAVE_AND_STOP)
        else:
            stop_request.stop_on_signals()
        _main()
    except KeyboardInterrupt as error:  # before a command starts; commands handle it themselves
        if str(error):  # a `StopSignal`
            print(f"mtrain: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 130))  # 128 + SIGINT


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
