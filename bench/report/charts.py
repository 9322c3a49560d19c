# SPDX-License-Identifier: BSL-1.0
"""Results as pictures. Every function returns a matplotlib figure, or None where there is nothing to show."""
import io
import pathlib
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from . import names, tables
from .names import INK
from .estimates import efficiency_of, exposed_of
from .text import milliseconds, seconds, size

REST, EXPOSED = "#9FB8CC", "#D55E00"
STEP_COLUMN, EXPOSED_COLUMN = 44, 104  # points beside the panel, where the columns of figures end
plt.rcParams.update({
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"], "font.size": 9, "axes.titlesize": 9.5,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.15,
    "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 5, "savefig.dpi": 130, "svg.fonttype": "none", "svg.hashsalt": "gradsync",
    **{key: INK for key in ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "grid.color")}})


def save_png(figure, path):
    figure.savefig(path, facecolor="white", metadata={"Software": None})


def svg(figure, **options):
    """The same bytes for the same results: no date, no version; and small."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, **options)
    text = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
    return re.sub(r"\s*\n\s*", "\n", text)


def save_svg(figure, path):
    pathlib.Path(path).write_text(svg(figure, facecolor="white"))


def inline_svg(figure, name, description):
    """For a page: no background, the page's text colour as ink, and identifiers that no other chart has."""
    text = svg(figure, transparent=True)
    text = text[text.index("<svg"):].replace(INK, "currentColor")
    text = re.sub(r'(\sid="|url\(#|href="#)', lambda found: f"{found.group(1)}{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def panels(count, width, height, **options):
    figure, axes = plt.subplots(1, count, figsize=(width, height), squeeze=False, layout="constrained", **options)
    return figure, list(axes[0])


def legend_below(figure, axes, columns):
    """One legend for all panels, each label once, in a strip of its own at the bottom."""
    entries = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()): entries.setdefault(label, handle)
    strip = (0.1 + 0.19 * -(-len(entries) // columns)) / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncol=columns)


def number_of_ranks(ranks, cores):
    return f"{ranks} rank{'s' * (ranks != 1)}" + (f" on {cores} cores" if cores and ranks > cores else "")


def all_reduce_time(results):
    """A panel a number of ranks, a line a contestant; both axes logarithmic."""
    cases = {ranks: whos for ranks, whos in tables.all_reduce_cases(results).items() if ranks > 1}
    if not cases: return None
    values = [b.time for contestants in cases.values() for of_who in contestants.values() for b in of_who.values()]
    sizes = sorted({count for contestants in cases.values() for of_who in contestants.values() for count in of_who})
    wide = max(values) > 1000 * min(values)
    figure, axes = panels(len(cases), {1: 6.5, 2: 9.4}.get(len(cases), 4 * len(cases)), 4.6, sharex=True, sharey=True)
    for axis, (ranks, contestants) in zip(axes, cases.items()):
        for who in names.ordered(contestants, names.WHO):
            look = names.WHO.get(who, names.Look(who, "#555555"))
            points = sorted((count, b.time) for count, b in contestants[who].items())
            axis.plot(*zip(*points), color=look.colour, marker=look.marker, linestyle=look.line, label=look.label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(number_of_ranks(ranks, results.machine.get("cores")))
        axis.set_xlabel("bytes of each rank (logarithmic)")
        axis.set_xticks([count for i, count in enumerate(sizes) if i == 0 or count / sizes[i - 1] > 3] or sizes)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1,) if wide else (1, 2, 5), numticks=20))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.minorticks_off()
    axes[0].set_ylabel("time, median (logarithmic)")
    legend_below(figure, axes, 3 if len(cases) > 1 else 2)
    return figure


def most_measured(of_ranks):
    """The number of ranks to show where there is room for one: of those that communicate, the one with the most figures."""
    several = {ranks: sum(map(len, backends.values())) for ranks, backends in of_ranks.items() if ranks > 1}
    return max(several, key=lambda ranks: (several[ranks], -ranks)) if several else None


