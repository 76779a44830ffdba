"""Handlers: the Python code of model archives, in processes of its own.

The table reads from what is decided to what is run:

    outcome   what a handler answers, and how it fails
    frames    what the two processes say to each other, and how: no pickle
    plan      how many processes, how large a batch, how long: from the archive's configuration and the call
    worker    one process: started, asked, ended
    pool      the queue of a model and its workers; the dead are replaced
    body      an HTTP request as the parameters that a handler expects
    place     the folder that an archive is laid out in
    version   a version of a model that is served by a handler
    measures  the metrics that handlers count
    child     the other side: what runs in the process (with confine, entry)
"""
