# SPDX-License-Identifier: BSL-1.0
"""The figures in README.md and docs/: what stands between

    <!-- bench: NAME -->
    <!-- end of bench: NAME -->

is written from results.json, and only from there. A block chart_NAME shows the chart of that name."""
import pathlib
import re

from . import charts, names, tables
from .estimates import exposed_of
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


def summary(results):
    """Two ranks, by the memory that is reduced: threads reach all of it, processes only what `allocate` gave them."""
    by_size = tables.all_reduce_cases(results).get(2, {})
    table = Table("", ["all-reduce", "threads, any memory", "processes, memory of `allocate()`", "processes, other memory", "MPI_Allreduce", "Gloo", "bare loop (limit)"])
    for count in (2 ** 20, 25 * 2 ** 20, 100 * 2 ** 20):
        cells = [by_size.get(who, {}).get(count) for who in ("threads", "mpi", "mpi_borrowed", "mpi_library", "gloo", "limit")]
        if any(cells): table.rows.append([size(count), *(or_blank(seconds, b and b.time) for b in cells)])
    return table.markdown()


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


def commands(part):
    """Those of memory differ in the stage S and the number of ranks N alone."""
    def text(results):
        lines = results.run.get("commands", {}).get(part, [])
        if part == "memory": lines = dict.fromkeys(re.sub(r"--shard (?!parameters)\w+", "--shard S", re.sub(r"(-n|--ranks) \d+", r"\1 N", line)) for line in lines)
        return "\n".join(f"    {line}" for line in lines)
    return text


def of_models(table):
    """A table for each model."""
    def text(results):
        made = [table(results, model) for model in tables.step_cases(results)]
        return "\n\n".join(f"{t.title}:\n\n{t.markdown()}" for t in made if t.rows)
    return text


def steps(results, model):
    ranks = charts.most_measured(tables.step_cases(results)[model])
    return tables.steps_briefly(results, model, ranks) if ranks else Table("", [])


def chart(name, what):
    return f"![{what[0].upper()}{what[1:]}](../charts/{name}.svg)"


BLOCKS = {  # by name: what makes its text of the results
    "conditions": conditions,
    "summary": summary,
    "summary_steps": summary_steps,
    "goals": lambda results: tables.goals(results).markdown(),
    "all_reduce_command": commands("all_reduce"),
    "all_reduce": lambda results: tables.all_reduce(results).markdown(),
    "to_limit": lambda results: tables.to_limit(results).markdown(),
    "train_step_command": commands("train_step"),
    "torch_command": commands("torch"),
    "train_step": of_models(steps),
    "scaling": of_models(tables.scaling),
    "memory_command": commands("memory"),
    "memory": lambda results: tables.memory(results).markdown(),
    "reducer_command": commands("reducer"),
    "marks": lambda results: tables.marks(results).markdown(),
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
    """Figures, charts and the results of the main branch, all from one run; returns the paths."""
    pages = {pathlib.Path(root, page): rewritten(page, pathlib.Path(root, page).read_text(), results, drawn) for page in PAGES}
    for path, text in pages.items(): path.write_text(text)
    folder = pathlib.Path(root, CHARTS)
    folder.mkdir(exist_ok=True)
    for name, (figure, _) in drawn.items(): charts.save_svg(figure, folder / f"{name}.svg")
    kept = pathlib.Path(root, "bench/results.json")
    results.brief().save(kept)
    return [*pages, *(folder / f"{name}.svg" for name in drawn), kept]
