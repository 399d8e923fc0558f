"""Word pools and value generators of the synthetic tasks, with a tenth of all words held out for evaluation."""

from __future__ import annotations

import json
import random
import unicodedata
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .facts import PHRASES

FIRST = """Ada Adam Aisha Alan Alba Alice Amir Amy Ana Anders Andrea Anita Anton Aria Arthur Astrid Aya Ben Bella Boris Bruno Carla
Carlos Cecilia Chen Chloe Clara Claude Cora Daniel Daria David Diana Diego Dora Edgar Elena Eli Elif Ella Emil Emma Eric Esther Eva
Fatima Felix Fiona Florian Frank Freya Gabriel George Gina Greta Gustav Hana Hannah Hans Hector Heidi Helen Henry Hugo Ian Ida Ines
Ingrid Irene Iris Isaac Ivan Ivy Jack Jacob Jan Jana Jasper Javier Jonas Julia Kai Karen Karl Kate Kenji Kim Kira Lara Lars Laura
Lea Leo Liam Lily Lina Linda Lisa Louis Lucas Lucia Luna Maja Marco Maria Marta Martin Matteo Maya Mei Mia Miguel Mila Mina Mira
Mona Nadia Naomi Nico Nina Noah Nora Olaf Olga Oliver Omar Oscar Otto Pablo Paula Pedro Peter Petra Pia Priya Quinn Rafael Ravi
Rita Robin Rosa Ruben Ruth Sam Samir Sandra Sara Selma Simon Sofia Stefan Stella Sven Tara Theo Thomas Tim Tina Tom Uma Ursula
Vera Victor Viola Walter Wanda Willem Yara Yuki Yusuf Zoe Zora""".split()
LAST = """Abbot Adler Alves Baker Barros Becker Berg Blake Bond Brandt Brooks Burke Castro Chan Cole Costa Cruz Dahl Diaz Dunn Ellis
Fischer Flores Ford Fox Frost Garcia Gomez Grant Gray Hansen Hart Hayes Holm Hughes Ito Jensen Keller Khan Klein Kovac Lang Larsen
Lopez Lund Mann Marsh Mendez Meyer Moore Mori Nash Novak Olsen Ortiz Park Patel Perez Price Quist Reed Reyes Rossi Ryan Sato Silva
Singh Stone Suzuki Tanaka Torres Tran Turner Vega Voss Wagner Walsh Weber Wolf Wood Yang Young Zhang""".split()
CITY = """Accra Aleppo Algiers Amsterdam Ankara Antwerp Athens Atlanta Auckland Austin Baku Bangkok Barcelona Basel Beirut Belgrade Bergen
Berlin Bogota Bologna Bonn Boston Brasilia Bremen Brisbane Bristol Brussels Bucharest Budapest Cairo Calgary Canberra Caracas Cardiff
Casablanca Chicago Cologne Copenhagen Cordoba Cusco Dakar Dallas Damascus Delhi Denver Detroit Dhaka Dresden Dubai Dublin Durban
Edinburgh Florence Frankfurt Geneva Genoa Glasgow Granada Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kabul Karachi
Kiev Kigali Kingston Krakow Kyoto Lagos Leeds Leipzig Lima Lisbon Liverpool Ljubljana London Lucerne Lusaka Lyon Madrid Malaga Manila
Marseille Melbourne Memphis Miami Milan Minsk Montreal Moscow Mumbai Munich Nairobi Naples Nice Odessa Osaka Oslo Ottawa Oxford Palermo
Panama Paris Perth Pisa Porto Prague Quito Reykjavik Riga Rome Rotterdam Salzburg Santiago Seattle Seoul Seville Shanghai Singapore
Sofia Stockholm Sydney Taipei Tallinn Tampere Tokyo Toronto Toulouse Trieste Tunis Turin Utrecht Valencia Vancouver Venice Verona Vienna
Vilnius Warsaw Zagreb Zurich""".split()
COLOUR = "red green blue yellow orange purple black white pink brown grey".split()
LANGUAGE = "English German French Spanish Italian Chinese Japanese Korean Dutch Polish Turkish Arabic Hindi Greek Swedish".split()
MONTH = "January February March April May June July August September October November December".split()
DAY = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
JOB = """teacher doctor baker farmer pilot nurse painter writer engineer lawyer dentist gardener carpenter singer sailor chemist
cook driver editor tailor miner plumber florist librarian architect astronomer mechanic fisher""".split()
ANIMAL = """cat dog horse rabbit parrot turtle hamster goat sheep cow duck goose fox wolf bear owl frog mouse pony lizard snake
chicken pigeon squirrel hedgehog donkey""".split()
CURRENCY = "USD EUR GBP JPY CHF CNY INR SEK NOK PLN CAD AUD BRL KRW".split()
VERB = """get set find send create delete list update search start stop check open close read write add remove book order move copy
count show load save merge split sort filter play pause lock unlock rename attach fetch compute plan track""".split()


