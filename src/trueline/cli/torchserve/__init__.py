"""`trueline torchserve ...`: model archives of TorchServe."""
