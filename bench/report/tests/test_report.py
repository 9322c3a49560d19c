#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Tests of what stands behind scripts/bench: no benchmark is run and no time is asserted."""
import contextlib
import html
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import sys
import tempfile
import textwrap
import unittest
import unittest.mock

BENCH = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(BENCH))
try:
    import matplotlib
    import pandas
    import scipy.stats
except ImportError as missing:
    print(f"skipped: {missing}; install python3-matplotlib, python3-pandas and python3-scipy")
    sys.exit(77)

from report import BadInput, charts, compare, docs, estimates, goals, machine, names, page, plan, run, tables, text
from report import __main__ as main
from report.results import Benchmark, Pool, Results
from report.tests import synthetic

LATENCY = "threads/all_reduce/f32/ranks:2/bytes:4096"
# Of bench_all_reduce, as Google Benchmark 1.7 wrote it.
ENTRY = {"name": LATENCY, "family_index": 0, "per_family_instance_index": 0, "run_name": LATENCY, "run_type": "iteration", "repetitions": 1,
         "repetition_index": 0, "threads": 1, "iterations": 1, "real_time": 0.57681551967811351, "cpu_time": 3.5699999999996153, "time_unit": "us",
         "algbw": 7101057201.5, "busbw": 7101057201.5, "bytes": 4096.0, "handoff_ns": 150.18, "limit_ratio": 0.99045, "samples": 86.0,
         "time_max": 8.7238548281499287e-06, "time_min": 5.53734e-07}


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def saved(self, name, results):
        results.save(self.folder / name)
        return self.folder / name


class ResultsTest(Folder):
    def test_rounds_are_merged(self):
        results = Results()
        for factor in (1, 3, 2):
            entry = {**ENTRY, "real_time": ENTRY["real_time"] * factor, "time_min": 5e-7 * factor}
            self.assertEqual(results.add_google_benchmark("bench_all_reduce", {"benchmarks": [entry]}), 1)
        merged, = results.benchmarks()
        self.assertAlmostEqual(merged.time, 2 * 0.57681551967811351e-6)
        self.assertEqual(merged.samples, 3 * 86)
        self.assertEqual(merged.counter("limit_ratio"), 0.99045)
        self.assertIsNone(merged.counter("independent_ratio"))
        self.assertEqual(merged.rounds("cpu_time"), [])

    def test_an_error_of_a_benchmark_is_kept(self):
        results = Results()
        failed = {"name": "mpi/all_reduce", "error_occurred": True, "error_message": "no mpirun", "real_time": 0.0, "time_unit": "us"}
        self.assertEqual(results.add_google_benchmark("bench_all_reduce", {"benchmarks": [failed]}), 0)
        self.assertEqual(results.errors, {"mpi/all_reduce": "no mpirun"})
        self.assertEqual(results.benchmarks(), [])

    def test_a_file_brings_everything_back(self):
        results = synthetic.results(rounds=2)
        results.errors["a"] = 'said "no"'
        again = Results.load(self.saved("r.json", results))
        self.assertEqual(again.columns.keys(), results.columns.keys())
        self.assertEqual((again.machine, again.run, again.errors), (results.machine, results.run, results.errors))
        for name, columns in results.columns.items():
            for counter, values in columns.items():
                if counter == "program": self.assertEqual(again.columns[name][counter], values)
                elif counter == "pairs":
                    for a, b in zip(itertools.chain(*again.columns[name][counter]), itertools.chain(*values), strict=True):
                        for k in (0, 1): self.assertAlmostEqual(a[k], b[k], delta=1e-4 * b[k])
                else:
                    for a, b in zip(again.columns[name][counter], values, strict=True): self.assertAlmostEqual(a, b, delta=1e-4 * abs(b))
        self.assertEqual(len(again.memory), 12)

    def test_pairs_are_kept_of_all_rounds(self):
        """As bench_train_step writes them, into a label, and torch_train_step.py."""
        results, name = Results(), "train_step/mlp/timeline/threads/ranks:2"
        entry = {**ENTRY, "name": name, "label": "pairs 0.06/0.05 0.07/0.065;watched 1e-05/0.06"}
        results.add_google_benchmark("bench_train_step", {"benchmarks": [entry]})
        results.add_google_benchmark("torch_train_step", {"benchmarks": [{**ENTRY, "name": name, "pairs": [[0.08, 0.075]]}]})
        benchmark, = results.benchmarks()
        self.assertEqual(benchmark.rounds("pairs"), [[[0.06, 0.05], [0.07, 0.065]], [[0.08, 0.075]]])
        self.assertEqual(len(benchmark.rounds("time")), 2)

    def test_the_worst_task_is_named_and_those_that_say_little(self):
        results = Results(run={"others": {"a": [0.1, 0.4], "b": [0.3]}})
        self.assertEqual(results.others(), ("others used at most 0.4 cores", ""))
        results.run["others"]["b"].append(0.7)
        self.assertEqual(results.others()[1], "Others used the machine during 1 of the programs, whose figures say little: b (0.7 cores).")
        self.assertEqual(Results().others(), ("", ""))

    def test_names_are_parsed_and_all_are_known(self):
        results = synthetic.results(rounds=1)
        found = results.parsed(tables.COLLECTIVE)
        self.assertEqual(set(found.who), set(names.WHO) - {"nccl", "nccl_library"})
        self.assertEqual({(row.who, row.collective, row.dtype, row.ranks, row.bytes) for row in found.itertuples() if row.benchmark.name == LATENCY},
                         {("threads", "all_reduce", "f32", 2, 4096)})
        steps = [b for b in results.benchmarks() if b.name.startswith("train_step") and names.WATCHED not in b.name]
        self.assertEqual(len(tables.steps(results)), len(steps))

    def test_an_mpi_is_called_by_its_version(self):
        self.assertEqual([tables.labels(synthetic.results(1))[who] for who in ("open_mpi", "mpich", "gloo")], ["Open MPI 6", "MPICH 5", "Gloo"])
        self.assertEqual(tables.labels(Results(run={"peers": True}), ["open_mpi"]), {"open_mpi": "Open MPI 5"})



class IntervalsTest(unittest.TestCase):
    def test_they_are_those_of_students_distribution(self):
        least, greatest = estimates.of_processes([3, 1, 2]).between
        self.assertAlmostEqual(least, 2 - 4.302653 / math.sqrt(3), places=5)  # as in tables
        self.assertAlmostEqual(least + greatest, 4)

    def test_one_value_says_nothing(self):
        self.assertIsNone(estimates.of_processes([]))
        self.assertEqual(estimates.of_processes([1.0]).text(str), "1.0 (one round)")

    def test_pairs_of_one_process_are_not_taken_for_independent(self):
        """What pairs of a process share is ten times what they differ by, and processes have different numbers of them: as often as said the
        interval holds the truth, here zero."""
        chance, held, times = random.Random(1), 0, 1000
        for _ in range(times):
            processes = []
            for pairs in (5, 25, 5, 25):
                shared = chance.gauss(0, 1)
                processes.append([[1 + shared + chance.gauss(0, 0.1), 1] for _ in range(pairs)])
            least, greatest = estimates.exposed_of(Benchmark("a", {"time": [1], "pairs": processes})).between
            held += least <= 0 <= greatest
        self.assertAlmostEqual(held / times, 0.95, delta=0.02)

    def test_thousands_of_pairs_are_not_too_many(self):
        pairs = [[1.0 + k / 5000, 1.0] for k in range(5000)]
        found = estimates.exposed_of(Benchmark("a", {"time": [1], "pairs": [pairs, pairs[1:]]}))
        self.assertAlmostEqual(found.value, 0.5, places=3)
        self.assertLess(found.between[0], found.value)


