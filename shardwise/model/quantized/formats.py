"""The two formats of fp8, and the exponent of each one's largest number: what kernels and their references share."""

from __future__ import annotations

import math

import torch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
TOP = {dtype: math.frexp(torch.finfo(dtype).max)[1] - 1 for dtype in (E4M3, E5M2)}
"""The exponent of each format's largest number, which is 1.75 times two to that power."""
