#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""A class of include/ has at most 20 public functions, a face more. Those that it inherits count; overloads count once; constructors,
destructors and assignments do not. Exit code 77 without libclang.  classes.py [--list]
"""
import collections
import pathlib
import shutil
import subprocess
import sys

MOST = 20
FACES = {"Reducer": 25, "TorchReducer": 25, "ShardedOptimizer": 30, "ShardedParameters": 30, "detail::TorchSharded": 30, "TorchShardedOptimizer": 30, "TorchFullyShard": 30}
# Others with more, and why. Never raise a number; where the code needs fewer, lower it.
EXCEPTIONS = {
    "It has every call of the concept Backend, and what only this one can do.": {
        "ThreadBackend": 28, "TcpBackend": 30, "MpiBackend": 29, "NcclBackend": 35, "StagingBackend": 28, "SimulatedBackend": 26, "detail::ProcessBackend": 29,
        "detail::EngineCollectives": 22},
    "It starts, completes, fails and divides the collectives of a backend.": {
        "collective::Engine": 33, "message_passing::MessageEngine": 39, "shared_memory::ProcessEngine": 35, "detail::HierarchicalEngine": 34,
        "detail::NcclEngine": 49, "simulation::Engine": 23, "shared_memory::Seat": 29},
    "It is all that processes need of a network, or of each other.": {
        "message_passing::Transport": 22, "message_passing::TcpTransport": 22, "detail::MpiTransport": 22, "message_passing::MessageWorld": 27},
    "It is a collective in every state between its hello and its last result.": {"message_passing::PendingCollective": 28},
    "It has the calls that both sharded classes share.": {"detail::ShardedBase": 21},
}
MORE = {name: count for counts in EXCEPTIONS.values() for name, count in counts.items()}
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build/python"))  # where scripts/test --all installs it
try:
    from clang import cindex
    from clang.cindex import AccessSpecifier, CursorKind
except ImportError as problem:
    print(f"libclang is not installed ({problem}); scripts/test --all installs it")
    sys.exit(77)

CLASSES = (CursorKind.CLASS_DECL, CursorKind.STRUCT_DECL, CursorKind.CLASS_TEMPLATE, CursorKind.CLASS_TEMPLATE_PARTIAL_SPECIALIZATION)
FUNCTIONS = (CursorKind.CXX_METHOD, CursorKind.FUNCTION_TEMPLATE, CursorKind.CONVERSION_FUNCTION)


def parsed(text, name="all.cpp"):
    """The syntax tree. Headers of packages that are not installed are left out, and so is what depends on them."""
    arguments = ["-std=c++20", f"-I{ROOT}/include", "-isystem", "/usr/include/eigen3", "-isystem", "/usr/include/torch/csrc/api/include", "-DOMPI_SKIP_MPICXX"]
    if compiler := shutil.which("g++"):  # the wheel of libclang has no headers of its own
        arguments += ["-isystem", subprocess.run([compiler, "-print-file-name=include"], capture_output=True, text=True).stdout.strip()]
    if shutil.which("pkg-config"):
        arguments += subprocess.run(["pkg-config", "--cflags-only-I", "ompi"], capture_output=True, text=True).stdout.split()
    keep_going = 0x200
    options = cindex.TranslationUnit.PARSE_SKIP_FUNCTION_BODIES | keep_going
    return cindex.Index.create().parse(name, args=arguments, unsaved_files=[(name, text)], options=options)


def base_of(specifier):
    """The definition of a base class, of a template's if it is an instance."""
    for child in specifier.get_children():
        if child.kind in (CursorKind.TEMPLATE_REF, CursorKind.TYPE_REF) and child.referenced is not None:
            found = child.referenced
            if found.kind in (CursorKind.TYPE_ALIAS_DECL, CursorKind.TYPEDEF_DECL):
                found = found.underlying_typedef_type.get_declaration()
            if (found := found.get_definition()) is not None and found.kind in CLASSES: return found
    return None


def public_functions(cls):
    names = set()
    for child in cls.get_children():
        if child.access_specifier != AccessSpecifier.PUBLIC: continue
        if child.kind in FUNCTIONS and child.spelling.partition("<")[0] not in (cls.spelling, "operator="): names.add(child.spelling)
        if child.kind == CursorKind.USING_DECLARATION:
            scopes = {c.spelling.rpartition("::")[2] for c in child.get_children() if c.kind in (CursorKind.TYPE_REF, CursorKind.TEMPLATE_REF)}
            if child.spelling.partition("<")[0] not in scopes and not child.spelling.endswith("_"): names.add(child.spelling)  # no constructor, no data
        if child.kind == CursorKind.CXX_BASE_SPECIFIER and (base := base_of(child)) is not None: names |= public_functions(base)
    return names


def classes(cursor, scope=""):
    for child in cursor.get_children():
        if child.location.file is None or not is_own(child.location.file.name): continue
        if child.kind in CLASSES and child.is_definition(): yield scope + child.spelling, child
        if child.kind in CLASSES or child.kind == CursorKind.NAMESPACE:
            inner = "" if child.spelling in ("gradsync", "v0_2") else child.spelling + "::"
            yield from classes(child, scope + inner)


def is_own(file):
    return file.startswith(f"{ROOT}/include/") or file == "all.cpp"


def test_the_count():
    text = """
        namespace gradsync { inline namespace v0_2 {
        struct Root { Root(); ~Root(); void a(); void a(int); bool operator==(const Root&) const; Root& operator=(const Root&); protected: void p(); };
        template <class T> class Base : public Root { public: template <class U> void b(U); operator bool() const; private: void q(); };
        template <class T> struct Derived : Base<T> { using Short = Base<int>; void c(); };
        struct Last : private Derived<int> { using Derived<int>::c; void d(); };
        template <class T> struct Lists : private Derived<T> { using Up = Derived<T>; using Up::a, Up::b, Up::data_; using Derived<T>::Derived; };
        class Hides : Root { public: void e(); };
        }}"""
    found = {name: public_functions(cls) for name, cls in classes(parsed(text).cursor)}
    assert found == {"Root": {"a", "operator=="}, "Base": {"a", "operator==", "b", "operator bool"}, "Derived": {"a", "operator==", "b", "operator bool", "c"},
                     "Last": {"c", "d"}, "Lists": {"a", "b"}, "Hides": {"e"}}, found


test_the_count()
headers = [str(file.relative_to(ROOT / "include")) for file in sorted((ROOT / "include").rglob("*.hpp"))]
counts = collections.Counter()
unit = parsed("".join(f"#include <{header}>\n" for header in headers))
complete = not any("file not found" in diagnostic.spelling for diagnostic in unit.diagnostics)
for name, cls in classes(unit.cursor):
    counts[name] = max(counts[name], len(public_functions(cls)))
if "--list" in sys.argv: print("\n".join(f"{count:3} {name}" for name, count in counts.most_common()))
wrong = []
for name, count in counts.items():
    most = MORE.get(name, FACES.get(name, MOST))
    if count > most: wrong.append(f"{name} has {count} public functions (at most {most}); give a part of them to a class of their own")
    if complete and name in MORE and count < most: wrong.append(f"{name} has only {count} public functions; lower the number in {pathlib.Path(__file__).name}")
if len(counts) < 300: wrong.append(f"only {len(counts)} classes in {ROOT}/include: can libclang read them?")
sys.exit("\n".join(wrong) or 0)  # sys.exit("") would fail
