"""Text to learn from that every machine has: what Python's own `help("…")` says, cut into batches.

text = read_text(); tokenizer = CharTokenizer(text)
batches = TextBatches(tokenizer.encode(text), batch=32, context=64)
batches(7)        inputs and targets of step 7, the same on every rank, in every run, on any layout
"""

from __future__ import annotations

from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]  # of the standard library

import torch
from torch import Tensor

from parallel101.models.seeding import generator_of


def read_text() -> str:
    """Return about 460 thousand characters of English about Python.

    They differ a little between versions of Python.
    """
    return "\n\n".join(topics[name] for name in sorted(topics))


class CharTokenizer:
    """A number for each character that the text has, in their order."""

    def __init__(self, text: str):
        self.characters = sorted(set(text))
        self.numbers = {character: number for number, character in enumerate(self.characters)}
        self.vocabulary = len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Return (length,) int64.

        Raises ValueError for a character that the tokenizer's text did not have.
        """
        unknown = sorted(set(text) - self.numbers.keys())
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is not among the {self.vocabulary} characters of the text "
                "that this tokenizer was made for"
            )
        numbers = [self.numbers[character] for character in text]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def decode(self, numbers: Tensor) -> str:
        """Return the text of these numbers."""
        return "".join(self.characters[number] for number in numbers.tolist())


class ByteTokenizer:
    """The bytes of UTF-8: 256 numbers for any text."""

    vocabulary = 256

    def encode(self, text: str) -> Tensor:
        """Return (length,) int64."""
        return torch.tensor(list(text.encode()), dtype=torch.int64, device="cpu")

    def decode(self, numbers: Tensor) -> str:
        """Return the text. Bytes that aren't a whole character become �."""
        return bytes(numbers.tolist()).decode(errors="replace")


class TextBatches:
    """A function of the step that returns (inputs, targets), both (batch, context).

    Targets are the inputs moved on by one token.

    Args:
        tokens: (length,) of the whole text, more than `context` of them.
        batch: samples in a whole batch.
        context: tokens in a sample.
        seed: of the places at which samples start.
    """

    def __init__(self, tokens: Tensor, batch: int, context: int, seed: int = 0):
        if batch < 1 or context < 1 or len(tokens) <= context:
            raise ValueError(
                f"TextBatches(batch={batch}, context={context}) of {len(tokens)} tokens: expected "
                "1 or more of each, and more tokens than a sample has"
            )
        self.tokens, self.batch, self.context, self.seed = tokens, batch, context, seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        generator = generator_of(self.seed, step)
        starts = torch.randint(
            len(self.tokens) - self.context, (self.batch, 1), generator=generator, device="cpu"
        )
        places = starts + torch.arange(self.context, device="cpu")
        return self.tokens[places], self.tokens[places + 1]
