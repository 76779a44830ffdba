"""`trueline try`."""

import click

from trueline.cli.options import Output, verb

_EXAMPLES = """
trueline try
    the whole line on a table of 300 flats, in the new folder flats; one of two workers is killed on the way

trueline try demo --into experiments
    the same in experiments/demo
"""


@verb("try", examples=_EXAMPLES, shows_progress=True)
@click.argument("name", default="flats")
@click.option("--into", default=".", metavar="FOLDER", help="Where the new folder goes.")
@click.option("--drill/--no-drill", default=True, show_default=True, help="Kill a worker a third of the way.")
def command(name: str, into: str, drill: bool) -> Output:
    """See the whole line at work, without a file of yours, in a minute.

    Writes a recipe and a table with empty cells, a category that only the evaluation has, and texts of any length into
    the folder NAME; trains it in two processes of which one is killed; captures, serves and asks it. Compares the
    trained model, the captured program and the server's answers, and prints what to type next. Needs no network.
    """
    from trueline.tryout import tryout

    tried = tryout(name, into=into, drill=drill)
    return Output(tried.as_text(), tried.as_dict())