# Letters that a Latin name may carry, by their plain form; and scripts of which names are put together letter by letter.
ACCENTS = {
    "a": "àáâãäåāąă", "c": "çćč", "d": "ďđ", "e": "èéêëēęě", "g": "ğģ", "i": "ìíîïīį", "l": "łľļ", "n": "ñńňņ", "o": "òóôõöøő",
    "r": "řŕ", "s": "šśşß", "t": "ťţ", "u": "ùúûüūůű", "y": "ýÿ", "z": "žźż",
}  # fmt: skip
CHINESE, HIRAGANA, KATAKANA = (0x4E00, 0x9FA5), (0x3041, 0x3093), (0x30A1, 0x30F6)
HANGUL, CYRILLIC, GREEK = (0xAC00, 0xD7A3), (0x0430, 0x044F), (0x03B1, 0x03C9)
OTHERS = (
    (0x05D0, 0x05EA), (0x0621, 0x063A), (0x0905, 0x0928), (0x0E01, 0x0E2E), (0x10D0, 0x10F0), (0x0531, 0x0556), (0x1EA0, 0x1EF9), (0x2010, 0x2027),
    (0x20A0, 0x20BF), (0x2190, 0x21FF), (0xFF01, 0xFF5E), (0x1F300, 0x1F64F), (0x1F900, 0x1F9FF), (0x20000, 0x2A6D6),
)  # fmt: skip


def held_out(word: str) -> bool:
    """Whether a word belongs to the tenth that training never uses as a name or value."""
    return zlib.crc32(word.lower().encode()) % 10 == 0


def twins() -> tuple[str, ...]:
    """Words the tokenizer holds with a leading space too, the held-out tenth apart: they are copied from one form to the other."""
    path = Path(__file__).parents[1] / "artifact" / "tokenizer.json"
    vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    words = (token[1:] for token in vocabulary if token.startswith("Ġ") and token[1:] in vocabulary)
    return tuple(sorted(word for word in words if word.isascii() and word.isalpha() and not held_out(word)))


@dataclass
class Pools:
    """The words one split may use; `Pools.load` reads the common-word list, the name lists above are fixed."""

    words: list[str]
    first: list[str]
    last: list[str]
    city: list[str]
    test: bool
    chinese: str = ""
    twins: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path, test: bool = False, limit: int = 7000) -> Pools:
        """Read `words.txt` (most frequent first) and keep this split's share of every open list."""
        return cls.split(path.read_text(encoding="utf-8").split("\n")[60:limit], test)

    @classmethod
    def held_out(cls) -> Pools:
        """The evaluation split from the list beside this module: needs no corpus."""
        return cls.split((Path(__file__).parent / "held_out_words.txt").read_text(encoding="utf-8").split(), True)

    @classmethod
    def split(cls, words: list[str], test: bool) -> Pools:
        """This split's share of `words` and of the fixed lists."""

        def keep(pool: list[str]) -> list[str]:
            return [word for word in pool if held_out(word) == test]

        chinese = "".join(sorted({c for forms in PHRASES.values() for c in forms[2] if c > "一"}))
        short = [word for word in words if len(word) <= 9]
        return cls(keep(short), keep(FIRST), keep(LAST), keep(CITY), test, chinese, () if test else twins())


