#!/usr/bin/env python3
"""Tests of gradsync_train as its users meet it: a program with flags, files and exit codes.

usage: test_trainer.py command_line|digests|checkpoints|report PROGRAM
"""
import itertools
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

PROGRAM = None
TRANSFORMER = "--model transformer --d-model 32 --blocks 2 --heads 2 --context 16 --micro-batch 2 --steps 4 --warmup 2".split()
MLP = "--model mlp --d-model 8 --context 5 --hidden 40,24 --micro-batch 6 --steps 4 --warmup 2".split()
MODELS = {"transformer": TRANSFORMER, "mlp": MLP, "tied": TRANSFORMER + ["--tied"]}


class TrainerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        words = "a rank holds the gradient of its bucket until every other rank has reduced it".split()
        chance = random.Random(1)
        self.text = self.write("text", " ".join(chance.choice(words) for _ in range(3000)))

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def call(self, *arguments, data=True):
        data = ["--data", self.text] if data else []
        return subprocess.run([PROGRAM, *map(str, arguments), *data], capture_output=True, text=True, timeout=60)

    def train(self, *arguments):
        done = self.call(*arguments, "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def digest(self, *arguments):
        return self.train(*arguments)["params_digest"]

    def refused(self, expected, *arguments, data=True, code=2):
        """One sentence on standard error that says what is wrong; nothing on standard output."""
        done = self.call(*arguments, data=data)
        self.assertEqual(done.returncode, code, (arguments, done.stderr))
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for part in expected if isinstance(expected, tuple) else (expected,):
            self.assertIn(part, done.stderr)


class CommandLine(TrainerTest):
    def test_help_names_every_flag(self):
        page = self.call("--help", data=False).stdout
        for flag in """model backend ranks micro-batch accumulate steps buckets bucket-mib overlap seed recompute checkpoint
                       checkpoint-every resume sample prompt json data lr warmup weight-decay clip tied d-model blocks heads context
                       hidden independent gradients validate-every timeout""".split():
            self.assertIn("--" + flag, page)

    def test_wrong_flags_are_refused(self):
        self.refused("--bogus", "--bogus")
        self.refused("--model", "--model", "rnn")
        self.refused("--backend", "--backend", "pigeons")
        self.refused("--buckets", "--buckets", "leaky")
        self.refused("--overlap", "--overlap", "sideways")
        self.refused("--ranks", "--ranks", "0")
        self.refused("--ranks", "--ranks", "two")
        self.refused("--steps", "--steps", "-3")
        self.refused("--lr", "--lr", "-1")
        self.refused("--bucket-mib", "--bucket-mib", "0")
        self.refused("--hidden", "--model", "mlp", "--hidden", "0")

    def test_flags_that_do_not_fit_together_are_refused(self):
        self.refused(("--d-model 30", "--heads 4"), "--d-model", "30")
        self.refused(("--global-batch 5", "16"), "--global-batch", "5")
        self.refused("--accumulate", "--global-batch", "32", "--accumulate", "2")
        self.refused("--tied", "--model", "mlp", "--tied")
        self.refused("--recompute", "--model", "mlp", "--recompute")
        self.refused("--checkpoint", "--resume")
        self.refused("--checkpoint", "--checkpoint-every", "5")
        self.refused("--independent", "--independent", "--sample", "5")
        self.refused("--prompt", "--prompt", "")

    def test_texts_that_cannot_serve_are_refused(self):
        self.refused(("--data", "/does/not/exist"), "--data", "/does/not/exist", data=False)
        self.refused(("directory", str(self.folder)), "--data", self.folder, data=False)
        self.refused(("0 bytes", "--context"), "--data", self.write("empty", ""), data=False)
        self.refused(("--context", "--data"), "--data", self.write("short", "short"), data=False)
        self.refused(("32768", "--micro-batch"), *TRANSFORMER, "--micro-batch", "1024", "--accumulate", "16")

    def test_an_unwritable_file_fails_after_training(self):
        self.assertEqual(self.call(*TRANSFORMER, "--json", "/does/not/exist/r.json").returncode, 1)


class Digests(TrainerTest):
    def test_policies_do_not_change_the_result(self):
        """Every bucket policy with every overlap policy, gradients in buckets or borrowed: the same bits."""
        for (name, flags), ranks in itertools.product(MODELS.items(), (2, 3)):
            digests = {}
            for buckets, overlap, gradients in itertools.product(
                    ("per-parameter", "flat", "capped"), ("none", "backward"), ("in-buckets", "borrowed")):
                digests[buckets, overlap, gradients] = self.digest(
                    *flags, "--ranks", ranks, "--buckets", buckets, "--overlap", overlap, "--gradients", gradients,
                    "--bucket-mib", 0.02, "--first-bucket-mib", 0.004)
            self.assertEqual(len(set(digests.values())), 1, (name, ranks, digests))

    def test_ranks_and_accumulation_agree(self):
        """N ranks with one micro-batch each, and fewer ranks that accumulate, sum the same gradients in the same order."""
        for (name, flags), n in itertools.product(MODELS.items(), (2, 3, 4)):
            parallel = self.digest(*flags, "--ranks", n)
            self.assertEqual(parallel, self.digest(*flags, "--ranks", 1, "--accumulate", n), (name, n))
            self.assertEqual(parallel, self.digest(*flags, "--ranks", 1, "--accumulate", n, "--gradients", "borrowed"), (name, n))

    def test_recomputation_does_not_change_the_result(self):
        self.assertEqual(self.digest(*TRANSFORMER), self.digest(*TRANSFORMER, "--recompute"))
        self.assertEqual(self.digest(*TRANSFORMER, "--accumulate", 2, "--tied"),
                         self.digest(*TRANSFORMER, "--accumulate", 2, "--tied", "--recompute"))

    def test_runs_repeat_and_seeds_matter(self):
        for flags in MODELS.values():
            self.assertEqual(self.digest(*flags), self.digest(*flags))
            self.assertNotEqual(self.digest(*flags), self.digest(*flags, "--seed", 2))


class Checkpoints(TrainerTest):
    def kept(self, *more):
        return ["--checkpoint", str(self.folder / "run"), *more]

    def test_a_resumed_run_gives_the_same_bits(self):
        for name, flags in MODELS.items():
            whole = self.digest(*flags, "--accumulate", 2)
            run = ["--accumulate", 2, "--checkpoint", self.folder / name]
            first = self.train(*flags, *run, "--stop-after", 2)
            self.assertEqual(first["steps"], 2)
            self.assertNotEqual(first["params_digest"], whole)
            self.assertEqual(self.digest(*flags, *run, "--resume"), whole)
            # Once more, from the end: nothing is left to train.
            self.assertEqual(self.digest(*flags, *run, "--resume"), whole)

    def test_resuming_on_other_ranks_keeps_the_data_order(self):
        whole = self.digest(*TRANSFORMER, "--ranks", 2)
        self.train(*TRANSFORMER, *self.kept("--stop-after", 3, "--ranks", 2))
        self.assertEqual(self.digest(*TRANSFORMER, *self.kept("--resume", "--ranks", 1, "--accumulate", 2)), whole)

    def test_nothing_is_left_but_the_checkpoint(self):
        self.train(*TRANSFORMER, *self.kept("--checkpoint-every", 1))
        self.assertEqual([p.name for p in (self.folder / "run").iterdir()], ["checkpoint.gradsync"])

    def test_torn_and_foreign_files_are_refused(self):
        self.train(*TRANSFORMER, *self.kept("--stop-after", 2))
        file = self.folder / "run" / "checkpoint.gradsync"
        good = file.read_bytes()
        resume = (*TRANSFORMER, *self.kept("--resume"))
        for cut in (0, 7, 8, 20, 56, len(good) // 2, len(good) - 8, len(good) - 1):
            file.write_bytes(good[:cut])
            self.refused("--resume", *resume)
        for place in (9, 30, 60, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1:])
            self.refused("--resume", *resume)
        file.write_bytes(good + b"more")
        self.refused("torn", *resume)
        file.write_bytes(b"PK\x03\x04" + bytes(100))
        self.refused("not a checkpoint", *resume)
        file.unlink()
        self.refused("cannot read", *resume)
        file.write_bytes(good)
        self.refused("--steps", *resume, "--steps", "1")
        self.refused("another model", *TRANSFORMER, *self.kept("--resume", "--tied"))
        self.refused("another model", *MLP, *self.kept("--resume"))
        self.assertEqual(self.call(*resume).returncode, 0)

    def test_a_changed_text_is_mentioned(self):
        self.train(*TRANSFORMER, *self.kept("--stop-after", 2))
        self.text = self.write("other", "quite another text " * 500)
        done = self.call(*TRANSFORMER, *self.kept("--resume"))
        self.assertEqual(done.returncode, 0)
        self.assertIn("text has changed", done.stderr)


class Report(TrainerTest):
    def test_fields(self):
        r = self.train(*TRANSFORMER, "--ranks", 3, "--accumulate", 2, "--steps", 7)
        self.assertEqual((r["world_size"], r["global_batch"], r["steps"]), (3, 12, 7))
        self.assertEqual(r["parameters"], 2 * 256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32)
        self.assertLessEqual(r["step_ms"]["min"], r["step_ms"]["median"])
        self.assertLessEqual(r["step_ms"]["median"], r["step_ms"]["max"])
        self.assertAlmostEqual(r["tokens_per_second"] / r["samples_per_second"], 16)
        self.assertGreater(r["comm_ms"], 0)
        self.assertGreater(r["exposed_comm_ms"], 0)
        self.assertTrue(0 <= r["overlap_ratio"] <= 1)
        self.assertGreater(r["peak_rss_bytes"], 1 << 20)
        self.assertRegex(r["params_digest"], "^[0-9a-f]{16}$")
        self.assertEqual(r["config"]["model"], "transformer")

    def test_both_models_learn(self):
        for flags in (TRANSFORMER, MLP):
            r = self.train(*flags, "--steps", 150, "--lr", 0.01, "--micro-batch", 8)
            self.assertLess(r["train_loss"], 2.0)   # from log 256 = 5.5; byte frequencies alone give 2.7
            self.assertLess(r["validation_loss"], 2.0)

    def test_independent_ranks_go_their_own_ways(self):
        r = self.train(*TRANSFORMER, "--independent", "--ranks", 2)
        self.assertEqual(r["world_size"], 2)
        self.assertEqual(r["comm_ms"], 0)

    def test_lines_table_and_sample(self):
        done = self.call(*TRANSFORMER, "--sample", 50, "--prompt", "rank ", "--validate-every", 2)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for part in ("step 4/4", "samples/s", "tokens/s", "exposed", "left", "validation loss", "parameters digest", "rank "):
            self.assertIn(part, done.stdout)
        self.assertNotIn("\r", done.stdout)

    def test_json_file(self):
        file = self.folder / "r.json"
        self.assertEqual(self.call(*MLP, "--json", file).returncode, 0)
        self.assertTrue(math.isfinite(json.loads(file.read_text())["validation_loss"]))

    def test_the_default_text_serves(self):
        self.assertEqual(self.call(*TRANSFORMER, data=False).returncode, 0)


if __name__ == "__main__":
    suite, PROGRAM = sys.argv[1:]
    classes = {"command_line": CommandLine, "digests": Digests, "checkpoints": Checkpoints, "report": Report}
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(classes[suite])
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(tests).wasSuccessful())
