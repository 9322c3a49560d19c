# SPDX-License-Identifier: BSL-1.0
"""Results as tables: DataFrames of strings, or of benchmarks for those who draw them."""
import pandas

from . import names
from .estimates import efficiency_of, exposed_of
from .results import median
from .text import bandwidth, efficiency, milliseconds, or_blank, ratio, ranks_of, seconds, significant, size

COLLECTIVE = r"(?P<who>\w+)/(?P<collective>\w+)/(?P<dtype>\w+)/ranks:(?P<ranks>\d+)/bytes:(?P<bytes>\d+)"
STEP = r"train_step/(?P<model>\w+)/(?P<strategy>\w+)/(?P<backend>\w+)/ranks:(?P<ranks>\d+)"


def labels(results, whos=names.WHO):
    """{name: label}; a peer that has a version is called by its first number."""
    versions = results.run.get("peers")
    known = versions if isinstance(versions, dict) else {}
    return {who: known[who].partition(".")[0] if who in ("open_mpi", "mpich") and who in known else names.WHO[who].label for who in whos}


def machine(results):
    said = {**results.machine, **{key: results.run[key] for key in ("mode", "rounds", "minutes") if key in results.run}}
    return pandas.DataFrame([(key.replace("_", " "), str(value)) for key, value in said.items()], columns=["machine", ""])


def name_of(run):
    m = run.machine
    return f"{m.get('date', '').removesuffix(' UTC')}, {m.get('commit', '')[:8]}{'' if m.get('clean') else ' with changes'}"


SLOW_COPY, SLOW_HANDOFF, STOLEN = 0.8, 1.5, 0.02  # of the median of the same processor's rounds; of all cores


def rounds(results):
    """The state of the machine in every round, and what was bad about it."""
    every = [(run, number, state) for run in results.runs for number, state in enumerate(run.states(), 1)]
    usual = lambda what, cpu: median([state[what] for run, _, state in every if run.machine.get("cpu") == cpu and state.get(what)]) or 0
    rows = []
    for run, number, state in every:
        cpu = run.machine.get("cpu", "")
        copy, handoff, steal = (state.get(what) for what in ("copy", "handoff_ns", "steal"))
        bad = [what for what, is_so in (("slow copy", copy and copy < SLOW_COPY * usual("copy", cpu)),
                                        ("slow handoff", handoff and handoff > SLOW_HANDOFF * usual("handoff_ns", cpu)),
                                        ("stolen time", steal and steal > STOLEN)) if is_so]
        rows.append({"run": name_of(run), "processor": cpu, "round": str(number), "copy": or_blank(bandwidth, copy),
                     "core to core": or_blank("{:.0f} ns".format, handoff), "stolen": or_blank("{:.1%}".format, steal), "state": ", ".join(bad) or "good"})
    return pandas.DataFrame(rows)


def all_reduces(results, whos=names.WHO):
    """Seconds of all-reduces in f32: a row a number of ranks and bytes, a column for each of `whos` that was measured."""
    found = results.parsed(COLLECTIVE).query("collective == 'all_reduce' and dtype == 'f32'")
    table = found.assign(time=[b.time for b in found.benchmark]).pivot(index=["ranks", "bytes"], columns="who", values="time")
    return table.reindex(columns=[who for who in whos if who in table])


def all_reduce(results):
    found = all_reduces(results, labels(results))
    table = found.applymap(seconds, na_action="ignore").fillna("").rename(columns=labels(results))
    table.insert(0, "all-reduce", [f"{ranks_of(ranks)}, {size(count)}" for ranks, count in found.index])
    return table


def steps(results):
    """Training steps that are paired with copies that do not synchronise, in the order of names: a DataFrame with a column "benchmark"."""
    found = results.parsed(STEP)
    for column, order in (("model", names.MODELS), ("backend", names.BACKENDS), ("strategy", names.STRATEGIES)):
        found[column] = pandas.Categorical(found[column], list(order), ordered=True)
    return found.dropna().sort_values(["model", "ranks", "backend", "strategy"])


def step_figures(results):
    """A row a training step."""
    rows = []
    for row in steps(results).itertuples():
        b = row.benchmark
        rows.append({"model": row.model, "ranks": str(row.ranks), "backend": names.BACKENDS[row.backend].label,
                     "strategy": names.STRATEGIES[row.strategy], "step, ms": milliseconds(b.time),
                     "exposed, ms": or_blank(lambda found: found.text(milliseconds), exposed_of(b)),
                     "efficiency": or_blank(lambda found: found.text(efficiency), efficiency_of(b)),
                     "samples/s": or_blank(significant, b.counter("samples_per_second")),
                     "state, MB": or_blank(lambda count: f"{count / 1e6:.1f}", b.counter("state_bytes"))})
    return pandas.DataFrame(rows)


def steps_briefly(found):
    """What synchronisation adds to a step of one model and number of ranks: a row for each strategy of names.BRIEFLY, a column a backend."""
    found = found[found.strategy.isin(names.BRIEFLY)]
    figures = pandas.DataFrame({"strategy": [names.STRATEGIES[strategy] for strategy in found.strategy],
                                "backend": [names.BACKENDS[backend].label for backend in found.backend],
                                "cell": [or_blank(lambda e: e.text(milliseconds, briefly=True), exposed_of(b)) for b in found.benchmark]})
    table = figures.pivot(index="strategy", columns="backend", values="cell").fillna("")
    return table.reindex(index=figures.strategy.unique(), columns=figures.backend.unique()).reset_index()


def memory(results):
    parts = ("bytes_parameters", "bytes_gradients", "bytes_optimizer", "bytes_activations", "peak_rss_bytes")
    return pandas.DataFrame({"sharded": row["shard"], "ranks": str(row["ranks"]), **{part: f"{row[part] / 1e6:.1f}" for part in parts}}
                            for row in results.memory)


def figures(results, *programs):
    """Every benchmark of these programs."""
    ratios = ("limit_ratio", "all_reduce_ratio", "compute_ratio", "memcpy_ratio", "hidden", "overhead")
    counters = {"busbw": bandwidth, **dict.fromkeys(ratios, ratio), "bytes_per_parameter": "{:.0f}".format}
    rows = [{"benchmark": b.name, "time": seconds(b.time), "samples": str(b.samples),
             **{name.replace("_", " "): or_blank(form, b.counter(name)) for name, form in counters.items()}}
            for b in results.benchmarks() if b.program in programs]
    table = pandas.DataFrame(rows)
    return table.loc[:, (table != "").any()]
