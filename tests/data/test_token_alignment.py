"""Spans of two tokenizers: their texts are equal, they have no common boundary inside, and log-probs add up."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from verl_mg.data.token_alignment import aligned_spans, retokenized, token_ends
from verl_mg.errors import UserError

TEXTS = [
    *("straw berry pie, straws and berries", "naïve café 北京欢迎你 🍓🍰"),
    *("a  b\n\tc d", "12345+67=80 (right)", "ééé"),
]
CORPUS = [*TEXTS, "the berry of the café is naïve", "straw", "pie 北京"] * 3


def bpe(size: int) -> PreTrainedTokenizerFast:
    """Of bytes, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """Of words with spaces in front, as SentencePiece's, with bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {"bytes": bpe(256), "short": bpe(275), "long": bpe(360), "words": metaspace()}


def cut_at_random(text: str, tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> list[int]:
    """Tokens of pieces of the text, which are not those of the whole."""
    tokens, start = [], 0
    while start < len(text):
        stop = start + chance.randint(1, 4)
        tokens += tokenizer(text[start:stop], add_special_tokens=False)["input_ids"]
        start = stop
    return tokens


@pytest.mark.parametrize("student", ["bytes", "short", "long", "words"])
@pytest.mark.parametrize("teacher", ["bytes", "short", "long", "words"])
def test_spans_of_two_tokenizers_have_the_same_text(tokenizers, student, teacher):
    ours, theirs, chance = tokenizers[student], tokenizers[teacher], random.Random(0)
    for text in TEXTS:
        for tokens in (ours(text, add_special_tokens=False)["input_ids"], cut_at_random(text, ours, chance)):
            decoded, ends = token_ends(tokens, ours)
            assert decoded == text == ours.decode(tokens)
            others, places = retokenized(text, theirs, "teachers.t.tokenizer")
            first, second = aligned_spans(ends, places, len(text))
            assert len(first) == len(tokens) and len(second) == len(others)
            assert sorted(set(first)) == sorted(set(second)) == list(range(first[-1] + 1))
            assert first == sorted(first) and second == sorted(second)
            pieces = [
                [tokenizer.decode([token for token, at in zip(side, spans, strict=True) if at <= span])
                 for span in range(first[-1] + 1)]
                for tokenizer, side, spans in ((ours, tokens, first), (theirs, others, second))
            ]  # fmt: skip
            assert pieces[0] == pieces[1]
            if student == teacher and tokens == others:
                whole = [end is not None for end in ends]
                assert first[-1] + 1 == sum(whole)  # as fine as characters allow


def test_spans_are_the_finest_ones(tokenizers):
    # straw|aw..: boundaries of the student after 3, 5, 10, 14 characters; of the teacher after 5, 8, 10, 14.
    first, second = aligned_spans([3, 5, 10, 14], [(0, 5), (5, 8), (8, 10), (11, 14)], 14)
    assert (first, second) == ([0, 0, 1, 2], [0, 1, 1, 2])


def test_tokenizer_without_places_is_an_error():
    with pytest.raises(UserError, match=r"t.tokenizer: the tokenizer does not report places .* tokenizer.json"):
        retokenized("text", ByT5Tokenizer(), "teachers.t.tokenizer")
