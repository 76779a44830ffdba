"""The part of TorchServe's `ts` package that handlers import, written for Trueline. Importing it imports no torch.

Source: the names and behaviour of TorchServe 0.12, as docs/guides/torchserve.md lists them.
"""

__version__ = "0.12.0"
"""Of the interface."""
