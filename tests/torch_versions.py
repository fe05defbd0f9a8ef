"""Which release of torch runs, for what differs between those that are supported (docs/torch-versions.md)."""

import torch
from torch.torch_version import TorchVersion

SINCE_2_15: bool = TorchVersion(torch.__version__) >= (2, 15)
