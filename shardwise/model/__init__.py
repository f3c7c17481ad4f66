"""The network on one device, its initial weights, generation, and weights to and from Hugging Face."""

from shardwise.model.initialize import initialize
from shardwise.model.transformer import Output, Transformer

__all__ = ["Output", "Transformer", "initialize"]
