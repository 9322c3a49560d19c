#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Runs the blocks ```sh run of a page, in their order, by one bash that ends at the first command that fails. It runs in an empty folder with
links to all that stands in the project's root; build/release there is BUILD. A block ```text output, next behind such a block, shows lines of
its output in their order; "..." stands for any characters.

    run_shell.py PAGE BUILD
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from pages import ROOT, blocks

END = "--- the end of a block ---"


def missing_line(shown, output):
    """Returns the first line of `shown` that is not in `output`, behind the one before; None if there is none."""
    rest = iter(output.splitlines())
    for line in filter(str.strip, shown.splitlines()):
        pattern = ".*".join(map(re.escape, line.rstrip().split("...")))
        if not any(re.fullmatch(pattern, other.rstrip()) for other in rest): return line
    return None


def test_the_comparison():
    assert missing_line("a 1\n\nb ... c\n", "x\na 1\ny\nb 2 3 c\nz\n") is None
    for wrong in ("a", "c ...", "b ... c\na 1"): assert missing_line(wrong, "a 1\nb 2 3 c\n") is not None, wrong


def main(page, build):
    test_the_comparison()
    parts = []  # (commands, the output that the page shows)
    previous = None
    for language, kind, code in blocks(page):
        if (language, kind) == ("sh", "run"): parts.append((code, ""))
        elif (language, kind) == ("text", "output"):
            if previous != ("sh", "run"): sys.exit(f"{page}: this output stands behind no block that is run:\n{code}")
            parts[-1] = parts[-1][0], code
        previous = language, kind
    if not parts: sys.exit(f"{page}: no block is run")
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        for entry in ROOT.iterdir():
            if entry.name not in ("build", ".git"): (work / entry.name).symlink_to(entry)
        (work / "build").mkdir()
        (work / "build/release").symlink_to(build)
        script = "".join(f"{code}\nwait\necho '{END}'\n" for code, _ in parts)
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        print(done.stdout)
    if done.returncode != 0: sys.exit(f"{page}: its commands ended with {done.returncode}")
    for (code, shown), output in zip(parts, done.stdout.split(END)):
        if (line := missing_line(shown, output)) is not None: sys.exit(f"{page}: the output of\n{code}has no line {line!r}, or not in this order")


main(sys.argv[1], pathlib.Path(sys.argv[2]).resolve())
