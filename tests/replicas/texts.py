"""Pseudo-natural documents, the same ones on every machine."""

import functools
import math
import random
from collections.abc import Sequence


def words(text: str) -> tuple[str, ...]:
    """The words of a line."""
    return tuple(text.split())


_TOPICS = (
    words("river mountain valley forest winter storm island harbour glacier meadow"),
    words("market budget invoice shares pension interest mortgage auditor profit currency"),
    words("match season goalkeeper referee champion stadium training league medal sprint"),
    words("oven flour butter garlic recipe simmer vinegar pastry roasted spoonful"),
    words("patient vaccine clinic therapy symptom surgeon dosage recovery nutrition allergy"),
    words("processor network compiler database keyboard encryption server browser pixel robot"),
    words("theorem electron orbit enzyme molecule fossil gravity equation telescope neuron"),
    words("election minister treaty parliament verdict lawsuit citizen mayor reform census"),
)
_COMMON = words(
    "the a of and to in is was for with on that by from this which were has their about after "
    "when because however many small new old long often slowly together without between people "
    "year day way part place found made said gives takes shows keeps remains becoming quickly"
)
_ACCENTED = words("café naïve jalapeño Zürich São façade smörgåsbord Łódź crème déjà Ελλάδα")
_RARE = words(
    "天気がいい 学习语言 東京 你好世界 한국어 Москва नमस्ते 🙂 🚀 👩\u200d🔬 "
    "http://example.org/a?b=1 #tag C++"
)
_SYLLABLES = words("ba ker lo min tra ves ul dor pi shan gre tuk el ona")


def sample_texts(
    count: int, seed: int = 0, *, min_words: int = 1, max_words: int = 120
) -> list[str]:
    """Pseudo-natural documents of varied length, the same ones for the same arguments.

    Mostly lower-case English words in sentences, with some accents, other scripts, emoji, numbers
    and line breaks; never empty, short ones commoner. A longer list begins with the shorter one.
    """
    rng = random.Random(seed)
    longest = math.log(max_words + 1)
    shortest = math.log(min_words)
    lengths = (int(math.exp(rng.uniform(shortest, longest))) for _ in range(count))
    return [_text(rng, min(max(length, min_words), max_words)) for length in lengths]


def _text(rng: random.Random, word_count: int) -> str:
    topic, parts = rng.choice(_TOPICS), []
    while word_count > 0:
        length = min(word_count, rng.randint(3, 14))
        sentence = " ".join(_word(rng, topic) for _ in range(length))
        parts.append(sentence[0].upper() + sentence[1:] + rng.choice(("." * 4) + "!?…"))
        parts.append(rng.choice((" ", " ", " ", "\n", "\n\n")))
        word_count -= length
    return "".join(parts[:-1])


def _word(rng: random.Random, topic: Sequence[str]) -> str:
    draw = rng.random()
    if draw < 0.40:
        word = rng.choice(topic)
    elif draw < 0.85:
        word = rng.choice(_COMMON)
    elif draw < 0.90:
        word = "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4)))
    elif draw < 0.93:
        word = str(rng.randint(0, 2100))
    else:
        word = rng.choice(_ACCENTED if draw < 0.97 else _RARE)
    return word + ("," if rng.random() < 0.08 else "")


def documents_of(texts: Sequence[str] | None) -> tuple[str, ...]:
    """The texts, or built-in ones."""
    return _default_texts() if texts is None else tuple(texts)


@functools.lru_cache(maxsize=1)
def _default_texts() -> tuple[str, ...]:
    return tuple(sample_texts(300, seed=1))
