"""A dirty crawl: ``python tests/dirty_crawl.py FOLDER`` writes it.

``crawl/`` has 24 ``.jsonl.gz`` and four Parquet files of documents in seven languages, lessons and
advertisements, with every kind of dirt in `DIRT`. ``evals/`` has test items, some of which are in
documents. `write_second_crawl` adds files later.
"""

import gzip
import json
import random
import sys
from pathlib import Path

import pandas as pd

# Lessons and advertisements by language; {n} is a number, so that documents differ.
SENTENCES = {
    "en": (
        ["Add {n} to both sides of the equation, and explain why it stays true.",
         "The heart pumps blood through the lungs, where it takes up oxygen.",
         "In chapter {n} we learn how plants turn light into sugar.",
         "A triangle with sides of three, four and five has a right angle.",
         "Read the poem twice, and write down which words rhyme."],
        ["Buy now and save {n} percent on all shoes, only today!",
         "Click here to win one of {n} phones, free of charge.",
         "The best watches at the lowest price, shipped to your door.",
         "Subscribe to our offers and get {n} coupons at once."]),
    "de": (
        ["Addiere {n} auf beiden Seiten der Gleichung und begründe jeden Schritt.",
         "Das Herz pumpt Blut durch die Lunge, wo es Sauerstoff aufnimmt.",
         "In Kapitel {n} lernen wir, wie Pflanzen aus Licht Zucker herstellen.",
         "Ein Dreieck mit den Seiten drei, vier und fünf hat einen rechten Winkel.",
         "Lies das Gedicht zweimal und schreibe auf, welche Wörter sich reimen."],
        ["Jetzt kaufen und {n} Prozent auf alle Schuhe sparen, nur heute!",
         "Klicken Sie hier und gewinnen Sie eines von {n} Handys.",
         "Die besten Uhren zum kleinsten Preis, frei Haus geliefert.",
         "Abonnieren Sie unsere Angebote und erhalten Sie {n} Gutscheine."]),
    "fr": (
        ["Ajoutez {n} aux deux membres de l'équation et expliquez chaque étape.",
         "Le cœur pompe le sang à travers les poumons, où il prend de l'oxygène.",
         "Au chapitre {n}, nous apprenons comment les plantes fabriquent du sucre.",
         "Un triangle de côtés trois, quatre et cinq possède un angle droit.",
         "Lisez le poème deux fois et notez les mots qui riment."],
        ["Achetez maintenant et économisez {n} pour cent sur toutes les chaussures !",
         "Cliquez ici pour gagner l'un des {n} téléphones gratuits.",
         "Les meilleures montres au plus bas prix, livrées chez vous.",
         "Abonnez-vous à nos offres et recevez {n} bons de réduction."]),
    "es": (
        ["Suma {n} a los dos lados de la ecuación y explica cada paso.",
         "El corazón bombea la sangre por los pulmones, donde toma oxígeno.",
         "En el capítulo {n} aprendemos cómo las plantas producen azúcar con la luz.",
         "Un triángulo de lados tres, cuatro y cinco tiene un ángulo recto.",
         "Lee el poema dos veces y anota las palabras que riman."],
        ["¡Compra ahora y ahorra un {n} por ciento en todos los zapatos!",
         "Haz clic aquí para ganar uno de los {n} teléfonos gratis.",
         "Los mejores relojes al precio más bajo, enviados a tu casa.",
         "Suscríbete a nuestras ofertas y recibe {n} cupones."]),
    "it": (
        ["Aggiungi {n} a entrambi i membri dell'equazione e spiega ogni passaggio.",
         "Il cuore pompa il sangue attraverso i polmoni, dove prende ossigeno.",
         "Nel capitolo {n} impariamo come le piante producono zucchero dalla luce.",
         "Un triangolo di lati tre, quattro e cinque ha un angolo retto.",
         "Leggi la poesia due volte e scrivi quali parole fanno rima."],
        ["Compra ora e risparmia il {n} per cento su tutte le scarpe!",
         "Clicca qui per vincere uno dei {n} telefoni gratuiti.",
         "I migliori orologi al prezzo più basso, consegnati a casa tua.",
         "Iscriviti alle nostre offerte e ricevi {n} buoni sconto."]),
    "pl": (
        ["Dodaj {n} do obu stron równania i wyjaśnij każdy krok.",
         "Serce pompuje krew przez płuca, gdzie pobiera ona tlen.",
         "W rozdziale {n} uczymy się, jak rośliny wytwarzają cukier ze światła.",
         "Trójkąt o bokach trzy, cztery i pięć ma kąt prosty.",
         "Przeczytaj wiersz dwa razy i zapisz słowa, które się rymują."],
        ["Kup teraz i oszczędź {n} procent na wszystkich butach, tylko dziś!",
         "Kliknij tutaj i wygraj jeden z {n} telefonów za darmo.",
         "Najlepsze zegarki w najniższej cenie, z dostawą do domu.",
         "Zapisz się na nasze oferty i odbierz {n} kuponów."]),
    "ru": (
        ["Прибавьте {n} к обеим частям уравнения и объясните каждый шаг.",
         "Сердце качает кровь через лёгкие, где она получает кислород.",
         "В главе {n} мы узнаем, как растения превращают свет в сахар.",
         "Треугольник со сторонами три, четыре и пять имеет прямой угол.",
         "Прочитайте стихотворение дважды и запишите, какие слова рифмуются."],
        ["Купите сейчас и сэкономьте {n} процентов на любой обуви, только сегодня!",
         "Нажмите здесь и выиграйте один из {n} телефонов бесплатно.",
         "Лучшие часы по самой низкой цене с доставкой на дом.",
         "Подпишитесь на наши предложения и получите {n} купонов."]),
}  # fmt: skip
ADDRESSES = ("ada.lovelace@example.org", "Ada.Lovelace@Example.org", "SALES@SHOP.example.com")
QUESTIONS = [
    f"A train leaves the {town} station at {n} o'clock and reaches the coast after {n + 2} hours. "
    "How fast did it travel if the coast is six hundred kilometres away from there?"
    for n, town in enumerate(["northern", "southern", "eastern", "western", "central"], 3)
]
DIRT = {  # number of a .jsonl.gz file, and its dirt
    "broken": 1,  # lines that are no JSON objects
    "crlf": 2,  # lines end in CRLF
    "bom": 3,  # the file begins with a byte order mark
    "members": 4,  # gzip in several members
    "latin1": 5,  # a line in Latin-1
    "half": 6,  # the last line is cut
    "surrogate": 7,  # half of a surrogate pair
    "kinds": 8,  # a column of numbers and texts
    "empty": 9,  # no byte, as after a failed download
    "long": 10,  # a text of 20 MB
    "blank": 12,  # blank lines
}
BROKEN = ('{"id": "x", "text": "cut of', "<html>504 Gateway Timeout</html>", '["no", "object"]')
LOST = (None, "", " \n\t ")  # texts of some rows
FILES, ROWS = 24, 20  # .jsonl.gz files, and rows of each
LONG_BYTES = 20 << 20


