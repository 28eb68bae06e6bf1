"""Models that know nothing of parallelism, and the text they learn: what the trainers are tried on.

The same seed gives the same weights on every rank and however a model is split; the same step gives
the same batch.
"""

from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.models.plans import GPT_PLAN
from parallel101.models.text import ByteTokenizer, CharTokenizer, TextBatches, read_text

__all__ = ["GPT", "GPT_PLAN", "MLP", "GPTConfig", "next_token_loss"]
__all__ += ["ByteTokenizer", "CharTokenizer", "TextBatches", "read_text"]
