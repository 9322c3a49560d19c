#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks the diffs that pages show. A block

    ```diff from A to B

shows all that differs between the two files, except comments at their tops, with any number of context lines. A line that begins
with @@ separates two places.

    check_diffs.py PAGE...      paths of files in the blocks start at the project's folder
"""

import itertools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```diff from (\S+) to (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    """What the diff says wrongly of two lists of lines; None if it is right."""
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
for page in sys.argv[1:]:
    for before, after, block in BLOCK.findall(pathlib.Path(page).read_text()):
        count += 1
        if mistake := first_mistake(code(before), code(after), block):
            sys.exit(f"{page}: in the diff from {before} to {after}, {mistake}")
print(f"{count} diffs")
sys.exit(0 if count else "no page shows a diff")
