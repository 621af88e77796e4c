"""Text to ids and back, against transformers on the same file."""

import random
import re

import pytest

ALPHABETS = [
    "abcdefghij ABC.,;:!?'\"-\n\t", "0123456789 .,%$", "äöüßéèñçøåþæ œ", "日本語中文한국어 ", "абвгд ежзик",
    "αβγδε ζηθ", "🙂👩🏽💻🏳🌈🇫🇷🎉\u200d\ufe0f ", "{}[]()<>=+-*/\\|&^%#@~`_ \n    def if",
    "\u200b\u00a0\u2028\ufeff\x00\x7f\r ", "مرحبا بالعالم ", "हिन्दी ",
]  # fmt: skip
PIECES = ["don't", "we'll", " the", "https://example.org/a?b=1&c=2", "<|im_end|>", "<|endoftext|>", "x = 3.14e-10\n"]
# transformers drops the file's own rule that a digit stands alone; where two or more blanks lead to a digit it
# therefore keeps the last blank apart. llama.cpp and the model's training follow the rule, and so do we.
BLANKS_BEFORE_DIGIT = re.compile(r"\s\s\d")


def strings(count: int) -> list[str]:
    chance = random.Random(20)
    made = ["", " ", "\n\n", "Hello world", "a" * 300, " " * 50]
    while len(made) < count:
        parts = [
            chance.choice(PIECES)
            if chance.random() < 0.2
            else "".join(chance.choices(alphabet, k=chance.randint(1, 12)))
            for alphabet in chance.choices(ALPHABETS, k=chance.randint(1, 5))
        ]
        text = "".join(parts)
        if text not in made and not BLANKS_BEFORE_DIGIT.search(text):
            made.append(text)
    return made


def test_a_thousand_strings_equal_transformers_and_round_trip(pretrained, reference_tokenizer):
    _, tokenizer = pretrained
    texts = strings(1000)
    assert len(set(texts)) == 1000
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference_tokenizer(text, add_special_tokens=False)["input_ids"], text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("text", "pieces"), [("a  1", ["a", "  ", "1"]), (" 42", [" ", "4", "2"])])
def test_a_digit_stands_alone(text, pieces, pretrained):
    _, tokenizer = pretrained
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == pieces


def test_the_chat_template_is_the_file_s(pretrained, reference_tokenizer):
    _, tokenizer = pretrained
    expected = reference_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi!"}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(tokenizer.chat("Hi!")) == expected
