# SPDX-License-Identifier: BSL-1.0
"""The HTML page: one file, charts inside it, nothing from a network, for light and dark screens."""
import html

from . import charts, tables
from .text import or_blank

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --faint: #d0d7de; --stripe: #f6f8fa; --bad: #b35900; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #30363d; --stripe: #161b22; --bad: #ffa657; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid var(--faint); }
svg { width: 100%; height: auto; max-width: 1100px; display: block; margin: 1rem 0; }
.table { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.25rem 0; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; } tbody tr:nth-child(even) { background: var(--stripe); }
.words td { text-align: left; } th { vertical-align: bottom; } td { white-space: nowrap; }
#goals td { text-align: left; white-space: normal; }
pre { background: var(--stripe); padding: 0.6rem; overflow-x: auto; font-size: 12px; }
.warning { border-left: 4px solid var(--bad); padding-left: 0.8rem; }
nav a { margin-right: 1rem; } a { color: inherit; } summary { cursor: pointer; }
"""


class Section:
    """What belongs together: what it is, how it was measured, charts, and the figures behind them."""

    def __init__(self, title, text, parts=(), pictures=(), shown=(), folded=()):
        self.title, self.text, self.parts, self.pictures = title, text, parts, pictures
        self.shown = [table for table in shown if table.rows]
        self.folded = [table for table in folded if table.rows]

    @property
    def anchor(self):
        return self.title.lower().replace(" ", "-")

    def html(self, results, drawn):
        pieces = [f'<section id="{self.anchor}"><h2>{html.escape(self.title)}</h2><p>{html.escape(self.text)}</p>']
        lines = [line for part in self.parts for line in results.run.get("commands", {}).get(part, [])]
        if lines: pieces.append("<details><summary>commands</summary><pre>" + html.escape("\n".join(lines)) + "</pre></details>")
        for name in self.pictures:
            if name in drawn: pieces.append(charts.inline_svg(drawn[name][0], name, html.escape(drawn[name][1])))
        pieces += [table.html() for table in self.shown]
        if self.folded: pieces += ["<details><summary>all figures</summary>", *(table.html() for table in self.folded), "</details>"]
        return "\n".join(pieces) + "</section>"

    def has_something(self, drawn):
        return bool(self.shown or self.folded or any(name in drawn for name in self.pictures))


def sections(results):
    cases = tables.step_cases(results)
    return [
        Section("Goals", "What the library is meant to reach on two cores. What is measured in pairs has in brackets the 95 % interval of the mean of its "
                "processes' medians, all else the least and the greatest round; where the goal lies inside, the figure is within the noise.",
                shown=[tables.goals(results)]),
        Section("All-reduce", "A float sum in place. Time until every rank has the result, the slowest rank's. Bus bandwidth is nccl-tests': 2 (n - 1) / n of "
                "the bytes over the time, comparable over numbers of ranks. The limit is a bare loop that reads every rank's buffer and writes every rank's "
                "buffer once, a thread a core, measured in turns with the others.",
                ["all_reduce", "collectives", "nccl"], ["all_reduce_time"],
                [tables.all_reduce(results), tables.bus_bandwidth(results), tables.to_limit(results)], [tables.contests(results)]),
        Section("Training step", "One step of the same model on the same batch, a thread of compute a rank. Exposed: the step less that of copies that do not "
                "synchronise, directly before and after it (below zero: within the noise). Waited: what the reducer itself says it has waited. Efficiency: the "
                "copies' time over the step's. Of both every process has a median over its pairs; the figure is their mean, in brackets are the least and the "
                "greatest of them.", ["train_step", "torch"], [f"step_time_{model}" for model in cases],
                folded=[tables.steps(results, model, ranks) for model, of_ranks in cases.items() for ranks in sorted(of_ranks)]),
        Section("Overlap", "How much of the communication a backward on a device hides.", ["overlap"], shown=[tables.on_devices(results)]),
        Section("Scaling", "Samples a second of all ranks, and efficiency against copies that do not synchronise.", ["train_step", "torch"], ["scaling"],
                [tables.scaling(results, model) for model in cases]),
        Section("Memory", "What a rank holds by the library's account (bars), and what its process used at most (marks), by stage of sharding.", ["memory"],
                ["memory"], [tables.memory(results)]),
        Section("Reducer", "What the Reducer costs beside the bytes: a mark, a step without compute, its construction. Ratios are other things' times over this "
                "one's, measured in turns.", ["reducer"], folded=[tables.others(results, "bench_reducer", "Reducer")]),
        Section("Conversion", "Bulk conversion between floating types, one thread.", ["convert"],
                folded=[tables.others(results, "bench_convert", "Conversion")]),
    ]


def render(results, drawn):
    present = [section for section in sections(results) if section.has_something(drawn)]
    others, much = results.used_by_others()
    warning = f'<p class="warning">Others used the machine ({others}): the figures say little.</p>' if much else ""
    if disturbed := results.disturbed(): warning += f'<p class="warning">{html.escape(disturbed)}</p>'
    errors = "".join(f"<li>{html.escape(name)}: {html.escape(text)}</li>" for name, text in results.not_measured())
    not_measured = f"<h2>Not measured</h2><ul>{errors}</ul>" if errors else ""
    body = "\n".join(section.html(results, drawn) for section in present)
    links = " ".join(f'<a href="#{section.anchor}">{html.escape(section.title)}</a>' for section in present)
    handoff = or_blank(lambda ns: f" In this run a message between cores took {ns:.0f} ns.", results.handoff())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gradsync: measured</title><style>{STYLE}</style></head><body>
<h1>gradsync: measured</h1>
<p>Medians over {results.up_to_rounds()}; in brackets the least and the greatest sample of all, or what the column says. Compare columns of one run: machines change their
state.{handoff}</p>{warning}
<nav>{links}</nav>
<div class="words">{tables.machine(results).html()}</div>
{body}
{not_measured}
</body></html>
"""
