# SPDX-License-Identifier: BSL-1.0
"""Results as tables."""
from . import names
from .estimates import efficiency_of, exposed_of
from .results import AllReduce, TrainStep
from .text import Table, bandwidth, megabytes, milliseconds, or_blank, paired, ratio, seconds, significant, size, spread


def machine(results):
    m, run = results.machine, results.run
    lines = [("processor", f"{m.get('cpu', 'unknown')}, {m.get('cores', '?')} cores{', virtual' if m.get('virtual') else ''}"),
             ("caches", ", ".join(m.get("caches", []))),
             ("memory", f"{m['memory_bytes'] / 2 ** 30:.0f} GiB" if m.get("memory_bytes") else ""),
             ("system", f"{m.get('system', '')}, Linux {m.get('kernel', '')}"),
             ("compiler", f"{m.get('compiler', '')}; {m.get('build', '')}"),
             ("peers", "; ".join(m.get("peers", []))),
             ("sources", f"{m.get('commit', 'unknown')[:12]}{'' if m.get('clean') else ', with changes that are not committed'}"),
             ("measured", f"{m.get('date', '')}; {run.get('mode', '')}, {results.up_to_rounds()}, minutes: {run.get('minutes', 0):.0f}"),
             ("others", results.used_by_others()[0]),
             ("handoff", or_blank(lambda ns: f"{ns:.0f} ns from core to core, median", results.handoff()))]
    return Table("The machine", ["", ""], [[name, value] for name, value in lines if value.strip(" ,;")])


def all_reduce_cases(results):
    """{ranks: {who: {bytes: Benchmark}}} of all-reduces in f32."""
    cases = {}
    for name, benchmark in results.parsed(AllReduce):
        if (name["collective"], name["dtype"]) == ("all_reduce", "f32"):
            cases.setdefault(name["ranks"], {}).setdefault(name["who"], {})[name["bytes"]] = benchmark
    return dict(sorted(cases.items()))


def all_reduce(results, form=seconds, what=lambda benchmark: benchmark.time, title="time, median", only=None):
    """A column a contestant."""
    cases = all_reduce_cases(results)
    present = {who for of_ranks in cases.values() for who in of_ranks}
    whos = [who for who in names.ordered(present, names.WHO) if only is None or who in only]
    table = Table(f"All-reduce, f32: {title}", ["ranks, size", *(names.WHO[who].label if who in names.WHO else who for who in whos)])
    for ranks, contestants in cases.items():
        for count in sorted({count for of_who in contestants.values() for count in of_who}):
            row = [contestants.get(who, {}).get(count) for who in whos]
            if any(row): table.rows.append([f"{ranks}, {size(count)}", *(or_blank(form, b and what(b)) for b in row)])
    return table


def bus_bandwidth(results):
    return all_reduce(results, bandwidth, lambda b: b.counter("busbw"), "bus bandwidth, median")


def to_limit(results):
    ours = [who for who in names.WHO if who not in names.PEERS]
    return all_reduce(results, ratio, lambda b: b.counter("limit_ratio"), "the limit's time over this one's", ours)


def contests(results):
    """Every collective that was measured, in full."""
    table = Table("Collectives, all figures", ["who", "collective", "dtype", "ranks", "size", "time (min, max)", "algbw", "busbw", "to the limit", "samples"])
    found = results.parsed(AllReduce)
    order = {who: i for i, who in enumerate(names.WHO)}
    for name, b in sorted(found, key=lambda f: (f[0]["collective"], f[0]["dtype"], f[0]["ranks"], f[0]["bytes"], order.get(f[0]["who"], 99))):
        table.rows.append([name["who"], name["collective"], name["dtype"], str(name["ranks"]), size(name["bytes"]), spread(seconds, b),
                           *(map(bandwidth, (name["bytes"] / b.time, b.counter("busbw"))) if name["bytes"] else ("", "")),
                           or_blank(ratio, b.counter("limit_ratio")), str(b.samples)])
    return table


def step_cases(results):
    """{model: {ranks: {backend: {strategy: Benchmark}}}}, of those that are paired with copies that do not synchronise."""
    cases = {}
    for name, benchmark in results.parsed(TrainStep):
        if name["strategy"] == names.WATCHED: continue
        of_ranks = cases.setdefault(name["model"], {}).setdefault(name["ranks"], {})
        of_ranks.setdefault(name["backend"], {})[name["strategy"]] = benchmark
    return {model: cases[model] for model in names.ordered(cases, names.MODELS)}


def exposed(benchmark):
    """Seconds, see exposed_of; None where it was not measured."""
    found = exposed_of(benchmark)
    return found and found.value


def with_spread(form, estimate):
    """Of what is measured in pairs: the figure, and the least and the greatest of its processes."""
    return or_blank(lambda found: found.spread_text(form), estimate)


def overlapped(strategy, benchmark, counter):
    """What the reducer says of its communication; None also where that is under way while others take their steps."""
    return None if strategy in names.GATHER_BETWEEN_STEPS else benchmark.counter(counter)


