"""Each method of compressing gradients as a loop over replicas in one process, in NumPy: what the ranks are held against."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Arrays = list[np.ndarray]


def blocks(method: str, x: np.ndarray) -> list[slice]:
    size = 64 if method == "int4" else 256
    return [slice(start, min(start + size, x.size)) for start in range(0, x.size, size)]


def fp8_values() -> np.ndarray:
    """All non-negative values of E4M3: 4 bits of exponent with bias 7, 3 of mantissa, no infinity."""
    found = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        found.append(mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(found)


FP8 = fp8_values()


def nearest_fp8(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to the even code."""
    size = np.abs(x.astype(np.float32)).astype(np.float64)
    above = np.clip(np.searchsorted(FP8, size), 1, len(FP8) - 1)
    low, high = FP8[above - 1], FP8[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.sign(x) * np.where(size >= FP8[-1], FP8[-1], np.where(up, high, low))


def rounded(method: str, x: np.ndarray) -> np.ndarray:
    """A flat array as it arrives."""
    out = np.empty_like(x)
    for part in blocks(method, x):
        v = x[part]
        if method == "onebit":
            scale = float(np.float32(np.abs(v).sum() / v.size))
            out[part] = np.where(v >= 0, scale, -scale)
            continue
        most = {"int8": 127, "int4": 7, "fp8": 448}[method]
        scale = float(np.float32(np.abs(v).max() / most))
        if scale == 0:
            out[part] = 0
            continue
        y = np.clip(v / scale, -most, most)
        out[part] = (nearest_fp8(y) if method == "fp8" else np.round(y)) * scale
    return out


class Replicas:
    """All replicas at once; `step` takes their gradients, [replica][tensor], and gives the sums that all of them get."""

    def __init__(self, method: str, replicas: int, shapes: list[tuple[int, ...]], **settings: Any) -> None:
        self.method, self.replicas, self.shapes, self.settings = method, replicas, shapes, settings
        self.error = [[np.zeros(s) for s in shapes] for _ in range(replicas)]
        self.momentum = [[np.zeros(s) for s in shapes] for _ in range(replicas)]
        self.factor: dict[int, np.ndarray] = settings.get("factors", {})

    def step(self, gradients: list[Arrays]) -> Arrays:
        return [self.tensor(n, [g[n].copy() for g in gradients]) for n in range(len(self.shapes))]

    def tensor(self, n: int, gradients: Arrays) -> np.ndarray:
        if self.method == "topk":
            return self.largest(n, gradients)
        if self.method == "powersgd":
            return self.low_rank(n, gradients)
        return self.quantized(n, gradients)

    def quantized(self, n: int, gradients: Arrays) -> np.ndarray:
        feedback = self.method == "onebit"
        total = np.zeros(self.shapes[n]).reshape(-1)
        for r, g in enumerate(gradients):
            x = (g + self.error[r][n]).reshape(-1) if feedback else g.reshape(-1)
            sent = rounded(self.method, x)
            total += sent
            if feedback:
                self.error[r][n] = (x - sent).reshape(self.shapes[n])
        arrived = rounded(self.method, total)
        if feedback:  # the rank that adds a block up keeps what the second rounding lost of it
            before = sum(len(blocks(self.method, np.empty(s))) for s in self.shapes[:n])
            every = sum(len(blocks(self.method, np.empty(s))) for s in self.shapes)
            share = math.ceil(every / self.replicas)
            for index, part in enumerate(blocks(self.method, total)):
                owner = (before + index) // share
                self.error[owner][n].reshape(-1)[part] += (total - arrived)[part]
        return arrived.reshape(self.shapes[n])

    def largest(self, n: int, gradients: Arrays) -> np.ndarray:
        m, count = self.settings.get("momentum", 0.0), math.ceil(self.settings["density"] * math.prod(self.shapes[n]))
        total = np.zeros(self.shapes[n]).reshape(-1)
        for r, g in enumerate(gradients):
            self.momentum[r][n] = m * self.momentum[r][n] + g
            error = (self.error[r][n] + self.momentum[r][n]).reshape(-1)
            places = np.argsort(-np.abs(error), kind="stable")[:count]
            total[places] += error[places]
            error[places] = 0
            self.momentum[r][n].reshape(-1)[places] = 0
            self.error[r][n] = error.reshape(self.shapes[n])
        return total.reshape(self.shapes[n])

    def low_rank(self, n: int, gradients: Arrays) -> np.ndarray:
        if n not in self.factor:
            return np.sum(gradients, axis=0)
        inputs = [g + e[n] for g, e in zip(gradients, self.error, strict=True)]
        total = np.empty(self.shapes[n])
        stacked = total.reshape(-1, *self.shapes[n][-2:])
        for index in range(len(stacked)):
            each = [x.reshape(stacked.shape)[index] for x in inputs]
            p, _ = np.linalg.qr(sum(x @ self.factor[n][index] for x in each))
            q = sum(x.T @ p for x in each)
            self.factor[n][index] = q
            stacked[index] = p @ q.T
        for r, x in enumerate(inputs):
            self.error[r][n] = x - total / self.replicas
        return total
