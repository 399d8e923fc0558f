"""Rebuild the training corpus from named Debian packages; the repository itself holds no corpus.

`python -m ninfer_core.demo.make.fetch_corpus OUT` downloads the packages with `apt-get download`, unpacks them into
`OUT/root` (nothing is installed) and writes one text file per source, one paragraph a line, duplicates dropped.
Only permissive and public-domain sources: see `NOTICE` beside the artifact.
"""

from __future__ import annotations

import argparse
import html.parser
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = (
    "python3.11-doc",
    "postgresql-doc-15",
    "rust-doc",
    "sword-text-web",
    "wordnet-base",
    # mod2imp and its libraries read the text module; they leave no trace in the corpus.
    "libsword-utils",
    "libsword1.9.0",
    "libsword-common",
    "libclucene-core1v5",
    "libclucene-contribs1v5",
)
# Words that must never be taught, matched as whole words over every line of natural text and over the word list.
BLOCKED = frozenset(
    """anal anus arse ass asses asshole bastard bastards bestiality bitch bitches bimbo bloody blowjob bollocks boob boobs
    breast breasts brothel bugger bum butt buttock buttocks castrate chink chinaman cock cocks concubine concubines coon copulate
    copulation crap cripple crotch cum cunt damn damned darkie darky dick dike dildo dyke ejaculate erection erotic erotica
    excrement faeces fag faggot fart feces fellatio foreskin fornicate fornication fuck gook genital genitals genitalia gypsy harlot harlots
    heroin hitler homo homosexual honky hooker horny incest intercourse jap jerk jew kike lesbian loins lust masturbate masturbation midget
    mongol mongoloid moron mulatto naked nazi negress negro negroid nigger niggers nipple nipples nude nympho orgasm orgy paki
    pederast penis piss pimp poof porn porno prick prostitute prostitutes prostitution pubic pussy queer rape raped raping rapist rectum redskin retard
    retarded scrotum semen sex sexed sexes sexual sexually sexy shit shitty slave slaves slavery slut sluts sodomy spastic sperm spic squaw
    stripper suicide swastika terrorist testicle testicles tit tits tranny transvestite turd urinate urine uterus vagina vibrator virgin
    virginity virgins vulva wanker wetback whore whoredom whores whoring wog wop yid genocide holocaust lynch murder murderer torture
    cocaine opium marijuana hashish""".split()
)
_WORD = re.compile(r"[a-z]+")
_SKIP = {"script", "style", "nav", "head", "footer", "svg", "button"}
_BREAK = {"p", "li", "dt", "dd", "div", "h1", "h2", "h3", "h4", "h5", "h6", "tr", "br", "td", "th"}