class PoolTest(Folder):
    STEP = "train_step/mlp/buckets_25MB/threads/ranks:2"

    def pool(self, *made):
        for number, results in enumerate(made):
            results.machine = {**results.machine, "date": f"2026-01-0{number + 1} 00:00 UTC", "commit": str(number) * 40}
            results.save(self.folder / f"{9 - number}.json")
        return Pool.load(self.folder.glob("*.json"))

    def test_a_figure_is_the_median_of_the_runs_between_the_least_and_the_greatest(self):
        made = [synthetic.results(3, noise=0) for _ in range(3)]
        for results, wait in zip(made, (3e-3, 1e-3, 8e-3)): results.columns[self.STEP]["pairs"] = [[[0.055 + wait, 0.055]]] * 3
        for results, slow in zip(made, (1, 3, 2)): results.columns[LATENCY]["time"] = [slow * 1e-6] * (2 + slow)
        pool = self.pool(*made)
        self.assertEqual(estimates.exposed_of(pool.get(self.STEP)).text(text.milliseconds), "3.00 (1.00 to 8.00, runs)")
        self.assertAlmostEqual(pool.get(LATENCY).time, 2e-6)
        self.assertEqual(len(pool.get(LATENCY).rounds("time")), 3 + 4 + 5)
        self.assertIn("3.00 (1.00 to 8.00)", docs.summary_steps(pool))

    def test_what_one_run_has_keeps_its_interval(self):
        made = [synthetic.results(3) for _ in range(2)]
        del made[0].columns[self.STEP]
        made[1].errors["a"] = "failed"
        pool = self.pool(*made)
        self.assertEqual(estimates.exposed_of(pool.get(self.STEP)), estimates.exposed_of(made[1].get(self.STEP)))
        self.assertIn(self.STEP, [b.name for b in pool.benchmarks()])
        self.assertEqual(pool.errors, {"a": "failed"})
        self.assertIsNone(pool.get("threads/nothing"))

    def test_goals_are_judged_by_all_runs(self):
        made = [synthetic.results(3, noise=0) for _ in range(2)]
        made[1].columns[f"threads/all_reduce/f32/ranks:2/bytes:{2 ** 20}"]["limit_ratio"] = [0.5] * 3
        row, = [row for row in goals.goals(self.pool(*made)).values if row[0].startswith("all-reduce, 2 ranks, 64 KiB and more: the limit's")]
        self.assertEqual(list(row[2:]), ["0.73 (0.50 to 0.95, runs): 1 MiB", "within the noise"])

    def test_rounds_in_a_bad_state_are_marked_and_kept(self):
        made = [synthetic.results(2, noise=0) for _ in range(2)]
        for results in made: results.run["states"] = [{"copy": 10e9, "steal": 0.0}, {"copy": 10e9, "steal": 0.001}]
        made[0].run["states"][1] = {"copy": 7.9e9, "steal": 0.03}
        for columns in made[1].columns.values(): columns["handoff_ns"] = [120, 200]
        shown = tables.rounds(self.pool(*made))
        self.assertEqual(list(shown.state), ["good", "slow copy, stolen time", "good", "slow handoff"])
        self.assertEqual(list(shown.iloc[1])[2:6], ["2", "7.9 GB/s", "120 ns", "3.0%"])
        self.assertIn(", 00000000 | 2 cores of a made-up processor | 2 | 10 GB/s, 7.9 GB/s | 120 ns, 120 ns | 2 (slow copy, stolen time) |",
                      docs.conditions(Pool.load(self.folder.glob("*.json"))))
        self.assertEqual(list(tables.rounds(synthetic.results(2)).state), ["good", "good"])  # an old file

    def test_days_are_no_draws_of_a_comparison(self):
        pool = self.pool(synthetic.results(2, seed=5), synthetic.results(2, seed=6))
        with self.assertRaisesRegex(BadInput, "--compare compares one run with another"): compare.compare(synthetic.results(2), pool, io.StringIO())

    def test_charts_name_all_runs(self):
        figure = charts.exposed(self.pool(synthetic.results(2), synthetic.results(2)), "mlp")
        self.assertEqual(figure._supxlabel.get_text(), "2 cores, a made-up processor; 2026-01-01 00:00 UTC and 2026-01-02 00:00 UTC")


class TextTest(unittest.TestCase):
    def test_units(self):
        self.assertEqual([text.seconds(v) for v in (8.42e-7, 1.62e-6, 0.9996e-3, 0.0128, 1.5)],
                         ["842 ns", "1.62 us", "1 ms", "12.8 ms", "1.5 s"])
        self.assertEqual([text.size(v) for v in (0, 4096, 25 * 2 ** 20, 2 ** 30)], ["0 B", "4 KiB", "25 MiB", "1 GiB"])
        self.assertEqual([text.bandwidth(v) for v in (2.1e6, 27.3e9)], ["2.1 MB/s", "27.3 GB/s"])
        self.assertEqual([text.milliseconds(v) for v in (-0.0012, 0.0123, 0.25)], ["-1.20", "12.3", "250"])

    def test_what_has_a_meaning_in_a_table_is_escaped(self):
        self.assertEqual(text.markdown(pandas.DataFrame({"x|y": ["<i>"], "z": ["1"]})), "| x\\|y | z |\n|---|---|\n| <i> | 1 |")
        self.assertEqual(text.markdown(pandas.DataFrame()), "")


