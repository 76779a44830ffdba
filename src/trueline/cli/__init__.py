"""The command `trueline`: one file for each verb, each of which imports what it runs inside its function.

Stdout is data (text for people, or JSON with --json); progress, warnings and errors go to stderr.
"""


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    import sys

    from trueline.cli.app import run

    sys.exit(run(sys.argv[1:]))
