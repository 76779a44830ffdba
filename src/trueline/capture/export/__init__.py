"""From an eager model to a program: torch.export, AOTInductor, TorchScript, offloaded subgraphs."""
