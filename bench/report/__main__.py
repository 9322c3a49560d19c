# SPDX-License-Identifier: BSL-1.0
"""scripts/bench: see --help."""
import argparse
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

from . import plan as planning
from .compare import compare, require_rounds
from .results import BadInput, Results

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build/release"
# By name in scripts/lib/packages.sh, or a Debian package.
PACKAGES = {"build": "${build_packages[@]} ${trainer_packages[@]} ${mpi_packages[@]} libbenchmark-dev",
            "peers": "libgloo-dev mpich libmpich-dev python3-torch", "charts": "python3-matplotlib", "comparison": "python3-scipy"}
MINUTES, PEERS_MINUTES, QUICK_MINUTES = 22, 6, 4.5
PARTS = "\n".join(f"  {name:12} {what}" for name, (what, _) in planning.PARTS.items())
DESCRIPTION = f"""Measures the library against the machine's limits and against its peers.

Installs what is missing (apt), builds the release preset, runs the benchmarks in rounds, and writes to --out:

  results.json   all figures, the machine, the commands
  index.html     the same as one page, with charts
  charts/        the charts as PNG and SVG
  log.txt        what the programs said

Parts (--only):
{PARTS}

Nothing else should run on the machine meanwhile; where something does, it waits until that has ended, 3 minutes at most, which come on top of
--minutes, as does the build. Exit code: 0; 1 if something could not be measured, or became slower; 2 on wrong input."""


def positive(kind):
    def parse(text):
        try:
            value = kind(text)
        except ValueError: value = 0
        if not (math.isfinite(value) and value > 0): raise argparse.ArgumentTypeError(f"takes a number above 0, not '{text}'")
        return value
    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(fail(message))


class Failed(Exception):
    """The input was good, the machine is not ready; the text is one sentence."""


def fail(sentence, code=2):
    print(f"bench: {sentence}", file=sys.stderr)
    return code