def documents(count, seed):
    """Documents as dicts, with their true `kind` and `true_language`, which files do not have."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        language = rng.choices([*SENTENCES], [6, 3, 2, 2, 1, 1, 1])[0]
        kind = rng.randrange(2)
        sentences = rng.sample(SENTENCES[language][kind], k=4)
        text = " ".join(sentences).replace("{n}", str(rng.randrange(10, 100_000)))
        if rng.random() < 0.15:
            text += f" {rng.choice(ADDRESSES)}."
        if rng.random() < 0.04:
            text += f" {rng.choice(QUESTIONS)}"
        host = f"host-{rng.randrange(12)}.example"
        row = {"id": f"{seed}-{number}", "text": text, "url": f"https://{host}/{number}"}
        row |= {"host": host, "year": 2000 + number % 25}
        rows.append(row | {"kind": ["lesson", "ad"][kind], "true_language": language})
    for one, other in zip(*[iter(rng.sample(rows, count // 6 * 2))] * 2, strict=True):
        one["text"], one["kind"], one["true_language"] = (
            other[name] for name in ("text", "kind", "true_language")
        )
    for row in rng.sample(rows, count // 25):
        row["text"], row["kind"], row["true_language"] = rng.choice(LOST), None, None
    return rows


def write_crawl(folder, long_bytes=LONG_BYTES):
    """Write ``crawl/`` and ``evals/``; return the readable rows, in order, as a frame."""
    rows = documents((FILES + 4) * ROWS, seed=1)
    crawl = folder / "crawl"
    crawl.mkdir(parents=True)
    kept = []
    for number in range(FILES):
        kept += _write_lines(
            crawl / f"part-{number:02}.jsonl.gz", number, rows[number * ROWS :][:ROWS], long_bytes
        )
    for number in range(FILES, FILES + 4):
        some = pd.DataFrame(rows[number * ROWS :][:ROWS])
        if number == FILES:
            some = some.drop(columns=["host", "year"])  # an older crawler's columns
        if number == FILES + 1:
            some = some[:0]
        kept += some.assign(file=f"part-{number:02}.parquet").to_dict("records")
        some.drop(columns=["kind", "true_language"]).to_parquet(
            crawl / f"part-{number:02}.parquet", index=False
        )
    evals = folder / "evals"
    evals.mkdir()
    lines = [json.dumps({"question": text}) for text in QUESTIONS]
    (evals / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return pd.DataFrame(kept)


def write_second_crawl(folder):
    """Write a second crawl's files into ``crawl/``; return their rows as a frame."""
    rows = documents(4 * ROWS, seed=2)
    rows[0]["text"] = documents(1, seed=1)[0]["text"]  # a copy from the first crawl
    kept = []
    for number in range(4):
        path = folder / f"crawl/second-{number}.jsonl.gz"
        kept += _write_lines(path, None, rows[number * ROWS :][:ROWS], 0)
    return pd.DataFrame(kept)


