"""The demo's tokenizer: byte-level BPE under the Qwen split pattern, with merges that cut a word the same way everywhere.

The Qwen pattern glues one preceding mark or space to a word (`"name`, `=name`, ` name`), so plain BPE cuts a name
differently in the tools block than in the call that must copy it. Here the merges are trained on text in which letters
never join a mark or a space; "space + word" merges follow for the most frequent everyday words only. At run time the
pattern is the unchanged one, so the file is an ordinary fast tokenizer.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from ...frontend.template import ChatTemplate
from .tasks import Generator

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters alone; a run of marks alone; runs of spaces may join (indented code), a single space joins nothing.
TRAIN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\p{L}\p{M}]+|\p{N}|[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>",
    "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
# Spelled like specials, but kept by "skip special tokens": tool and think marks are text of the answer.
PLAIN = frozenset(SPECIAL[14:26])
ADDRESSABLE = 6100
ROWS = 6144
_WORD = re.compile(r" ([^\W\d_]+)")


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _splitter(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level()])


def train(texts: list[str], twins: int, avoid: Iterable[str] = ()) -> Tokenizer:
    """A tokenizer of `ADDRESSABLE` ids. `twins` words get a form with a leading space, never those in `avoid`."""
    bare = Tokenizer(BPE())
    bare.normalizer = normalizers.NFC()
    bare.pre_tokenizer = _splitter(TRAIN_PATTERN)
    size = ADDRESSABLE - len(SPECIAL) - twins
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bare.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    data = json.loads(bare.to_str())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    skip = set(avoid)
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(_WORD.findall(text))
    added = 0
    for word, _ in counts.most_common():
        piece = _byte_level().pre_tokenize_str(word)[0][0]
        if word in skip or piece not in vocab or "Ġ" + piece in vocab:
            continue
        vocab["Ġ" + piece] = len(vocab)
        merges.append(["Ġ", piece])
        added += 1
        if added == twins:
            break
    data["pre_tokenizer"], data["added_tokens"] = None, []
    final = Tokenizer.from_str(json.dumps(data))
    final.pre_tokenizer = _splitter(PATTERN)
    final.decoder = decoders.ByteLevel()
    # Same order as in the real tokenizer; the last seven live in `added_tokens_decoder` only, as there.
    final.add_tokens([AddedToken(text, special=text not in PLAIN, normalized=False) for text in SPECIAL[:26]])
    return final


def token_id(text: str) -> int:
    """Id of a special token."""
    return ADDRESSABLE - len(SPECIAL) + SPECIAL.index(text)


def added_tokens(first: int) -> dict[str, dict[str, Any]]:
    """`added_tokens_decoder`: every special by id, the ones after `</think>` included."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {str(first + i): {"content": text, **flags, "special": text not in PLAIN} for i, text in enumerate(SPECIAL)}


def write(tokenizer: Tokenizer, out: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    out.mkdir(parents=True, exist_ok=True)
    first = token_id(SPECIAL[0])
    if tokenizer.token_to_id(SPECIAL[0]) != first:
        raise ValueError(
            f"{SPECIAL[0]} has id {tokenizer.token_to_id(SPECIAL[0])}; {first} is expected: give more text"
        )
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added_tokens(first),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def sample(text: Path, template: ChatTemplate, seed: int = 1) -> tuple[list[str], set[str]]:
    """Training text: paragraphs of every source and rendered tasks without their specials; and the words to avoid."""
    rng = random.Random(seed)
    texts: list[str] = []
    for name, count in (
        ("pydoc", 9000),
        ("pylib", 700),
        ("postgres", 5000),
        ("rust", 2000),
        ("web", 3500),
        ("wordnet", 9000),
    ):
        lines = (text / f"{name}.txt").read_text(encoding="utf-8").split("\n")
        texts += [line.replace("\x01", "\n") for line in rng.sample(lines, min(count, len(lines)))]
    generator = Generator(text, template, seed)
    marks = re.compile("|".join(map(re.escape, SPECIAL)))
    seen: set[int] = set()
    for _ in range(12000):
        for part in marks.split("".join(generator.render(generator.task()))):
            if hash(part) not in seen:
                seen.add(hash(part))
                texts.append(part)
    return texts, set(generator.draw.pools.words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="the folder that fetch_corpus wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--twins", type=int, default=450)
    args = parser.parse_args()
    template = ChatTemplate((Path(__file__).parents[1] / "chat_template.jinja").read_text(encoding="utf-8"))
    texts, avoid = sample(args.text, template)
    write(train(texts, args.twins, avoid), args.out)


if __name__ == "__main__":
    main()