class _Text(html.parser.HTMLParser):
    """Collects paragraphs of an HTML page; preformatted blocks keep their line breaks as one paragraph."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._now: list[str] = []
        self._skip = 0
        self._pre = 0

    def _close(self) -> None:
        text = "".join(self._now)
        self._now = []
        text = text.strip("\n") if self._pre else " ".join(text.split())
        if text.strip():
            self.blocks.append(text.replace("\n", "\x01"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIP:
            self._skip += 1
        elif tag == "pre":
            self._close()
            self._pre += 1
        elif tag in _BREAK and not self._pre:
            self._close()

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIP:
            self._skip = max(0, self._skip - 1)
        elif tag == "pre" and self._pre:
            self._close()
            self._pre -= 1
        elif tag in _BREAK and not self._pre:
            self._close()

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self._now.append(data)


def html_paragraphs(paths: Iterable[Path]) -> Iterator[str]:
    """Paragraphs of HTML pages in reading order; a line break inside one is the byte 1."""
    for path in sorted(paths):
        parser = _Text()
        parser.feed(path.read_text(encoding="utf-8", errors="replace"))
        parser.close()
        yield from (block.replace("¶", "").rstrip() for block in parser.blocks)


def scripture(root: Path) -> Iterator[str]:
    """Verses of the public-domain text module joined to paragraphs of about five."""
    env = dict(os.environ, SWORD_PATH=str(root / "usr/share/sword"))
    env["LD_LIBRARY_PATH"] = str(root / "usr/lib/x86_64-linux-gnu")
    out = subprocess.run(
        [root / "usr/bin/mod2imp", "engWEB2015eb", "-s"], env=env, check=True, capture_output=True
    ).stdout.decode("utf-8", "replace")
    verses: list[str] = []
    for part in re.split(r"^\$\$\$.*$", out, flags=re.M):
        text = " ".join(re.sub(r"<[^>]+>", " ", part).split())
        if text:
            verses.append(text)
        if len(verses) == 5:
            yield " ".join(verses)
            verses = []
    if verses:
        yield " ".join(verses)


def glosses(root: Path) -> Iterator[str]:
    """Dictionary entries: words, part of speech and gloss."""
    for part in ("noun", "verb", "adj", "adv"):
        for line in (root / f"usr/share/wordnet/data.{part}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            head, gloss = line.split("|", 1)
            fields = head.split()
            count = int(fields[3], 16)
            words = [re.sub(r"\(.*\)", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * count : 2]]
            yield f"{', '.join(words)} ({part}): {gloss.strip()}"


def sources(paths: Iterable[Path]) -> Iterator[str]:
    """Blocks of source files, split at top-level definitions."""
    for path in sorted(paths):
        for block in re.split(r"\n\n\n+(?=\S)", path.read_text(encoding="utf-8", errors="replace")):
            yield block.strip("\n").replace("\n", "\x01")


def clean(blocks: Iterable[str], least: int = 40, most: int = 4000) -> Iterator[str]:
    """Drop short blocks, exact duplicates and every block that holds a blocked word; cut very long ones."""
    seen: set[int] = set()
    for block in blocks:
        block = block[:most].replace("\t", "    ").replace("\r", "")
        key = hash(block)
        if len(block) < least or key in seen or BLOCKED.intersection(_WORD.findall(block.lower())):
            continue
        seen.add(key)
        yield block


def common_words(root: Path, least: int = 1) -> list[str]:
    """Lower-case words of three to nine letters that occur in the sense-tagged texts, most frequent first."""
    counts: dict[str, int] = {}
    for line in (root / "usr/share/wordnet/cntlist.rev").read_text(encoding="latin-1").splitlines():
        sense, _, tally = line.split()
        word = sense.split("%")[0]
        if re.fullmatch(r"[a-z]{3,9}", word) and word not in BLOCKED:
            counts[word] = counts.get(word, 0) + int(tally)
    return sorted((w for w, n in counts.items() if n >= least), key=lambda w: (-counts[w], w))


def names(root: Path) -> dict[str, list[str]]:
    """English names of countries, languages, months and days with their German, French and Chinese forms (CLDR)."""
    sys.path.insert(0, str(root))
    from babel import Locale  # unpacked beside the packages, never installed

    table: dict[str, list[str]] = {}
    local = [Locale.parse(code) for code in ("en", "de", "fr", "zh")]
    views = [
        lambda loc: {k: v for k, v in loc.territories.items() if len(k) == 2 and k.isalpha()},
        lambda loc: {k: v for k, v in loc.languages.items() if len(k) == 2},
        lambda loc: loc.months["stand-alone"]["wide"],
        lambda loc: loc.days["stand-alone"]["wide"],
    ]
    for view in views:
        english, *others = (view(loc) for loc in local)
        for key, name in english.items():
            if all(key in other for other in others) and "(" not in name and len(name) < 24:
                table[name] = [other[key] for other in others]
    return table


def download(folder: Path) -> Path:
    """Fetch and unpack the packages below `folder`; returns the unpacked root."""
    packages, root = folder / "packages", folder / "root"
    packages.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=packages, check=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", packages, "babel"], check=True)
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    with zipfile.ZipFile(next(packages.glob("babel-*.whl"))) as wheel:
        wheel.extractall(root)
    return root


def build(root: Path, out: Path) -> dict[str, int]:
    """Write one text file per source into `out`; returns characters per source."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    skip = {
        "test",
        "tests",
        "idlelib",
        "encodings",
        "site-packages",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "__pycache__",
    }
    code = [p for p in stdlib.rglob("*.py") if not skip.intersection(p.relative_to(stdlib).parts)]
    rust = root / "usr/share/doc/rust-doc/html"
    streams: dict[str, Iterable[str]] = {
        "pydoc": html_paragraphs((root / "usr/share/doc/python3.11/html").rglob("*.html")),
        "pylib": sources(code),
        "postgres": html_paragraphs((root / "usr/share/doc/postgresql-doc-15/html").glob("*.html")),
        "rust": html_paragraphs([*(rust / "book").glob("*.html"), *(rust / "reference").glob("*.html")]),
        "web": scripture(root),
        "wordnet": glosses(root),
    }
    out.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for name, blocks in streams.items():
        lines = list(clean(blocks))
        (out / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
        sizes[name] = sum(map(len, lines))
    (out / "names.json").write_text(json.dumps(names(root), ensure_ascii=False), encoding="utf-8")
    (out / "words.txt").write_text("\n".join(common_words(root)), encoding="utf-8")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", type=Path, help="packages already unpacked here: skip the download")
    args = parser.parse_args()
    root = args.root or download(args.out)
    for name, size in build(root, args.out / "text").items():
        print(f"{name:10} {size / 1e6:6.2f} M characters")


if __name__ == "__main__":
    main()
