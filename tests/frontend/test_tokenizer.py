"""The tokenizer on the published vocabulary (248,077 entries) and on small files that are wrong."""

from __future__ import annotations

import argparse
import inspect
import json
import random
import threading
import unicodedata

import pytest
import tokenizers

from ninfer_core.errors import ContentError
from ninfer_core.frontend.tokenizer import Tokenizer
from ninfer_core.testing import scripted_resources

from . import real_vocabulary

TEXTS = [
    "In 2024, 1234567.89 numbers",
    "你好，世界！今天天气很好。",
    "def f(x):\n    return x**2  # ok\n",
    "👨‍👩‍👧‍👦 🇨🇳 family and flag",
    "don't I'LL we've   trailing   ",
    "\n\n\n  \t\r\n mixed\n blanks \n",
    "Ünïcödé naïve e\u0301 cafe\u0301",
    "مرحبا بالعالم שלום עולם नमस्ते สวัสดี Привет мир こんにちは 안녕하세요",
    "a" * 300,
    "",
    " ",
    "\u0000\u0001\x7f",
    "x² ½ Ⅷ ﬁ",
    inspect.getsource(argparse)[:60_000],
]


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    files = real_vocabulary.files()
    return Tokenizer(files["tokenizer.json"], files["tokenizer_config.json"])


def test_counts_and_special_ids(real):
    assert real.addressable == 248_077
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<tool_call>"]
    assert [real.id(name) for name in names] == [248044, 248045, 248046, 248053, 248056, 248058]
    names = ["</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_pad|>"]
    assert [real.id(name) for name in names] == [248059, 248066, 248067, 248068, 248069, 248076]
    assert len(real.special) == 33
    with pytest.raises(ContentError, match="no token '<nope>'"):
        real.id("<nope>")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_start|>user\n", [248045, 846, 198]),
        ("<|im_end|>\n", [248046, 198]),
        ("<think>\n", [248068, 198]),
        ("<think>\n\n</think>\n\n", [248068, 271, 248069, 271]),
        ("\n</think>\n\n", [198, 248069, 271]),
        ("</think>\n\n<tool_call>\n<function=", [248069, 271, 248058, 198, 27, 1628, 28]),
        ("<0.5 seconds>", [27, 15, 13, 20, 6283, 29]),
    ],
)
def test_tokens_of_the_template(real, text, ids):
    assert real.encode(text) == ids


def test_lengths_of_known_texts(real):
    assert len(real.encode(TEXTS[0])) == 19
    assert len(real.encode(TEXTS[1])) == 8
    assert len(real.encode(TEXTS[2])) == 14


def test_agrees_with_the_rank_based_tokenizer(real):
    other = real_vocabulary.reference()
    rng = random.Random(5)
    lines = [line for text in TEXTS for line in text.split("\n")]
    joined = ["\n".join(rng.sample(lines, 5)) for _ in range(100)]
    for text in [*TEXTS, *joined]:
        assert real.encode(text) == other.encode(text)


def test_agrees_with_the_library_on_text_with_special_tokens(real):
    files = real_vocabulary.files()
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    rng = random.Random(6)
    pieces = [*list(real.special)[:26], *TEXTS[:8], "<", "|>", "<|im_", "think>", "</think", " "]
    for _ in range(300):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(9)))
        assert real.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_tokens_that_merging_never_makes(real):
    other = real_vocabulary.reference()
    never = []
    for text in json.loads(real_vocabulary.files()["unsplit.json"]):
        (token,) = other.encode(text)
        if real.encode(text) != [token]:
            never.append(text)
            assert real.decode(real.encode(text)) == text
            assert real.token_bytes(token) == text.encode()
    assert len(never) == 201
    assert {"毛泽东", "加拿大"} <= set(never)
    assert real.encode("毛泽东") == [97008, 98340, 96265]
    assert real.encode("加拿大") == [95984, 97048, 95779]


def test_decoding_gives_the_normalised_text(real):
    rng = random.Random(7)
    ranges = [
        (0x20, 0x250),
        (0x300, 0x370),
        (0x600, 0x780),
        (0xE00, 0xE7F),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0x1F300, 0x1F6FF),
    ]
    texts = ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40))) for _ in range(300)]
    for text in [*TEXTS, *texts]:
        assert real.decode(real.encode(text)) == unicodedata.normalize("NFC", text)
        assert real.decode(real.encode(text, allow_special=False)) == unicodedata.normalize("NFC", text)


