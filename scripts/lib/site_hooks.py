# SPDX-License-Identifier: BSL-1.0
"""What MkDocs does to the pages of docs/, which are written for readers of the plain files.

- Behind the language of a code block stands what a test does with it; readers of the site do not need it.
- Pages link to files of the project outside of docs/. Those are taken into the site: pages as pages in project/, sources as texts in files/.
- api/index.html is a place holder for Doxygen's pages, which scripts/docs puts there.
"""
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^()\s#]+)((?:#[^()\s]*)?)\)")


def place(path):
    """Where the site has a file of the project that stands outside of docs/; None for a folder."""
    if (ROOT / path).is_dir(): return None
    return f"project/{path}" if path in PAGES else f"files/{path}.txt"


def linked(markdown, folder):
    """The files of the project, outside of docs/, to which a page in `folder` links, by the links' texts."""
    found = {}
    for target, _ in LINK.findall(markdown):
        path = pathlib.Path((ROOT / folder / target).resolve())
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs") and path.exists(): found[target] = str(path.relative_to(ROOT))
    return found


def on_files(files, config):
    paths = dict.fromkeys(PAGES)
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / page for page in PAGES)]:
        paths.update(dict.fromkeys(linked(page.read_text(), page.parent.relative_to(ROOT)).values()))
    for path in paths:
        if to := place(path): files.append(File.generated(config, to, content=(ROOT / path).read_text()))
    files.append(File.generated(config, "api/index.html", content="scripts/docs puts Doxygen's pages here."))
    return files


def on_page_markdown(markdown, page, config, files):
    own = page.file.src_uri
    folder = pathlib.PurePosixPath("." if own.startswith("project/") else "docs", *pathlib.PurePosixPath(own.removeprefix("project/")).parent.parts)
    outside = linked(markdown, folder)

    def site_link(match):
        target, anchor = match.groups()
        if own.startswith("project/") and target.startswith("docs/"): return f"](../{target.removeprefix('docs/')}{anchor})"
        if target not in outside: return match[0]
        to = place(outside[target])
        up = "../" * own.count("/")
        return f"]({up}{to}{anchor})" if to else "]()"

    markdown = re.sub(r"^```(\w+)[ \t].*$", r"```\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\(\)", r"\1", LINK.sub(site_link, markdown))
