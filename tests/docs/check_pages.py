#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks what pages say that can be checked without running anything:

- A link to a file of the project leads to a file, and to a heading if it names one.
- A block ```diff from A to B shows all that differs between the two files, except comments at their tops, with any number of context
  lines. A line that begins with @@ separates two places.
- A block ```LANGUAGE from FILE has lines of that file, in its order.
- A page has one title: docs/index.md and mkdocs.yml give it no other.
- A block ```sh is valid for bash, the project's files that it names exist, and so do the options that it gives to the project's programs
  and scripts.
- A table has at most 6 columns; code of README.md and docs/index.md has at most 95, so that nobody has to scroll.
- Without the lines of docs/api/ that only name something, and measured figures, README.md and docs/ have at most 38,100 words, and a page 1,800,
  except the lab notes.

    check_pages.py PAGE...      paths of files in the blocks start at the project's folder
"""
import itertools
import pathlib
import re
import subprocess
import sys

from pages import ROOT, blocks, prose

LINK = re.compile(r"\]\((?![a-z]+:)([^()\s#]*)(?:#([^()\s]*))?\)")
MOST_WORDS, MOST_WORDS_OF_A_PAGE, UNLIMITED = 38_100, 1_800, "lab-notes.md"
MOST_COLUMNS, MOST_CHARACTERS, SEEN_FIRST = 6, 95, ("README.md", "index.md")
PROGRAMS = {  # the sources that define their options
    "gradsync_train": "examples/*.?pp examples/cuda/*.?pp",
    "gradsync_plan": "examples/plan/*.?pp",
    "gradsync_run": "examples/run/*.?pp",
    "scripts/bench": "scripts/bench bench/report/*.py",
    "scripts/faults": "scripts/faults tests/faults/driver.cpp",
}
OF_OTHERS = {"--help", "--version"}  # every program has them


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(page):
    for target, anchor in LINK.findall(prose(page)):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{target}#{anchor}" if anchor else target


def other_titles():
    """Titles that are not a page's first heading."""
    for text, target in re.findall(r"^- \[([^]]*)\]\(([^)#]*\.md)\)", (ROOT / "docs/index.md").read_text(), flags=re.MULTILINE):
        title = (ROOT / "docs" / target).read_text().partition("\n")[0].removeprefix("# ")
        if text != title: yield f"docs/index.md: {target} is called {title!r}, not {text!r}"
    for title, page in re.findall(r"^ *- ([^:\n]+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE):
        yield f"mkdocs.yml: {page} has a title of its own; do not give it another, {title!r}"


def code(name):
    """The lines of a file below the comments at its top."""
    return list(itertools.dropwhile(lambda line: not line or line.startswith("//"), (ROOT / name).read_text().splitlines()))


def hunks(block):
    """The lines before and after, for each place."""
    for separator, lines in itertools.groupby(block.splitlines(), lambda line: line.startswith("@@")):
        if not separator:
            lines = [line or " " for line in lines]
            yield [line[1:] for line in lines if line[0] in " -"], [line[1:] for line in lines if line[0] in " +"]


def first_mistake(before, after, block):
    """Returns the first error in the diff of two lists of lines, or None."""
    b = a = 0
    for old, new in hunks(block):
        while (before[b : b + len(old)], after[a : a + len(new)]) != (old, new):
            if b == len(before) or a == len(after):
                return f"these lines do not stand in both files, in this order: {(old or new)[0]!r}, ..."
            if before[b] != after[a]:
                return f"the files differ, and the diff does not show it: {before[b]!r}, {after[a]!r}"
            b, a = b + 1, a + 1
        b, a = b + len(old), a + len(new)
    return None if before[b:] == after[a:] else f"the files differ after the last place: {before[b : b + 1]}, {after[a : a + 1]}"


def foreign_line(text, block):
    """Returns the first line of a block that `text` has not, behind the one before; None if there is none."""
    rest = iter(text.splitlines())
    for line in filter(str.strip, block.splitlines()):
        if not any(line.strip() in other for other in rest): return line
    return None


def sources(program):
    files = [file for pattern in PROGRAMS.get(program, program).split() for file in ROOT.glob(pattern)]
    return "\n".join(file.read_text() for file in files)


def commands(block):
    """The simple commands of a block: lists of words, without comments."""
    text = re.sub(r"(^|\s)#.*", r"\1", block.replace("\\\n", " "), flags=re.MULTILINE)
    return [words for part in re.split(r"[\n;&|()]+|\bdo\b", text) if (words := part.split())]


def mistakes_of_shell(block):
    checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
    if checked.returncode != 0: yield checked.stderr.strip()
    for words in commands(block):
        for word in words:
            if re.match(r"(scripts|examples|tests|deploy|bench|packaging|include)/[\w./-]+$", word) and not (ROOT / word).exists():
                yield f"there is no {word}"
        places = [i for i, word in enumerate(words) if (name := word.removeprefix("./").removeprefix("build/release/examples/")) in PROGRAMS
                  or (word.startswith("scripts/") and (ROOT / word).is_file())]
        for first, last in zip(places, [*places[1:], len(words)]):
            name = words[first].removeprefix("./").removeprefix("build/release/examples/")
            own = list(itertools.takewhile(lambda word: word != "--", words[first + 1 : last]))
            for before, option in zip([name, *own], own):
                if before == "--mpirun": continue  # an option for mpirun
                found = re.match(r"--[a-z][\w-]*", option)
                if found and found[0] not in OF_OTHERS and not re.search(re.escape(found[0]) + r"(?![\w-])", sources(name)):
                    yield f"{name} has no option {found[0]}"


def too_wide(page):
    """Tables of a page; and code of those pages that visitors see first."""
    for line in prose(page).splitlines():
        if re.match(r"\|(-+\|)+$", line) and line.count("|") - 1 > MOST_COLUMNS: yield f"a table of {line.count('|') - 1} columns"
    if page.name in SEEN_FIRST:
        yield from (f"a line of {len(line)} columns: {line}" for _, _, block in blocks(page) for line in block.splitlines() if len(line) > MOST_CHARACTERS)


def check(pages):
    """All mistakes of the pages."""
    words = 0
    yield from other_titles()
    for page in map(pathlib.Path, pages):
        for mistake in too_wide(page): yield f"{page}: {mistake}"
        for link in broken_links(page): yield f"{page}: a link leads nowhere: {link}"
        for language, kind, block in blocks(page):
            if language == "diff" and (found := re.match(r"from (\S+) to (\S+)$", kind)):
                if mistake := first_mistake(code(found[1]), code(found[2]), block): yield f"{page}: in the diff {kind}, {mistake}"
            if language != "diff" and kind.startswith("from "):
                if (line := foreign_line((ROOT / kind[5:]).read_text(), block)) is not None:
                    yield f"{page}: {kind[5:]} has no line {line!r}, or not in this order"
            if language == "sh":
                for mistake in mistakes_of_shell(block): yield f"{page}: {mistake}, in the block\n{block}"
        if page.name == "README.md" or "docs" in page.resolve().parts[-3:-1]:
            of_page = len(re.sub(r"^::: .*$|^<!-- bench: (?s:.*?)<!-- end of bench: .*$", "", page.read_text(), flags=re.MULTILINE).split())
            words += of_page
            if of_page > MOST_WORDS_OF_A_PAGE and page.name != UNLIMITED:
                yield f"{page}: {of_page:,} words; a page has at most {MOST_WORDS_OF_A_PAGE:,}"
    if words > MOST_WORDS: yield f"{words:,} words in all; README.md and docs/ have at most {MOST_WORDS:,}"


def test_the_checker():
    before, after, block = ["a", "b", "c", "d", "e"], ["a", "B", "c", "d", "E", "f"], " a\n-b\n+B\n@@\n d\n-e\n+E\n+f\n"
    assert first_mistake(before, after, block) is None
    for wrong in (block.replace("+B", "+X"), block.replace("-b", "-x"), block.replace("+f\n", ""), block[: block.index("@@")]):
        assert first_mistake(before, after, wrong), wrong
    assert first_mistake([*before, "g"], after, block) and first_mistake(["z", *before], after, block)
    assert foreign_line("a\nb\nc\n", "  a\n\nc") is None and foreign_line("a\nb\n", "b\na") == "a"
    right = "RANK=0 build/release/examples/gradsync_train --ranks 2 --json=- &  # two --colours\nscripts/test --all\nmpirun --any x -- ./scripts/format --check\n"
    assert not list(mistakes_of_shell(right)), list(mistakes_of_shell(right))
    for wrong in ("for x in", "gradsync_train --colour", "g++ examples/none.cpp", "scripts/test --al", "gradsync_train --rank 2"):
        assert list(mistakes_of_shell(wrong)), wrong


test_the_checker()
if mistakes := list(check(sys.argv[1:])): sys.exit("\n".join(mistakes))
