"""What a launch prepares for hosts that join it: certificates, a token, the files that travel, the join line."""

import importlib.metadata
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from trueline import events
from trueline.engine.hosts import folder as travel
from trueline.engine.hosts import route, tls
from trueline.engine.hosts.messages import TravelledFile
from trueline.engine.hosts.ssh import SshJoins, find_listen_address, parse_hosts
from trueline.engine.hosts.token import TokenFile, issue_token, read_token, write_token
from trueline.environment import available_bytes
from trueline.errors import DataError, StorageError, UsageError
from trueline.storage.location import parse_location
from trueline.train.job_dir import JobDir
from trueline.train.master.claims import Leader, ViewClaims, sweep_claims
from trueline.train.master.failover import reserve_port
from trueline.train.master.hosts import HostsFolder, HostsLaunch, mark_store
from trueline.train.settings import JobSettings
from trueline.version import __version__


def own_versions() -> dict[str, str]:
    """What has to be the same on all hosts."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"trueline": __version__, "python": python, "torch": importlib.metadata.version("torch")}


def package_versions(modules: Sequence[str]) -> dict[str, str]:
    """The installed distributions that have these modules, with their versions."""
    names = {name for top in {module.partition(".")[0] for module in modules} for name in _find_owners(top)}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def _find_owners(package: str) -> Sequence[str]:
    """The distributions that have a package. One of its name is found at once, others by the lists of all files."""
    try:
        return [importlib.metadata.distribution(package).name]
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.packages_distributions().get(package, ())


def prepare(folder: JobDir, job: JobSettings, preload: Sequence[str]) -> str:
    """Fills JOB/hosts for this launch; returns the line that other hosts type. Raises UsageError, StorageError."""
    own = HostsFolder(folder)
    shutil.rmtree(own.path, ignore_errors=True)
    if not job.listen:
        return ""
    host, port = route.split_address(job.listen)
    if host in route.ANY and not job.interface:
        raise UsageError(
            f"--listen {job.listen} does not say where the workers of this host listen",
            hint="add --interface with the name or address of the network that the hosts share",
        )
    address = route.find_interface_address(job.interface or route.resolve(host))
    own.path.mkdir(mode=0o700)
    certificates = tls.make_certificates(job.name)
    for path, content in ((own.certificate, certificates.master), (own.key, certificates.key)):
        path.touch(mode=0o600)
        path.write_bytes(content)
    token = issue_token(folder.read_secret(), now=time.time())
    write_token(own.token, TokenFile(job=job.name, token=token, ca=certificates.ca.decode()))
    where = parse_location(job.checkpoints or folder.checkpoints)
    store, probe = "", ""
    if isinstance(where, Path):
        store, probe = str(where), mark_store(where, f"{folder.path} on {socket.gethostname()}")
    sweep_claims(where)
    shown = route.join_address(address if host in route.ANY else host, port)
    own.write_launch(HostsLaunch(
        listen=job.listen, address=address, ports=job.ports,
        cores=len(os.sched_getaffinity(0)) if job.cores < 0 else job.cores, memory=available_bytes(),
        preload=tuple(preload),
        files=_pack(folder, own, job, str(where)), packages=package_versions(preload), versions=own_versions(),
        store=store, probe=probe, id=secrets.token_hex(8),
        leader=Leader(id=secrets.token_hex(8), host=socket.gethostname(), address=shown, token=str(own.token)),
    ))  # fmt: skip
    return join_line(shown, own.token, certificates.ca.decode())


def expect_leader(folder: JobDir, job: JobSettings) -> None:
    """Raises UsageError if a joined host has led the job since its launch here: two masters would train it twice."""
    own = HostsFolder(folder)
    launch = own.read_launch()
    if launch is None:  # it ended in order, or no other host could join
        return
    try:
        newest = ViewClaims(launch.store or job.checkpoints, launch.id).newest()
    except (StorageError, DataError, OSError) as error:
        events.emit("store.away", where=launch.store or job.checkpoints, why=str(error), effect="the job starts here")
        return
    if newest is not None and newest.leader.id != launch.leader.id:
        leader = newest.leader
        raise UsageError(
            f"{leader.host} has led this job since: its folder is {Path(leader.token).parents[1]} there",
            hint="continue there, with `trueline status` or `trueline resume`; "
            f"if that host is lost, remove {own.path}: "
            "the job continues from its newest checkpoint",
        )


def reserve_listen(job: JobSettings) -> tuple[JobSettings, socket.socket | None]:
    """Reserves the port for other hosts: a free one if --listen names port 0, and for --hosts alone a free one on the
    way to them. Raises PortInUse, UsageError."""
    if not job.listen and not job.hosts:
        return job, None
    if job.listen and route.split_address(job.listen)[1]:
        return job, reserve_port(job.listen)
    if job.listen:
        address = route.split_address(job.listen)[0]
    else:
        address = route.announce(job.interface, "") if job.interface else find_listen_address(parse_hosts(job.hosts))
    reserved = reserve_port(route.join_address(address, 0))
    return replace(job, listen=route.join_address(address, reserved.getsockname()[1])), reserved


def connect_ssh(folder: JobDir, job: JobSettings, emit: Callable[..., None]) -> SshJoins:
    """Connects to the hosts of --hosts, which then wait for their tokens. Raises TrainError."""
    launch = HostsFolder(folder).read_launch()
    assert launch is not None
    joins = SshJoins(
        parse_hosts(job.hosts), command=job.remote_trueline, log=lambda name: folder.log(f"ssh-{name}"), emit=emit
    )
    try:
        joins.open(launch.leader.address, job.ports, launch.versions)
    except BaseException:
        joins.close()
        raise
    return joins


def make_token(folder: JobDir) -> bytes:
    """The token file of this launch with a new token."""
    token = issue_token(folder.read_secret(), now=time.time())
    return msgspec.json.encode(msgspec.structs.replace(read_token(HostsFolder(folder).token), token=token))


def join_line(address: str, token: Path, ca: str) -> str:
    """What is typed on another host."""
    return f"trueline join {address} --token-file {token} --ca {tls.fingerprint(ca)}"


def clean(folder: JobDir, *, keep_launch: bool) -> None:
    """Removes keys and tokens of a launch that has ended; `keep_launch`: not what `expect_leader` reads."""
    own = HostsFolder(folder)
    launch = own.read_launch() if keep_launch else None
    shutil.rmtree(own.path, ignore_errors=True)
    if launch is not None:
        with suppress(OSError, StorageError):  # of a read-only folder nothing was removed
            own.path.mkdir(mode=0o700)
            own.write_launch(launch)


def _pack(folder: JobDir, own: HostsFolder, job: JobSettings, store: str) -> tuple[TravelledFile, ...]:
    """The files of the job as joined hosts get them; its settings there name the recipe or script that travelled."""
    users, *arguments = job.script or (job.recipe,)
    named = ":" in users and not job.script
    code = Path.cwd() if named else Path(users).parent
    there = users if named else f"{travel.CODE}/{Path(users).name}"
    travelled = replace(job, script=(there, *arguments)) if job.script else replace(job, recipe=there)
    settings = own.path / "job.json"
    settings.write_bytes(msgspec.json.encode(replace(travelled, checkpoints=store)))
    sources = {"job.json": settings, **travel.code_files(code)}
    for path in (folder.columns, folder.weights):
        if path.exists():
            sources[path.name] = path
    return travel.pack(sources, own.blobs)
