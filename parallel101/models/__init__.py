"""Models that know nothing of parallelism, and the text they learn: what the trainers are tried on.

The same seed gives the same weights on every rank and however a model is split; the same step gives
the same batch.
"""

from parallel101.models.experts import Experts, MixtureOfExperts
from parallel101.models.gpt import GPT, GPTConfig, balanced_next_token_loss, next_token_loss
from parallel101.models.llama import Llama, LlamaConfig
from parallel101.models.mlp import MLP
from parallel101.models.text import ByteTokenizer, CharTokenizer, TextBatches, read_text

__all__ = ["GPT", "GPT_PLAN", "MLP", "GPTConfig", "next_token_loss"]
__all__ += ["LLAMA_PLAN", "Llama", "LlamaConfig"]
__all__ += ["Experts", "MixtureOfExperts", "balanced_next_token_loss"]
__all__ += ["ByteTokenizer", "CharTokenizer", "TextBatches", "read_text"]

# Plans that cut the two for tensor parallelism: module → style, where `*` is the number of a block.
# plan="auto" finds the same ones. With another loss than p101.vocabulary_cross_entropy, leave out
# the embedding and the head.
GPT_PLAN = {
    "embedding.token": "vocabulary",  # each rank has some of the rows
    "blocks.*.attention.query": "column",  # each rank has some of the heads
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.out": "row",  # one all-reduce
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",  # another all-reduce
    "head": "vocabulary",  # each rank has the logits of some tokens
}
LLAMA_PLAN = {
    **GPT_PLAN,  # key and value have kv_heads heads, of which each rank has some
    "blocks.*.mlp.gate": "column",
}
