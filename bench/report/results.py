# SPDX-License-Identifier: BSL-1.0
"""results.json: what one run of scripts/bench found; and several of them, pooled.

    {"format": 1, "machine": {...},                         see machine.py
     "run": {...},                                           how it was run: see run.py
     "benchmarks": {NAME: {"program": ..., COUNTER: [...]}}, a value a round; of "pairs", [time, reference], a list
     "errors": {NAME: sentence},                             what could not be measured
     "memory": [{...}]}                                      the trainer's results, by stage of sharding and ranks

Names and counters are those of the programs (bench/*.cpp), each benchmark's median is its counter "time", and all times are seconds."""
import json
import pathlib
import re
import statistics

import pandas

from . import BadInput

FORMAT = 1
# The counters that tables, charts, goals and comparisons read.
COUNTERS = re.compile(r"samples|handoff_ns|busbw|samples_per_second|state_bytes|hidden|overhead|bytes_per_parameter|\w+_ratio")
OTHERS = 0.5  # cores busy with others, on average, above which figures say little
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def median(values):
    """None of none."""
    return statistics.median(values) if values else None


class Benchmark:
    """One benchmark: its columns in one run, or in several."""

    def __init__(self, name, *columns):
        self.name, self.columns, self.program = name, columns, columns[0].get("program", "")
        self.time, self.samples = self.counter("time"), int(sum(self.rounds("samples")))

    @property
    def runs(self):
        return [self] if len(self.columns) == 1 else [Benchmark(self.name, columns) for columns in self.columns]

    def rounds(self, counter):
        """Of all runs."""
        return [value for columns in self.columns for value in columns.get(counter, [])]

    def counter(self, counter):
        """The median over the runs of the median over the rounds; None where it was not measured."""
        return median([statistics.median(columns[counter]) for columns in self.columns if columns.get(counter)])


class Results:
    def __init__(self, machine=None, run=None):
        self.machine, self.run = machine or {}, run or {}
        self.columns = {}  # by name: program and counters
        self.errors, self.memory = {}, []

    def get(self, name):
        """None where it was not measured."""
        return Benchmark(name, self.columns[name]) if self.columns.get(name, {}).get("time") else None

    def benchmarks(self):
        return [found for name in self.columns if (found := self.get(name))]

    def parsed(self, pattern):
        """A DataFrame of the benchmarks whose names match: a column for each named group, and "benchmark"."""
        pattern = re.compile(pattern)
        rows = [{**match.groupdict(), "benchmark": b} for b in self.benchmarks() if (match := pattern.fullmatch(b.name))]
        found = pandas.DataFrame(rows, columns=[*pattern.groupindex, "benchmark"])
        return found.astype({column: int for column in ("ranks", "bytes") if column in found})

    @property
    def runs(self):
        return [self]

    def states(self):
        """The state of the machine, a dictionary a round: nanoseconds from core to core, and what machine.Round found."""
        found = [dict(state) for state in self.run.get("states", [{}] * self.run.get("rounds", 0))]
        handoffs = [columns["handoff_ns"] for columns in self.columns.values() if len(columns.get("handoff_ns", [])) == len(found)]
        for state, *values in zip(found, *handoffs): state["handoff_ns"] = median([value for value in values if value > 0])
        return found

    def handoff(self):
        """Nanoseconds from core to core, the median over the rounds. None: unknown."""
        return median([state["handoff_ns"] for state in self.states() if state.get("handoff_ns")])

    def others(self):
        """(sentence, warning): how much of the machine others used while a program ran, at most; and the programs whose figures therefore say
        little. Empty if unknown, and if there are none."""
        worst = sorted(((max(cores), label) for label, cores in self.run.get("others", {}).items()), reverse=True)
        told = [f"{label} ({cores:.1f} cores)" for cores, label in worst if cores > OTHERS]
        return (f"others used at most {worst[0][0]:.1f} cores" if worst else "",
                f"Others used the machine during {len(told)} of the programs, whose figures say little: {', '.join(told)}." if told else "")

    def add_google_benchmark(self, program, answer):
        """One round: what a program wrote with --benchmark_out. Returns how many benchmarks were measured."""
        good = [entry for entry in answer["benchmarks"] if not entry.get("error_occurred")]
        self.errors.update((entry["name"], entry.get("error_message", "failed")) for entry in answer["benchmarks"] if entry not in good)
        for entry in good:
            columns = self.columns.setdefault(entry["name"], {"program": program})
            found = {key: value for key, value in entry.items() if COUNTERS.fullmatch(key)}
            for counter, value in {**found, "time": entry["real_time"] * UNITS[entry["time_unit"]]}.items():
                columns.setdefault(counter, []).append(five_digits(value))
            if pairs := pairs_of(entry): columns.setdefault("pairs", []).append(pairs)
        return len(good)

    def save(self, path):
        """A line a benchmark: its changes can be read."""
        lines = lambda items: ",\n".join(f"  {item}" for item in items)
        keyed = lambda mapping: lines(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in sorted(mapping.items()))
        pathlib.Path(path).write_text(
            f'{{"format": {FORMAT},\n "machine": {json.dumps(self.machine, indent=2)},\n "run": {json.dumps(self.run, indent=2)},\n'
            f' "benchmarks": {{\n{keyed(self.columns)}}},\n "errors": {{\n{keyed(self.errors)}}},\n'
            f' "memory": [\n{lines(map(json.dumps, self.memory))}]}}\n')

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


class Pool(Results):
    """Several runs, the newest last. Its machine, peers and memory are the newest's."""

    def __init__(self, runs):
        newest = runs[-1]
        super().__init__(newest.machine, newest.run)
        self.of, self.memory = runs, newest.memory
        self.columns = {name: None for run in runs for name in run.columns}  # the names only
        self.errors = {name: why for run in runs for name, why in run.errors.items() if name in newest.errors and name not in self.columns}

    @property
    def runs(self):
        return self.of

    def get(self, name):
        measured = [run.columns[name] for run in self.of if run.columns.get(name, {}).get("time")]
        return Benchmark(name, *measured) if measured else None

    @staticmethod
    def load(paths):
        """One run if there is one."""
        runs = sorted(map(Results.load, paths), key=lambda run: run.machine.get("date", ""))
        return Pool(runs) if len(runs) > 1 else runs[0]


def pairs_of(entry):
    """What our own programs say in a label, "pairs 0.2/0.19 0.21/0.2;...", and PyTorch's as a list."""
    said = re.search(r"\bpairs ([^;]*)", entry.get("label", ""))
    pairs = [pair.split("/") for pair in said.group(1).split()] if said else entry.get("pairs", [])
    return [[five_digits(float(number)) for number in pair] for pair in pairs]


def five_digits(value):
    """Short in a file."""
    return float(f"{value:.5g}")
