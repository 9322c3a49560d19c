# SPDX-License-Identifier: BSL-1.0
"""The figures in README.md and docs/: what stands between

    <!-- bench: NAME -->
    <!-- end of bench: NAME -->

is written from results.json, and only from there. A block chart_NAME shows the chart of that name."""
import pathlib
import re

from . import charts, names, tables
from .estimates import exposed_of
from .goals import MET, PART
from .plan import MIB
from .results import BadInput
from .text import Table, milliseconds, or_blank, seconds, size

PAGES = ("README.md", "docs/background/performance.md")
CHARTS = "docs/charts"
BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n)(.*?)(<!-- end of bench: \2 -->)", re.DOTALL)


def conditions(results):
    m, run = results.machine, results.run
    others, much = results.used_by_others()
    return (f"{m.get('cores')} cores of {'a virtual machine' if m.get('virtual') else 'a machine'} ({m.get('cpu')}), {m.get('compiler')}, "
            f"`{m.get('build')}`; {'; '.join(m.get('peers', [])) or 'no peers'}. {m.get('date')}, commit {m.get('commit', '')[:12]}"
            f"{'' if m.get('clean') else ' with changes'}, {results.up_to_rounds()}"
            + or_blank(lambda ns: f", {ns:.0f} ns from core to core", results.handoff()) + f", {others}" * bool(others) + "."
            + " **Others used the machine: the figures say little.**" * much + (f" **{results.disturbed()}**" if results.disturbed() else "")
            + ("\n\nNot measured: " + "; ".join(f"{name} ({text})" for name, text in results.not_measured()) + "." if results.not_measured() else ""))


def all_reduces(results, whos, counts, numbers_of_ranks):
    """A row a size, a column a contestant: `whos`, {name: heading}."""
    cases = tables.all_reduce_cases(results)
    table = Table("", ["all-reduce", *whos.values()])
    for ranks in numbers_of_ranks:
        for count in counts:
            cells = [cases.get(ranks, {}).get(who, {}).get(count) for who in whos]
            label = f"{ranks} ranks, " * (len(numbers_of_ranks) > 1) + size(count)
            if any(cells): table.rows.append([label, *(or_blank(seconds, b and b.time) for b in cells)])
    return table.markdown()


def summary(results):
    """Two ranks, by the memory that is reduced: threads reach all of it, processes only what `allocate` gave them."""
    return all_reduces(results, {"threads": "threads, any memory", "mpi": "processes, memory of `allocate()`", "mpi_borrowed": "processes, other memory",
                                 "mpi_library": "MPI_Allreduce", "gloo": "Gloo", "limit": "bare loop (limit)"}, (MIB, 25 * MIB, 100 * MIB), (2,))


def all_reduce(results):
    present = {who for contestants in tables.all_reduce_cases(results).values() for who in contestants}
    whos = {who: look.label for who, look in names.WHO.items() if who in present & names.BRIEFLY_REDUCED}
    return all_reduces(results, whos, (4096, MIB, 25 * MIB), (2, 4))


def exposed_briefly(benchmark):
    """Milliseconds that synchronisation adds to a step; the interval's upper end if it includes zero."""
    found = benchmark and exposed_of(benchmark)
    if not found: return ""
    least, most = found.between or (found.value, found.value)
    return f"{milliseconds(found.value)} ms" if least > 0 else f"at most {milliseconds(max(most, found.value))} ms"


def summary_steps(results):
    table = Table("", ["training step", "alone", "added by gradsync, threads", "processes", "added by PyTorch DDP over Gloo"])
    for model, of_ranks in tables.step_cases(results).items():
        at = lambda backend, strategy: of_ranks.get(2, {}).get(backend, {}).get(strategy)
        alone = at("threads", "independent")
        table.rows.append([{"mlp": "MLP"}.get(model, model), or_blank(lambda b: f"{milliseconds(b.time)} ms", alone),
                           *(exposed_briefly(at(backend, names.DEFAULT)) for backend in ("threads", "mpi")), exposed_briefly(at("gloo", names.PEER_DEFAULT))])
    return table.markdown()


def train_step(results):
    """A table for each model, of those strategies that a user chooses between."""
    cases = tables.step_cases(results)
    made = [tables.steps_briefly(results, model, ranks) for model in cases if (ranks := charts.most_measured(cases[model]))]
    return "\n\n".join(f"{t.title}:\n\n{t.markdown()}" for t in made if t.rows)


def goals(results):
    """Those that are not met, and how many there are."""
    rows = [row for row in tables.goals(results).rows if row[3] != PART]
    table = Table("", ["goal not met", "goal", "measured", ""], [row for row in rows if row[3] != MET])
    return f"{len(rows) - len(table.rows)} of {len(rows)} goals are met." + "\n\n" * bool(table.rows) + table.markdown()


def chart(name, what):
    return f"![{what[0].upper()}{what[1:]}](../charts/{name}.svg)"


BLOCKS = {  # by name: what makes its text of the results
    "conditions": conditions,
    "summary": summary,
    "summary_steps": summary_steps,
    "goals": goals,
    "all_reduce": all_reduce,
    "train_step": train_step,
}


def rewritten(page, text, results, drawn):
    """`text` with every block anew; `drawn`: the charts that there are."""
    opened = re.findall(r"<!-- bench: (.*?) -->", text)
    whole = [name for _, name, _, _ in BLOCK.findall(text)]
    for name in opened:
        if name not in BLOCKS and not name.startswith("chart_"): raise BadInput(f"{page}: there is no block {name}; choose from {', '.join(BLOCKS)}")
    if opened != whole: raise BadInput(f"{page}: a block has no end: {', '.join(name for name in opened if name not in whole)}")

    def content(name):
        picture = name.removeprefix("chart_")
        if name != picture: return chart(picture, drawn[picture][1]) if picture in drawn else ""
        return BLOCKS[name](results).strip("\n")

    return BLOCK.sub(lambda found: f"{found.group(1)}{content(found.group(2)) or 'Not in this run.'}\n{found.group(4)}", text)


def write(root, results, drawn):
    """Figures, the charts that the pages show, and the results of the main branch, all from one run; returns the paths."""
    pages = {pathlib.Path(root, page): pathlib.Path(root, page).read_text() for page in PAGES}
    shown = [name for name in drawn if any(f"<!-- bench: chart_{name} -->" in text for text in pages.values())]
    for path, text in pages.items(): path.write_text(rewritten(path, text, results, drawn))
    folder = pathlib.Path(root, CHARTS)
    folder.mkdir(exist_ok=True)
    for name in shown: charts.save_svg(drawn[name][0], folder / f"{name}.svg")
    kept = pathlib.Path(root, "bench/results.json")
    results.brief().save(kept)
    return [*pages, *(folder / f"{name}.svg" for name in shown), kept]