class CompareTest(Folder):
    def compared(self, old, new):
        out = io.StringIO()
        return compare.compare(old, new, out), out.getvalue()

    def test_what_watching_costs_is_guarded(self):
        watched = "train_step/mlp/timeline/threads/ranks:2"
        good, said = self.compared(synthetic.results(), synthetic.results(seed=2, slower={watched: 1.2}))
        self.assertFalse(good)
        self.assertIn(f"| {watched} | the same unwatched |", said)

    def test_a_busy_machine_is_told(self):
        old, new = synthetic.results(), synthetic.results(seed=2)
        self.assertNotIn("Others", self.compared(old, new)[1])
        new.run["others"]["conversion"] = [2.0]
        good, said = self.compared(old, new)
        self.assertTrue(good)
        self.assertRegex(said, r"new: .* Others used the machine during 1 of the programs, whose figures say little: conversion \(2\.0 cores\)\.")

    def test_noise_is_no_regression(self):
        """An alarm in one of 20 runs would be as promised."""
        runs = [self.compared(synthetic.results(seed=seed, noise=0.03), synthetic.results(seed=100 + seed, noise=0.03)) for seed in range(8)]
        alarms = [said for good, said in runs if not good]
        self.assertLessEqual(len(alarms), 1, "".join(alarms))

    def test_a_regression_is_found_and_named(self):
        for rounds in (3, 5):
            good, said = self.compared(synthetic.results(rounds), synthetic.results(rounds, seed=2, slower={LATENCY: 1.4}))
            self.assertFalse(good)
            self.assertIn(f"| {LATENCY} | the limit |", said)
            self.assertIn("1 slower, 0 faster", said)

    def test_two_rounds_are_enough_as_benchmarks_tell_of_one_another(self):
        """By its own variance, of two rounds on each side, one of hundreds is not significant whatever happened to it."""
        for seed in range(2, 4):
            good, said = self.compared(synthetic.results(2, noise=0.03), synthetic.results(2, noise=0.03, seed=seed))
            self.assertTrue(good, said)
            good, said = self.compared(synthetic.results(2), synthetic.results(2, seed=seed, slower={LATENCY: 1.5}))
            self.assertFalse(good)
            self.assertIn("1 slower, 0 faster", said)

    def test_p_values_are_those_of_students_test(self):
        """If all benchmarks vary alike, what all say of the variance is what each says: as much as four rounds more."""
        h, m = 0.01, 0.06
        pair = ([math.exp(-h), math.exp(h)], [math.exp(m - h), math.exp(m + h)])
        for p in compare.p_values([pair] * 5): self.assertAlmostEqual(p, 2 * scipy.stats.t.sf(m / math.sqrt(2 * h * h), 6), places=12)

    def test_few_benchmarks_and_equal_rounds_can_be_tested(self):
        self.assertEqual(list(compare.p_values([([1.0, 1.0], [1.0, 1.0])])), [1.0])
        self.assertLess(compare.p_values([([1.0, 1.0], [1.2, 1.2])])[0], 1e-3)
        noisy = [1.0, 1.5]
        self.assertGreater(compare.p_values([(noisy, [1.2, 1.8])])[0], 0.05)
        self.assertLess(compare.p_values([(noisy, [3.0, 4.5])] + [([1.0, 1.01], [1.0, 1.02])] * 20)[0], compare.p_values([(noisy, [3.0, 4.5])])[0])

    def test_what_became_faster_is_no_regression(self):
        good, said = self.compared(synthetic.results(slower={LATENCY: 1.4}), synthetic.results(seed=2))
        self.assertTrue(good)
        self.assertIn("0 slower, 1 faster", said)

    def test_a_step_is_guarded_more_closely(self):
        step = "train_step/transformer/buckets_25MB/threads/ranks:2"
        old, new = synthetic.results(noise=0.005), synthetic.results(noise=0.005, seed=2, slower={step: 1.08, LATENCY: 1.08})
        good, said = self.compared(old, new)
        self.assertFalse(good)
        self.assertIn(step, said)
        self.assertNotIn(LATENCY, said)

    def test_peers_may_become_slower(self):
        peers = {name: 2 for name in synthetic.results(1).columns if name.startswith(("gloo", "limit", "mpi_library", "train_step/mlp/torch_ddp", "train_step/mlp/indep"))}
        self.assertGreater(len(peers), 50)
        self.assertTrue(self.compared(synthetic.results(), synthetic.results(seed=2, slower=peers))[0])

    def test_a_slower_machine_is_no_regression(self):
        """Everything takes 1.5 times as long, ratios stay: only what has no ratio could be blamed, and the handoff clears it."""
        old, new = synthetic.results(), synthetic.results(seed=2)
        for columns in new.columns.values():
            for counter in ("time", "time_min", "time_max", "handoff_ns"): columns[counter] = [1.5 * v for v in columns[counter]]
        good, said = self.compared(old, new)
        self.assertTrue(good, said)
        self.assertIn("another state of the machine: 120 and 180 ns", said)
        new = synthetic.results(seed=2, slower={"reducer/construct/ranks:2/parameters:100000": 1.5})
        self.assertFalse(self.compared(old, new)[0])
        new.machine["cpu"] = "another one"
        good, said = self.compared(old, new)
        self.assertTrue(good)
        self.assertIn("another machine", said)
        self.assertNotIn("reducer/", said)

    def test_what_fails_now_is_a_regression(self):
        new = synthetic.results(seed=2)
        del new.columns[LATENCY]
        self.assertTrue(self.compared(synthetic.results(), new)[0])  # perhaps --only
        new.errors[LATENCY] = "a rank died"
        good, said = self.compared(synthetic.results(), new)
        self.assertFalse(good)
        self.assertIn("a rank died", said)

    def test_many_tests_make_no_alarm_by_themselves(self):
        """Benjamini and Hochberg: of p-values that are evenly spread, none is significant, and of few small ones all are."""
        self.assertFalse(compare.significant_ones(pandas.Series([(i + 1) / 100 for i in range(100)])).any())
        self.assertEqual(list(compare.significant_ones(pandas.Series([1e-5, 0.5, 1e-4, 0.2, 0.9]))), [True, False, True, False, False])
        self.assertEqual(list(compare.significant_ones(pandas.Series([0.04, 0.03]))), [True, True])