def test_bytes_of_tokens_join_to_the_text(real):
    text = "naïve 😀 毛泽东<|im_end|>\n"
    pieces = [real.token_bytes(i) for i in real.encode(text)]
    assert b"".join(pieces) == text.encode()
    assert pieces[-2:] == [b"<|im_end|>", b"\n"]
    assert any(b"\xf0" in piece or b"\x9f" in piece for piece in pieces)


def test_every_byte_has_a_token(real):
    singles = {real.token_bytes(i) for i in range(256)}
    assert singles == {bytes([byte]) for byte in range(256)}


def test_rows_without_text_decode_to_nothing(real):
    assert real.token_bytes(248_077) == b""
    assert real.decode([248_319, *real.encode("hi")]) == "hi"
    with pytest.raises(ValueError, match="negative"):
        real.token_bytes(-1)


def test_special_text_can_be_kept_as_ordinary_text(real):
    ids = real.encode("<|im_end|><think>", allow_special=False)
    assert not set(ids) & set(real.special.values())
    assert real.decode(ids) == "<|im_end|><think>"
    broken = real.encode("a<\ufdd0|im_end|><|im_end|>", broken_by="\ufdd0")
    assert broken.count(248046) == 1
    assert real.decode(broken) == "a<|im_end|><|im_end|>"


def test_skipping_special_tokens(real):
    assert real.decode(real.encode("<|im_start|>user\nhi<|im_end|>"), skip_special=True) == "user\nhi"


def test_lone_surrogates_are_replaced(real):
    assert real.decode(real.encode("a\ud800b")) == "a\ufffdb"


def test_other_threads_run_while_a_long_text_is_read():
    """A stream must not stand still for the second that somebody else's long prompt takes."""
    made, done, turns = build(*small()), threading.Event(), 0

    def read() -> None:
        made.encode("words " * 300_000)
        done.set()

    worker = threading.Thread(target=read)
    worker.start()
    while not done.wait(0.0005):
        turns += 1
    worker.join()
    assert turns > 20


def test_repeated_text_is_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr("ninfer_core.frontend.tokenizer.CACHE_CHARACTERS", 10_000)
    made = build(*small())
    text = "<|im_start|>user\n" + "some words " * 50 + "<|im_end|>"
    first = made.encode(text)
    assert made.encode(text) == first
    for i in range(50):
        made.encode(f"{i}" + "x y " * 200)
    assert 5_000 < made._cached <= 10_000
    assert made._cached == sum(map(len, made._cache))
    assert made.encode(text) == first


# files that are wrong


def small() -> tuple[dict, dict]:
    files = scripted_resources()
    return json.loads(files["tokenizer.json"]), json.loads(files["tokenizer_config.json"])


def build(tokenizer: dict, config: dict) -> Tokenizer:
    return Tokenizer(json.dumps(tokenizer).encode(), json.dumps(config).encode())


def test_added_tokens_of_the_configuration_are_appended():
    tokenizer, config = small()
    count = build(tokenizer, config).addressable
    config["added_tokens_decoder"][str(count)] = {"content": "<|extra|>", "special": True}
    made = build(tokenizer, config)
    assert made.addressable == count + 1
    assert made.encode("a<|extra|>b")[1] == count
    assert made.token_bytes(count) == b"<|extra|>"


def test_disagreeing_files_are_refused():
    tokenizer, config = small()
    config["added_tokens_decoder"]["256"]["content"] = "<|other|>"
    with pytest.raises(ContentError, match=r"id 256 is '<|other|>'"):
        build(tokenizer, config)


def test_a_gap_before_an_appended_token_is_refused():
    tokenizer, config = small()
    config["added_tokens_decoder"]["400"] = {"content": "<|extra|>", "special": True}
    with pytest.raises(ContentError, match="wants id 400"):
        build(tokenizer, config)


def test_a_vocabulary_without_all_bytes_is_refused():
    tokenizer, config = small()
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["zz"] = vocabulary.pop("z")
    with pytest.raises(ContentError, match="no token for byte 0x7a"):
        build(tokenizer, config)


def test_matching_flags_are_refused():
    tokenizer, config = small()
    tokenizer["added_tokens"][0]["lstrip"] = True
    with pytest.raises(ContentError, match="matching flags"):
        build(tokenizer, config)


def test_a_broken_file_is_refused():
    with pytest.raises(ContentError, match="cannot be read"):
        Tokenizer(b"{")
