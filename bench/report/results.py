# SPDX-License-Identifier: BSL-1.0
"""results.json: what one run of scripts/bench found.

    {"format": 1,
     "machine": {...},                                       see machine.py
     "run": {...},                                           how it was run: see run.py
     "benchmarks": {NAME: {"program": ..., COUNTER: [...]}}, a value a round; of "pairs" and "watched" a list
     "errors": {NAME: sentence},                             what could not be measured
     "memory": [{...}]}                                      the trainer's results, by stage of sharding and ranks

Names and counters are those of the programs (bench/*.cpp), each benchmark's median is its counter "time", and all times are seconds. Rounds are
merged when they are read: the median of medians, the least time_min, the greatest time_max. Pairs, [time, reference], are those of all rounds
together, and of contests that were made for pairs alone; and so are metered steps, [watching, all]."""
import copy
import json
import pathlib
import re
import statistics

import pandas

from . import BadInput

FORMAT = 1
# Of Google Benchmark's fields, those that say nothing about the measurement.
NOT_COUNTERS = {"family_index", "per_family_instance_index", "repetitions", "repetition_index", "threads", "iterations", "real_time", "cpu_time",
                "error_occurred"}
SERIES = ("pairs", "watched")  # lists of pairs of numbers
# The counters that tables, charts, goals and comparisons read.
KEPT = re.compile(r"program|pairs|watched|time|time_min|time_max|samples|handoff_ns|busbw|exposed|communication|samples_per_second|state_bytes|"
                  r"hidden|overhead|\w+_ratio")
OTHERS = 0.5  # cores busy with others, on average, above which figures say little
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Benchmark:
    """All rounds of one benchmark."""

    def __init__(self, name, columns):
        self.name, self.columns, self.program = name, columns, columns.get("program", "")
        times = columns["time"]
        self.time, self.samples = statistics.median(times), int(sum(self.rounds("samples"))) or len(times)
        self.least, self.greatest = min(self.rounds("time_min") or times), max(self.rounds("time_max") or times)

    def rounds(self, counter):
        return self.columns.get(counter, [])

    def series(self, name):
        """Of all rounds: (time, reference) of "pairs", (watching, all) of "watched"."""
        return [tuple(each) for of_round in self.rounds(name) for each in of_round]

    def counter(self, counter):
        """Median over the rounds; None where it was not measured."""
        return statistics.median(self.rounds(counter)) if self.rounds(counter) else None


