"""What the agent imports ahead of the workers it forks, because torch itself imports it at the first step.

`torch.optim` pulls in `torch._dynamo` (about a second) when the first optimizer is made.
"""

import torch._dynamo
import torch.nn.parallel
import torch.optim  # noqa: F401
