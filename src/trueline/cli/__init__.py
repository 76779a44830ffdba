"""The command `trueline`: one file a verb, which imports the code that it runs inside its function.

Stdout is data (text, or JSON with --json); progress, warnings and errors go to stderr.
"""


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    import atexit
    import faulthandler
    import gc
    import signal
    import sys

    # Importing torch and exporting a model make millions of objects that stay. The collector visits them less often (a
    # quarter of an import's time, a fifth of an export's), and not at all at the exit (a second).
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    # The interpreter restores SIGINT's default before it clears its modules: a signal then would kill a process that
    # has its exit code already.
    atexit.register(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    if (
        sys.__stderr__ is not None
    ):  # an operator that ends the process leaves the line of the user's code that called it
        faulthandler.enable(sys.__stderr__, all_threads=False)

    try:
        from trueline.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # outside of `run`: while it is imported, or cleans up
        code = 130
    # CPython remembers an interrupt in an `exec` of a string (which makes every dataclass and named tuple), and
    # `python -m` then dies of SIGINT at its end although the interrupt was caught. Another `exec` clears that.
    exec("")
    sys.exit(code)