def _write_lines(path, number, rows, long_bytes):
    """Write a file with the dirt of its number, and return its readable rows."""
    [dirt] = [name for name, other in DIRT.items() if other == number] or [None]
    if dirt == "long":
        words = " ".join(SENTENCES["en"][0]).replace("{n}", "7") + " "
        rows[0]["text"] = (words * (long_bytes // len(words) + 1))[:long_bytes]
        rows[0]["kind"], rows[0]["true_language"] = "lesson", "en"
    if dirt == "kinds":
        for row in rows[::2]:
            row["year"] = f"about {row['year']}"
    names = ("id", "text", "url", "host", "year")
    lines = [json.dumps({name: row[name] for name in names}, ensure_ascii=False) for row in rows]
    kept = [row | {"file": path.name} for row in rows]
    encoded = [line.encode() for line in lines]
    end = b"\r\n" if dirt == "crlf" else b"\n"
    if dirt == "broken":
        encoded[4:4] = [line.encode() for line in BROKEN]
    if dirt == "latin1":
        encoded[3] = '{"id": "latin1", "text": "Wörter, größer, schöner"}'.encode("latin-1")
        del kept[3]
    if dirt == "surrogate":
        encoded[5] = rb'{"id": "surrogate", "text": "a smile \ud83d, cut", "year": 2001}'
        del kept[5]
    if dirt == "blank":
        encoded[2:2] = [b"", b"  "]
    content = b"".join(line + end for line in encoded)
    if dirt == "bom":
        content = b"\xef\xbb\xbf" + content
    if dirt == "half":
        content = content[:-40]
        del kept[-1]
    if dirt == "empty":
        path.write_bytes(b"")
        return []
    if dirt == "members":
        half = content.find(end, len(content) // 3) + 7  # in the middle of a line
        path.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    else:
        path.write_bytes(gzip.compress(content))
    return kept


if __name__ == "__main__":
    write_crawl(Path(sys.argv[1]))