class Results:
    def __init__(self, machine=None, run=None):
        self.machine, self.run = machine or {}, run or {}
        self.columns = {}  # by name: program and counters
        self.errors, self.memory = {}, []

    def get(self, name):
        """None where it was not measured."""
        return Benchmark(name, self.columns[name]) if self.columns.get(name, {}).get("time") else None

    def benchmarks(self):
        return [self.get(name) for name in self.columns if self.get(name)]

    def parsed(self, pattern):
        """A DataFrame of the benchmarks whose names match: a column for each named group, and "benchmark"."""
        pattern = re.compile(pattern)
        rows = [{**match.groupdict(), "benchmark": b} for b in self.benchmarks() if (match := pattern.fullmatch(b.name))]
        found = pandas.DataFrame(rows, columns=[*pattern.groupindex, "benchmark"])
        return found.astype({column: int for column in ("ranks", "bytes") if column in found})

    def up_to_rounds(self):
        """Some of what is measured takes part in fewer rounds: see Task.rounds."""
        rounds = self.run.get("rounds", 0)
        return "1 round" if rounds == 1 else f"up to {rounds} rounds"

    def handoff(self):
        """Nanoseconds from core to core, the median over all benchmarks: the state of the machine. None: unknown."""
        values = [value for columns in self.columns.values() for value in columns.get("handoff_ns", []) if value > 0]
        return statistics.median(values) if values else None

    def used_by_others(self):
        """What others used of the machine, in words, and: so much that the figures say little? ("", False) if that is unknown."""
        before, during = self.machine.get("busy_before"), self.machine.get("busy_with_others")
        if before is None: return "", False
        text = f"busy before {before:.1f} cores" + ("" if during is None else f", with others meanwhile {during:.1f}")
        for most, label in self.others_by_task()[:1]: text += f", at most {most:.1f} ({label})"
        return text, max(before, during or 0) > OTHERS

    def others_by_task(self):
        """(cores, label), the most first: how many others used while a task ran, on average, in its worst round."""
        return sorted(((max(of_rounds), label) for label, of_rounds in self.run.get("others", {}).items()), reverse=True)

    def disturbed(self):
        """A sentence that names the tasks in which others used so much that their figures say little; empty if there are none."""
        found = [f"{label} ({cores:.1f} cores)" for cores, label in self.others_by_task() if cores > OTHERS]
        return f"Others used the machine during {len(found)} of the programs, whose figures say little: {', '.join(found)}." if found else ""

    def add_google_benchmark(self, program, answer, series_only=False):
        """One round: what a program wrote with --benchmark_out. Returns how many benchmarks were measured. Those of `series_only` count for
        nothing but their series: they were measured among others than in the other rounds, or longer."""
        measured = 0
        for entry in answer["benchmarks"]:
            if entry.get("error_occurred"):
                self.errors[entry["name"]] = entry.get("error_message", "failed")
                continue
            found = series_of(entry)
            if not series_only:
                found["time"] = entry["real_time"] * UNITS[entry["time_unit"]]
                found.update((key, value) for key, value in entry.items() if isinstance(value, (int, float)) and key not in NOT_COUNTERS)
            columns = self.columns.setdefault(entry["name"], {"program": program})
            for counter, value in found.items(): columns.setdefault(counter, []).append(value)
            measured += 1
        return measured

    def brief(self):
        """Without what follows from the rest or is shown nowhere, to be kept with the sources."""
        kept = copy.copy(self)
        kept.columns = {name: {key: values for key, values in columns.items() if KEPT.fullmatch(key)} for name, columns in self.columns.items()}
        return kept

    def save(self, path):
        """A line a benchmark, five digits a number: small, and its changes can be read."""
        short = lambda value: json.dumps(json.loads(json.dumps(value, allow_nan=False), parse_float=five_digits))
        lines = lambda items: ",\n".join(f"  {item}" for item in items)
        keyed = lambda mapping: lines(f"{json.dumps(key)}: {short(value)}" for key, value in sorted(mapping.items()))
        pathlib.Path(path).write_text(
            f'{{"format": {FORMAT},\n "machine": {json.dumps(self.machine, indent=2)},\n "run": {json.dumps(self.run, indent=2)},\n'
            f' "benchmarks": {{\n{keyed(self.columns)}}},\n "errors": {{\n{keyed(self.errors)}}},\n'
            f' "memory": [\n{lines(map(short, self.memory))}]}}\n')

    @staticmethod
    def load(path):
        try:
            content = json.loads(pathlib.Path(path).read_text())
            if content["format"] != FORMAT: raise BadInput(f"{path} has another format than this scripts/bench reads; measure again")
            results = Results(content["machine"], content["run"])
            results.columns, results.errors, results.memory = content["benchmarks"], content["errors"], content["memory"]
        except (ValueError, LookupError, TypeError) as e:
            raise BadInput(f"{path} holds no results; give a results.json that scripts/bench has written") from e
        return results


def series_of(entry):
    """What our own programs say in a label, "pairs 0.2/0.19 0.21/0.2;watched ...", and PyTorch's as lists."""
    found = {name: entry[name] for name in SERIES if entry.get(name)}
    for words in map(str.split, entry.get("label", "").split(";")):
        if words and words[0] in SERIES: found[words[0]] = [[float(number) for number in word.split("/")] for word in words[1:]]
    return found


def five_digits(text):
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")
