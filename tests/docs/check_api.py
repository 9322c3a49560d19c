#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks that every public name in include/ has a text and a place in docs/api/; and that this check, scripts/lib/api_reference.py, finds what
it should. Needs Doxygen; exits with 77 without it.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

from pages import ROOT

sys.path.insert(0, str(ROOT / "scripts/lib"))
from api_reference import Reference  # noqa: E402

HEADER = """
namespace gradsync::inline v0_2 {
/// A thing. Does `work()`.
template <class T = int>
struct Thing {
    Thing() = default;
    Thing(const Thing& other);
    Thing& operator=(const Thing& other);
    ~Thing();
    int count = 0;  ///< of parts
    int width = 1, height = 2;
    void work(const T& what, int times = 3) const;
    /// Internal.
    void engine();
};
/// Does it all.
[[nodiscard]] bool all(Thing<> first);
void nothing();
}
"""


def read(folder, source):
    """The docstrings of the headers in `source`."""
    settings = (ROOT / "docs/Doxyfile").read_text() + f'\nOUTPUT_DIRECTORY = {folder}\nINPUT = {source}\nSTRIP_FROM_PATH = {source}\nSTRIP_FROM_INC_PATH = {source}\n'
    subprocess.run(["doxygen", "-"], input=settings + "WARN_AS_ERROR = FAIL_ON_WARNINGS\n", text=True, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return Reference(pathlib.Path(folder) / "xml")


def mistakes(reference, pages):
    unknown = [f"{page}: there is no {name}" for page, text in pages.items() for name in reference.assign(page, text)]
    return unknown or list(dict.fromkeys(reference.mistakes(pages)))


def test_the_check(folder):
    (folder / "include/gradsync").mkdir(parents=True)
    header = folder / "include/gradsync/thing.hpp"
    found = lambda page: [m.rpartition(": ")[2] for m in mistakes(read(folder / "out", folder / "include"), {"api/page.md": page})]
    header.write_text(HEADER)
    both = "::: Thing\n\n::: all\n"
    missing = 'no page of docs/api/ names {}; or begin its docstring with "Internal"'
    assert found(both) == ["Thing::width has no text", "Thing::height has no text", "Thing::work has no text", missing.format("nothing")], found(both)
    assert found("::: Thong\n") == ["there is no Thong"]
    header.write_text(HEADER.replace("int width", "/// Of the whole.\n    int width").replace("    void work", "    /// Works as `width` says, see `all`.\n    void work"))
    assert found("::: Thing\n\n::: all\n\n::: nothing\n") == ["nothing has no text"]
    reference = read(folder / "out", folder / "include")
    reference.assign("api/page.md", both)
    text = reference.written("api/page.md", both)
    for expected in ("template <class T = int>\nstruct Thing;", "void work(const T& what, int times = 3) const;", "`int width = 1`{: #Thing.width }\n`int height = 2`{: #Thing.height }\n",
                     "[<code>width</code>](#Thing.width)", "bool all(Thing<> first);"):
        assert expected in text, (expected, text)
    for hidden in ("engine", "~Thing", "operator="): assert hidden not in text, (hidden, text)


if not shutil.which("doxygen"):
    print("skipped: no doxygen")
    sys.exit(77)
with tempfile.TemporaryDirectory() as folder:
    test_the_check(pathlib.Path(folder))
    pages = {f"api/{page.name}": page.read_text() for page in (ROOT / "docs/api").glob("*.md")}
    if wrong := mistakes(read(pathlib.Path(folder) / "all", ROOT / "include"), pages): sys.exit("\n".join(wrong))
