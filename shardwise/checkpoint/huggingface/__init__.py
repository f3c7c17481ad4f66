"""Weights and `config.json` to and from Hugging Face folders: GPT-2, Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral and
DeepSeek-V3. Families and layouts are described once, and that description serves both ways."""

from shardwise.checkpoint.huggingface.config import config_from_model, model_from_config
from shardwise.checkpoint.huggingface.convert import Conversion, from_hf, to_hf
from shardwise.checkpoint.huggingface.peft import from_peft, to_peft

__all__ = ["Conversion", "config_from_model", "from_hf", "from_peft", "model_from_config", "to_hf", "to_peft"]
