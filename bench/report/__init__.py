# SPDX-License-Identifier: BSL-1.0
"""What stands behind scripts/bench: runs the benchmarks, draws their results, compares two of them.

  plan      which programs are run with which flags
  run       runs them, round by round, in a bounded time
  machine   the machine, the compiler, the state of the sources
  results   results.json: what was found, and how to read it
  names     who takes part: names, order, colours
  intervals where a mean lies
  estimates a figure, and what it lies between
  text      numbers with units, tables as HTML and Markdown
  tables    results as tables
  goals     what is to be reached, and whether it is
  charts    results as pictures
  page      the HTML page
  docs      the figures in README.md and docs/
  compare   did something become slower?
"""
