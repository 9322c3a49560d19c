# SPDX-License-Identifier: BSL-1.0
"""The figures in README.md and docs/: what stands between

    <!-- bench: NAME -->
    <!-- end of bench: NAME -->

is written from bench/results/, and only from there. A block chart_NAME shows the chart of that name."""
import re

import pandas

from . import BadInput, charts, names, tables
from .estimates import exposed_of
from .goals import MET, NOT_MEASURED, goals, step
from .plan import MIB
from .text import markdown, milliseconds, or_blank, significant, size

PAGES = ("README.md", "docs/background/performance.md", "docs/background/method.md")
BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n)(.*?)(<!-- end of bench: \2 -->)", re.DOTALL)
# Two ranks, by the memory that is reduced: threads reach all of it, processes only what `allocate` gave them.
SUMMARY = {"limit": "bare loop: the limit", "threads": "gradsync, threads", "mpi": "gradsync, processes: buckets and `allocate()`",
           "mpi_borrowed": "gradsync, processes: other memory", "deepspeed_shm": "DeepSpeed, shared memory", "mpi_library": "MPI_Allreduce", "tcp_messages": "gradsync, sockets", "gloo": "Gloo, sockets"}


def conditions(results):
    """A row for each run, and what ran beside."""
    rows, states = [], tables.rounds(results)
    for run in results.runs:
        own = states[states.run == tables.name_of(run)]
        bad = [f"{row.round} ({row.state})" for row in own.itertuples() if row.state != "good"]
        rows.append({"run": tables.name_of(run), "processor": f"{run.machine.get('cores')} cores of {run.machine.get('cpu')}",
                     "rounds": str(len(own)), "copy": ", ".join(filter(None, own["copy"])), "core to core": ", ".join(filter(None, own["core to core"])),
                     "bad rounds": ", ".join(bad) or "none"})
    m, peers = results.machine, dict.fromkeys(peer for run in results.runs for peer in run.machine.get("peers", []))
    missing = "; ".join(f"{name} ({text})" for name, text in sorted(results.errors.items()))
    return (f"{markdown(pandas.DataFrame(rows))}\n\n{m.get('compiler')}, `{m.get('build')}`; {'; '.join(peers) or 'no peers'}."
            + "".join(f" **{run.others()[1]}**" for run in results.runs if run.others()[1]) + f"\n\nNot measured: {missing}." * bool(missing))


def all_reduce_of(results, ranks, whos, counts):
    """A row for each of `whos`, {name: heading}, and a column for each size, in one unit."""
    found = tables.all_reduces(results, whos)
    found = found[found.index.isin([(ranks, count) for count in counts])].dropna(axis=1, how="all")
    table = {f"all-reduce, {ranks} ranks": [whos[who] for who in found]}
    for (_, count), times in found.iterrows():
        factor, unit = (1e-3, "ms") if times.min() >= 1e-3 else (1e-6, "us")
        table[f"{size(count)}, {unit}"] = ["" if pandas.isna(time) else significant(time / factor) for time in times]
    return markdown(pandas.DataFrame(table)) if len(table) > 1 else ""


def summary(results):
    return all_reduce_of(results, 2, SUMMARY, (MIB, 25 * MIB, 100 * MIB))


def all_reduce(results):
    """A table for each number of ranks, of those that a user chooses between."""
    whos = tables.labels(results, names.BRIEFLY_REDUCED)
    return "\n\n".join(filter(None, (all_reduce_of(results, ranks, whos, (4096, MIB, 25 * MIB)) for ranks in (2, 4))))


def brackets(results):
    count = len(results.runs)
    return "Brackets: " + (f"the least and the greatest of {count} runs." if count > 1 else "95 % confidence intervals.")


def summary_steps(results):
    rows, adds = [], lambda benchmark: or_blank(lambda found: found.text(milliseconds, briefly=True), exposed_of(benchmark))
    for model in tables.steps(results).model.unique():
        own = {backend: step(results, model, names.DEFAULT, backend) for backend in ("threads", "mpi")}
        alone = step(results, model, "independent", "threads")
        rows.append({"ms per step": {"mlp": "MLP"}.get(model, model), "alone": or_blank(lambda b: milliseconds(b.time), alone),
                     "gradsync adds, threads": adds(own["threads"]), "gradsync adds, processes": adds(own["mpi"]),
                     "gradsync in PyTorch adds": adds(step(results, model, names.IN_TORCH, "tcp")),
                     "PyTorch DDP over Gloo adds": adds(step(results, model, names.PEER_DEFAULT, "gloo"))})
    return f"{markdown(pandas.DataFrame(rows))}\n\n{brackets(results)}"


def train_step(results):
    """A table for each model, of those strategies that a user chooses between."""
    said = []
    for model, found in tables.steps(results).query("ranks == 2").groupby("model", observed=True):
        alone, torch = step(results, model, "independent", "threads"), step(results, model, "torch_independent", "gloo")
        takes = f", which takes {milliseconds(alone.time)} ms without synchronisation" if alone else ""
        if takes and torch: takes += f" ({milliseconds(torch.time)} in PyTorch)"
        said.append(f"{model}, 2 ranks: ms added to a step{takes}:\n\n{markdown(tables.steps_briefly(found))}")
    return "\n\n".join([*said, brackets(results)])


def goals_not_met(results):
    table = goals(results)
    missed, unknown = table[~table[""].isin((MET, NOT_MEASURED))], table.what[table[""] == NOT_MEASURED]
    return (f"{(table[''] == MET).sum()} of {len(table)} goals are met.\n\n" + markdown(missed.rename(columns={"what": "goal not met"}))
            + ("\n\nNot measured: " + "; ".join(unknown) + ".") * bool(len(unknown)))


BLOCKS = {"conditions": conditions, "summary": summary, "summary_steps": summary_steps, "goals": goals_not_met, "all_reduce": all_reduce,
          "train_step": train_step}


def rewritten(page, text, results, drawn):
    """`text` with every block anew; `drawn`: the charts that there are."""
    whole = [name for _, name, _, _ in BLOCK.findall(text) if name in BLOCKS or name.startswith("chart_")]
    for name in re.findall(r"<!-- bench: (.*?) -->", text):
        if name not in whole: raise BadInput(f"{page}: the block {name} has no end or is none of {', '.join(BLOCKS)}, chart_NAME; mend its marks")

    shown = {f"chart_{name}": f"![{what}](../charts/{name}.svg)" for name, (_, what) in drawn.items()}
    content = lambda name: BLOCKS[name](results).strip("\n") if name in BLOCKS else shown.get(name)
    return BLOCK.sub(lambda found: f"{found[1]}{content(found[2]) or 'Not in this run.'}\n{found[4]}", text)


def write(root, results, drawn):
    """Figures and the charts that the pages show; returns the paths."""
    pages = {root / page: rewritten(page, (root / page).read_text(), results, drawn) for page in PAGES}
    every = "".join(pages.values())
    shown = {root / f"docs/charts/{name}.svg": figure for name, (figure, _) in drawn.items() if f"<!-- bench: chart_{name} -->" in every}
    for path, text in pages.items(): path.write_text(text)
    for path, figure in shown.items(): charts.save(figure, path)
    return [*pages, *shown]
