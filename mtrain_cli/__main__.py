"""`mtrain`, and `python -m mtrain_cli`."""

from mtrain_cli.commands.app import app


def main() -> None:
    """Runs the command line; exits with its code."""
    app(prog_name="mtrain")


if __name__ == "__main__":
    main()
