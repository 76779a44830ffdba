"""The command `trueline`: one file for each verb, each of which imports what it runs inside its function.

Stdout is data (text for people, or JSON with --json); progress, warnings and errors go to stderr.
"""


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    import atexit
    import gc
    import sys

    # Importing torch and exporting a model make millions of objects that stay. The collector looks through them less
    # often (a quarter of an import's time, a fifth of an export's), and not at all at the exit (a second).
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)

    try:
        from trueline.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # outside what `run` catches: while it is imported, or cleans up
        code = 130
    sys.exit(code)
