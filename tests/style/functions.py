#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""No function of include/ has more than 60 lines, from the line of its name to the closing brace of its body. Exit code 77 without lizard."""
import pathlib
import re
import sys

MOST = 60
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build/python"))  # where scripts/test --all installs it
try:
    import lizard
except ImportError as problem:
    print(f"lizard is not installed ({problem}); scripts/test --all installs it")
    sys.exit(77)


def functions(file):
    """The functions of a file. Without these replacements lizard takes a < for a bracket, and misses functions behind it or with a requires clause."""
    text = re.sub(r" (<<?|>>?)=? ", " + ", file.read_text())
    text = re.sub(r"^ +requires\(.*\)$", "", text, flags=re.M)
    # lizard tells the language by the file's name, and does not know those of CUDA.
    found = lizard.analyze_file.analyze_source_code(str(file.with_suffix(".hpp")), text).function_list
    return [f for f in found if not f.name.endswith("::requires")]  # a concept


count, wrong = 0, []
for file in sorted(ROOT.glob("include/**/*")):
    if file.suffix in (".hpp", ".cpp", ".cuh", ".cu"):
        for function in functions(file):
            count += 1
            if function.length > MOST:
                name = re.sub(r"\binlinev\w+::", "", function.name)
                wrong.append(f"{file.relative_to(ROOT)}:{function.start_line}: {name} has {function.length} lines; split it (at most {MOST})")
if count < 2000:
    wrong.append(f"only {count} functions in {ROOT}/include: can lizard read them?")
sys.exit("\n".join(wrong) or 0)  # sys.exit("") would fail
