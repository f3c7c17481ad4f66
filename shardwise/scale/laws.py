"""Functional forms of a model's loss in its parameters N and the tokens D it was trained on.

While fitting, log N and log D are centred on the mean of the points, which makes coefficients nearly independent of each other.
`coefficients` returns them as the papers write them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from shardwise.scale.minimize import Array


class Law(ABC):
    """A form of the loss. Rows of `theta` are the fitted coefficients; `x` and `y` are centred log N and log D."""

    name: str
    sentence: str
    """The formula, with its publication."""
    size: int
    """The number of fitted coefficients."""
    sizes: int
    """The number of model sizes needed to determine the coefficients, with one to spare."""
    exponent: int | None = None
    """Which coefficient is an exponent that few points hardly determine, and published ones are a prior for."""

    @abstractmethod
    def starts(self, number: int, level: float, random: np.random.Generator) -> Array:
        """Random starting points, for runs whose mean log loss is `level`."""

    @abstractmethod
    def evaluate(self, theta: Array, x: Array, y: Array, slope: bool = True) -> tuple[Array, list[Array]]:
        """The log of the loss, (rows, points), and its derivative with respect to each coefficient."""

    @abstractmethod
    def coefficients(self, theta: Sequence[float], x0: float, y0: float) -> dict[str, float]:
        """The coefficients as the paper writes them, for N and D that are not centred."""


def _shares(number: int, level: float, random: np.random.Generator, terms: int = 3) -> list[Array]:
    """Logs of terms that sum to the level of the points, in random shares; a share near zero would have no gradient."""
    return list(np.log(0.05 + 0.85 * random.dirichlet(np.ones(terms), number).T) + level)


def _exponents(number: int, random: np.random.Generator) -> Array:
    return random.uniform(0.03, 1.0, number)


def _sum_of_three(e: Array, a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """log(exp e + exp a + exp b), and the share of each."""
    most = np.maximum(np.maximum(e, a), b)
    parts = [np.exp(term - most) for term in (e, a, b)]
    whole = parts[0] + parts[1] + parts[2]
    return most + np.log(whole), parts[0] / whole, parts[1] / whole, parts[2] / whole


class Chinchilla(Law):
    """L = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, eq. 2)."""

    name = "chinchilla"
    sentence = "E + A/N^alpha + B/D^beta (Hoffmann et al. 2022)"
    size = 5
    sizes = 4

    def starts(self, number: int, level: float, random: np.random.Generator) -> Array:
        terms = _shares(number, level, random)
        return np.stack([*terms, _exponents(number, random), _exponents(number, random)], 1)

    def evaluate(self, theta: Array, x: Array, y: Array, slope: bool = True) -> tuple[Array, list[Array]]:
        e, a, b, alpha, beta = (theta[:, at : at + 1] for at in range(5))
        value, of_e, of_a, of_b = _sum_of_three(
            np.broadcast_to(e, (len(theta), x.shape[-1])), a - alpha * x, b - beta * y
        )
        return value, [of_e, of_a, of_b, -x * of_a, -y * of_b] if slope else []

    def coefficients(self, theta: Sequence[float], x0: float, y0: float) -> dict[str, float]:
        e, a, b, alpha, beta = theta
        return dict(
            E=_exp(e), A=_exp(a + alpha * x0), B=_exp(b + beta * y0), alpha=float(alpha), beta=float(beta)
        )  # fmt: skip


class OverTraining(Law):
    """L = E + (a M^eta + b M^-eta) C^-eta with M = D/N and C = 6 N D (Gadre et al. 2024, eq. 4).

    It is Chinchilla's form with alpha = beta = 2 eta: the best M is then the same at every scale. With one coefficient fewer it is
    more stable where points are few.
    """

    name = "over-training"
    sentence = "E + A/N^alpha + B/D^alpha, the same exponent twice (Gadre et al. 2024)"
    size = 4
    sizes = 3

    def starts(self, number: int, level: float, random: np.random.Generator) -> Array:
        return np.stack([*_shares(number, level, random), _exponents(number, random)], 1)

    def evaluate(self, theta: Array, x: Array, y: Array, slope: bool = True) -> tuple[Array, list[Array]]:
        value, slopes = Chinchilla().evaluate(np.concatenate([theta, theta[:, 3:]], 1), x, y, slope)
        return value, [*slopes[:3], slopes[3] + slopes[4]] if slope else []

    def coefficients(self, theta: Sequence[float], x0: float, y0: float) -> dict[str, float]:
        found, (_, a, b, alpha), eta = Chinchilla().coefficients([*theta, theta[3]], x0, y0), theta, float(theta[3]) / 2
        six = eta * math.log(6)
        return found | dict(a=_exp(a + alpha * x0 + six), b=_exp(b + alpha * y0 + six), eta=eta)


class Kaplan(Law):
    """L = ((Nc/N)^(alpha_N/alpha_D) + Dc/D)^alpha_D (Kaplan et al. 2020, eq. 1.5): the loss goes to zero at infinite size."""

    name = "kaplan"
    sentence = "((Nc/N)^(alpha_N/alpha_D) + Dc/D)^alpha_D (Kaplan et al. 2020)"
    size = 4
    sizes = 3

    def starts(self, number: int, level: float, random: np.random.Generator) -> Array:
        power = random.uniform(0.03, 0.5, number)
        terms = _shares(number, 0.0, random, 2)
        return np.stack(
            [terms[0] + level / power, terms[1] + level / power, random.uniform(0.2, 2.0, number), np.log(power)], 1
        )

    def evaluate(self, theta: Array, x: Array, y: Array, slope: bool = True) -> tuple[Array, list[Array]]:
        n, d, ratio, logged = (theta[:, at : at + 1] for at in range(4))
        power = np.exp(logged)  # stays positive
        first, second = n - ratio * x, d - y
        most = np.maximum(first, second)
        parts = np.exp(first - most), np.exp(second - most)
        whole = parts[0] + parts[1]
        inside = most + np.log(whole)
        of_n = power * parts[0] / whole
        return power * inside, [of_n, power * parts[1] / whole, -x * of_n, power * inside] if slope else []

    def coefficients(self, theta: Sequence[float], x0: float, y0: float) -> dict[str, float]:
        n, d, ratio, logged = theta
        power = math.exp(logged)
        # exp(n) = (Nc / exp(x0))^ratio
        return dict(Nc=_exp(n / ratio + x0), Dc=_exp(d + y0), alpha_N=float(ratio) * power, alpha_D=power)


class Power(Law):
    """L = E + A / N^alpha, for runs with the same tokens per parameter: the data term then has the same form."""

    name = "power"
    sentence = "E + A/N^alpha, at one ratio of tokens to parameters"
    size = 3
    sizes = 4
    exponent = 2

    def starts(self, number: int, level: float, random: np.random.Generator) -> Array:
        return np.stack([*_shares(number, level, random, 2), _exponents(number, random)], 1)

    def evaluate(self, theta: Array, x: Array, y: Array, slope: bool = True) -> tuple[Array, list[Array]]:
        e, a, alpha = (theta[:, at : at + 1] for at in range(3))
        value = np.logaddexp(e, a - alpha * x)
        share = np.exp(a - alpha * x - value)
        return value, [1 - share, share, -x * share] if slope else []

    def coefficients(self, theta: Sequence[float], x0: float, y0: float) -> dict[str, float]:
        e, a, alpha = theta
        return dict(E=_exp(e), A=_exp(a + alpha * x0), alpha=float(alpha))


def _exp(value: float) -> float:
    """The exponential, but at most e^700, which a float can hold: a JSON file has no infinity."""
    return math.exp(min(value, 700.0))


LAWS: dict[str, Law] = {law.name: law for law in (Chinchilla(), OverTraining(), Kaplan(), Power())}


def log_loss(name: str, theta: Array, params: Array, tokens: Array, x0: float, y0: float) -> Array:
    """The log of the loss, (rows of theta, points)."""
    return LAWS[name].evaluate(np.atleast_2d(theta), np.log(params) - x0, np.log(tokens) - y0, slope=False)[0]
