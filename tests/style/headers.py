#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Rules of CONTRIBUTING.md that a header's text shows:

- A line of include/ has at most 120 columns, comments too.
- A class repeats at most 5 names of its bases with `using Base::name`.
- A header says its idea in a comment, before it defines anything.
"""
import pathlib
import re
import sys

COLUMNS, NAMES = 120, 5
# More names than NAMES, and why. Never raise a number; where the code needs fewer, lower it.
MORE_NAMES = {
    "gradsync/shard/sharded_optimizer.hpp": (6, "names of a base that depends on a template parameter"),
    "gradsync/shard/sharded_parameters.hpp": (7, "names of a base that depends on a template parameter"),
}
ROOT = pathlib.Path(__file__).resolve().parents[2] / "include"
# What defines nothing: namespaces, and declarations of what stands elsewhere.
NOTHING = re.compile(r"((inline )?namespace\b[^;{]*\{|using [\w:, ]*::[\w:, ]*;|(class|struct) \w+;|static_assert\(.*\);|\}.*)\s*")


def classes(text):
    """The classes at namespace scope, whose lines begin in the first column."""
    return re.findall(r"^(?:class|struct) [^;{]*\{.*?^\};", text, flags=re.M | re.S)


def names_of_bases(text):
    return [name for names in re.findall(r"^    using ((?:typename )?[\w:<>\s,]+);", text, flags=re.M)
            for name in names.split(",") if re.search(r"::\w+$", name)]


def defines_first(text):
    """What a header defines before any comment, or None."""
    rest = text.split("#pragma once\n", 1)[-1]
    rest = re.sub(r"^\s*#(?:.*\\\n)*.*\n", "", rest, flags=re.M).strip()
    while found := NOTHING.match(rest): rest = rest[found.end():]
    return None if not rest or rest.startswith("//") else rest.partition("\n")[0]


def test_the_checks():
    assert names_of_bases("class A : B {\n    using B::a, B::b,\n        B::c;\n    using T = B::d;\n};\n") == ["B::a", " B::b", "\n        B::c"]
    head = "// SPDX\n#pragma once\n\n#include <span>\n#define A(b) \\\n    b\n\nnamespace a::inline b {\nnamespace c {\nclass D;\nusing e::f;\n"
    assert defines_first(head + "/// An idea.\nstruct G {};\n") is None
    assert defines_first(head + "struct G {};  ///< none\n") == "struct G {};  ///< none"


test_the_checks()
wrong, files = [], [file for file in sorted(ROOT.glob("gradsync/**/*")) if file.suffix in (".hpp", ".cpp", ".cuh", ".cu")]
for file in files:
    name, text = str(file.relative_to(ROOT)), file.read_text()
    wrong += [f"{name}:{n}: a line of {len(line)} columns (at most {COLUMNS})" for n, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]
    if file.suffix in (".hpp", ".cuh") and (line := defines_first(text)):
        wrong.append(f"{name}: write the idea of this header in a comment before it defines '{line}'")
    count, most = max((len(names_of_bases(c)) for c in classes(text)), default=0), MORE_NAMES.get(name, (NAMES, ""))[0]
    if count > most: wrong.append(f"{name}: a class repeats {count} names of its bases (at most {most}); let it hold the base, or leave them out")
    if name in MORE_NAMES and count < most: wrong.append(f"{name}: {count} names of bases are repeated; lower the number in {pathlib.Path(__file__).name}")
if len(files) < 150: wrong.append(f"only {len(files)} headers in {ROOT}")
sys.exit("\n".join(wrong) or 0)  # sys.exit("") would fail
