"""Settings of training, declared once: command options, Python arguments, values of a recipe, the job's file."""

from dataclasses import dataclass
from typing import Literal

from trueline.settings import setting

Precision = Literal["fp32", "bf16", "fp16"]
Shuffle = Literal["full", "windows", "none"]
LossReduction = Literal["auto", "mean", "sum"]
Strategy = Literal["allreduce", "ps", "hybrid"]

_RESULT = "What is computed (a resumed job keeps it)"
_WORKERS = "The workers (a resumed job may have others)"
_KEEPING = "Checkpoints and evaluation"
_JOB = "The job"
_HOSTS = "Other hosts"
_SERVERS = "Parameter servers"


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How many steps, over which records."""

    epochs: int = setting(
        10, "Times that every record is trained.", section=_RESULT, metavar="N", low=1, recipe=True, fixed=True
    )
    global_batch: int = setting(
        64, "Records of one optimizer step, over all workers.",
        section=_RESULT, metavar="N", flag="batch", low=1, recipe=True, fixed=True,
    )  # fmt: skip
    seed: int = setting(
        0, "Decides the order of the records and the first weights.",
        section=_RESULT, metavar="N", low=0, high=2**63 - 1, recipe=True, fixed=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step is computed. `trueline.Options` has the same fields for custom loops."""

    micro_batch: int = setting(
        0, "Records of one forward; gradients are accumulated. 0: a worker's share of the step, or shards where the "
        "model needs them.", section=_RESULT, metavar="N", low=0, recipe=True, fixed=True,
    )  # fmt: skip
    shuffle: Shuffle = setting(
        "full", "full: any record may stand anywhere in an epoch; windows: row groups are shuffled, and records inside "
        "windows of them; none: in the source's order.", section=_RESULT, recipe=True, fixed=True,
    )  # fmt: skip
    reduction: LossReduction = setting(
        "auto", "How losses of parts make the loss of a step: mean or sum; auto: as tried before the first step. "
        "A loss that the trial finds to be neither is computed over shards of micro_batch records if this is set.",
        section=_RESULT, recipe=True, fixed=True,
    )  # fmt: skip
    bitwise: bool = setting(
        False, "The same weights to the last bit for any number of workers.", section=_RESULT, fixed=True
    )
    precision: Precision = setting(
        "fp32", "Autocast of forward and loss; fp16 with a GradScaler.", section=_RESULT, recipe=True, fixed=True
    )
    clip_norm: float = setting(
        0.0, "Largest norm of all gradients together; 0: no clipping.",
        section=_RESULT, metavar="X", low=0, recipe=True, fixed=True,
    )  # fmt: skip
    ema: float = setting(
        0.0, "Decay of a moving average of the weights, which is then evaluated and captured; 0.999 looks back some "
        "1,000 steps, 0: none.", section=_RESULT, metavar="DECAY", low=0, below=1, recipe=True, fixed=True,
    )  # fmt: skip
    compile: bool = setting(False, "Use torch.compile.", section=_WORKERS, recipe=True)
    find_unused_parameters: bool = setting(
        False,
        "Parameters may take no part in the first step; in later ones they may in any case.",
        section=_WORKERS,
        recipe=True,
    )
    readers: int = setting(
        0, "Processes of each worker that read records ahead (num_workers elsewhere); 0: the worker reads.",
        section=_WORKERS, metavar="N", low=0, recipe=True,
    )  # fmt: skip
    backend: str = setting(
        "gloo", "What sums gradients: gloo (host memory, on every device), nccl, or module:function.",
        section=_WORKERS, metavar="NAME", recipe=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(StepSettings, LoopSettings):
    """All settings of a job beside its recipe and its number of workers."""

    strategy: Strategy = setting(
        "allreduce", "allreduce: every worker has the whole model; ps: parameter servers hold it, with embedding "
        "tables of any size, and workers train asynchronously; hybrid: servers hold the tables, every worker all else.",
        section=_SERVERS, recipe=True, fixed=True,
    )  # fmt: skip
    servers: int = setting(
        1, "Parameter servers that share tables and dense parameters.",
        section=_SERVERS, metavar="N", low=1, recipe=True,
    )  # fmt: skip
    staleness: int = setting(
        -1, "A minibatch begins while at most this many others are under way; 0: synchronous steps of --batch records, "
        "-1: no bound.", section=_SERVERS, metavar="N", low=-1, recipe=True, fixed=True,
    )  # fmt: skip
    tables_above: int = setting(
        0, "Each torch.nn.Embedding(sparse=True) of more than this many rows is trained as a table of the servers, and "
        "is itself again in the checkpoint; 0: none.", section=_SERVERS, metavar="ROWS", low=0, recipe=True, fixed=True,
    )  # fmt: skip
    hot_rows: int = setting(
        0, "Rows of each table that a worker keeps from one minibatch to the next, and pulls again after --staleness "
        "steps; 0: none.", section=_SERVERS, metavar="ROWS", low=0, recipe=True,
    )  # fmt: skip
    server_memory_mb: int = setting(
        0, "Memory that each server may have: new rows wait beyond it, until there are more servers; 0: what the "
        "system leaves.", section=_SERVERS, metavar="MB", low=0, recipe=True,
    )  # fmt: skip
    half_rows: bool = setting(False, "Rows and their gradients travel as float16.", section=_SERVERS, recipe=True)
    grpc_port: int = setting(
        0, "Port on which the servers are one gRPC service for other clients (parameter_server.proto); 0: none.",
        section=_SERVERS, metavar="PORT", low=0, high=65535,
    )  # fmt: skip
    publish_every: float = setting(
        0.0, "Minutes between versions of the model that the running job publishes to --publish-to: a bundle, then "
        "deltas; 0: none.", section=_SERVERS, metavar="MINUTES", low=0,
    )  # fmt: skip
    publish_to: str = setting(
        "", "The model store that a server follows, for --publish-every.", section=_SERVERS, metavar="STORE",
    )  # fmt: skip
    weights: str = setting(
        "", "Weights that the training starts from: a state_dict of torch.save, safetensors, a Hugging Face folder, a "
        "checkpoint or a job. They fit the model in every name and shape.",
        section=_RESULT, metavar="FILE|FOLDER", fixed=True,
    )  # fmt: skip
    new_layers: str = setting(
        "", "Layers that --weights does not set, by name or by what their names begin with, as a new head: fc,norm.",
        section=_RESULT, metavar="NAME,...", fixed=True,
    )  # fmt: skip

    autoscale: bool = setting(
        False, "Vary the number of workers between MIN and MAX by what another worker brings.", section=_WORKERS
    )
    lease_s: float = setting(
        3.0, "A worker that is silent for this long is given up.",
        section=_WORKERS, metavar="SECONDS", flag="lease", low=1,
    )  # fmt: skip
    set_aside: int = setting(
        100, "Records that fail on every worker and may be left out before the job ends; 0: the first one ends it.",
        section=_WORKERS, metavar="N", low=0,
    )  # fmt: skip
    max_failures: int = setting(
        3, "Deaths in a row, before a step of its own, that put a slot in quarantine.",
        section=_WORKERS, metavar="N", low=1,
    )  # fmt: skip
    device: str = setting(
        "auto", "auto (CUDA where the machine has it), cpu, cuda (dealt out to the workers), or cuda:N.",
        section=_WORKERS, metavar="DEVICE", recipe=True,
    )  # fmt: skip
    checkpoint_every: int = setting(
        0, "Steps between checkpoints; 0: at the end of each epoch.", section=_KEEPING, metavar="STEPS", low=0
    )
    checkpoints: str = setting(
        "", "Where they go, e.g. s3://bucket/name; else the job's folder.", section=_KEEPING, metavar="FOLDER|URL"
    )
    keep: int = setting(3, "Newest checkpoints that stay, beside the best.", section=_KEEPING, metavar="N", low=1)
    evaluate_every: int = setting(
        0, "Steps between evaluations; 0: each epoch if --monitor or --patience is set, else never.",
        section=_KEEPING, metavar="STEPS", low=0, recipe=True,
    )  # fmt: skip
    monitor: str = setting(
        "", "loss or a metric that chooses the best checkpoint, which evaluate and capture use; smaller is better, "
        "-NAME: larger is.", section=_KEEPING, metavar="[-]NAME", recipe=True,
    )  # fmt: skip
    patience: int = setting(
        0, "Stop after this many evaluations without a better one; 0: never.",
        section=_KEEPING, metavar="N", low=0, recipe=True,
    )  # fmt: skip
    profile: str = setting(
        "", "Trace these steps of one worker into JOB/traces, for Perfetto or chrome://tracing: 10, or 10:15 for five.",
        section=_JOB, metavar="STEP[:STOP]",
    )  # fmt: skip
    page_port: int = setting(
        0, "Port of the live page; any free one for 0, or if it is in use.",
        section=_JOB, metavar="PORT", low=0, high=65535,
    )  # fmt: skip
    hosts: str = setting(
        "", "Other hosts, on which Trueline is started over ssh, e.g. a,b:2; b:2 takes at most two workers.",
        section=_HOSTS, metavar="HOST[:N],...",
    )  # fmt: skip
    remote_trueline: str = setting(
        "", "The trueline command on these hosts; else the path of this one, or trueline in PATH.",
        section=_HOSTS, metavar="PATH",
    )  # fmt: skip
    listen: str = setting(
        "", "Where other hosts join with `trueline join`, e.g. host-a:7700 or 0.0.0.0:7700; over TLS and with a token.",
        section=_HOSTS, metavar="HOST:PORT",
    )  # fmt: skip
    cores: int = setting(
        -1, "With --listen or --hosts, workers that this host takes; else one for each CPU.",
        section=_HOSTS, metavar="N", low=-1,
    )  # fmt: skip
    interface: str = setting(
        "", "Where workers of this host listen for others: its name or address, else that of --listen.",
        section=_HOSTS, metavar="NAME|ADDRESS",
    )  # fmt: skip
    ports: str = setting(
        "", "Ports for the workers of this host and of --hosts, e.g. 7800-7899, three for each; else any.",
        section=_HOSTS, metavar="FIRST-LAST",
    )  # fmt: skip
