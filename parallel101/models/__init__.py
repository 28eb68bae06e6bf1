"""Models that know nothing of parallelism, and the text they learn: what the trainers are tried on.

The same seed gives the same weights on every rank and however a model is split; the same step gives
the same batch.
"""

from parallel101.models.experts import Experts, MixtureOfExperts
from parallel101.models.gpt import GPT, GPTConfig, balanced_next_token_loss, next_token_loss
from parallel101.models.llama import Llama, LlamaConfig
from parallel101.models.mlp import MLP
from parallel101.models.plans import GPT_PLAN, LLAMA_PLAN
from parallel101.models.text import ByteTokenizer, CharTokenizer, TextBatches, read_text

__all__ = ["GPT", "GPT_PLAN", "MLP", "GPTConfig", "next_token_loss"]
__all__ += ["LLAMA_PLAN", "Llama", "LlamaConfig"]
__all__ += ["Experts", "MixtureOfExperts", "balanced_next_token_loss"]
__all__ += ["ByteTokenizer", "CharTokenizer", "TextBatches", "read_text"]
