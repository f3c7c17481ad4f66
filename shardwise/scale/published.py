"""Published laws and models: coefficients of Chinchilla's form, the training tokens of known models, and how learning rate and
batch scale."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.scale.minimize import Array


@dataclass(frozen=True)
class PublishedLaw:
    """L = E + A / N^alpha + B / D^beta in nats per token of the authors' data and tokenizer."""

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, params: Array, tokens: Array) -> Array:
        """The loss of models of these sizes on these tokens."""
        return self.E + self.A / params**self.alpha + self.B / tokens**self.beta


LAWS: dict[str, PublishedLaw] = {
    law.name: law
    for law in (
        PublishedLaw("besiroglu2024", "Besiroglu et al. 2024, table 1", 1.8172, 482.01, 2085.43, 0.3478, 0.3658),
        PublishedLaw("hoffmann2022", "Hoffmann et al. 2022, eq. 10 (Chinchilla, approach 3)", 1.69, 406.4, 410.7, 0.34, 0.28),
        PublishedLaw("muennighoff2023", "Muennighoff et al. 2023, appendix A: C4, one epoch", 1.87, 521.0, 1488.0, 0.353, 0.353),
    )
}  # fmt: skip
DEFAULT = "besiroglu2024"
EXPONENTS = [exponent for law in LAWS.values() for exponent in (law.alpha, law.beta)]


@dataclass(frozen=True)
class PublishedModel:
    """A trained model and its training tokens."""

    name: str
    params: float
    tokens: float
    source: str


MODELS: tuple[PublishedModel, ...] = (
    PublishedModel("GPT-3", 175e9, 300e9, "Brown et al. 2020, table 2.1"),
    PublishedModel("Chinchilla", 70e9, 1.4e12, "Hoffmann et al. 2022, section 4.1"),
    PublishedModel("Llama 1 7B", 6.7e9, 1.0e12, "Touvron et al. 2023, table 2"),
    PublishedModel("Llama 1 65B", 65.2e9, 1.4e12, "Touvron et al. 2023, table 2"),
    PublishedModel("Llama 2 7B", 6.74e9, 2.0e12, "Touvron et al. 2023 (Llama 2), table 1"),
    PublishedModel("Llama 2 70B", 69.0e9, 2.0e12, "Touvron et al. 2023 (Llama 2), table 1"),
    PublishedModel("Llama 3 8B", 8.03e9, 15.0e12, "Grattafiori et al. 2024"),
    PublishedModel("Llama 3 70B", 70.6e9, 15.0e12, "Grattafiori et al. 2024"),
    PublishedModel("Llama 3 405B", 405.9e9, 15.6e12, "Grattafiori et al. 2024, section 3.2"),
)


def step_law(params: float, tokens: float) -> tuple[float, float]:
    """The best peak learning rate of AdamW, and the best batch in tokens (Li et al. 2025, "Step law", eq. 1: 1.79 N^-0.713 D^0.307
    and 0.58 D^0.571; N without embeddings, cosine or linear decay, fitted to models of 60 M to 1 B)."""
    return 1.79 * params**-0.713 * tokens**0.307, 0.58 * tokens**0.571
