# SPDX-License-Identifier: BSL-1.0
"""Results as pictures. Every function returns a matplotlib figure, or None where there is nothing to show."""
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator

from . import names, tables
from .estimates import efficiency_of, exposed_of
from .text import milliseconds, ranks_of, seconds, size

INK, REST, EXPOSED = "#1f2328", "#9FB8CC", "#D55E00"
plt.rcParams.update({
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"], "font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.15, "legend.frameon": False,
    "lines.linewidth": 1.6, "lines.markersize": 5, "svg.fonttype": "none", "svg.hashsalt": "gradsync", "figure.constrained_layout.use": True,
    **{f"{what}color": INK for what in ("text.", "axes.edge", "axes.label", "axes.title", "xtick.", "ytick.", "grid.")}})


def save(figure, path):
    """The same bytes for the same results: no date, no version."""
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})


def legend_below(figure, columns):
    """One legend for all panels, each label once."""
    entries = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()): entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="upper center", bbox_to_anchor=(0.5, 0), ncol=columns)


def number_of_ranks(ranks, results):
    cores = results.machine.get("cores")
    return ranks_of(ranks) + (f" on {cores} cores" if cores and ranks > cores else "")


def all_reduce_time(results):
    """A panel a number of ranks, a line a contestant; both axes logarithmic."""
    table = tables.all_reduces(results).query("ranks > 1")
    if table.empty: return None
    times = table.applymap(lambda b: b.time if b else None).astype(float)
    every = times.index.unique("ranks")
    sizes = sorted(times.index.unique("bytes"))
    figure, axes = plt.subplots(1, len(every), figsize=(max(6.5, 4.1 * len(every)), 4.2), squeeze=False, sharex=True, sharey=True)
    for axis, ranks in zip(axes[0], every):
        for who in times:
            look, line = names.WHO[who], times.loc[ranks][who].dropna()
            if len(line): axis.loglog(line, color=look.colour, marker=look.marker, linestyle=look.line, label=look.label)
        axis.set(title=number_of_ranks(ranks, results), xlabel="bytes of each rank (logarithmic)")
        axis.set_xticks([count for before, count in zip([0, *sizes], sizes) if count > 3 * before])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axis.yaxis.set_major_locator(LogLocator(base=10, numticks=20))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
        axis.minorticks_off()
    axes[0][0].set_ylabel("time, median (logarithmic)")
    legend_below(figure, 3)
    return figure


def step_time(results, model):
    """A panel a backend, two in a row, a bar a strategy: the step, whose end is exposed. Nothing is marked if that is below zero."""
    found = tables.steps(results).query("model == @model")
    ranks = tables.most_measured(found)
    if not ranks: return None
    panels = list(found[found.ranks == ranks].groupby("backend", observed=True))
    rows = [max(len(steps) for _, steps in panels[i:i + 2]) for i in range(0, len(panels), 2)]
    figure, axes = plt.subplots(len(rows), min(2, len(panels)), figsize=(11, 1 + 0.27 * sum(rows) + 0.6 * len(rows)), squeeze=False, sharex=True,
                                gridspec_kw={"height_ratios": rows})
    for axis in axes.flat[len(panels):]: axis.set_axis_off()
    for axis, (backend, steps) in zip(axes.flat, panels):
        exposed = [exposed_of(b) for b in steps.benchmark]
        waits = [max(e.value, 0) * 1e3 if e else 0 for e in exposed]
        rest = [b.time * 1e3 - wait for b, wait in zip(steps.benchmark, waits)]
        ends = [[abs(end - e.value) * 1e3 for end in e.spread] if e else [0, 0] for e in exposed]
        places = range(len(steps))
        axis.barh(places, rest, color=REST, label="the step without its exposed time")
        bars = axis.barh(places, waits, left=rest, color=EXPOSED, xerr=list(zip(*ends)), ecolor=INK, error_kw={"elinewidth": 0.8},
                         label="exposed: added by synchronisation (line: fastest to slowest process)")
        axis.bar_label(bars, [milliseconds(b.time) + (f" ({milliseconds(e.value)})" if e else "") for b, e in zip(steps.benchmark, exposed)],
                       padding=4, fontsize=8)
        axis.set_yticks(places, [names.STRATEGIES[strategy] for strategy in steps.strategy])
        axis.set(title=names.BACKENDS[backend].label, xlabel="ms per step (exposed), median")
        axis.invert_yaxis()
        axis.margins(x=0.2, y=0.02)
        axis.grid(visible=False)
        axis.tick_params(axis="x", labelbottom=True)
    figure.suptitle(f"{model}, {number_of_ranks(ranks, results)}", x=0.01, ha="left", fontsize=10)
    legend_below(figure, 2)
    return figure


def scaling(results):
    """Samples a second and efficiency over ranks, of the policies that a user gets who chooses none; a column a model."""
    found = tables.steps(results)
    found = found[found.strategy.isin((names.DEFAULT, names.PEER_DEFAULT))]
    models = [(model, steps) for model, steps in found.groupby("model", observed=True) if steps.ranks.nunique() > 1]
    if not models: return None
    figure, axes = plt.subplots(2, len(models), figsize=(4.8 * len(models), 5.6), squeeze=False, sharex=True)
    for column, (model, steps) in enumerate(models):
        speed, efficiency = axes[:, column]
        for backend, line in steps.groupby("backend", observed=True):
            look = names.BACKENDS[backend]
            style = {"color": look.colour, "marker": look.marker, "label": look.label}
            speed.plot(line.ranks, [b.counter("samples_per_second") for b in line.benchmark], **style)
            known = [(ranks, e) for ranks, b in zip(line.ranks, line.benchmark) if (e := efficiency_of(b))]
            efficiency.errorbar([ranks for ranks, _ in known], [e.value for _, e in known], elinewidth=0.8, **style,
                                yerr=[[abs(e.spread[end] - e.value) for _, e in known] for end in (0, 1)])
        efficiency.axhline(1, color=INK, linestyle="--", linewidth=1, label="copies that do not synchronise")
        for axis in (speed, efficiency): axis.set_ylim(bottom=0)
        speed.set_title(model)
        efficiency.set_xscale("log", base=2)
        every = sorted(steps.ranks.unique())
        efficiency.set_xticks(every, map(str, every))
        efficiency.minorticks_off()
        efficiency.set_xlabel("ranks (logarithmic)")
    axes[0][0].set_ylabel("samples per second, all ranks")
    axes[1][0].set_ylabel("efficiency (lines: of processes)")
    legend_below(figure, 3)
    return figure


def drawn(results):
    """{name: (figure, what it shows)} of all that the results have something for."""
    every = {"all_reduce_time": (all_reduce_time(results), "All-reduce: time over size, by backend and ranks")}
    for model in names.MODELS:
        what = f"{model.capitalize()}: time of a step by strategy and backend, and its exposed part"
        every[f"step_time_{model}"] = (step_time(results, model), what)
    every["scaling"] = (scaling(results), "Samples per second and efficiency over ranks")
    return {name: (figure, what) for name, (figure, what) in every.items() if figure}
