# SPDX-License-Identifier: BSL-1.0
"""scripts/bench: see --help."""
import argparse
import os
import pathlib
import signal
import subprocess
import sys

from . import BadInput, charts, docs, machine, page
from . import plan as planning
from .compare import compare
from .results import Pool, Results
from .run import Runner, say

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build/release"
RUNS = ROOT / "bench/results"
MINUTES, PEERS_MINUTES, QUICK_MINUTES = 20, 20, 4.5
PARTS = "\n".join(f"  {name:12} {what}" for name, (what, _) in planning.PARTS.items())
DESCRIPTION = f"""Measures the library against the machine's limits and against its peers.

Installs what is missing, builds the release preset, runs the benchmarks in rounds, and writes results.json, index.html, charts/ and log.txt.
Run nothing else meanwhile. Parts (--only):

{PARTS}

Exit code: 0; 1 if something could not be measured or became slower; 2 on wrong input."""


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"less of everything: {QUICK_MINUTES:g} minutes instead of {MINUTES}")
    add("--peers", action="store_true", help=f"also Gloo, PyTorch, DeepSpeed and other MPIs; not quick: {PEERS_MINUTES} minutes more")
    add("--out", metavar="DIR", type=pathlib.Path, default=ROOT / "build/bench", help="where to write to [build/bench]")
    add("--only", metavar="PART", action="append", choices=planning.PARTS, help="this part; repeat it for others")
    add("--rounds", metavar="N", type=int, default=3, help="rounds, if there is time for them [3]; without --only, some programs take part in "
        f"{planning.BESIDES} only")
    add("--minutes", metavar="M", type=float, help="no round is begun that would end later, and none goes on")
    add("--pool", metavar="RESULTS.json", type=pathlib.Path, nargs="+", help="measure nothing; draw these runs: of several, the medians, and the "
        "least and the greatest")
    add("--docs", action="store_true", help=f"add this run to {RUNS.relative_to(ROOT)}/, and write figures and charts of all runs there into README.md and "
        "docs/")
    add("--compare", metavar="OLD.json", type=pathlib.Path, help="what became slower since OLD, in this run or in what --pool gives?")
    options = parser.parse_args()
    if options.rounds < 1 or not (options.minutes is None or options.minutes > 0): parser.error("--rounds and --minutes must be positive")
    part = options.only or options.quick
    if options.docs and not options.pool and part: parser.error("--docs needs a whole run; leave out --only and --quick")
    if "torch" in (options.only or []) and not options.peers: parser.error("--only torch needs --peers")
    return options


def build(peers):
    packages = "libgloo-dev python3-venv python3-dev" * peers
    script = f"""
        . scripts/lib/packages.sh
        install_packages ${{build_packages[@]}} ${{trainer_packages[@]}} ${{mpi_packages[@]}} libbenchmark-dev {packages}
        cmake --preset release
        cmake --build --preset release --target gradsync_benchmarks gradsync_train
        {"bench/peers/install" * peers}"""
    subprocess.run(["bash", "-euc", script], cwd=ROOT, stdout=sys.stderr, check=True)


def measure(options):
    build(options.peers)
    peers = machine.installed_peers(ROOT) if options.peers else None
    plan = planning.Plan(ROOT, BUILD, options.only or planning.PARTS, options.quick, peers, chosen=bool(options.only))
    if not plan.tasks: raise BadInput("there is nothing to measure: " + ("; ".join(plan.left_out.values()) or "these parts are empty with --quick"))
    names = {peer["name"]: peer["version"] for peer in (peers or {}).get("all_reduce", [])}
    results = Results(machine.describe(ROOT, BUILD, peers or {}), {"mode": "quick" if options.quick else "full", "peers": names})
    results.errors.update(plan.left_out)
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES + PEERS_MINUTES * options.peers)
    Runner(plan, results, options.out, options.rounds, minutes).run()
    return results


def published(results):
    """The runs of the main branch, with this one."""
    m = results.machine
    if not m["clean"]: raise BadInput("--docs publishes runs of a commit: this one had other changes; it is in results.json")
    results.save(RUNS / f"{m['date'].removesuffix(' UTC').replace(' ', '-').replace(':', '')}-{m['commit'][:8]}.json")
    return Pool.load(RUNS.glob("*.json"))


def render(results, options):
    drawn = charts.drawn(results)
    (options.out / "charts").mkdir(parents=True, exist_ok=True)
    for name, (figure, _) in drawn.items(): charts.save(figure, options.out / f"charts/{name}.svg")
    (options.out / "index.html").write_text(page.render(results, drawn))
    written = [options.out / "index.html", *(docs.write(ROOT, results, drawn) if options.docs else [])]
    for path in written: say(f"wrote {os.path.relpath(path)}")


def main():
    options = arguments()
    try:
        old = Results.load(options.compare) if options.compare else None
        options.out.mkdir(parents=True, exist_ok=True)
        results = Pool.load(options.pool) if options.pool else measure(options)
        render(published(results) if options.docs and not options.pool else results, options)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may have seen enough
        same = compare(old, results, sys.stdout) if old else True
        return 0 if same and (options.pool or not results.errors) else 1
    except OSError as e:
        said, code = f"{e.filename}: {e.strerror}", 2
    except BadInput as e:
        said, code = e, 2
    except subprocess.CalledProcessError:
        said, code = "could not build; see above", 1
    except KeyboardInterrupt:
        said, code = "interrupted; results.json holds the rounds that were made", 130
    print(f"bench: {said}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
