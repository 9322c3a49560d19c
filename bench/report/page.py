# SPDX-License-Identifier: BSL-1.0
"""The HTML page, which stands beside charts/."""
import html

import pandas

from . import tables
from .goals import goals

pandas.set_option("display.max_colwidth", None)  # no cell is cut
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; } img { width: 100%; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 13px; }
th, td { padding: 0.2rem 0.7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #d0d7de; }
"""
# Title, explanation, charts, tables. docs/background/method.md explains more.
SECTIONS = [
    ("Machine", "Compare columns of one run: machines change their state.", [], [tables.machine, tables.rounds]),
    ("Goals", "For two cores. In brackets: the 95 % interval, or the least and the greatest round or run.", [], [goals]),
    ("All-reduce", "A float sum in place: time until the slowest rank has the result.", ["all_reduce_time"],
     [tables.all_reduce, lambda results: tables.figures(results, "bench_all_reduce", "bench_nccl")]),
    ("Training step", "Exposed and efficiency: against copies that do not synchronise. In brackets: the 95 % interval, or the least and the greatest run.",
     ["exposed_transformer", "exposed_mlp", "scaling"], [tables.step_figures]),
    ("Memory", "What a rank holds by the library's account, and what its process used at most, in 10^6 bytes.", [], [tables.memory]),
    ("Others", "Ratios are other things' times over this one's, measured in turns.", [],
     [lambda results: tables.figures(results, "bench_reducer", "bench_convert", "bench_overlap")])]


def render(results, drawn):
    sections = []
    for title, text, pictures, makers in SECTIONS:
        shown = [f'<img alt="{drawn[name][1]}" src="charts/{name}.svg">' for name in pictures if name in drawn]
        shown += [table.to_html(index=False, border=0) for make in makers if not (table := make(results)).empty]
        if shown: sections += [f"<h2>{title}</h2><p>{text}</p>", *shown]
    for title, lines in (("Not measured", [f"{name}: {why}" for name, why in sorted(results.errors.items())]),
                         ("Commands", [command for commands in results.run.get("commands", {}).values() for command in commands])):
        sections.append(f"<h2>{title}</h2><pre>" + html.escape("\n".join(lines)) + "</pre>")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>gradsync: measured</title><style>{STYLE}</style></head><body>
<h1>gradsync: measured</h1>
<p>Medians over all rounds. <b>{html.escape(results.others()[1])}</b></p>
{chr(10).join(sections)}
</body></html>
"""
