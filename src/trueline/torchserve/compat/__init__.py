"""What others' programs import, in our own writing. `ts` stands in for TorchServe's package in handlers' processes.

This folder is put on the path of a handler's process and of nothing else; no room of Trueline imports it.
"""
