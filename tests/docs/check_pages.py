#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks the links between pages, and the diffs that they show. A link to a file of the project leads to a file, and to a heading
where it names one. A block

    ```diff from A to B

shows all that differs between the two files, except comments at their tops, with any number of context lines. A line that begins
with @@ separates two places.

    check_pages.py PAGE...      paths of files in the blocks start at the project's folder
"""

import itertools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!`)\]\((?![a-z]+:)([^()\s#]*)(?:#([^()\s]*))?\)")
BLOCK = re.compile(r"^```diff from (\S+) to (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(page):
    for target, anchor in LINK.findall(page.read_text()):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{target}#{anchor}" if anchor else target


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


def test_the_checker():
    before, after, block = ["a", "b", "c", "d", "e"], ["a", "B", "c", "d", "E", "f"], " a\n-b\n+B\n@@\n d\n-e\n+E\n+f\n"
    assert first_mistake(before, after, block) is None
    for wrong in (block.replace("+B", "+X"), block.replace("-b", "-x"), block.replace("+f\n", ""), block[: block.index("@@")]):
        assert first_mistake(before, after, wrong), wrong
    assert first_mistake([*before, "g"], after, block) and first_mistake(["z", *before], after, block)


test_the_checker()
count = 0
if broken := [f"{page}: {link}" for page in sys.argv[1:] for link in broken_links(pathlib.Path(page))]:
    sys.exit("links that lead nowhere:\n  " + "\n  ".join(broken))
for page in sys.argv[1:]:
    for before, after, block in BLOCK.findall(pathlib.Path(page).read_text()):
        count += 1
        if mistake := first_mistake(code(before), code(after), block):
            sys.exit(f"{page}: in the diff from {before} to {after}, {mistake}")
print(f"{count} diffs")
sys.exit(0 if count else "no page shows a diff")
