# SPDX-License-Identifier: BSL-1.0
"""results.json: what one run of scripts/bench found.

    {"format": 1,
     "machine": {...},                                       see machine.py
     "run": {...},                                           how it was run: see run.py
     "benchmarks": {NAME: {"program": ..., COUNTER: [...]}}, a value a round; of "pairs" and "watched" a list
     "errors": {NAME: sentence},                             what could not be measured
     "memory": [{...}]}                                      the trainer's results, by stage of sharding and ranks

Names and counters are those of the programs (bench/*.cpp), each benchmark's median is its counter "time", and all times are
seconds. Rounds are merged when they are read: the median of medians, the least time_min and lower quartile, the greatest time_max and upper
quartile: what differs from round to round is to be seen. Pairs, [time, reference], are those of all rounds together, and of contests that
were made for pairs alone; and so are metered steps, [watching, all].
"""
import json
import pathlib
import re
import statistics

FORMAT = 1
# Of Google Benchmark's fields, those that say nothing about the measurement.
NOT_COUNTERS = {"name", "family_index", "per_family_instance_index", "run_name", "run_type", "repetitions", "repetition_index", "threads",
                "iterations", "real_time", "cpu_time", "time_unit", "error_occurred", "error_message", "label"}
SERIES = ("pairs", "watched")  # lists of pairs of numbers
KEPT = {*SERIES, "program", "time", "time_min", "time_max", "samples", "handoff_ns", "busbw", "limit_ratio", "threads_ratio", "mpi_library_ratio",
        "mpi_library_best_ratio", "all_reduce_ratio", "memcpy_ratio", "nccl_library_ratio",
        "communication", "overlap_ratio", "samples_per_second", "state_bytes", "hidden", "overhead",
        *(name + quartile for name in ("independent_ratio", "exposed_against_independent", "unwatched_ratio", "exposed", "compute_ratio") for quartile in ("", "_q1", "_q3"))}
OTHERS = 0.5  # cores busy with others, on average, above which figures say little
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class BadInput(Exception):
    """What the user gave cannot serve; the text is one sentence that says why."""


class Benchmark:
    """All rounds of one benchmark."""

    def __init__(self, name, columns):
        self.name = name
        self.program = columns.get("program", "")
        self.columns = {key: values for key, values in columns.items() if isinstance(values, list) and values}

    def rounds(self, counter):
        return self.columns.get(counter, [])

    def series(self, name):
        """Of all rounds: (time, reference) of "pairs", (watching, all) of "watched"; empty where there are none."""
        return [tuple(each) for of_round in self.rounds(name) for each in of_round]

    def counter(self, counter):
        """Median over the rounds; None where it was not measured."""
        values = self.rounds(counter)
        return statistics.median(values) if values else None

    def quartiles(self, counter):
        """Of what is measured in pairs: the widest quartiles, the least lower and the greatest upper one of a round; None where there are
        none. The median over the rounds lies between them."""
        lower, upper = self.rounds(f"{counter}_q1"), self.rounds(f"{counter}_q3")
        return (min(lower), max(upper)) if lower and upper else None

    @property
    def time(self):
        return self.counter("time")

    @property
    def least(self):
        return min(self.rounds("time_min") or self.rounds("time"))

    @property
    def greatest(self):
        return max(self.rounds("time_max") or self.rounds("time"))

    @property
    def samples(self):
        return int(sum(self.rounds("samples"))) or len(self.rounds("time"))


class AllReduce:
    """WHO/COLLECTIVE/DTYPE/ranks:N/bytes:B"""
    pattern = re.compile(r"(?P<who>\w+)/(?P<collective>\w+)/(?P<dtype>\w+)/ranks:(?P<ranks>\d+)/bytes:(?P<bytes>\d+)")


class TrainStep:
    """train_step/MODEL/STRATEGY/BACKEND/ranks:N"""
    pattern = re.compile(r"train_step/(?P<model>\w+)/(?P<strategy>\w+)/(?P<backend>\w+)/ranks:(?P<ranks>\d+)")


class MarkReady:
    """reducer/mark_ready/OVERLAP/STORAGE/ranks:N/parameters:P"""
    pattern = re.compile(r"reducer/mark_ready/(?P<overlap>\w+)/(?P<storage>\w+)/ranks:(?P<ranks>\d+)/parameters:(?P<parameters>\d+)")


class Reducing:
    """reducer/construct/ranks:N/parameters:P"""
    pattern = re.compile(r"reducer/construct/ranks:(?P<ranks>\d+)/parameters:(?P<parameters>\d+)")


