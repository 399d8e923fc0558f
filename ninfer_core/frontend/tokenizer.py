"""The checkpoint's byte-level BPE tokenizer: text to ids, ids to exact bytes, special ids by name."""

from __future__ import annotations

import json
import re
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ..errors import ContentError

PROBE = "The 1st caf\u00e9,\n  \u4f60\u597d \U0001f600!\t"
"""Text that every tokenizer must be able to encode."""

CACHE_CHARACTERS = 8_000_000
"""Text between special tokens that one tokenizer keeps encoded, in characters."""


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary, as stand-in -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    odd = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(odd)}


class Tokenizer:
    """A `tokenizer.json` with the added tokens of `tokenizer_config.json` merged in.

    Added tokens (special or not) are recognised in text; everything between two of them is encoded on its own, which
    is what the file format defines, and is remembered, so that a growing conversation encodes only its new turns.
    One object may be used from several threads.

    Args:
        tokenizer_json: bytes of `tokenizer.json` (byte-level BPE).
        tokenizer_config: bytes of `tokenizer_config.json`; entries of `added_tokens_decoder` that the first file
            lacks are appended.

    Raises:
        ContentError: not a byte-level BPE, or the two files disagree about an id.
    """

    def __init__(self, tokenizer_json: bytes, tokenizer_config: bytes | None = None) -> None:
        try:
            self._full = tokenizers.Tokenizer.from_str(tokenizer_json.decode("utf-8"))
            config = json.loads(tokenizer_config) if tokenizer_config else {}
        except BaseException as error:  # the library raises bare Exception, and a panic is not even that
            raise _unreadable(error) from error
        if not isinstance(config, dict):
            raise ContentError(f"tokenizer_config.json holds a {type(config).__name__}; it must be an object")
        try:
            self._append(config.get("added_tokens_decoder") or {})
        except ContentError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ContentError(
                f"tokenizer_config.json: added_tokens_decoder is damaged ({type(error).__name__}: {error})"
            ) from error
        self._alphabet = byte_alphabet()
        self.addressable = self._count()
        added = self._full.get_added_tokens_decoder()
        for token in added.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise ContentError(
                    f"tokenizer.json: added token {token.content!r} has matching flags; none are supported"
                )
        self.special: Mapping[str, int] = {token.content: i for i, token in sorted(added.items())}
        """Every added token, flagged special or not: text -> id."""
        self._added_bytes = {i: text.encode() for text, i in self.special.items()}
        spellings = sorted(self.special, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        """Finds added tokens in text."""
        # The same model without added tokens; the model object itself is shared.
        self._plain = tokenizers.Tokenizer(self._full.model)
        if self._full.normalizer is not None:
            self._plain.normalizer = self._full.normalizer
        if self._full.pre_tokenizer is not None:
            self._plain.pre_tokenizer = self._full.pre_tokenizer
        self._bytes: dict[int, bytes] = {}
        self._cache: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()
        for probed in self._encode_plain(PROBE):
            if probed >= self.addressable:
                raise ContentError(f"tokenizer.json encodes ordinary text to id {probed} of {self.addressable}")
        plain_form = type(self._full.normalizer).__name__ in ("NoneType", "NFC")
        spelled = max((len(text) for text in self._full.get_vocab(with_added_tokens=False)), default=1)
        self._longest = max([spelled, *map(len, self._added_bytes.values())]) if plain_form else 0

    def _append(self, decoder: Mapping[str, Mapping[str, Any]]) -> None:
        """Append the added tokens that only the configuration defines, in order of id."""
        for i, entry in sorted((int(key), value) for key, value in decoder.items()):
            content = str(entry["content"])
            have = self._full.id_to_token(i)
            if have == content:
                continue
            if have is not None or self._full.token_to_id(content) is not None:
                raise ContentError(
                    f"tokenizer_config.json says id {i} is {content!r}; tokenizer.json has {have!r} there "
                    f"and {content!r} at {self._full.token_to_id(content)}. Use the two files of one checkpoint."
                )
            token = tokenizers.AddedToken(content, special=bool(entry.get("special")), normalized=False)
            self._full.add_tokens([token])
            if self._full.token_to_id(content) != i:
                raise ContentError(
                    f"tokenizer_config.json: {content!r} wants id {i}, but the ids before it are not all given"
                )

    def _count(self) -> int:
        """The number of ids that have text; checks that they are 0..n-1 and that every byte can be written."""
        count = self._full.get_vocab_size(with_added_tokens=True)
        if any(self._full.id_to_token(i) is None for i in range(count)):
            missing = next(i for i in range(count) if self._full.id_to_token(i) is None)
            raise ContentError(f"tokenizer.json: {count} tokens, but id {missing} has none; ids must be 0..{count - 1}")
        lacking = [byte for letter, byte in self._alphabet.items() if self._full.token_to_id(letter) is None]
        if lacking:
            raise ContentError(f"tokenizer.json is not a byte-level BPE: no token for byte 0x{lacking[0]:02x}")
        return count

    def id(self, text: str) -> int:
        """The id of an added token by its text, e.g. `<|im_end|>`.

        Raises:
            ContentError: this tokenizer has no such token.
        """
        if text not in self.special:
            raise ContentError(f"the tokenizer has no token {text!r}; the engine needs it")
        return self.special[text]

    def encode(self, text: str, allow_special: bool = True, *, broken_by: str = "") -> list[int]:
        """Token ids of `text`, after the file's own normalisation (NFC).

        Args:
            text: any string; lone surrogates become U+FFFD.
            allow_special: False encodes the spelling of added tokens as ordinary text.
            broken_by: a character to be removed after added tokens have been looked for, so that a spelling with this
                character inside stays ordinary text.
        """
        text = replace_surrogates(text)
        if not allow_special:
            return list(self._encode_plain(text.replace(broken_by, "") if broken_by else text))
        ids: list[int] = []
        end = 0
        for match in self.pattern.finditer(text):
            if match.start() > end:
                ids += self._segment(text[end : match.start()], broken_by)
            ids.append(self.special[match.group()])
            end = match.end()
        if end < len(text):
            ids += self._segment(text[end:], broken_by)
        return ids

    def least(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without encoding it: its bytes over the longest token."""
        if not self._longest:
            return 0
        size = len(unicodedata.normalize("NFC", replace_surrogates(text)).encode())
        return -(-size // self._longest)

    def _segment(self, text: str, broken_by: str) -> Sequence[int]:
        return self._encode_plain(text.replace(broken_by, "") if broken_by else text)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        with self._lock:
            found = self._cache.get(text)
            if found is not None:
                self._cache.move_to_end(text)
                return found
        try:
            # Only the library's calls for several texts let other threads run meanwhile, the engine's among them.
            (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
            ids = tuple(encoded.ids)
        except BaseException as error:
            raise _unreadable(error, f"fails on a text of {len(text):,} characters") from error
        with self._lock:
            if text not in self._cache and len(text) <= CACHE_CHARACTERS:
                self._cache[text] = ids
                self._cached += len(text)
                while self._cached > CACHE_CHARACTERS:
                    self._cached -= len(self._cache.popitem(last=False)[0])
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of a token; nothing for an id >= `addressable` (rows of the matrices without text).

        Raises:
            ValueError: a negative id.
        """
        found = self._bytes.get(token)
        if found is None:
            if token < 0:
                raise ValueError(f"token id {token} is negative; ids are 0..{self.addressable - 1}")
            found = self._added_bytes.get(token)
            if found is None:
                text = (self._full.id_to_token(token) if token < self.addressable else None) or ""
                found = bytes(self._alphabet[letter] for letter in text)
            self._bytes[token] = found
        return found

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of tokens; malformed UTF-8 becomes U+FFFD. `skip_special` leaves out every added token."""
        if skip_special:
            ids = [i for i in ids if i not in self._added_bytes]
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def _unreadable(error: BaseException, what: str = "or tokenizer_config.json cannot be read") -> BaseException:
    """What to raise for a fault of the tokenizer library, whose panics derive from BaseException."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        return error
    return ContentError(f"tokenizer.json {what}: {error}")


_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """`text` with lone surrogates, which have no UTF-8 form, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text
