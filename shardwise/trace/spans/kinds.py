"""What kind of computing a kernel or operator does, in the ledger's categories, told by its name: libraries name their matrix
products and attention kernels in ways that are easy to know; what is neither moves memory.
"""

from __future__ import annotations

import re

_ATTENTION = re.compile(r"flash|fmha|attention|softmax|sdpa|mha_", re.IGNORECASE)
_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgrad|dgrad|conv|cijk_|matmul|::(?:mm|bmm|addmm|baddbmm|linear|mkldnn_linear|mv|addmv)$"
    r"|splitk|triton_\w*_mm_|(?:^|_)mm_",
    re.IGNORECASE,
)


def category_of(name: str) -> str:
    """`attention`, `matmul` or `memory`."""
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name) else "memory"