class Results:
    def __init__(self, machine=None, run=None):
        self.machine = machine or {}
        self.run = run or {}
        self.columns = {}  # by name: program and counters
        self.errors = {}
        self.memory = []

    def benchmarks(self):
        return [Benchmark(name, columns) for name, columns in self.columns.items() if columns.get("time")]

    def parsed(self, kind):
        """(fields of the name, Benchmark) of those of one kind; whole numbers where the name has some."""
        found = []
        for benchmark in self.benchmarks():
            match = kind.pattern.fullmatch(benchmark.name)
            if match:
                found.append(({key: int(value) if value.isdigit() else value for key, value in match.groupdict().items()}, benchmark))
        return found

    def up_to_rounds(self):
        """Some of what is measured takes part in fewer rounds: see Task.rounds."""
        rounds = self.run.get("rounds", 0)
        return f"up to {rounds} rounds" if rounds > 1 else f"{rounds} round{'s' * (rounds != 1)}"

    def handoff(self):
        """Nanoseconds from core to core, the median over all benchmarks: the state of the machine. None: unknown."""
        values = [v for columns in self.columns.values() for v in columns.get("handoff_ns", []) if v > 0]
        return statistics.median(values) if values else None

    def used_by_others(self):
        """What others used of the machine, in words, and: so much that the figures say little? ("", False) if that is unknown."""
        before, during = self.machine.get("busy_before"), self.machine.get("busy_with_others")
        if before is None:  # older results have the load average
            load = self.machine.get("load_before")
            return ("", False) if load is None else (f"load before {load:.1f}", load > 1)
        text = f"busy before {before:.1f} cores" + ("" if during is None else f", with others meanwhile {during:.1f}")
        if (most := max(self.others_by_task(), default=(0, ""))) > (0, ""): text += f", at most {most[0]:.1f} ({most[1]})"
        return text, before > OTHERS or (during or 0) > OTHERS

    def others_by_task(self):
        """(cores, label): how many others used while a task ran, on average, in its worst round. Of older results, nothing."""
        return [(max(of_rounds), label) for label, of_rounds in self.run.get("others", {}).items() if of_rounds]

    def disturbed(self):
        """A sentence that names the tasks in which others used so much that their figures say little; empty if there are none."""
        found = sorted((each for each in self.others_by_task() if each[0] > OTHERS), reverse=True)
        named = ", ".join(f"{label} ({cores:.1f} cores)" for cores, label in found)
        return f"Others used the machine during {len(found)} of the programs, whose figures say little: {named}." if found else ""

    def not_measured(self):
        """(what, why), in order."""
        return sorted({**self.errors, **self.run.get("left_out", {})}.items())

    def add_google_benchmark(self, program, answer, series_only=False, rename=lambda name: name):
        """One round: what a program wrote with --benchmark_out. Returns how many benchmarks were measured. Those of `series_only` count for
        nothing but their series: they were measured among others than in the other rounds, or longer."""
        measured = 0
        for entry in answer["benchmarks"]:
            name = rename(entry["name"])
            if entry.get("error_occurred"):
                self.errors[name] = entry.get("error_message", "failed")
                continue
            columns = self.columns.setdefault(name, {"program": program})
            for each, values in series_of(entry).items(): columns.setdefault(each, []).append(values)
            measured += 1
            if series_only: continue
            columns.setdefault("time", []).append(entry["real_time"] * UNITS[entry["time_unit"]])
            for counter, value in entry.items():
                if counter not in NOT_COUNTERS and isinstance(value, (int, float)):
                    columns.setdefault(counter, []).append(value)
        return measured

    def brief(self):
        """Without what follows from the rest or is shown nowhere, to be kept with the sources."""
        kept = Results(self.machine, self.run)
        kept.columns = {name: {key: values for key, values in columns.items() if key in KEPT} for name, columns in self.columns.items()}
        kept.errors, kept.memory = self.errors, self.memory
        return kept

    def save(self, path):
        """A line a benchmark, five digits a number: small, and its changes can be read."""
        dump = lambda value: json.dumps(shortened(value), allow_nan=False)
        lines = lambda items: ",\n".join(f"  {item}" for item in items)
        keyed = lambda mapping: lines(f"{json.dumps(key)}: {dump(value)}" for key, value in sorted(mapping.items()))
        pathlib.Path(path).write_text(
            f'{{"format": {FORMAT},\n "machine": {json.dumps(self.machine, indent=2)},\n "run": {json.dumps(self.run, indent=2)},\n'
            f' "benchmarks": {{\n{keyed(self.columns)}}},\n "errors": {{\n{keyed(self.errors)}}},\n'
            f' "memory": [\n{lines(dump(row) for row in self.memory)}]}}\n')

    @staticmethod
    def load(path):
        try:
            content = json.loads(pathlib.Path(path).read_text())
        except OSError as e:
            raise BadInput(f"cannot read {path}: {e.strerror}") from e
        except ValueError as e:
            raise BadInput(f"{path} is not JSON; give a results.json that scripts/bench has written") from e
        if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), dict):
            raise BadInput(f"{path} holds no results; give a results.json that scripts/bench has written")
        if content.get("format") != FORMAT:
            raise BadInput(f"{path} has format {content.get('format')}, this scripts/bench reads {FORMAT}; measure again")
        results = Results(content.get("machine"), content.get("run"))
        results.columns, results.errors, results.memory = content["benchmarks"], content.get("errors", {}), content.get("memory", [])
        if not results.benchmarks() and not results.memory:
            raise BadInput(f"{path} holds no results: nothing was measured")
        return results


def series_of(entry):
    """What our own programs say in a label, "pairs 0.2/0.19 0.21/0.2;watched ...", and PyTorch's as lists."""
    found = {name: entry[name] for name in SERIES if entry.get(name)}
    for words in map(str.split, entry.get("label", "").split(";")):
        if words and words[0] in SERIES: found[words[0]] = [[float(number) for number in word.split("/")] for word in words[1:]]
    return found


def shortened(value):
    """Every float rounded to five significant digits, inside lists and dictionaries too."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")
    if isinstance(value, list):
        return [shortened(v) for v in value]
    if isinstance(value, dict):
        return {key: shortened(v) for key, v in value.items()}
    return value