class GoalsTest(unittest.TestCase):
    def rows(self, results):
        return {row[0]: list(row) for row in goals.goals(results).values}

    OURS, ZERO1, PEER = (f"train_step/mlp/{name}/ranks:2" for name in ("buckets_25MB/threads", "zero1/threads", "torch_ddp/gloo"))
    IN_TORCH = "train_step/mlp/torch_gradsync/tcp/ranks:2"

    def found(self, results, *words):
        return next(row[2:] for what, row in self.rows(results).items() if all(word in what for word in words))

    def test_what_is_measured_in_pairs_shows_where_the_mean_of_its_processes_lies(self):
        results = synthetic.results(3, noise=0)
        results.columns[self.ZERO1]["pairs"] = [[[1.0, 0.5], [1.0, 1.0], [1.0, 1.01]], [[1.0, 1.02]], [[1.0, 1.01]]]
        efficiency = lambda: self.found(results, "mlp, threads", "ZeRO 1)")
        self.assertEqual(efficiency(), ["1.010 (0.985 to 1.035)", "met"])  # 4.30 times 0.01 over the root of 3
        results.columns[self.ZERO1]["pairs"] = [[[1.0, 1.01]] * 50]
        self.assertEqual(efficiency(), ["1.010 (one round)", "met in one round"])

    def test_more_processes_tell_what_few_do_not(self):
        results = synthetic.results(1, noise=0)
        def verdict(times):
            results.columns[self.ZERO1]["pairs"] = [[[1.0, 0.975]], [[1.0, 0.995]]] * times
            return self.found(results, "mlp, threads", "ZeRO 1)")[1]
        self.assertEqual([verdict(1), verdict(20)], ["within the noise", "met"])

    def test_what_is_exposed_is_compared_with_what_ddp_exposes(self):
        results = synthetic.results(3, noise=0)
        def found(own, peers):
            for name, waits in ((self.IN_TORCH, own), (self.PEER, peers)): results.columns[name]["pairs"] = [[[0.06 + wait, 0.06]] for wait in waits]
            return self.found(results, "mlp, gradsync in PyTorch: exposed")
        self.assertEqual(found([0.0009] * 3, [0.02] * 3), ["-0.10 (-0.10 to -0.10): 0.90 of DDP's 20.0 ms", "met"])
        self.assertEqual(found([-0.002, 0.004, 0.001], [0.02] * 3)[1], "within the noise")
        self.assertEqual(found([0.004] * 3, [0.02] * 3), ["3.00 (3.00 to 3.00): 4.00 of DDP's 20.0 ms", "missed"])
        self.assertEqual(found([0.004], [0.02] * 3)[1], "missed in one round")
        self.assertEqual(found([0.0001] * 3, [0.02, -0.001, 0.02])[1], "within the noise")

    @staticmethod
    def set(results, who, counter, values, ranks=2, count=2 ** 20):
        results.columns[f"{who}/all_reduce/f32/ranks:{ranks}/bytes:{count}"][counter] = values

    def test_one_row_names_where_a_goal_is_missed(self):
        results = synthetic.results(3, noise=0)
        threads = lambda: self.found(results, "2 ranks, 64 KiB and more", "the limit's")
        self.assertEqual(threads()[1], "met")
        self.set(results, "threads", "limit_ratio", [0.1] * 3, count=2 ** 12)  # below 64 KiB
        self.assertEqual(threads()[1], "met")
        for count, values in ((2 ** 20, [0.8, 0.8, 0.85]), (25 * 2 ** 20, [0.9] * 3), (100 * 2 ** 20, [0.94, 1.0])):
            self.set(results, "threads", "limit_ratio", values, count=count)
        self.assertEqual(threads(), ["0.80 (0.80 to 0.85, rounds): 1 MiB. Also missed: 25 MiB 0.90", "missed"])
        self.set(results, "threads", "limit_ratio", [0.5])
        self.assertTrue(threads()[0].startswith("0.50 (one round): 1 MiB"), threads())

    def test_messages_are_compared_with_the_best_peer_by_the_limit_beside_each(self):
        results = synthetic.results(3, noise=0)
        messages = lambda: self.found(results, "4 ranks: time of MPI, messages")
        self.assertRegex(messages()[0], r"^1.25 \(1.25 to 1.25, rounds\): [\w ]+ \(Open MPI 5\)\. Also missed: ")
        self.assertEqual(messages()[1], "missed")
        for ranks, count in itertools.product((2, 4), synthetic.SIZES): self.set(results, "mpi_messages", "limit_ratio", [1 / 5.0] * 3, ranks, count)
        for ranks, count in itertools.product((2, 4), synthetic.SIZES[:5]): self.set(results, "open_mpi", "limit_ratio", [1 / 5.1] * 3, ranks, count)
        self.set(results, "open_mpi", "limit_ratio", [1 / 5.1] * 3, 2, synthetic.SIZES[5])
        self.assertEqual(messages()[1], "met")
        self.set(results, "mpich", "limit_ratio", [1 / 4.0] * 3, 4)
        self.set(results, "mpich", "time", [5.0] * 3, 4)  # of other turns
        self.assertEqual(messages(), ["1.25 (1.25 to 1.25, rounds): 1 MiB (MPICH 5)", "missed"])
        self.set(results, "gloo", "limit_ratio", [1 / 3.0] * 3, 4)  # through sockets
        self.assertEqual(messages(), ["1.25 (1.25 to 1.25, rounds): 1 MiB (MPICH 5)", "missed"])

    def test_peers_have_goals(self):
        results = synthetic.results(3, noise=0)
        self.assertEqual(self.found(results, "DeepSpeed"), ["1.12 (1.12 to 1.12, rounds): 4 KiB", "met"])
        self.set(results, "deepspeed_shm", "limit_ratio", [1 / 3.9] * 3, count=2 ** 12)
        self.assertEqual(self.found(results, "DeepSpeed")[1], "missed")
        self.assertEqual(self.found(results, "2 ranks: time of TCP")[1], "met")
        self.assertEqual(self.found(results, "adopted")[1], "met")
        self.set(results, "mpi_adopted", "limit_ratio", [0.5] * 3)
        self.assertEqual(self.found(results, "adopted"), ["0.60 (0.60 to 0.60, rounds): 1 MiB", "missed"])

    def test_what_its_own_rounds_contradict_is_within_the_noise(self):
        results = synthetic.results(3, noise=0)
        adopted = lambda: self.found(results, "adopted")
        self.set(results, "mpi", "limit_ratio", [0.8, 0.8, 0.8])
        self.set(results, "mpi_adopted", "limit_ratio", [0.8, 0.6, 0.6])
        self.assertEqual(adopted(), ["0.75 (0.75 to 1.00, rounds): 1 MiB", "within the noise"])
        self.set(results, "mpi_adopted", "limit_ratio", [0.8])  # of which round?
        self.assertEqual(adopted()[1], "met")

    def test_what_overlap_cannot_hide_is_allowed(self):
        results = synthetic.results(3, noise=0)
        limit = results.get(f"limit/all_reduce/f32/ranks:2/bytes:{25 * 2 ** 20}").time
        bare = limit * 5e7 / 4 / (25 * 2 ** 20)
        for name in (self.OURS, "train_step/mlp/zero3/threads/ranks:2"): results.columns[name]["pairs"] = [[[0.055 + bare, 0.055]]] * 3
        self.assertEqual(self.found(results, "mlp, threads: exposed time beyond a bare"), ["0.00 (0.00 to 0.00)", "met"])
        self.assertEqual(self.found(results, "mlp, threads: exposed time of ZeRO 3"), [f"{-bare / 2 * 1e3:.2f} ({-bare / 2 * 1e3:.2f} to {-bare / 2 * 1e3:.2f})", "met"])
        results.columns[self.OURS]["pairs"] = [[[0.055 + 2 * bare, 0.055]]] * 3
        self.assertEqual(self.found(results, "mlp, threads: exposed time beyond a bare")[1], "missed")

    def test_reducers_have_goals(self):
        results = synthetic.results(3, noise=0)
        self.assertEqual(self.found(results, "mark_ready", "2 ranks"), ["27 ns (27 ns to 27 ns, rounds): NoOverlap/borrowed. Also missed: NoOverlap/in_buckets 24 ns; OverlapBackward/in_buckets 24 ns; 3 more", "missed"])
        results.columns["reducer/mark_ready/NoOverlap/in_buckets/ranks:1/parameters:1000"]["time"] = [16e-9] * 3
        self.assertEqual(self.found(results, "mark_ready", "1 rank"), ["16 ns (16 ns to 16 ns, rounds): NoOverlap/in_buckets", "missed"])
        self.assertEqual(self.found(results, "construction"), ["140 ms (140 ms to 140 ms, rounds): 2 ranks", "met"])
        self.assertEqual(self.found(results, "one element"), ["70 ms (70 ms to 70 ms, rounds)", "met"])

    def test_the_optimizer_inside_has_goals(self):
        results = synthetic.results(3, noise=0)
        self.assertEqual(self.found(results, "mlp", "one set of weights"), ["0.982 (0.982 to 0.982)", "met"])
        for time, verdict in ((1.049, "met"), (1.06, "missed")):
            results.columns["train_step/mlp/fused/threads/ranks:2"]["pairs"] = [[[time, 1.0]]] * 3
            self.assertEqual(self.found(results, "mlp", "threads", "with the optimizer inside")[1], verdict)

    def test_a_timeline_is_judged_by_its_pairs(self):
        results = synthetic.results(3, noise=0)
        results.columns["train_step/mlp/timeline/threads/ranks:2"]["pairs"] = [[[0.0556, 0.055]], [[0.055, 0.055]], [[0.0553, 0.055]]]
        self.assertEqual(self.found(results, "mlp", "Timeline"), ["0.995 (0.981 to 1.008)", "within the noise"])

    def test_no_goal_vanishes(self):
        """Whatever could not be measured: the list is the same."""
        whole, nothing = synthetic.results(3, noise=0), Results()
        self.assertEqual(list(self.rows(nothing)), list(self.rows(whole)))
        self.assertEqual({row[3] for row in self.rows(nothing).values()}, {"not measured"})
        self.assertLessEqual({row[3] for row in self.rows(whole).values()}, {"met", "missed", "within the noise"})
        del whole.columns[f"threads/all_reduce/f32/ranks:2/bytes:{2 ** 20}"]
        found = self.found(whole, "2 ranks, 64 KiB and more", "the limit's")
        self.assertEqual((found[0].endswith(". Not measured: 1 MiB"), found[1]), (True, "not measured"))

    def test_one_quantity_has_one_figure(self):
        results = synthetic.results(3)
        results.columns[self.OURS]["pairs"] = [[[0.06, 0.0505]], [[0.06, 0.051]], [[0.06, 0.0515]]]
        figures = tables.step_figures(results)
        row = figures[(figures.model == "mlp") & (figures.ranks == "2") & (figures.backend == names.BACKENDS["threads"].label)
                      & (figures.strategy == names.STRATEGIES[names.DEFAULT])].iloc[0]
        self.assertEqual((row["exposed, ms"], row["efficiency"]), ("9.00 (7.76 to 10.2)", "0.850 (0.829 to 0.871)"))
        brief = tables.steps_briefly(tables.steps(results).query("model == 'mlp' and ranks == 2")).set_index("strategy")
        self.assertEqual("9.00 (7.76 to 10.2)", brief.loc[names.STRATEGIES[names.DEFAULT], names.BACKENDS["threads"].label])
        self.assertIn("| 9.00 (7.76 to 10.2) |", docs.summary_steps(results))


