"""Text to token ids and back, from the vocabulary and merges that the model file carries."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CONTROL = 3  # GGUF's type of a token that stands for no text, such as <|im_end|>


class Tokenizer:
    """SmolLM2's byte-level BPE: every text has an encoding, and decoding it gives the text back."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        self._bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        # "smollm", the kind the file names: digits stand alone, the rest splits as GPT-2's did.
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        self._bpe.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL])
        self.bos_id: int = fields["tokenizer.ggml.bos_token_id"]
        self.eos_id: int = fields["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> list[int]:
        """Token ids; the text of a control token, such as <|im_end|>, becomes that token."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens included."""
        return self._bpe.decode(ids, skip_special_tokens=False)

    def chat(self, question: str) -> list[int]:
        """Token ids of a one-question conversation, ready for the model to answer."""
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        turns = [("system", system), ("user", question)]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(f"{text}<|im_start|>assistant\n")
