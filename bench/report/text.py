# SPDX-License-Identifier: BSL-1.0
"""Numbers with units, and tables as Markdown."""
efficiency = "{:.3f}".format


def significant(value, digits=3):
    """Rounded to so many digits, without an exponent from 0.0001 to a million."""
    return format(float(f"{value:.{digits}g}"), "g")


def scaled(*steps, digits=3):
    def form(value):
        factor, unit = next((step for step in steps if abs(value) >= step[0] * 0.9995), steps[-1])
        return f"{significant(value / factor, digits)} {unit}"
    return form


seconds = scaled((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
size = scaled((2 ** 30, "GiB"), (2 ** 20, "MiB"), (2 ** 10, "KiB"), (1, "B"), digits=4)
bandwidth = scaled((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


def milliseconds(value):
    value *= 1e3
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{round(value, digits) + 0.0:.{digits}f}"  # no minus before a zero


def ratio(value):
    return f"{value:.2f}" if abs(value) >= 0.095 else significant(value, 2)


def or_blank(form, value):
    return "" if value is None else form(value)


def ranks_of(count):
    return f"{count} rank{'s' * (count != 1)}"


def markdown(table):
    """A DataFrame of strings, without its index."""
    if table.empty: return ""
    line = lambda cells: "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
    return "\n".join([line(table.columns), "|" + "---|" * len(table.columns), *map(line, table.values)])