class Draw:
    """A seeded source of words and typed values."""

    def __init__(self, rng: random.Random, pools: Pools) -> None:
        self.rng = rng
        self.pools = pools

    def one(self, pool: Any) -> Any:
        """One item of a sequence."""
        return self.rng.choice(pool)

    def chance(self, p: float) -> bool:
        """True with probability `p`."""
        return self.rng.random() < p

    def word(self) -> str:
        """A common word of this split; in training at times a blend, copied piece by piece, or a word of two forms."""
        word, pick = self.rng.choice(self.pools.words), self.rng.random()
        if self.pools.test or pick > 0.25:
            return word
        return self.blend(word) if pick < 0.15 else self.rng.choice(self.pools.twins)

    def blend(self, word: str) -> str:
        """The beginning of a word and the end of another: spelled like a word, and in no list."""
        other = self.rng.choice(self.pools.words)
        made = word[: self.rng.randint(1, len(word))] + other[self.rng.randint(0, len(other) - 1) :]
        return word if held_out(made) or len(made) > 12 else made

    def words(self, count: int) -> list[str]:
        """`count` different words."""
        made: dict[str, None] = {}
        while len(made) < count:
            made[self.word()] = None
        return list(made)

    def letters(self, script: tuple[int, int], low: int, high: int) -> str:
        """Some letters of a script, any of them."""
        return "".join(chr(self.rng.randint(*script)) for _ in range(self.rng.randint(low, high)))

    def foreign(self) -> str:
        """A name in another script or with accents, put together from single letters: what has to be copied exactly."""
        pick = self.rng.random()
        if pick < 0.3:
            text = self.letters(CHINESE, 2, 6)
        elif pick < 0.4:
            text = "".join(self.rng.choice(self.pools.chinese) for _ in range(self.rng.randint(2, 6)))
        elif pick < 0.6:
            text = self.letters(self.one((HIRAGANA, KATAKANA)), 2, 6) + self.one(
                ("", "", "ー", self.letters(CHINESE, 1, 3))
            )
            text = self.letters(CHINESE, 1, 3) + text if self.chance(0.3) else text
        elif pick < 0.67:
            text = self.letters(HANGUL, 2, 4)
        elif pick < 0.74:
            text = self.letters(self.one((CYRILLIC, GREEK)), 3, 7)
            text = text.capitalize() if "ς" not in text else text
        else:
            plain = self.one((self.invented, self.invented, self.word))()
            text = "".join(self.one(ACCENTS[c]) if c in ACCENTS and self.chance(0.35) else c for c in plain)
            text = text if not self.chance(0.3) else f"{text} {self.invented()}"
        if self.chance(0.06):
            text = self.letters(self.one(OTHERS), 1, 4)
        if self.chance(0.12):
            text += self.one((" ", "-", "・", ".")) + self.one((self.invented, self.word, self.foreign))()
        return unicodedata.normalize("NFC", text)

    def number(self, digits: int = 5) -> int:
        """An integer with a random number of digits, seldom negative."""
        value = self.rng.randint(0, 10 ** self.rng.randint(1, digits) - 1)
        return -value if self.rng.random() < 0.05 else value

    def decimal(self) -> float:
        """A number with one or two decimals."""
        return round(self.rng.uniform(0, 10 ** self.rng.randint(1, 3)), self.rng.randint(1, 2))

    def code(self) -> str:
        """Letters and digits, as in an identifier or a password."""
        alphabet = self.rng.choice(("abcdefghijklmnopqrstuvwxyz0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))
        return "".join(self.rng.choice(alphabet) for _ in range(self.rng.randint(3, 7)))

    def marked(self) -> str:
        """Words and numbers joined by marks: prices, tags, addresses, paths, versions."""
        a, b, n, m = self.word(), self.word(), self.number(3), self.rng.randint(0, 99)
        forms = ("${n}", "{n}%", "#{a}", "{a}/{b}", "{a}&{b}", "{a}-{b}", "{a}_{b}", "{a}.{b}", "v{n}.{m}", "{a}+{b}", "~/{a}/{b}", "{a}|{b}", "{a}*{m}",
                 "{a}\\{b}", "{a}^{m}", "`{a}`", "{a}:{n}", "{a};{b}", "({a})", "[{a}]", "{a}!", "{a}?", "{a}'s {b}", "@{a}", "{a} > {b}", "{n}-{m}")  # fmt: skip
        return str(self.one(forms).format(a=a, b=b, n=n, m=m))

    def phrase(self) -> str:
        """One to four words, seldom with marks."""
        if self.rng.random() < 0.03:
            return self.marked()
        text = " ".join(self.words(self.rng.choice((1, 2, 2, 3, 4))))
        return text.capitalize() if self.rng.random() < 0.2 else text

    def person(self) -> str:
        """A first name, at times with a last name, at times of another script."""
        if self.rng.random() < 0.12:
            return self.foreign()
        first = self.rng.choice(self.pools.first)
        return first if self.rng.random() < 0.6 else f"{first} {self.rng.choice(self.pools.last)}"

    def invented(self) -> str:
        """A pronounceable name that is in no list."""
        syllables = [
            self.rng.choice("b c d f g h j k l m n p r s t v w z br dr st tr kl".split()) + self.rng.choice("aeiou")
            for _ in range(self.rng.randint(2, 3))
        ]
        return ("".join(syllables) + self.rng.choice(("", "n", "r", "s", "l"))).capitalize()

    def name(self) -> str:
        """A first name, a word used as one, or an invented one."""
        pick = self.rng.random()
        if pick < 0.06:
            return self.foreign()
        if pick < 0.5:
            return str(self.rng.choice(self.pools.first))
        return self.invented() if pick < 0.8 else self.word().capitalize()

    def place(self) -> str:
        """A city, at times an invented one or one of another script."""
        if self.rng.random() < 0.08:
            return self.foreign()
        return str(self.rng.choice(self.pools.city)) if self.rng.random() < 0.75 else self.invented()

    def date(self) -> str:
        """An ISO date."""
        return f"{self.rng.randint(1950, 2049)}-{self.rng.randint(1, 12):02d}-{self.rng.randint(1, 28):02d}"

    def clock(self) -> str:
        """A time of day."""
        return f"{self.rng.randint(0, 23):02d}:{self.rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"

    def email(self) -> str:
        """An address at a reserved domain."""
        return f"{self.rng.choice(self.pools.first).lower()}@example.{self.rng.choice(('com', 'org', 'net'))}"

    def path(self) -> str:
        """A file name."""
        return f"{self.word()}.{self.rng.choice(('txt', 'csv', 'json', 'md', 'py', 'png'))}"

    def value(self, kind: str) -> Any:
        """A value of a named kind: a JSON type or one of the word kinds above."""
        rng = self.rng
        if kind in ("integer", "int"):
            return rng.randint(0, 20) if rng.random() < 0.2 else self.number(rng.choice((2, 3, 5, 5, 9)))
        if kind == "small":
            return rng.randint(1, 30)
        if kind == "number":
            return self.decimal() if rng.random() < 0.6 else self.number(3)
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "array":
            return self.words(rng.randint(1, 3))
        if kind == "string":
            pick = rng.random()
            makers = (self.word, self.phrase, self.code, self.name, self.place, self.foreign)
            weights = (0.33, 0.56, 0.7, 0.83, 0.92, 1.01)
            return next(make() for make, top in zip(makers, weights, strict=True) if pick < top)
        fixed = {
            "colour": COLOUR,
            "language": LANGUAGE,
            "month": MONTH,
            "day": DAY,
            "job": JOB,
            "animal": ANIMAL,
            "currency": CURRENCY,
        }
        if kind in fixed:
            return rng.choice(fixed[kind])
        return getattr(self, kind)()
