"""What kernels and operators compute, by their names."""

from __future__ import annotations

import re
from functools import lru_cache

CATEGORIES_BY_NAME = ("matmul", "attention", "memory")
"""What `category_of` may answer."""

# Of names in lower case; the searched text is faster to lower than to compare without case.
# FlashInfer has norms and activations too, and the softmax of a loss is no attention. cuDNN's backward pass has two more kernels.
_ATTENTION = re.compile(
    r"flash(?!infer)|fmha|attention|softmax|sdpa|mha_|(?:prefill|decode)with|compute_dot_do_o|convert_dq_to_16bits"
)
_LOSS = re.compile(r"log_?softmax")
_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgrad|dgrad|conv(?!er)|cijk_|matmul|::(?:mm|bmm|addmm|baddbmm|linear|mkldnn_linear|mv|addmv)$"
    r"|splitk|triton_\w*_mm_|(?:^|_)mm_"
)


@lru_cache(maxsize=1 << 16)
def category_of(name: str) -> str:
    """The ledger's category of a compute kernel or operator, by its name: `attention`, `matmul` or `memory`."""
    lower = name.lower()
    if _ATTENTION.search(lower) and not _LOSS.search(lower):
        return "attention"
    return "matmul" if _MATMUL.search(lower) else "memory"
