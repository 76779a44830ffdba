"""The command `trueline`: one file for each verb, each of which imports what it runs inside its function.

Stdout is data (text for people, or JSON with --json); progress, warnings and errors go to stderr.
"""


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    import atexit
    import gc
    import signal
    import sys

    # Importing torch and exporting a model make millions of objects that stay. The collector looks through them less
    # often (a quarter of an import's time, a fifth of an export's), and not at all at the exit (a second).
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    # The interpreter gives SIGINT back to the system before it clears its modules: one that comes then would be the
    # end of a process that has its exit code already.
    atexit.register(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))

    try:
        from trueline.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # outside what `run` catches: while it is imported, or cleans up
        code = 130
    # CPython notes an interrupt that left an `exec` or `eval` of a string (every dataclass and named tuple is made by
    # one), and `python -m` then dies of SIGINT at its end although the interrupt was caught. Another `exec` clears it.
    exec("")
    sys.exit(code)
