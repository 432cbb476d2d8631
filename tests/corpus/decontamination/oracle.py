"""Decontamination by sets of n-grams in plain Python, and texts with planted items."""

import functools
import unicodedata

from gpuclassify.corpus.dedup.matching import WITHOUT_SPACES


def words(text):
    """The words of a text, each with where it begins and ends, one character after another."""
    found, state = [], "gap"
    for place, char in enumerate(text):
        if unicodedata.category(char) == "Cf" or char in "\ufe0e\ufe0f":
            continue
        for folded in fold(char):
            kind, is_alone = kind_of(folded)
            if kind == "M" and state != "gap":
                found[-1] = (found[-1][0] + folded, found[-1][1], place + 1)
            elif kind in "LNM":
                if state == "word" and not is_alone:
                    found[-1] = (found[-1][0] + folded, found[-1][1], place + 1)
                else:
                    found.append((folded, place, place + 1))
                state = "alone" if is_alone else "word"
            else:
                state = "gap"
    return [(unicodedata.normalize("NFD", word), start, end) for word, start, end in found]


@functools.cache
def fold(char):
    for _ in range(2):
        char = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", char).casefold())
    return "".join(str(unicodedata.decimal(each, each)) for each in char)


@functools.cache
def kind_of(char):
    kind = unicodedata.category(char)[0]
    is_alone = any(first <= ord(char) <= last for first, last in WITHOUT_SPACES)
    return kind, is_alone and kind != "M"


def windows(found, n):
    return [tuple(word for word, _, _ in found[at : at + n]) for at in range(len(found) - n + 1)]


def decontaminate(docs, items, *, ngram=13, min_words=8, max_items=10, threshold=0.2, ignore=()):
    """Of each document the share of the worst item, its name, all names, and passages.

    `items` are pairs of a name and a text; the name begins with the file.
    """
    kept, seen = [], set()
    for name, text in items:
        if text is None:
            continue
        found = tuple(word for word, _, _ in words(text))
        key = name.partition("#")[0], found
        if len(found) >= min_words and key not in seen:
            seen.add(key)
            kept.append((name, found))
    grams = [
        {found[at : at + ngram] for at in range(len(found) - ngram + 1)} or {found}
        for _, found in kept
    ]
    distinct = {found for _, found in kept}
    lengths = sorted({len(gram) for owned in grams for gram in owned})
    every = set().union(*grams) if grams else set()
    counts = dict.fromkeys(every, 0)
    for found in distinct:
        inside = {found[at : at + n] for n in lengths for at in range(len(found) - n + 1)}
        for gram in inside & every:
            counts[gram] += 1
    dull = {gram for gram, count in counts.items() if count > max_items}
    for text in ignore:
        dull |= {gram for n in lengths for gram in windows(words(text), n)}
    grams = [owned - dull for owned in grams]
    owners = {}
    for number, owned in enumerate(grams):
        for gram in owned:
            owners.setdefault(gram, []).append(number)
    return [_of_document(doc, kept, grams, owners, lengths, threshold) for doc in docs]


def _of_document(doc, kept, grams, owners, lengths, threshold):
    if doc is None:
        return None
    found, hits = words(doc), {}
    for n in lengths:
        for at, gram in enumerate(windows(found, n)):
            for number in owners.get(gram, ()):
                hits.setdefault(number, {}).setdefault(gram, []).append((at, at + n - 1))
    shares = {number: len(each) / len(grams[number]) for number, each in hits.items()}
    order = sorted(shares, key=lambda number: (-shares[number], number))
    reached = [number for number in order if shares[number] >= threshold]
    spans = sorted(
        (found[first][1], found[last][2])
        for number in reached
        for places in hits[number].values()
        for first, last in places
    )
    passages = []
    for start, end in spans:
        if passages and start <= passages[-1][1]:
            passages[-1] = (passages[-1][0], max(end, passages[-1][1]))
        else:
            passages.append((start, end))
    names = [kept[number][0] for number in reached]
    worst = shares[order[0]] if order else 0.0
    return worst, names[0] if names else None, names, passages
