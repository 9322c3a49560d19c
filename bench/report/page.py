# SPDX-License-Identifier: BSL-1.0
"""The HTML page: one file, charts inside it, nothing from a network."""
import base64
import html

import pandas

from . import tables
from .goals import goals

pandas.set_option("display.max_colwidth", None)  # no cell is cut
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; }
img { width: 100%; margin: 1rem 0; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #d0d7de; }
pre { background: #f6f8fa; padding: 0.6rem; overflow-x: auto; font-size: 12px; }
.warning { border-left: 4px solid #b35900; padding-left: 0.8rem; }
"""
# Title, explanation, parts of the plan, charts, tables. docs/background/method.md explains more.
SECTIONS = [
    ("Machine", "Compare columns of one run: machines change their state.", [], [], [tables.machine]),
    ("Goals", "For two cores. In brackets: the 95 % interval of the mean of the processes' medians, or the least and the greatest round.", [], [],
     [goals]),
    ("All-reduce", "A float sum in place: time until the slowest rank has the result. The limit is a bare loop, one thread per core, that reads and "
     "writes every rank's buffer once.", ["all_reduce", "collectives", "nccl"], ["all_reduce_time"],
     [tables.all_reduce, lambda results: tables.figures(results, "bench_all_reduce", "bench_nccl")]),
    ("Training step", "Exposed: the step less that of copies that do not synchronise, directly before and after it. Efficiency: the "
     "copies' time over the step's. In brackets: the 95 % interval.", ["train_step", "torch"],
     ["step_time_transformer", "step_time_mlp", "scaling"], [tables.step_figures]),
    ("Memory", "What a rank holds by the library's account, and what its process used at most, in MB (10^6 bytes).", ["memory"], [], [tables.memory]),
    ("Others", "Ratios are other things' times over this one's, measured in turns.", ["reducer", "convert", "overlap"], [],
     [lambda results: tables.figures(results, "bench_reducer", "bench_convert", "bench_overlap")])]


def picture(path, description):
    return f'<img alt="{description}" src="data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def section(results, drawn, folder, title, text, parts, pictures, makers):
    """Empty if there is nothing to show."""
    shown = [picture(folder / f"{name}.svg", drawn[name][1]) for name in pictures if name in drawn]
    shown += [table.to_html(index=False, border=0) for make in makers if not (table := make(results)).empty]
    lines = html.escape("\n".join(line for part in parts for line in results.run.get("commands", {}).get(part, [])))
    commands = f"<details><summary>commands</summary><pre>{lines}</pre></details>" if lines else ""
    return f"<h2>{title}</h2><p>{text}</p>{commands}" + "\n".join(shown) if shown else ""


def render(results, drawn, folder):
    """`folder`: where the charts are."""
    warning = results.others()[1]
    missing = "".join(f"<li>{html.escape(f'{name}: {why}')}</li>" for name, why in sorted(results.errors.items()))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>gradsync: measured</title><style>{STYLE}</style></head><body>
<h1>gradsync: measured</h1>
<p>Medians over all rounds; in brackets the least and the greatest sample, if nothing else is said.</p>
{f'<p class="warning">{html.escape(warning)}</p>' if warning else ""}
{"".join(section(results, drawn, folder, *each) for each in SECTIONS)}
{f"<h2>Not measured</h2><ul>{missing}</ul>" if missing else ""}
</body></html>
"""
