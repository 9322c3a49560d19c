# SPDX-License-Identifier: BSL-1.0
"""Numbers with units, and tables as HTML and Markdown."""
import html
from dataclasses import dataclass, field


def significant(value, digits=3):
    """Rounded to so many digits, without an exponent from 0.0001 to a million."""
    return format(float(f"{value:.{digits}g}"), "g")


def scaled(value, steps, digits=3):
    for factor, unit in steps:
        if abs(value) >= factor * 0.9995: break
    return f"{significant(value / factor, digits)} {unit}"


def seconds(value):
    return scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))) if value else "0 s"


def size(count):
    """Of a message; binary units, as sizes are powers of two."""
    return scaled(count, ((2 ** 30, "GiB"), (2 ** 20, "MiB"), (2 ** 10, "KiB"), (1, "B")), 4)


def bandwidth(rate):
    return scaled(rate, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")))


def megabytes(count):
    return f"{count / 1e6:.1f}"


def milliseconds(value):
    return f"{value * 1e3:.2f}" if abs(value) < 0.01 else f"{value * 1e3:.1f}" if abs(value) < 0.1 else f"{value * 1e3:.0f}"


def ratio(value):
    return f"{value:.2f}" if abs(value) >= 0.095 else significant(value, 2)


def or_blank(form, value):
    return "" if value is None else form(value)


def spread(form, benchmark):
    """Median, least and greatest of a benchmark's time."""
    return f"{form(benchmark.time)} ({form(benchmark.least)}, {form(benchmark.greatest)})"


def paired(form, benchmark, counter):
    """Median of what is measured in pairs, and its widest quartiles."""
    value, between = benchmark.counter(counter), benchmark.quartiles(counter)
    if value is None: return ""
    return form(value) + (f" ({form(between[0])} to {form(between[1])})" if between else "")


@dataclass
class Table:
    title: str
    columns: list
    rows: list = field(default_factory=list)  # of strings, as many as columns

    def markdown(self):
        if not self.rows: return ""
        line = lambda cells: "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        return "\n".join([line(self.columns), "|" + "---|" * len(self.columns), *map(line, self.rows)])

    def html(self):
        cells = lambda tag, row: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        return (f'<div class="table"><table><caption>{html.escape(self.title)}</caption>\n'
                f"<thead><tr>{cells('th', self.columns)}</tr></thead>\n<tbody>{body}</tbody></table></div>")