def steps(results, model, ranks):
    table = Table(f"{model}, {ranks} rank{'s' * (ranks != 1)}: a step",
                  ["backend", "strategy", "step, ms (min, max)", "exposed, ms (of processes)", "waited, ms", "communication, ms", "overlap",
                   "efficiency (of processes)", "samples/s", "state, MB"])
    backends = step_cases(results)[model][ranks]
    for backend in names.ordered(backends, names.BACKENDS):
        for strategy in names.ordered(backends[backend], names.STRATEGIES):
            b = backends[backend][strategy]
            blank_or = lambda form, counter: or_blank(form, b.counter(counter))
            communicated = lambda form, counter: or_blank(form, overlapped(strategy, b, counter))
            table.rows.append([names.BACKENDS[backend].label if backend in names.BACKENDS else backend, names.STRATEGIES.get(strategy, strategy),
                               spread(milliseconds, b), with_spread(milliseconds, exposed_of(b)), blank_or(milliseconds, "exposed"),
                               communicated(milliseconds, "communication"), communicated(ratio, "overlap_ratio"), with_spread(efficiency, efficiency_of(b)),
                               blank_or(significant, "samples_per_second"), blank_or(megabytes, "state_bytes")])
    return table


def steps_briefly(results, model, ranks):
    """A row for each strategy of names.BRIEFLY, a column a backend: step (exposed)."""
    backends = step_cases(results)[model][ranks]
    order = names.ordered(backends, names.BACKENDS)
    table = Table(f"{model}, {ranks} ranks: ms per step (exposed)", ["strategy", *(names.BACKENDS[b].label if b in names.BACKENDS else b for b in order)])
    named = {}  # what PyTorch calls the same stands in the same row
    for backend in order:
        for strategy in names.BRIEFLY:
            if strategy in backends[backend]: named.setdefault(names.STRATEGIES[strategy], {})[backend] = backends[backend][strategy]
    for label in names.ordered(named, dict.fromkeys(names.STRATEGIES.values())):
        cell = lambda b: "" if b is None else milliseconds(b.time) + ("" if exposed(b) is None else f" ({milliseconds(exposed(b))})")
        table.rows.append([label, *(cell(named[label].get(backend)) for backend in order)])
    return table


def scaling_cases(results, model):
    """{(backend, strategy): {ranks: Benchmark}} of what a user gets who chooses nothing."""
    cases = {}
    for ranks, backends in step_cases(results)[model].items():
        for backend, strategies in backends.items():
            for strategy in (names.DEFAULT, names.PEER_DEFAULT):
                if strategy in strategies: cases.setdefault((backend, strategy), {})[ranks] = strategies[strategy]
    return {key: dict(sorted(cases[key].items())) for key in sorted(cases, key=lambda key: names.ordered({k[0] for k in cases}, names.BACKENDS).index(key[0]))}


def efficiency(value):
    return f"{value:.3f}"


def scaling(results, model):
    table = Table(f"{model}: scaling", ["backend", "strategy", "ranks", "samples/s", "efficiency (of processes)"])
    for (backend, strategy), of_ranks in scaling_cases(results, model).items():
        for ranks, b in of_ranks.items():
            table.rows.append([names.BACKENDS[backend].label if backend in names.BACKENDS else backend, names.STRATEGIES[strategy], str(ranks),
                               or_blank(significant, b.counter("samples_per_second")), with_spread(efficiency, efficiency_of(b))])
    return table


def memory(results):
    table = Table("Memory of a rank, MB (10^6 bytes)", ["sharded", "ranks", *(look.label for look in names.MEMORY.values()), "peak RSS"])
    for row in results.memory:
        table.rows.append([names.STAGES.get(row["shard"], row["shard"]), str(row["ranks"]), *(megabytes(row[part]) for part in names.MEMORY),
                           megabytes(row["peak_rss_bytes"])])
    return table


def others(results, program, title):
    """What has no chart: every benchmark of one program."""
    ratios = ("all_reduce_ratio", "compute_ratio", "memcpy_ratio")
    found = [b for b in results.benchmarks() if b.program == program]
    present = [r for r in ratios if any(b.counter(r) is not None for b in found)]
    table = Table(title, ["benchmark", "time (min, max)", *(r.replace("_", " ") for r in present)])
    for b in found:
        table.rows.append([b.name, spread(seconds, b), *(or_blank(ratio, b.counter(r)) for r in present)])
    return table


def on_devices(results):
    """What bench_overlap found, where there is a GPU."""
    table = Table("A backward on a device", ["benchmark", "time (min, max)", "exposed (widest quartiles)", "hidden", "over the compute"])
    for b in results.benchmarks():
        if b.program == "bench_overlap":
            table.rows.append([b.name, spread(seconds, b), paired(seconds, b, "exposed"), or_blank(ratio, b.counter("hidden")),
                               or_blank(significant, b.counter("overhead"))])
    return table


def goals(results):
    """What the library is meant to reach on two cores, and what it does. See goals.py."""
    from .goals import rows
    return Table("Goals", ["what", "goal", "measured", ""], rows(results))