def step_time(results, model):
    """A panel a backend, two in a row, a bar a strategy: the step, of which the end is exposed. Nothing is marked where that is below zero. The
    figures stand beside the panel, in columns: on it they would be crossed by its lines."""
    of_ranks = tables.step_cases(results).get(model, {})
    ranks = most_measured(of_ranks)
    if not ranks: return None
    backends = of_ranks[ranks]
    order = names.ordered(backends, names.BACKENDS)
    columns = min(2, len(order))
    pairs = [order[i:i + columns] for i in range(0, len(order), columns)]
    rows = [max(len(backends[backend]) for backend in pair) for pair in pairs]
    figure, grid = plt.subplots(len(pairs), columns, figsize=(0.3 + 5.6 * columns, 0.9 + sum(0.95 + 0.24 * n for n in rows)), squeeze=False, sharex=True,
                                layout="constrained", height_ratios=[n + 0.8 for n in rows])
    for axis in grid.flat[len(order):]: axis.set_axis_off()
    for i, backend in enumerate(order):
        axis = grid.flat[i]
        strategies = names.ordered(backends[backend], names.STRATEGIES)
        column = lambda text, points, place: axis.annotate(text, (1, place), (points, 0), xycoords=axis.get_yaxis_transform(), textcoords="offset points",
                                                           ha="right", va="center", fontsize=8, annotation_clip=False)
        for text, points in (("step, ms", STEP_COLUMN), ("exposed, ms", EXPOSED_COLUMN)): column(text, points, -0.95)
        for place, strategy in enumerate(strategies):
            b = backends[backend][strategy]
            exposed = exposed_of(b)
            step, waits = b.time * 1e3, max(exposed.value if exposed else 0, 0) * 1e3
            axis.barh(place, step - waits, 0.72, color=REST, label="the step without its exposed time")
            if waits: axis.barh(place, waits, 0.72, left=step - waits, color=EXPOSED, label="exposed: added by synchronisation")
            column(milliseconds(b.time), STEP_COLUMN, place)
            if not exposed: continue
            column(milliseconds(exposed.value), EXPOSED_COLUMN, place)
            if exposed.spread:
                below, above = (abs(end - exposed.value) * 1e3 for end in exposed.spread)
                axis.errorbar(step, place, xerr=[[below], [above]], color=INK, elinewidth=0.8, capsize=2, label="exposed time of the fastest and the slowest process")
        axis.set_yticks(range(len(strategies)), [names.STRATEGIES.get(s, s) for s in strategies])
        axis.set_ylim(rows[i // columns] - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelbottom=True)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_title(names.BACKENDS[backend].label if backend in names.BACKENDS else backend, pad=16)
        axis.set_xlabel("ms per step, median")
    grid.flat[0].set_xlim(left=0)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    figure.suptitle(f"{model}, {number_of_ranks(ranks, results.machine.get('cores'))}", x=0.01, ha="left", fontsize=10)
    legend_below(figure, list(grid.flat[:len(order)]), columns)
    return figure


def scaling(results):
    """Samples a second and efficiency over ranks, of the policies that a user gets who chooses none; a column a model."""
    cases = {model: tables.scaling_cases(results, model) for model in tables.step_cases(results)}
    cases = {model: lines for model, lines in cases.items() if any(len(of_ranks) > 1 for of_ranks in lines.values())}
    if not cases: return None
    figure, axes = plt.subplots(2, len(cases), figsize=(max(6.5, 4.4 * len(cases)), 5.6), squeeze=False, layout="constrained", sharex=True)
    cores = results.machine.get("cores")
    for column, (model, lines) in enumerate(cases.items()):
        speed, efficiency = axes[0][column], axes[1][column]
        every = sorted({ranks for of_ranks in lines.values() for ranks in of_ranks})
        for i, ((backend, _), of_ranks) in enumerate(lines.items()):
            look = names.BACKENDS.get(backend, names.Look(backend, "#555555"))
            beside = 2 ** (0.05 * (i - (len(lines) - 1) / 2))  # so that no mark hides another
            ratios = {ranks: found for ranks, b in of_ranks.items() if (found := efficiency_of(b))}
            speeds = {ranks: b.counter("samples_per_second") for ranks, b in of_ranks.items() if b.counter("samples_per_second") is not None}
            for axis, values in ((speed, speeds), (efficiency, {ranks: found.value for ranks, found in ratios.items()})):
                points = [(ranks * beside, value) for ranks, value in values.items()]
                if points: axis.plot(*zip(*points), color=look.colour, marker=look.marker, linestyle=look.line, label=look.label)
            for ranks, found in ratios.items():
                if found.spread: efficiency.vlines(ranks * beside, *found.spread, color=look.colour, linewidth=0.8)
        efficiency.axhline(1, color=INK, linestyle="--", linewidth=1, label="copies that do not synchronise")
        for axis in (speed, efficiency):
            axis.set_ylim(0, axis.dataLim.y1 * 1.1)
            if cores and every[-1] > cores: axis.axvspan(cores * 2 ** 0.2, every[-1] * 2 ** 0.2, color=INK, alpha=0.06, linewidth=0, label="more ranks than cores")
        speed.set_title(model)
        efficiency.set_xscale("log", base=2)
        efficiency.set_xticks(every, [str(ranks) for ranks in every])
        efficiency.set_xlim(every[0] / 2 ** 0.2, every[-1] * 2 ** 0.2)
        efficiency.minorticks_off()
        efficiency.set_xlabel("ranks (logarithmic)")
    axes[0][0].set_ylabel("samples per second, all ranks")
    axes[1][0].set_ylabel("efficiency (lines: of processes)")
    legend_below(figure, [axis for row in axes for axis in row], 3)
    return figure


def memory(results):
    """A panel a number of ranks, a bar a stage of sharding: what a rank holds by its own account, and its process at most."""
    every = sorted({row["ranks"] for row in results.memory})
    if not every: return None
    figure, axes = panels(len(every), max(6.5, 3.1 * len(every)), 4.2, sharey=True)
    for axis, ranks in zip(axes, every):
        rows = {row["shard"]: row for row in results.memory if row["ranks"] == ranks}
        stages = names.ordered(rows, names.STAGES)
        for place, stage in enumerate(stages):
            floor = 0
            for part, look in names.MEMORY.items():
                axis.bar(place, rows[stage][part] / 1e6, 0.7, bottom=floor, color=look.colour, label=look.label)
                floor += rows[stage][part] / 1e6
            for height in (floor, rows[stage]["peak_rss_bytes"] / 1e6):
                axis.annotate(f"{height:.0f}", (place, height), (0, 4), textcoords="offset points", ha="center", fontsize=8)
        axis.plot(range(len(stages)), [rows[stage]["peak_rss_bytes"] / 1e6 for stage in stages], color=INK, marker="_", markersize=17,
                  markeredgewidth=2, linestyle="", label="peak resident memory of the process")
        axis.set_xticks(range(len(stages)), [names.STAGES.get(stage, stage) for stage in stages], rotation=22, ha="right", rotation_mode="anchor")
        axis.margins(y=0.1)
        axis.grid(visible=False)  # each height has its figure, which no line is to cross
        axis.set_title(f"{ranks} rank{'s' * (ranks != 1)}")
    axes[0].set_ylabel("MB (10^6 bytes) per rank")
    legend_below(figure, axes, 3)
    return figure


def drawn(results):
    """{name: (figure, what it shows)} of all that the results have something for."""
    every = {"all_reduce_time": (all_reduce_time(results), "all-reduce: time over size, by backend and ranks")}
    for model in tables.step_cases(results):
        every[f"step_time_{model}"] = (step_time(results, model), f"{model}: time of a step by strategy and backend, and its exposed part")
    every["scaling"] = (scaling(results), "samples per second and efficiency over ranks")
    every["memory"] = (memory(results), "memory per rank by stage of sharding and number of ranks")
    return {name: (figure, what) for name, (figure, what) in every.items() if figure}
