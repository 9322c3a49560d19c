# SPDX-License-Identifier: BSL-1.0
"""Results as pictures. Every function returns a matplotlib figure, or None if there is nothing to show."""
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts/lib"))
import dark_svg

from . import names, tables
from .estimates import efficiency_of, exposed_of
from .text import ranks_of, seconds, size

INK = "#1f2328"
LIMIT = {"color": INK, "linestyle": "--", "linewidth": 1.6, "zorder": 3}
plt.rcParams.update({
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"], "font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.15, "legend.frameon": False,
    "lines.markersize": 5, "svg.fonttype": "none", "svg.hashsalt": "gradsync", "figure.constrained_layout.use": True,
    **{f"{what}color": INK for what in ("text.", "axes.edge", "axes.label", "axes.title", "xtick.", "ytick.", "grid.")}})


def save(figure, path):
    """The same bytes for the same results: no date, no version."""
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    dark_svg.adapt_file(pathlib.Path(path))


def finished(figure, results):
    """With one legend above all panels, each label once, and the machine and the date below."""
    entries = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(entries.values(), entries.keys(), loc="lower center", bbox_to_anchor=(0.5, 1), ncol=3)
    machines = dict.fromkeys(f"{run.machine.get('cores')} cores, {run.machine.get('cpu')}" for run in results.runs)
    dates = [run.machine.get("date", "") for run in results.runs]
    figure.supxlabel(f"{' and '.join(machines)}; {' and '.join(dict.fromkeys((dates[0], dates[-1])))}", x=0.01, ha="left", fontsize=7)
    return figure


def all_reduce_time(results):
    """A panel a number of ranks, a line a contestant."""
    times, labels = tables.all_reduces(results).query("ranks in (2, 4)"), tables.labels(results)
    if times.empty: return None
    every, sizes = times.index.unique("ranks"), sorted(times.index.unique("bytes"))
    figure, axes = plt.subplots(1, len(every), figsize=(1.5 + 4.6 * len(every), 4.6), squeeze=False, sharex=True, sharey=True)
    for axis, ranks in zip(axes[0], every):
        for who in times:
            line = times.loc[ranks][who].dropna()
            if len(line): axis.loglog(line, **{**names.WHO[who].style(), "label": labels[who], **(LIMIT if who == "limit" else {})})
        axis.set(title=ranks_of(ranks), xlabel="bytes of each rank")
        axis.set_xticks([count for before, count in zip([0, *sizes], sizes) if count > 3 * before])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axis.yaxis.set_major_locator(LogLocator(base=10, numticks=20))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
        axis.minorticks_off()
    axes[0][0].set_ylabel("time, median")
    return finished(figure, results)


def exposed(results, model):
    """A row a strategy, a mark a backend: what synchronisation adds to the step, and the interval."""
    found = tables.steps(results).query("model == @model and ranks == 2")
    found = found.assign(estimate=[exposed_of(b) for b in found.benchmark]).dropna(subset="estimate")
    if found.empty: return None
    labels = list(dict.fromkeys(names.STRATEGIES[strategy] for strategy in names.STRATEGIES if strategy in set(found.strategy)))
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.36 * len(labels)))
    backends = list(found.backend.unique())
    for backend, steps in found.groupby("backend", observed=True):
        look, apart = names.BACKENDS[backend], 0.7 * (backends.index(backend) / len(backends) - 0.4)
        for place, estimate in zip([labels.index(names.STRATEGIES[strategy]) for strategy in steps.strategy], steps.estimate):
            least, most = estimate.between or (estimate.value, estimate.value)
            axis.plot([least * 1e3, most * 1e3], [place + apart] * 2, color=look.colour, linewidth=1.6)
            axis.plot(estimate.value * 1e3, place + apart, color=look.colour, marker=look.marker, linestyle="", markersize=6, label=look.label)
    axis.axvline(0, label="no synchronisation", **LIMIT)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=10)
    axis.set(title=f"{model}, 2 ranks", xlabel="ms added to a step without synchronisation")
    axis.xaxis.set_major_locator(FixedLocator([-10, -5, 0, 5, 10, 20, 50, 100, 200, 500]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    return finished(figure, results)


def scaling(results):
    """Samples a second and efficiency over ranks, of the policies that a user gets who chooses none; a column a model."""
    found = tables.steps(results)
    found = found[found.strategy.isin((names.DEFAULT, names.PEER_DEFAULT))]
    models = [(model, steps) for model, steps in found.groupby("model", observed=True) if steps.ranks.nunique() > 1]
    if not models: return None
    figure, axes = plt.subplots(2, len(models), figsize=(4.8 * len(models), 5.6), squeeze=False, sharex=True)
    for (speed, efficiency), (model, steps) in zip(axes.T, models):
        for backend, line in steps.groupby("backend", observed=True):
            style = names.BACKENDS[backend].style()
            speed.loglog(line.ranks, [b.counter("samples_per_second") for b in line.benchmark], **style)
            found = [efficiency_of(b) for b in line.benchmark]
            efficiency.semilogx(line.ranks, [estimate and estimate.value for estimate in found], **style)
            between = [(ranks, estimate.between) for ranks, estimate in zip(line.ranks, found) if estimate and estimate.between]
            for ranks, ends in between: efficiency.plot([ranks] * 2, ends, color=style["color"], linewidth=1)
        efficiency.axhline(1, label="copies that do not synchronise (limit)", **LIMIT)
        every = sorted(steps.ranks.unique())
        efficiency.set(xlabel="ranks", xticks=every, xticklabels=map(str, every), ylim=(0, None))
        for axis in (speed, efficiency): axis.minorticks_off()
        speed.set(title=model)
        speed.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=20))
        speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0][0].set_ylabel("samples per second, all ranks")
    axes[1][0].set_ylabel("efficiency")
    return finished(figure, results)


def drawn(results):
    """{name: (figure, what it shows)} of all that the results have something for."""
    what = "what synchronisation adds to a step, by strategy and backend"
    steps = {f"exposed_{model}": (exposed(results, model), f"{model.capitalize()}: {what}") for model in names.MODELS}
    every = {"all_reduce_time": (all_reduce_time(results), "All-reduce: time over size, by backend and ranks"), **steps,
             "scaling": (scaling(results), "Samples per second and efficiency over ranks")}
    return {name: shown for name, shown in every.items() if shown[0]}
