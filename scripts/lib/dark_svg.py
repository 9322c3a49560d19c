# SPDX-License-Identifier: BSL-1.0
"""Charts of matplotlib and gnuplot that are legible on light and on dark pages."""

INK = "#101418"  # text on coloured bars: the same on both
STYLE = """<style>
@media (prefers-color-scheme: dark) {
  [style*="fill: #ffffff"], rect[fill="#ffffff"] { fill: #161b22 !important; stroke: none }
  text:not([style*="#101418"]), [fill="black"], [fill="rgb(64,64,64)"] { fill: #d6dbe1 !important }
  [style*="fill: #1f2328"], [style*="fill: #555555"] { fill: #aeb6c0 !important }
  [style*="stroke: #1f2328"], [style*="stroke: #000000"], [style*="stroke: #555555"] { stroke: #aeb6c0 !important }
  [color="black"] { color: #aeb6c0 }
  [stroke="rgb(216, 216, 216)"] { stroke: #3a424c }
  [stroke="rgb( 64,  64,  64)"] { stroke: #aeb6c0 }
}
</style>
"""


def adapt(svg):
    """The text of a chart with colours for dark pages."""
    if "prefers-color-scheme" in svg: return svg
    begin = svg.index(">", svg.index("<svg")) + 1
    return svg[:begin] + "\n" + STYLE + svg[begin:].lstrip("\n")


def adapt_file(path):
    if path.suffix == ".svg": path.write_text(adapt(path.read_text()))