class DocsTest(unittest.TestCase):
    PAGE = "before\n<!-- bench: all_reduce -->\nold\n<!-- end of bench: all_reduce -->\nafter\n<!-- bench: conditions -->\n<!-- end of bench: conditions -->\n"

    def test_blocks_are_written_and_nothing_else(self):
        results = synthetic.results(2)
        written = docs.rewritten("page", self.PAGE, results, {})
        self.assertTrue(written.startswith("before\n<!-- bench: all_reduce -->\n| all-reduce, 2 ranks | 4 KiB, us | 1 MiB, us | 25 MiB, ms |\n"))
        self.assertIn("\n\n| all-reduce, 4 ranks | 4 KiB, us | 1 MiB, us | 25 MiB, ms |\n", written)
        self.assertIn("\n<!-- end of bench: all_reduce -->\nafter\n<!-- bench: conditions -->\n| run | processor | rounds |", written)
        self.assertNotIn("old", written)
        self.assertEqual(docs.rewritten("page", written, results, {}), written)

    def test_figures_of_another_run_do_not_stay(self):
        results = synthetic.results(2)
        results.columns = {name: columns for name, columns in results.columns.items() if "all_reduce" not in name}
        self.assertIn("<!-- bench: all_reduce -->\nNot in this run.\n<!-- end", docs.rewritten("page", self.PAGE, results, {}))

    def test_goals_that_are_met_are_counted_and_the_others_shown(self):
        results = synthetic.results(3, noise=0)
        verdicts = [row[3] for row in goals.goals(results).values]
        lines = docs.goals_not_met(results).splitlines()
        self.assertEqual(lines[0], f"{verdicts.count('met')} of {len(verdicts)} goals are met.")
        self.assertEqual(len(lines), 4 + len(verdicts) - verdicts.count("met"))
        del results.columns[f"deepspeed_shm/all_reduce/f32/ranks:2/bytes:{2 ** 20}"]
        for size in synthetic.SIZES: results.columns.pop(f"mpi_adopted/all_reduce/f32/ranks:2/bytes:{size}")
        last = docs.goals_not_met(results).splitlines()[-1]
        self.assertRegex(last, r"^Not measured: all-reduce, 2 ranks, 64 KiB and more: time in allocated memory over that in adopted memory, MPI; .*DeepSpeed's time .*\.$")
        self.assertNotIn("| met |", docs.goals_not_met(results))

    def test_a_busy_machine_is_told(self):
        results = synthetic.results(2)
        self.assertNotIn("Others used", docs.rewritten("page", self.PAGE, results, {}))
        results.run["others"] = {"conversion": [0.9]}
        self.assertIn("**Others used the machine during 1 of the programs", docs.rewritten("page", self.PAGE, results, {}))

    def test_what_could_not_be_measured_is_told(self):
        results = synthetic.results(2)
        self.assertNotIn("Not measured", docs.rewritten("page", self.PAGE, results, {}))
        results.errors = {"PyTorch's step of the mlp, 2 ranks": "failed", "all-reduce, 2 ranks, 1 GiB": "no memory"}
        self.assertIn("\n\nNot measured: PyTorch's step of the mlp, 2 ranks (failed); all-reduce, 2 ranks, 1 GiB (no memory).\n<!-- end of bench: conditions",
                      docs.rewritten("page", self.PAGE, results, {}))

    def test_wrong_marks_are_refused(self):
        with self.assertRaisesRegex(BadInput, "the block al_reduce has no end or is none of conditions, "): docs.rewritten("page", self.PAGE.replace("all_reduce", "al_reduce"), synthetic.results(2), {})
        with self.assertRaisesRegex(BadInput, "the block all_reduce has no end"): docs.rewritten("page", self.PAGE.replace("end of bench: all_reduce", ""), synthetic.results(2), {})

    def test_the_pages_are_those_of_the_published_results(self):
        """And the charts that they show exist."""
        root, results = BENCH.parent, Pool.load((BENCH / "results").glob("*.json"))
        drawn = {"all_reduce_time": (None, "All-reduce: time over size, by backend and ranks"),
                 "exposed_transformer": (None, "Transformer: what synchronisation adds to a step, by strategy and backend"),
                 "scaling": (None, "Samples per second and efficiency over ranks")}
        for name in docs.PAGES:
            content = (root / name).read_text()
            self.assertEqual(docs.rewritten(name, content, results, drawn), content)
            for picture in re.findall(r"\]\(((?:docs/|../)?charts/[\w-]+\.svg)\)", content): self.assertTrue(((root / name).parent / picture).exists(), picture)

    def test_a_chart_that_is_not_drawn_is_not_shown(self):
        page = "<!-- bench: chart_memory -->\n![Old](charts/memory.svg)\n<!-- end of bench: chart_memory -->"
        self.assertNotIn("![", docs.rewritten("page", page, synthetic.results(2), {}))


