"""The workers' side of `worlds.gates.StepGate`: a learning-rate schedule that changes nothing."""

import os
import socket

import torch

WORKER = os.getpid()  # a fork of it tries what follows, and is at no step of the job


def pass_gate(step):
    port = os.environ.get("TRUELINE_STEP_GATE")
    if port and os.getpid() == WORKER:
        step = int(os.environ.get("TRUELINE_PS_STEP", step))  # of the process that writes a checkpoint
        with socket.create_connection(("127.0.0.1", int(port))) as gate:
            gate.sendall(b"%d\n" % step)
            gate.recv(1)
    return 1.0


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, pass_gate)
