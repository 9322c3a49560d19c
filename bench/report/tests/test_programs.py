#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Do bench_train_step and torch_train_step.py write the pairs that the report reads? No time is asserted.

    test_programs.py BENCH_TRAIN_STEP TORCH_TRAIN_STEP
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

from report.results import Results

PROGRAM, PEER = sys.argv[1:3] if len(sys.argv) > 2 else (None, None)
NO_TORCH = 77


def run(*command):
    """What it wrote, as one round of results."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "answer.json")
        flags = [f"--out={file}"] if command[0] == sys.executable else [f"--benchmark_out={file}", "--benchmark_out_format=json"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=200)
        if done.returncode == NO_TORCH: raise unittest.SkipTest(done.stderr.strip())
        if done.returncode != 0: raise AssertionError(done.stderr or done.stdout)
        results = Results()
        results.add_google_benchmark("program", json.loads(file.read_text()))
        return {benchmark.name: benchmark for benchmark in results.benchmarks()}


@unittest.skipUnless(PROGRAM, "which programs? See above")
class PairsTest(unittest.TestCase):
    def of(self, strategies, rounds=2):
        return run(PROGRAM, f"--rounds={rounds}", f"--benchmark_filter=^train_step/mlp/({strategies})/threads/ranks:2$")

    def check(self, benchmark, rounds=2):
        """Its pairs are of times like its own, in seconds. The median is compared: a busy machine can hold up a single step for any time."""
        (pairs,), time = benchmark.rounds("pairs"), benchmark.time
        self.assertEqual(len(pairs), rounds)
        values = [value for pair in pairs for value in pair]
        self.assertGreater(min(values), 0, pairs)
        self.assertTrue(time / 30 < statistics.median(values) < 30 * time, (pairs, time))

    def test_two_strategies_have_a_step_of_the_reference_between_them_and_a_strategy_two_between_its_own(self):
        """a b, a b, b a, b a: in turns, twice the same upon itself."""
        found = self.of("flat|naive|independent", 4)
        for strategy in ("flat", "naive"):
            benchmark = found[f"train_step/mlp/{strategy}/threads/ranks:2"]
            self.check(benchmark, 4)
        reference = found["train_step/mlp/independent/threads/ranks:2"]
        self.assertEqual((reference.samples, reference.rounds("pairs")), (1 + 2 * 4 + 2, []))

    def test_pairs_of_one_strategy_share_no_step(self):
        self.assertEqual(self.of("flat|independent")["train_step/mlp/independent/threads/ranks:2"].samples, 2 * 2)

    def test_a_timeline_is_paired_with_the_same_steps_without(self):
        benchmark, = self.of("timeline").values()
        self.check(benchmark)

    def test_steps_of_pytorch_have_pairs_too(self):
        found = run(sys.executable, PEER, "--model", "mlp", "--modes", "flat", "--rounds", "2")
        flat, reference = (found[f"train_step/mlp/torch_{mode}/gloo/ranks:2"] for mode in ("flat", "independent"))
        self.check(flat)
        self.assertEqual((reference.samples, reference.rounds("pairs")), (2 * 2, []))

    def test_pairs_of_one_mode_of_pytorch_share_no_step(self):
        """a b, b a: once the same upon itself."""
        found = run(sys.executable, PEER, "--model", "mlp", "--modes", "flat,naive", "--rounds", "2")
        self.assertEqual(found["train_step/mlp/torch_independent/gloo/ranks:2"].samples, 1 + 2 * 2 + 1)

    def test_modes_of_gradsync_need_its_module(self):
        for flags, sentence in ((["--modes", "gradsync"], "gradsync needs --gradsync FOLDER"),
                                (["--modes", "gradsync", "--gradsync", "/nowhere"], "no gradsync_torch.so for this Python and PyTorch in /nowhere")):
            done = subprocess.run([sys.executable, PEER, *flags], capture_output=True, text=True, timeout=100)
            if done.returncode == NO_TORCH: self.skipTest(done.stderr.strip())
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(sentence, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