class ChartsTest(Folder):
    @classmethod
    def setUpClass(cls):
        cls.results = synthetic.results(2)
        cls.drawn = charts.drawn(cls.results)

    def test_every_chart_is_drawn_and_the_same_each_time(self):
        self.assertEqual(list(self.drawn), ["all_reduce_time", "exposed_transformer", "exposed_mlp", "scaling"])
        for copy in ("a", "b"): charts.save(charts.scaling(self.results), self.folder / f"{copy}.svg")
        self.assertEqual((self.folder / "a.svg").read_bytes(), (self.folder / "b.svg").read_bytes())
        self.assertNotIn(b"<dc:date>", (self.folder / "a.svg").read_bytes())
        self.assertEqual((self.folder / "a.svg").read_bytes().count(b"prefers-color-scheme: dark"), 1)

    def overlaps(self, figure):
        """Pairs of words that touch one another."""
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        words = [(artist.get_text(), artist.get_window_extent(renderer)) for artist in figure.findobj(matplotlib.text.Text)
                 if artist.get_visible() and artist.get_text().strip() and self.is_drawn(artist)]
        apart = 2  # pixels of a hundredth of an inch
        wider = lambda box: matplotlib.transforms.Bbox.from_extents(box.x0 - apart, box.y0 - 0.5, box.x1 + apart, box.y1 + 0.5)
        turned = {artist.get_text() for artist in figure.findobj(matplotlib.text.Text) if artist.get_rotation() % 90}  # their boxes are larger than they
        found = [(a, b) for (a, box), (b, other) in itertools.combinations(words, 2) if not {a, b} & turned and wider(box).overlaps(other)]
        return found

    @staticmethod
    def is_drawn(artist):
        """Labels of ticks beyond the axis are objects, but not shown."""
        axis = next((a for axes in artist.figure.axes for a in (axes.xaxis, axes.yaxis)
                     if any(artist in (tick.label1, tick.label2) for tick in a.get_major_ticks() + a.get_minor_ticks())), None)
        if not axis: return True
        low, high = sorted(axis.get_view_interval())
        return any(artist in (tick.label1, tick.label2) and low <= tick.get_loc() <= high for tick in axis.get_major_ticks() + axis.get_minor_ticks())

    def test_nothing_overlaps_and_the_test_can_fail(self):
        for name, (figure, _) in self.drawn.items():
            if name != "exposed_mlp": self.assertEqual(self.overlaps(figure), [], name)
        figure = self.drawn["scaling"][0]
        added = [figure.text(0.5, 0.5, "over one another"), figure.text(0.51, 0.5, "and more")]
        self.assertIn(("over one another", "and more"), self.overlaps(figure))
        for each in added: each.remove()

    def test_results_of_one_part_are_enough(self):
        self.assertEqual(list(charts.drawn(one_step())), ["exposed_mlp"])
        self.assertEqual(charts.drawn(Results()), {})


def one_step():
    results = synthetic.results(2)
    results.columns = {name: columns for name, columns in results.columns.items() if name.startswith("train_step/mlp/flat/threads/ranks:2")}
    return results


class CommandLineTest(Folder):
    @staticmethod
    def call(*arguments):
        """The exit code, and what was written to stdout and stderr."""
        with (unittest.mock.patch.object(sys, "argv", ["bench", *map(str, arguments)]), contextlib.redirect_stdout(io.StringIO()) as out,
              contextlib.redirect_stderr(io.StringIO()) as said):
            try:
                code = main.main()
            except SystemExit as end:
                code = end.code
        return code, out.getvalue(), said.getvalue()

    def refused(self, expected, *arguments):
        code, out, said = self.call(*arguments)
        self.assertEqual((code, out), (2, ""), said)
        self.assertIn(expected, said.strip().splitlines()[-1])

    def test_wrong_input_is_refused_in_a_sentence(self):
        (self.folder / "broken.json").write_text("{")
        (self.folder / "other.json").write_text('{"benchmarks": {}, "format": 0}')
        (self.folder / "list.json").write_text("[1]")
        good, one = self.saved("good.json", synthetic.results(2)), self.saved("one.json", synthetic.results(1))
        for file, expected in (("broken.json", "broken.json holds no results"), ("other.json", "other.json has another format"),
                               ("list.json", "list.json holds no results")):
            with self.assertRaisesRegex(BadInput, expected): Results.load(self.folder / file)
        self.refused("absent.json: No such file", "--pool", "absent.json")
        self.refused("the new run has too few rounds;", "--compare", good, "--pool", one, "--out", self.folder)
        self.refused("--docs needs a whole run", "--docs", "--quick")
        self.refused("--only torch needs --peers", "--only", "torch")
        for flag, value in (("--minutes", "nan"), ("--minutes", "-1"), ("--rounds", "0")): self.refused("must be positive", flag, value)

    def test_comparing_two_files(self):
        old, slow = self.saved("old.json", synthetic.results()), self.saved("slow.json", synthetic.results(seed=2, slower={LATENCY: 1.5}))
        self.assertEqual(self.call("--compare", old, "--pool", old, "--out", self.folder / "out")[0], 0)
        code, out, _ = self.call("--compare", old, "--pool", slow, "--out", self.folder / "out")
        self.assertEqual(code, 1)
        self.assertIn(LATENCY, out)

    def test_a_page_holds_the_figures(self):
        results = one_step()
        results.errors["mpi/something"] = "no <mpirun>"
        code, _, said = self.call("--pool", self.saved("r.json", results), "--out", self.folder / "page")
        self.assertEqual(code, 0, said)
        content = (self.folder / "page/index.html").read_text()
        self.assertEqual(content.count("<img "), 1)
        self.assertIn("<svg", (self.folder / "page" / re.search('src="(.*?)"', content).group(1)).read_text())
        shown = [tables.step_figures(results), goals.goals(results), tables.memory(results), tables.machine(results)]
        for cell in itertools.chain.from_iterable(table.values.flat for table in shown): self.assertIn(f"<td>{html.escape(cell, quote=False)}</td>", content)
        self.assertIn("no &lt;mpirun&gt;", content)
        self.assertEqual(re.findall(r'(?:src|href)="(?!charts/|#)[^"]*"', content), [])  # nothing from elsewhere


