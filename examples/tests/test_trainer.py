#!/usr/bin/env python3
"""Tests of gradsync_train as its users meet it: a program with flags, files and exit codes.

usage: test_trainer.py command_line|digests|checkpoints|report PROGRAM
       test_trainer.py mpi PROGRAM MPIEXEC
"""
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = None
MPIEXEC = None
TRANSFORMER = "--model transformer --d-model 32 --blocks 2 --heads 2 --context 16 --micro-batch 2 --steps 4 --warmup 2".split()
MLP = "--model mlp --d-model 8 --context 5 --hidden 40,24 --micro-batch 6 --steps 4 --warmup 2".split()
MODELS = {"transformer": TRANSFORMER, "mlp": MLP, "tied": TRANSFORMER + ["--tied"]}
POLICIES = list(itertools.product(("per-parameter", "flat", "capped"), ("none", "backward", "backward-thread"), ("in-buckets", "borrowed")))


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
                       hidden independent gradients validate-every timeout no-shared-memory reproducible""".split():
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
        self.refused("--backend mpi", "--no-shared-memory")

    def test_every_backend_is_there_or_says_what_is_missing(self):
        done = self.call(*TRANSFORMER, "--backend", "mpi", "--ranks", 1)
        if done.returncode != 0:
            self.refused(("--backend mpi", "libopenmpi-dev"), *TRANSFORMER, "--backend", "mpi")

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
            for buckets, overlap, gradients in POLICIES:
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


    def test_a_rank_that_does_not_come_is_survived_by_the_state(self):
        """Rank 0 stops in its first checkpoint, which nobody reads from; rank 1 waits for it, and then keeps the state."""
        run = self.folder / "run"
        run.mkdir()
        os.mkfifo(run / "checkpoint.gradsync.new0")
        flags = [*TRANSFORMER, "--checkpoint", str(run)]
        process = subprocess.Popen([PROGRAM, *flags, "--data", self.text, "--checkpoint-every", "2", "--timeout", "2"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        self.assertTrue(wait_for(lambda: (run / "checkpoint.gradsync").exists()))
        with open(run / "checkpoint.gradsync.new0", "rb") as pipe:
            pipe.read()
        errors = process.communicate(timeout=20)[1]
        self.assertEqual(process.returncode, 1, errors)
        self.assertEqual(errors.count("has kept the state"), 1, errors)
        self.assertIn("has kept the state after step 2", errors)
        (run / "checkpoint.gradsync.new0").unlink(missing_ok=True)
        self.assertEqual(self.digest(*flags, "--resume"), self.digest(*TRANSFORMER))


class Report(TrainerTest):
    def test_fields(self):
        r = self.train(*TRANSFORMER, "--ranks", 3, "--accumulate", 2, "--steps", 7)
        self.assertEqual((r["world_size"], r["global_batch"], r["steps"]), (3, 12, 7))
        self.assertEqual(r["transport"], "3 threads")
        self.assertEqual(r["parameters"], 2 * 256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32)
        self.assertLessEqual(r["step_ms"]["min"], r["step_ms"]["median"])
        self.assertLessEqual(r["step_ms"]["median"], r["step_ms"]["max"])
        self.assertAlmostEqual(r["tokens_per_second"] / r["samples_per_second"], 16)
        self.assertGreater(r["comm_ms"], 0)
        self.assertGreater(r["exposed_comm_ms"], 0)
        self.assertTrue(0 <= r["overlap_ratio"] <= 1)
        self.assertEqual(sum(r["bucket_bytes"]), 4 * r["parameters"])
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


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class Mpi(TrainerTest):
    """The processes of one mpirun instead of threads."""

    def setUp(self):
        super().setUp()
        # What Open MPI asks for to run as root in a container, with more ranks than cores.
        self.environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                                OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none")

    def program(self, *arguments):
        return [PROGRAM, "--backend", "mpi", "--data", self.text, *map(str, arguments)]

    def run_processes(self, processes, *arguments):
        return subprocess.run([MPIEXEC, "-n", str(processes), *self.program(*arguments)], capture_output=True, text=True,
                              timeout=60, env=self.environment)

    def train_processes(self, processes, *arguments):
        done = self.run_processes(processes, *arguments, "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_the_same_bits_as_over_threads(self):
        for ranks, (name, flags) in zip((2, 3, 4), MODELS.items()):
            expected = self.digest(*flags, "--ranks", ranks)
            for buckets, overlap, gradients in POLICIES[ranks % 2::2]:  # in buckets, borrowed, in buckets
                found = self.train_processes(
                    ranks, *flags, "--reproducible", "--buckets", buckets, "--overlap", overlap, "--gradients", gradients,
                    "--bucket-mib", 0.02, "--first-bucket-mib", 0.004)["params_digest"]
                self.assertEqual(found, expected, (name, ranks, buckets, overlap, gradients))

    def test_the_same_bits_by_messages(self):
        some = (("capped", "backward", "in-buckets"), ("per-parameter", "none", "borrowed"), ("flat", "backward", "borrowed"))
        for ranks, (name, flags) in zip((2, 3, 4), MODELS.items()):
            expected = self.digest(*flags, "--ranks", ranks)
            for buckets, overlap, gradients in some:
                found = self.train_processes(
                    ranks, *flags, "--no-shared-memory", "--buckets", buckets, "--overlap", overlap, "--gradients", gradients,
                    "--bucket-mib", 0.02, "--first-bucket-mib", 0.004)
                self.assertIn("send messages", found["transport"])
                self.assertEqual(found["params_digest"], expected, (name, ranks, buckets, overlap, gradients))

    def test_fields(self):
        r = self.train_processes(3, *TRANSFORMER, "--accumulate", 2, "--ranks", 3)
        self.assertEqual((r["world_size"], r["global_batch"], r["steps"]), (3, 12, 4))
        self.assertEqual(r["config"]["backend"], "mpi")
        self.assertEqual(r["transport"], "3 processes that share memory")
        r = self.train_processes(2, *TRANSFORMER, "--independent")
        self.assertEqual((r["world_size"], r["comm_ms"]), (2, 0))

    def test_usage_errors_are_said_once(self):
        for part, flags in (("--bogus", ["--bogus"]), ("mpirun has started 3", ["--ranks", 2]),
                            ("cannot read", ["--resume", "--checkpoint", self.folder / "none"])):
            done = self.run_processes(3, *TRANSFORMER, *flags)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            said = [line for line in done.stderr.splitlines() if line.startswith("gradsync_train:")]
            self.assertEqual(len(said), 1, done.stderr)
            self.assertIn(part, said[0])
        done = self.run_processes(3, "--help")
        self.assertEqual((done.returncode, done.stdout.count("--backend"), done.stderr), (0, 1, ""))

    def test_a_run_that_loses_a_process_goes_on(self):
        """One of four is killed within a step: the others say so, one keeps the state, which leads to the same bits."""
        self.check_losses(([2], [4]), ([0], [1, "--accumulate", 4]))

    def test_a_run_that_loses_two_processes_goes_on(self):
        """Also without rank 0, and without the one that comes next."""
        self.check_losses(([0, 1], [4]))

    def test_a_run_by_messages_that_loses_a_process_goes_on(self):
        self.check_losses(([0], [4]), ([3], [1, "--accumulate", 4]), flags=["--no-shared-memory"])

    def check_losses(self, *cases, flags=()):
        """Of four processes some are killed; the run goes on with others."""
        if "Open MPI" not in subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout:
            self.skipTest("Open MPI's launcher is needed to let the others live on")
        flags = [*TRANSFORMER, "--d-model", 64, "--steps", 200, *flags]
        expected = self.train_processes(4, *flags)["params_digest"]
        for victims, resume in cases:
            run = ["--checkpoint", self.folder / "-".join(map(str, ["without", *victims]))]
            errors = self.lose(victims, *flags, *run)
            said = [line for line in errors.splitlines() if line.startswith("gradsync_train:")]
            left = [rank for rank in range(4) if rank not in victims]
            self.assertEqual(errors.count("exit code 1\n"), len(left), errors)
            for rank in left:
                lost = [line for line in said if line.startswith(f"gradsync_train: rank {rank}: ")]
                self.assertEqual(len(lost), 1, errors)
                self.assertTrue(any(f"rank {victim} " in lost[0] for victim in victims), errors)
            kept = [line for line in said if "has kept" in line]
            self.assertEqual(len(said), len(left) + len(kept), errors)
            # If a rank dies while others have the last step complete and some do not, two states are kept in turn.
            self.assertIn(len(kept), (1, 2), errors)
            resumed = self.train_processes(*resume, *flags, *run, "--resume")
            self.assertEqual(resumed["params_digest"], expected, (victims, errors))

    def test_machines_with_checkpoints_of_their_own(self):
        """They have to be the same."""
        runs = []
        for step in (2, 3):
            runs.append(["--checkpoint", self.folder / f"step{step}"])
            self.train(*TRANSFORMER, *runs[-1], "--stop-after", step)
        flags = [*TRANSFORMER, "--resume"]
        environment = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([MPIEXEC, "-n", "1", *self.program(*flags, *runs[0]),
                               ":", "-n", "1", *self.program(*flags, *runs[1])], **environment)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("rank 1 finds another checkpoint (after step 3)", done.stderr)

    def lose(self, victims, *arguments):
        """Kills some of four processes after some steps; returns what the others had to say."""
        # The launcher itself returns 0 from a job that it let go on, or (Open MPI 4.1) does not return at all.
        telling = ["sh", "-c", '"$@"; echo "exit code $?" >&2', "sh"]
        file = self.folder / "errors"
        with open(file, "w") as stderr:
            job = subprocess.Popen([MPIEXEC, "--enable-recovery", "-n", "4", *telling, *self.program(*arguments)],
                                   stdout=subprocess.PIPE, stderr=stderr, text=True, env=self.environment)
        try:
            self.assertTrue(wait_for(lambda: all(map(self.process_of, victims))))
            processes = [self.process_of(victim) for victim in victims]
            job.stdout.readline()  # a line every twentieth of the run
            for process in processes:
                os.kill(process, signal.SIGKILL)
            self.assertTrue(wait_for(lambda: file.read_text().count("exit code ") == 4), file.read_text())
        finally:
            job.terminate()
            job.communicate(timeout=20)
        return file.read_text()

    def process_of(self, rank):
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_text().split("\0")
                ours = command[0] == PROGRAM and self.text in command
                if ours and f"OMPI_COMM_WORLD_RANK={rank}" in (process / "environ").read_text().split("\0"):
                    return int(process.name)
            except OSError:  # gone meanwhile, or not ours
                pass
        return None


if __name__ == "__main__":
    suite, PROGRAM, *rest = sys.argv[1:]
    MPIEXEC = rest[0] if rest else None
    classes = {"command_line": CommandLine, "digests": Digests, "checkpoints": Checkpoints, "report": Report, "mpi": Mpi}
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(classes[suite])
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(tests).wasSuccessful())
