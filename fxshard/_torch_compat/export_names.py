"""Private names of torch (2.13): the numbers that stand for dtypes and memory formats in files of ``torch.export``.

What would replace it: the schema of ``torch.export``'s files, published.
"""

from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE as export_dtypes
from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_MEMORY_FORMAT as export_memory_formats

__all__ = ["export_dtypes", "export_memory_formats"]