class RunTest(Folder):
    def task(self, label, script, kind="google", **more):
        path = self.folder / f"bench_{label}"
        path.write_text("#!/usr/bin/env python3\nimport json, sys, time\nfile = next((a.split('=')[1] for a in sys.argv if a.startswith('--benchmark_out=')), sys.argv[-1])\n"
                        + textwrap.dedent(script))
        path.chmod(0o755)
        return plan.Task("part", label, [str(path)], kind, **more)

    def measured(self, tasks, rounds=3, minutes=1.0):
        planned = plan.Plan(self.folder, self.folder)
        planned.tasks = tasks
        results = Results()
        with contextlib.redirect_stderr(io.StringIO()) as said: run.Runner(planned, results, self.folder, rounds, minutes).run()
        return results, said.getvalue()

    def test_rounds_are_collected(self):
        good = self.task("good", f"open(file, 'w').write(json.dumps({{'benchmarks': [{ENTRY!r}]}}))")
        results, said = self.measured([good])
        self.assertEqual(len(results.columns[LATENCY]["time"]), 3)
        self.assertEqual((results.run["rounds"], results.errors), (3, {}))
        self.assertEqual(results.run["commands"], {"part": ["bench_good"]})
        self.assertEqual(len(re.findall(r"round \d/3, 1/1, minutes 0.\d of 1 at most: good", said)), 3, said)
        self.assertEqual(len(Results.load(self.folder / "results.json").benchmarks()), 1)
        self.assertEqual([len(results.run["others"]["good"]), min(results.run["others"]["good"]) >= 0], [3, True])

    def test_one_that_fails_does_not_stop_the_others(self):
        good = self.task("good", f"open(file, 'w').write(json.dumps({{'benchmarks': [{ENTRY!r}]}}))")
        results, _ = self.measured([self.task("bad", "print('a reason'); sys.exit(3)"), self.task("silent", ""), good], rounds=1)
        self.assertIn("exit code 3", results.errors["bad"])
        self.assertIn("measured nothing", results.errors["silent"])
        self.assertEqual(len(results.columns), 1)
        self.assertIn("a reason", (self.folder / "log.txt").read_text())

    def test_one_benchmark_that_fails_does_not_take_the_others_along(self):
        lost = {**ENTRY, "name": ENTRY["name"].replace("threads/", "mpi_library/"), "error_occurred": True, "error_message": "no ranks"}
        mixed = self.task("mixed", f"open(file, 'w').write(json.dumps({{'benchmarks': [{ENTRY!r}, {lost!r}]}})); sys.exit(1)")
        results, _ = self.measured([mixed], rounds=1)
        self.assertEqual(list(results.columns), [LATENCY])
        self.assertEqual(results.errors, {lost["name"]: "no ranks"})

    def test_what_cannot_be_started_is_said(self):
        results, _ = self.measured([plan.Task("part", "gone", [str(self.folder / "gone")], "google")], rounds=1)
        self.assertIn("failed with exit code 127", results.errors["gone"])

    def test_what_a_machine_cannot_do_is_no_failure(self):
        results, said = self.measured([self.task("gpu", "sys.exit(77)"), self.task("bad", "sys.exit(1)")])
        self.assertEqual(list(results.errors), ["bad"])
        self.assertEqual(said.count(": gpu"), 1)

    def test_time_is_bounded(self):
        results, said = self.measured([self.task("endless", "time.sleep(600)"), self.task("late", "")], minutes=4 / 60)  # `endless` starts if more than 1 s is left
        self.assertIn("was ended when the time was up", results.errors["endless"])
        self.assertIn("no time was left", results.errors["late"])
        self.assertNotIn("round 2", said)

    def test_memory_is_measured_once(self):
        row = {key: 1 for key in run.OF_MEMORY}
        results, _ = self.measured([self.task("m", f"open(file, 'w').write(json.dumps({row!r}))", kind="memory", rounds=1, about={"shard": "none", "ranks": 2})])
        self.assertEqual([(r["shard"], r["ranks"], r["bytes_optimizer"]) for r in results.memory], [("none", 2, 1)])


    def test_a_measurement_from_the_plan_to_the_files(self):
        """With one program in the place of bench_convert, and nothing built."""
        good = self.task("convert", f"open(file, 'w').write(json.dumps({{'benchmarks': [{ENTRY!r}]}}))").command[0]
        (self.folder / "bench").mkdir()
        pathlib.Path(good).rename(self.folder / "bench/bench_convert")
        arguments = ["bench", "--only", "convert", "--rounds", "2", "--out", str(self.folder / "out")]
        with (unittest.mock.patch.multiple(main, BUILD=self.folder, build=lambda peers: None), unittest.mock.patch.object(sys, "argv", arguments),
              contextlib.redirect_stderr(io.StringIO()) as said):
            self.assertEqual(main.main(), 0, said.getvalue())
        results = Results.load(self.folder / "out/results.json")
        self.assertEqual((len(results.get(LATENCY).rounds("time")), results.run["rounds"]), (2, 2))
        self.assertIn(LATENCY, (self.folder / "out/index.html").read_text())