def arguments():
    parser = Parser(prog="scripts/bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="less of everything: under 5 minutes after the build (and the wait), instead of about 20")
    parser.add_argument("--peers", action="store_true", help="install and measure Gloo, MPICH and PyTorch too")
    parser.add_argument("--out", metavar="DIR", type=pathlib.Path, default=ROOT / "build/bench", help="where to write to [build/bench]")
    parser.add_argument("--only", metavar="PART", action="append", choices=planning.PARTS, help="this part; repeat it for others")
    parser.add_argument("--seconds", metavar="S", type=positive(float), help="for each contest, instead of what suits each program")
    parser.add_argument("--rounds", metavar="N", type=positive(int), default=3, help=f"of all programs, as many as there is time for [3]; up to {planning.BESIDES} of what is beside the point, unless --only asks for it")
    parser.add_argument("--minutes", metavar="M", type=positive(float), help=f"no round is begun that would end later, and none goes on [{MINUTES:g}; with --peers {MINUTES + PEERS_MINUTES:g}; quick: {QUICK_MINUTES:g}]")
    parser.add_argument("--render", metavar="RESULTS.json", type=pathlib.Path, help="measure nothing, draw these")
    parser.add_argument("--docs", action="store_true", help="write figures and charts into README.md and docs/, and bench/results.json")
    parser.add_argument("--compare", metavar=("OLD.json", "NEW.json"), nargs="+", type=pathlib.Path,
                        help="what became slower since OLD? Without NEW it is measured now")
    options = parser.parse_args()
    if options.compare and len(options.compare) > 2: parser.error("--compare takes OLD.json and at most one NEW.json")
    if options.compare and len(options.compare) == 2 and (options.render or options.docs):
        parser.error("--compare OLD.json NEW.json only compares; leave out --render and --docs")
    if options.compare and options.render: parser.error("--compare and --render do not go together; give both files to --compare")
    if options.docs and not options.render and (options.only or options.quick): parser.error("--docs needs a whole run; leave out --only and --quick")
    if options.only and "torch" in options.only and not options.peers: parser.error("--only torch needs --peers")
    return options


def install(*what):
    script = f'. "$0"; install_packages {" ".join(PACKAGES[each] for each in what)}'
    if subprocess.run(["bash", "-euc", script, ROOT / "scripts/lib/packages.sh"], stdout=sys.stderr).returncode != 0:
        raise Failed("could not install what is missing; see above")


def need(module, *what):
    """Installs what holds a module, if it is missing."""
    try:
        __import__(module)
    except ImportError:
        install(*what)
        try:
            __import__(module)
        except ImportError as e: raise Failed(f"{sys.executable} has no {module}; install {' '.join(PACKAGES[each] for each in what)}") from e


def build():
    for step in (["cmake", "--preset", "release"], ["cmake", "--build", "--preset", "release", "--target", "gradsync_benchmarks", "gradsync_train"]):
        if subprocess.run(step, cwd=ROOT, stdout=sys.stderr).returncode != 0: raise Failed(f"{' '.join(step)} failed; see above")


def default_minutes(options):
    return QUICK_MINUTES if options.quick else MINUTES + PEERS_MINUTES * options.peers


def measure(options):
    from . import machine
    from .run import Runner
    install("build", *(["peers"] if options.peers else []))
    build()
    plan = planning.Plan(ROOT, BUILD, sys.executable, options.quick, options.peers, options.seconds, chosen=bool(options.only))
    plan.add_parts(options.only or planning.PARTS)
    if not plan.tasks: raise BadInput("there is nothing to measure: " + ("; ".join(plan.left_out.values()) or "these parts are empty with --quick"))
    say = lambda text: print(text, file=sys.stderr, flush=True)
    busy = machine.wait_until_quiet(say)
    others = machine.Others()
    results = Results({**machine.describe(ROOT, BUILD, sys.executable), "busy_before": busy and round(busy, 2)}, {"mode": "quick" if options.quick else "full", "peers": options.peers})
    results.errors.update(plan.left_out)
    if plan.beyond: results.run["left_out"] = plan.beyond
    for label, why in plan.beyond.items(): say(f"left out: {label}: {why}")
    begun = time.monotonic()
    Runner(plan, results, options.out, options.rounds, options.minutes or default_minutes(options)).run()
    results.run["minutes"] = round((time.monotonic() - begun) / 60, 1)
    during = others.cores()
    results.machine["busy_with_others"] = during and round(during, 2)
    results.save(options.out / "results.json")
    return results


def render(results, drawn, folder):
    from . import charts, page
    (folder / "charts").mkdir(parents=True, exist_ok=True)
    for name, (figure, _) in drawn.items():
        charts.save_png(figure, folder / "charts" / f"{name}.png")
        charts.save_svg(figure, folder / "charts" / f"{name}.svg")
    (folder / "index.html").write_text(page.render(results, drawn))
    print(f"wrote {os.path.relpath(folder / 'index.html')}", file=sys.stderr)


def main():
    options = arguments()
    try:
        old = Results.load(options.compare[0]) if options.compare else None
        new = Results.load(options.compare[1]) if options.compare and len(options.compare) == 2 else None
        given = Results.load(options.render) if options.render else None
        for results, path in zip((old, new), options.compare or ()):
            if results: require_rounds(results, path)
        if old: need("scipy.stats", "comparison")
        if not new:
            need("matplotlib", "charts")
            try:
                options.out.mkdir(parents=True, exist_ok=True)
            except OSError as e: raise BadInput(f"cannot write to {options.out}: {e.strerror}") from e
            results = given or measure(options)
            if old: require_rounds(results, "this run")
            from . import charts, docs
            drawn = charts.drawn(results)
            render(results, drawn, options.out)
            if options.docs:
                if not given and (made := results.run.get("rounds", 0)) < options.rounds:
                    print(f"bench: the figures in README.md and docs/ are of {made} of {options.rounds} rounds; measure again with more --minutes", file=sys.stderr)
                for path in docs.write(ROOT, results, drawn): print(f"wrote {os.path.relpath(path)}", file=sys.stderr)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads the comparison may have seen enough
        good = compare(old, new or results, sys.stdout) if old else True
        return 0 if good and (new or given or not results.errors) else 1
    except BadInput as e: return fail(e)
    except Failed as e: return fail(e, 1)
    except KeyboardInterrupt: return fail("interrupted; results.json holds the rounds that were made", 130)


if __name__ == "__main__":
    sys.exit(main())
