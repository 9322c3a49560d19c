# SPDX-License-Identifier: BSL-1.0
"""What MkDocs does to the pages of docs/, which are written for readers of the plain files.

- Behind the language of a code block stands what a test does with it; readers of the site do not need it.
- Pages link to files of the project outside of docs/. Those are taken into the site: pages as pages in project/, sources as pages in files/.
- Pages in docs/api/ name what they describe: api_reference.py writes it. Where other pages first name it in `code`, a link leads there.
- A page's title is its first heading, everywhere; the site's name has the version.
"""
import pathlib
import re
import sys

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/lib"))
import api_reference  # noqa: E402

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^()\s#]+)((?:#[^()\s]*)?)\)")
LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".cu": "cuda", ".py": "python", ".cmake": "cmake", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".json": "json"}
LARGEST_PAGE = 100_000  # larger files stay plain texts

reference = None


def place(path):
    """Where the site has a file of the project that stands outside of docs/; None for a folder."""
    if (ROOT / path).is_dir(): return None
    if path in PAGES: return f"project/{path}"
    return f"files/{path}.md" if (ROOT / path).stat().st_size <= LARGEST_PAGE else f"files/{path}.txt"


def content(path):
    text = (ROOT / path).read_text()
    if not place(path).startswith("files/") or place(path).endswith(".txt"): return text
    language = LANGUAGES.get(pathlib.Path(path).suffix) or ("bash" if text.startswith("#!") and "bash" in text[:40] else "python" if text.startswith("#!") else "text")
    return f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# {path}\n\n~~~~~~ {{ .{language} linenums=\"1\" }}\n{text}\n~~~~~~\n"


def linked(markdown, folder):
    """The files of the project, outside of docs/, to which a page in `folder` links, by the links' texts."""
    found = {}
    for target, _ in LINK.findall(markdown):
        path = pathlib.Path((ROOT / folder / target).resolve())
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs") and path.exists(): found[target] = str(path.relative_to(ROOT))
    return found


def on_config(config):
    version = dict(re.findall(r"#define GRADSYNC_VERSION_(\w+) (\d+)", (ROOT / "include/gradsync/core/version.hpp").read_text()))
    config.site_name = f"gradsync {version['MAJOR']}.{version['MINOR']}.{version['PATCH']}"
    return config


def on_files(files, config):
    global reference
    reference = api_reference.Reference(ROOT / "build/reference/xml")
    api = {f"api/{page.name}": page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md"))}
    mistakes = [f"docs/{page}: there is no {name}" for page, text in api.items() for name in reference.assign(page, text)]
    if mistakes := mistakes or list(dict.fromkeys(reference.mistakes(api))): raise PluginError("the API reference:\n" + "\n".join(mistakes))

    paths = dict.fromkeys(PAGES)
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / page for page in PAGES)]:
        paths.update(dict.fromkeys(linked(page.read_text(), page.parent.relative_to(ROOT)).values()))
    paths.update(dict.fromkeys(f"include/{header}" for header in reference.headers(api)))
    for path in paths:
        if to := place(path): files.append(File.generated(config, to, content=content(path)))
    return files


def with_links_to_the_reference(markdown, own):
    """The first `Name` in a page's prose that the reference describes becomes a link."""
    seen, parts = set(), re.split(r"(^```[\s\S]*?^```[ \t]*$|^#.*$|\[[^]]*\]\([^)]*\))", markdown, flags=re.MULTILINE)

    def link(match):
        name = re.sub(r"^(gs|gradsync)::", "", re.sub(r"[({<].*", "", match[1]))
        found = reference.places.get(f"name {name}")
        distinct = re.match(r"[A-Z]|\w+::", name) or (name in reference.functions and (own.startswith("api/") or match[1].startswith("gs::") or "_" in name))
        if not found or name in seen or not distinct: return match[0]
        seen.add(name)
        page, anchor = found
        return f"[`{match[1]}`]({'../' * own.count('/')}{page}#{anchor})"

    return "".join(part if i % 2 else re.sub(r"(?<![`\[])`([\w:]+(?:[({<][^`|]*)?)`(?!`)", link, part) for i, part in enumerate(parts))


def on_page_markdown(markdown, page, config, files):
    own = page.file.src_uri
    if own.startswith("files/"): return markdown
    if own.startswith("api/"): return reference.written(own, with_links_to_the_reference(markdown, own))
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
    markdown = re.sub(r"\[([^]]*)\]\(\)", r"\1", LINK.sub(site_link, markdown))
    return markdown if own == "project/CHANGELOG.md" else with_links_to_the_reference(markdown, own)