class PlanTest(Folder):
    PEERS = {"torch_python": "/venv/bin/python", "gradsync_torch": "/gradsync", "versions": ["PyTorch 2.15.0"],
             "all_reduce": [{"name": name, "version": "1", "command": f"python {name}.py", "spins": name == "mpich"} for name in ("deepspeed_shm", "mpich")]}
    PROGRAMS = ("bench/bench_all_reduce", "bench/bench_train_step", "bench/bench_mpi_train_step", "bench/bench_reducer")

    def planned(self, *programs, **options):
        for name in programs:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        return plan.Plan(self.folder, self.folder, plan.PARTS, **options)

    def test_what_is_not_built_is_left_out_with_a_reason(self):
        planned = self.planned("bench/bench_all_reduce")
        self.assertEqual({t.part for t in planned.tasks}, {"all_reduce", "collectives"})
        self.assertEqual(set(planned.left_out), {"reducer", "convert", "train_step", "memory"})

    def test_what_is_not_installed_is_left_out_with_a_reason(self):
        planned = self.planned(*self.PROGRAMS, peers={})
        self.assertEqual([t for t in planned.tasks if t.part == "torch" or "--peer" in " ".join(t.command)], [])
        self.assertIn("PyTorch is not to be had", planned.left_out["torch"])
        planned = self.planned(peers={"torch_python": "/venv/bin/python"})
        self.assertIn("gradsync_torch was not built", planned.left_out["gradsync in PyTorch"])
        commands = [" ".join(t.command) for t in planned.tasks if t.part == "torch"]
        self.assertTrue(commands and not any("gradsync" in command for command in commands), commands)

    def test_filters_choose_what_is_meant(self):
        every = synthetic.results(1).columns
        for quick, peers in ((True, None), (True, self.PEERS), (False, self.PEERS)):
            planned = self.planned(*self.PROGRAMS, quick=quick, peers=peers)
            filters = [(pathlib.Path(t.command[0]).name, t.command[-1].partition("=")[2]) for t in planned.tasks if t.kind == "google" and not t.label.endswith("more pairs")]
            for name in every:
                if not name.startswith(("train_step", "gloo", "threads/all_reduce/f32", "deepspeed", "reducer")) or "torch" in name: continue
                chosen, (who, *rest) = sum(every[name]["program"] == p and bool(re.search(f, name)) for p, f in filters), name.split("/")
                wanted = peers is not None if who in ("gloo", "deepspeed_shm") else True
                if quick: self.assertLessEqual(chosen, wanted, name)
                elif who == "train_step": self.assertEqual(chosen, self.step_is_wanted(*rest), name)
                else: self.assertEqual(chosen, wanted, name)

    @staticmethod
    def step_is_wanted(model, strategy, backend, ranks):
        if strategy in ("independent", names.DEFAULT): return (backend, ranks) != ("mpi_messages", "ranks:1")
        return ranks == "ranks:2" and (backend != "mpi_messages" or strategy in plan.OF_MESSAGES)

    def test_peers_are_started_by_their_commands(self):
        with unittest.mock.patch.object(machine, "cores", return_value=2): planned = self.planned(*self.PROGRAMS, peers=self.PEERS)
        given = [(t.label, flag) for t in planned.tasks for flag in t.command if flag.startswith("--peer=")]
        self.assertEqual(len(given), 5 + 3)  # ranks that spin, with a core for each
        self.assertEqual(given[0], ("all-reduce of DeepSpeed, shared memory, 2 ranks, small", "--peer=deepspeed_shm=python deepspeed_shm.py"))
        quick = [t.label for t in self.planned(peers=self.PEERS, quick=True).tasks if any(flag.startswith("--peer=") for flag in t.command)]
        self.assertEqual([label.partition("memory, ")[2] for label in quick][::2], ["2 ranks, small", "2 ranks, large"])

    def test_gradsync_in_pytorch_is_measured_beside_ddp(self):
        tasks = [t for t in self.planned(peers=self.PEERS).tasks if t.part == "torch"]
        self.assertEqual({t.command[0] for t in tasks}, {"/venv/bin/python"})
        modes = [t.command[t.command.index("--modes") + 1].split(",") for t in tasks if "2 ranks" in t.label]
        self.assertTrue(all({"ddp", "gradsync"} <= set(each) for each in modes), modes)
        self.assertTrue(any({"zero1", "fsdp2", "gradsync_zero1", "gradsync_fsdp"} <= set(each) for each in modes), modes)

    def test_what_a_goal_is_about_has_contests_of_its_own(self):
        alone = [task.label for task in self.planned(*self.PROGRAMS).tasks if task.label.endswith("more pairs")]
        self.assertEqual(alone, [f"step of the {model}, 2 ranks, {backend}, more pairs" for model in names.MODELS for backend in ("threads", "mpi")])

    def test_the_time_does_for_all_pairs_as_the_contest_counts(self):
        """contest.hpp and torch_train_step.py: so many whole rounds, each a step of every strategy and as many of the reference."""
        for cores, quick, model in itertools.product((1, 2), (False, True), names.MODELS):
            for ranks, strategies, slower in ((1, 1, 1.0), (2, 12, 1.0), (4, 1, 1.0), (2, 7, 1.6), (2, 2, 1.6)):
                with unittest.mock.patch.object(machine, "cores", return_value=cores):
                    seconds = plan.Plan(self.folder, self.folder, quick=quick).seconds_for(plan.PAIRS, model, ranks, strategies, slower)
                step = slower * plan.STEP_SECONDS[model] * max(1, ranks / cores)
                for luck in (0.97, 1.0, 1.03):
                    pairs = int(seconds / ((2 * strategies + (strategies <= 2)) * step * luck))
                    self.assertTrue(0 <= pairs - plan.PAIRS[model][quick] <= 1, (pairs, model, quick))

    def test_what_is_chosen_is_not_beside_the_point(self):
        rounds = lambda **options: {t.rounds for t in self.planned(*self.PROGRAMS, **options).tasks if t.kind == "google"}
        self.assertEqual((rounds(), rounds(chosen=True)), ({plan.BESIDES, plan.MANY}, {plan.MANY}))


class MachineTest(unittest.TestCase):
    def test_it_is_described(self):
        found = machine.describe(BENCH.parent, pathlib.Path("/nowhere"), {"versions": ["PyTorch 2.15.0"]})
        self.assertEqual(found["cores"], machine.cores())
        self.assertGreater(found["memory_bytes"], 2 ** 20)
        self.assertTrue(found["cpu"] and found["system"] and found["date"])
        self.assertEqual(found["peers"], ["PyTorch 2.15.0"])

    @unittest.skipUnless(hasattr(os, "sched_setaffinity"), "no such thing here")
    def test_cores_are_those_that_the_process_was_given(self):
        given = os.sched_getaffinity(0)
        self.addCleanup(os.sched_setaffinity, 0, given)
        self.assertEqual(machine.cores(), len(given))
        os.sched_setaffinity(0, {min(given)})
        self.assertEqual(machine.cores(), 1)

    def test_what_is_busy_is_read_from_the_system(self):
        with tempfile.TemporaryDirectory() as root:
            pathlib.Path(root, "proc").mkdir()
            tick = os.sysconf("SC_CLK_TCK")
            line = lambda name, factor: name + " " + " ".join(str(n * tick * factor) for n in (1, 2, 3, 500, 600, 4, 5, 6, 0, 0)) + "\n"
            pathlib.Path(root, "proc/stat").write_text(line("cpu ", 111) + line("cpu0", 1) + line("cpu1", 10) + line("cpu10", 100) + "intr 1 2 3\n")
            once = 1 + 2 + 3 + 4 + 5 + 6  # not what it idled, nor waited for a disk
            for given, factor in (({0}, 1), ({1}, 10), ({0, 10}, 101)):  # what others do on cores that are not its own takes nothing from it
                with unittest.mock.patch.object(os, "sched_getaffinity", return_value=given, create=True):
                    self.assertEqual(machine.seconds_of_cores(root), (once * factor, 6 * factor))

    def test_what_others_use_is_all_less_what_is_its_own(self):
        with unittest.mock.patch.object(machine.Others, "state", side_effect=[(90.0, 0.0), (105.0, 30.0)]):
            self.assertAlmostEqual(machine.Others().cores(), 0.5)


if __name__ == "__main__":
    unittest.main(verbosity=2)
