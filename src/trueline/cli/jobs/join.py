"""`trueline join`."""

import contextlib
import os
import socket
from pathlib import Path

import click

from trueline.cli.options import Output, verb
from trueline.errors import UsageError

_EXAMPLES = """
trueline join host-a:7700 --token-file token
    lends this machine's cores to the job that listens there; Ctrl-C takes them back

trueline join host-a:7700 --token-file token --cores 4 --interface eth1 --ports 7800-7899
    room for four workers, which listen on these ports of eth1

trueline join s3://bucket/jobs --cores 4
    lends four cores to the jobs of that store that are submitted with --on hosts
"""


@verb("join", examples=_EXAMPLES, shows_progress=True)
@click.argument("address", metavar="HOST:PORT|STORE")
@click.option("--token-file", metavar="FILE", help="A copy of JOB/hosts/token; -: stdin, whose end ends this.")
@click.option("--ca", default="", metavar="sha256:...", help="Fingerprint that the join line shows, to compare.")
@click.option("--cores", type=click.IntRange(1), default=None, metavar="N", help="Workers; else one for each CPU.")
@click.option("--name", default="", metavar="NAME", help="Of this host in status; else its host name.")
@click.option("--interface", default="", metavar="NAME|ADDRESS", help="Where workers listen; else the route's.")
@click.option("--ports", default="", metavar="FIRST-LAST", help="Ports for the workers, three for each; else any.")
def command(
    address: str, token_file: str | None, ca: str, cores: int | None, name: str, interface: str, ports: str
) -> Output:
    """Lend this machine's cores to a job on another host, or to jobs of a store.

    A job that was started with --listen shows the line to type. This host needs Python and Trueline with the versions
    of the job's; the recipe's folder comes over the connection. Workers start here while the job has slots to fill.
    They leave between two steps at Ctrl-C, and no step is lost.

    With a STORE, a folder that all hosts see at this path or a URL, this host runs what `trueline submit --on hosts
    --store STORE` asks for: jobs wait by priority, and each starts when the hosts have room for all that it needs to
    begin. Who can write the store runs code here.
    """
    if "/" in address or Path(address).is_dir():
        return lend_to_store(address, cores=cores, name=name, given={
            "--token-file": token_file, "--ca": ca, "--interface": interface, "--ports": ports,
        })  # fmt: skip
    if ":" not in address:
        raise UsageError(
            f"'{address}' is neither HOST:PORT nor a store",
            hint="the job's join line has the address; a store is a folder that all hosts see, or s3://...",
        )
    if token_file is None:
        raise UsageError(f"the job at {address} asks for a token", hint="copy its JOB/hosts/token: --token-file FILE")
    return lend_to_job(address, token_file, ca=ca, cores=cores, name=name, interface=interface, ports=ports)


def lend_to_store(store: str, *, cores: int | None, name: str, given: dict[str, str | None]) -> Output:
    from trueline.engine.cluster.pool_lender import PoolLender
    from trueline.environment import available_bytes
    from trueline.storage.location import is_remote, local_path

    for option, value in given.items():
        if value:
            raise UsageError(
                f"{option} is for a job that listens, and {store} is a store",
                hint="[engine.hosts] in trueline.toml has interface and ports, where the jobs are submitted",
            )
    if not is_remote(store) and not local_path(store).absolute().parent.is_dir():
        raise UsageError(f"there is no folder {local_path(store).absolute().parent}", hint="is the store mounted here?")
    lender = PoolLender(
        store, name=name or socket.gethostname(), cores=cores or len(os.sched_getaffinity(0)),
        memory_mb=available_bytes() // 1_000_000,
    )  # fmt: skip
    why = lender.run()
    return Output(f"left {store}: {why}", {"store": store, "why": why})


def lend_to_job(
    address: str, token_file: str, *, ca: str, cores: int | None, name: str, interface: str, ports: str
) -> Output:
    import asyncio
    import json

    from trueline import files
    from trueline.engine.hosts.agent import HostAgent
    from trueline.engine.hosts.relay import Relay
    from trueline.engine.hosts.standby import JoinRequest, replace_earlier
    from trueline.engine.hosts.tls import fingerprint
    from trueline.engine.hosts.token import read_token
    from trueline.train.launch.hosts import own_versions
    from trueline.train.launch.lend import lend
    from trueline.train.launch.preload import find_preload
    from trueline.train.launch.standby import StandbyMaster

    versions, piped = own_versions(), token_file == "-"
    with contextlib.ExitStack() as exits:
        agent = HostAgent()
        exits.callback(agent.end)
        if piped:
            click.echo(json.dumps(versions))  # for the host that starts this one over ssh
            agent.begin(find_preload("allreduce"))  # the token comes once the master listens
        token = read_token(Path(token_file))
        if piped:
            earlier = replace_earlier(files.user_cache() / "joined", f"{fingerprint(token.ca)[7:23]}-{name}")
            exits.callback(os.close, earlier)
        if ca and fingerprint(token.ca) != ca:
            raise UsageError(
                f"the token file {token_file} has another certificate than the join line: {fingerprint(token.ca)}",
                hint="copy the token file of this start of the job",
            )
        agent.begin(find_preload("allreduce"))
        request = JoinRequest(
            address=address, token=token, cores=cores or len(os.sched_getaffinity(0)),
            name=name or socket.gethostname(), interface=interface, ports=ports, versions=versions,
        )  # fmt: skip
        why = asyncio.run(lend(Relay(request, StandbyMaster(request), agent), piped=piped))
    return Output(f"left {token.job}: {why}", {"job": token.job, "why": why})
