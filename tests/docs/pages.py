# SPDX-License-Identifier: BSL-1.0
"""The pages of the project, and their code blocks."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\S*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """The code blocks of a page, in order: (language, what stands behind it, code)."""
    return [(language, kind.strip(), code) for language, kind, code in BLOCK.findall(pathlib.Path(page).read_text())]


def prose(page):
    """A page without code blocks, and with `code` for code in a line."""
    return re.sub(r"`[^`\n]+`", "`code`", BLOCK.sub("", pathlib.Path(page).read_text()))
