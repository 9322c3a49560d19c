#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Tests of gradsync_plan as its users meet it. usage: test_plan.py PROGRAM [gradsync_train]"""
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = TRAINER = None


def call(line):
    return subprocess.run([PROGRAM, *shlex.split(line)], capture_output=True, text=True, timeout=60)


class PlanTest(unittest.TestCase):
    def ask(self, line):
        done = call(line + " --json -")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def refused(self, line, *words, code=2):
        """One sentence on standard error that says what is wrong; nothing on standard output."""
        done = call(line)
        self.assertEqual(done.returncode, code, (line, done.stderr))
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)


class Batch(PlanTest):
    def test_four_million_tokens(self):
        answer = self.ask("batch --global-tokens 4000000 --sequence 4000 --micro-batch 2 --devices 128")
        self.assertEqual(answer["global_samples"], 1000)
        self.assertEqual(answer["accumulate_exact"], 3.90625)
        self.assertEqual(answer["devices_for_no_accumulation"], 500)
        choices = {c["rounding"]: c for c in answer["choices"]}
        self.assertEqual((choices["more_steps"]["accumulate"], choices["more_steps"]["samples"], choices["more_steps"]["tokens"]), (4, 1024, 4096000))
        self.assertEqual((choices["fewer_steps"]["accumulate"], choices["fewer_steps"]["samples"]), (3, 768))
        self.assertEqual(choices["uneven_steps"]["samples"], 1000)
        # 500 micro-batches: 3 = 2 + 1 for each device, and one more for 116 of them.
        self.assertEqual(choices["uneven_steps"]["sums"], 2 + 116 / 128)
        self.assertEqual((choices["more_steps"]["sums"], choices["fewer_steps"]["sums"]), (1, 2))

    def test_samples_instead_of_tokens(self):
        answer = self.ask("batch --global-samples 32 --micro-batch 2 --devices 32")
        self.assertEqual(answer["accumulate_exact"], 0.5)
        self.assertTrue(answer["more_devices_than_work"])

    def test_a_table_for_people(self):
        text = call("batch --global-tokens 4000000 --sequence 4000 --micro-batch 2 --devices 128").stdout
        for words in ("3.90625", "4,096,000", "2.4 %", "12 devices accumulate 3, the others 4"):
            self.assertIn(words, text)

    def test_refused(self):
        good = {"--global-tokens": "4000", "--sequence": "4", "--micro-batch": "2", "--devices": "3"}
        for flag in good:
            for value in "0", "-4", "1.5", "many", "99999999999999999999":
                self.refused("batch " + " ".join(f"{k} {value if k == flag else v}" for k, v in good.items()), flag, value, "whole number")
        self.refused("batch --global-tokens 4000 --devices 3", "--micro-batch")
        self.refused("batch --global-samples 18446744073709551615 --sequence 3 --micro-batch 1 --devices 3", "64 bits")
        self.refused("batch --global-tokens 1 --global-samples 1 --micro-batch 1 --devices 3", "--global-samples")
        self.refused("batch --global-tokens 4000 --micro-batch 2 --devices 3 --plot x.svg", "nothing to draw")
        self.refused("batch --global-tokens 4000 --micro-batch 2 --devices 3 --json /no/such/folder/x", "/no/such/folder/x")
        self.refused("", "subcommand")
        self.refused("guess", "subcommand")
        self.refused("batch --bogus", "see --help")


class Memory(PlanTest):
    XXL = "memory --ffn-only --d-model 16384 --d-ff 53248 --blocks 126 --batch 1 --sequence 1 --activation-bytes 2"

    def test_feed_forward_blocks(self):
        answer = self.ask("memory --ffn-only --d-model 16384 --d-ff 53248 --blocks 126 --batch 1 --sequence 1")
        self.assertEqual(answer["parameters"], 219848638464)
        self.assertEqual(answer["weight_bytes"], 819 << 30)
        answer = self.ask(self.XXL + " --devices 64 --quoted-bytes-per-token 17543808")
        self.assertEqual(answer["activation_bytes_per_token"], 17547264)
        self.assertEqual(answer["quoted"]["bytes_per_token"], 17543808)
        self.assertEqual(answer["quoted"]["difference"], -3456)
        self.assertIn("no multiple of 126 blocks", answer["quoted"]["reason"])
        self.assertEqual(answer["bytes_with_activations_split"], (16 * 219848638464 + 17547264) // 64)
        self.assertIn("the same", self.ask(self.XXL + " --quoted-bytes-per-token 17547264")["quoted"]["reason"])

    def test_a_transformer(self):
        model = "memory --vocabulary 50257 --d-model 1024 --blocks 16 --heads 8 --d-ff 1536 --gated --no-biases --tied --precision half"
        answer = self.ask(model + " --batch 64 --sequence 512 --activation-gradients")
        self.assertEqual(answer["parameters"], 194103296)
        activations = 64 * 512 * (2 * 50257 + 16 * (6 * 1024 + 8 * 512))
        self.assertEqual(answer["activations"], activations)
        self.assertEqual(answer["stages"][0]["bytes"], (4 * 194103296 + 2 * activations) * 2)
        self.assertLess(self.ask(model + " --batch 64 --sequence 512 --recompute")["activations"], activations)

    def test_an_mlp(self):
        answer = self.ask("memory --mlp 4096,2048,2048,4096 --batch 4")
        self.assertEqual(answer["weights_and_activations_mib"], 80.1875)

    def test_zero_stages(self):
        answer = self.ask("memory --mlp 1000,1000 --precision mixed --devices 8")
        p = 1000000
        self.assertEqual([s["state_bytes"] for s in answer["stages"]], [16 * p, 4 * p + 12 * p // 8, 2 * p + 14 * p // 8, 16 * p // 8])

    def test_matrices_that_are_not_cut(self):
        gpt2 = "memory --vocabulary 50257 --d-model 768 --blocks 12 --devices "
        for devices in (2, 3, 4, 6, 8):
            whole = self.ask(gpt2 + str(devices))["whole_matrices"]
            self.assertLess(whole["padding"], 0.1)
            self.assertLess(whole["imbalance"], 0.1)
        # Three matrices of one shape on two devices: one device has two of them, and the other a gap.
        whole = self.ask("memory --mlp 64,64,64,64 --devices 2")["whole_matrices"]
        self.assertEqual(whole["buckets"], 1)
        self.assertAlmostEqual(whole["padding"], 1 / 3)
        self.assertAlmostEqual(whole["imbalance"], 1 / 3)
        self.assertNotIn("whole_matrices", self.ask("memory --mlp 64,64"))
        self.assertIn("33 % of padding", call("memory --mlp 64,64,64,64 --devices 2").stdout)

    def test_sums_of_micro_batches(self):
        answer = self.ask("memory --mlp 1000,1000 --precision mixed --devices 4 --micro-batches 32")
        p = 1000000
        self.assertEqual([s["sum_bytes"] for s in answer["stages"]], [3 * 4 * p, 3 * 4 * p, 2 * p, 2 * p])
        text = call("memory --mlp 1000,1000 --micro-batches 32").stdout
        self.assertIn("sums", text)
        self.assertNotIn("sums", call("memory --mlp 1000,1000").stdout)

    def test_refused(self):
        self.refused("memory", "--d-model is needed")
        self.refused("memory --ffn-only --d-model 4 --blocks 2", "--d-ff is needed")
        self.refused("memory --d-model 4 --blocks 2", "--vocabulary is needed")
        self.refused("memory --ffn-only --d-model 4000000000 --d-ff 4000000000 --blocks 3", "64 bits")
        self.refused("memory --ffn-only --d-model 0 --d-ff 4 --blocks 3", "--d-model", "whole number")
        self.refused("memory --mlp 5", "two widths")
        self.refused("memory --mlp 5,5 --d-model 3", "excludes")
        self.refused("memory --mlp 5,5 --precision f8", "f8")

    def test_more_blocks_than_memory_holds_are_refused(self):
        self.assertGreater(self.ask("memory --d-model 64 --blocks 100000 --vocabulary 100")["parameters"], 1e9)
        for blocks in 100_001, 10_000_000_000:
            for model in "--vocabulary 100", "--ffn-only --d-ff 64":
                self.refused(f"memory --d-model 64 --blocks {blocks} {model}", f"--blocks {blocks} is more than this can hold; 100000 is the most")

    @unittest.skipUnless(shutil.which("gnuplot"), "no gnuplot")
    def test_a_chart(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "it's a chart.svg"
            done = call(f'memory --mlp 1000,1000 --plot "{file}"')
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("</svg>", file.read_text())
        self.refused_plot("/no/such/folder/x.svg")

    def refused_plot(self, file):
        done = call("memory --mlp 1000,1000 --plot " + file)
        self.assertEqual(done.returncode, 1)
        self.assertIn("was not drawn", done.stderr.strip().splitlines()[-1])


class Measured(PlanTest):
    def train(self, flags):
        if TRAINER is None: self.skipTest("no gradsync_train")
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text"
            text.write_text("a rank holds the gradient of its bucket until every other rank has reduced it. " * 300)
            done = subprocess.run([TRAINER, "--steps", "8", "--json", "-", "--data", text, *flags.split()], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_bytes_of_the_trainer(self):
        for d, blocks, heads, context, batch in ((64, 6, 2, 16, 4), (32, 2, 4, 64, 2), (96, 3, 3, 32, 1)):
            for tied in "", "--tied":
                for recompute in "", "--recompute":
                    run = self.train(f"--model transformer --d-model {d} --blocks {blocks} --heads {heads} --context {context} --micro-batch {batch} {tied} {recompute}")
                    plan = self.ask(f"memory --vocabulary 256 --d-model {d} --blocks {blocks} --heads {heads} --positions {context} --batch {batch} "
                                    f"--sequence {context} --kept-rows 16 {tied} {recompute}")
                    state = plan["stages"][0]
                    self.assertEqual(plan["parameters"], run["parameters"])
                    self.assertEqual(state["weight_bytes"], run["bytes_parameters"])
                    self.assertEqual(state["optimizer_bytes"], run["bytes_optimizer"])
                    self.assertAlmostEqual(state["gradient_bytes"] / run["bytes_gradients"], 1, delta=0.05)  # gaps between them
                    self.assertAlmostEqual(plan["activation_bytes"] / run["bytes_activations"], 1, delta=0.25)

    def test_a_profile_of_the_trainer(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.train("--model mlp --hidden 64,64 --buckets optimal")
            file = pathlib.Path(folder) / "run.json"
            file.write_text(json.dumps(run))
            answer = self.ask(f"buckets --profile {file}")
        self.assertEqual(answer["bytes"], 4 * run["parameters"])
        self.assertEqual(answer["policies"][-1]["bucket_bytes"], run["bucket_bytes"])


class Buckets(PlanTest):
    EQUAL = "buckets --gradients 150 --bytes 440000000 --backward-ms 80 --ranks 16 --latency-us 10 --bandwidth 12.5"

    def write(self, text):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        file = pathlib.Path(folder.name) / "result.json"
        file.write_text(text)
        return str(file)

    def test_nothing_is_through_before_the_optimum(self):
        answer = self.ask(self.EQUAL)
        self.assertAlmostEqual(answer["fixed"], 2 * 15 * 10e-6)
        self.assertAlmostEqual(answer["per_byte"], 2 * 15 / 16 / 12.5e9)
        policies = {p["policy"]: p for p in answer["policies"]}
        self.assertEqual(len(policies["per-parameter"]["bucket_bytes"]), 150)
        self.assertEqual(policies["flat"]["bucket_bytes"], [440000000])
        self.assertAlmostEqual(answer["square_root_bucket_bytes"], (440e6 * answer["fixed"] / answer["per_byte"]) ** 0.5)
        for policy in policies.values():
            self.assertEqual(sum(policy["bucket_bytes"]), 440000000)
            self.assertGreaterEqual(policy["finish_seconds"], policies["optimal"]["finish_seconds"])
            self.assertAlmostEqual(policy["exposed_seconds"], policy["finish_seconds"] - 0.08)
        self.assertIn("capped 25 MiB", policies)

    def test_a_profile(self):
        profile = self.write('{"profile": {"fixed": 1e-5, "per_byte": 1e-9, "gradients": [{"ready": 0.1, "bytes": 1000}, {"ready": 0, "bytes": 100000}]}}')
        answer = self.ask(f"buckets --profile {profile} --caps 1")
        self.assertEqual(answer["backward_seconds"], 0.1)
        self.assertEqual(answer["policies"][-1]["policy"], "optimal")
        self.assertEqual(answer["policies"][-1]["bucket_bytes"], [100000, 1000])
        self.assertEqual(self.ask(f"buckets --profile {profile} --bandwidth 2")["per_byte"], 0.5e-9)

    def test_compute_and_link_that_share_their_cores(self):
        for flags in ("", " --compute-keeps 0.5 --link-keeps 0.8"):
            answer = self.ask(self.EQUAL + flags)
            for policy in answer["policies"]:
                slower = policy["hidden_seconds"] * (1 - answer["compute_keeps"])
                self.assertAlmostEqual(policy["finish_seconds"], 0.08 + slower + policy["exposed_seconds"])
                calls = len(policy["bucket_bytes"]) * answer["fixed"] + 440e6 * answer["per_byte"]
                self.assertAlmostEqual(policy["hidden_seconds"] * answer["link_keeps"] + policy["exposed_seconds"], calls)
        # What was measured beside the default's buckets is taken for what it is: the second gradient's time holds a collective.
        profile = self.write('{"profile": {"fixed": 0, "per_byte": 1e-9, "gradients": [{"ready": 0, "bytes": 2000000}, {"ready": 0.1, "bytes": 4}]}}')
        answer = self.ask(f"buckets --profile {profile} --compute-keeps 0.5 --link-keeps 0.5")
        self.assertAlmostEqual(answer["backward_seconds"], 0.1 - 0.004 * 0.5)

    def test_refused(self):
        self.refused(self.EQUAL + " --compute-keeps 0", "--compute-keeps")
        self.refused(self.EQUAL + " --link-keeps 1.5", "that the link keeps")
        self.refused(self.EQUAL + " --link-keeps nan", "link")
        self.refused("buckets --gradients 150 --bytes 440000000 --backward-ms 80", "--bandwidth is needed")
        self.refused("buckets --gradients 150 --bytes 440000000 --bandwidth 3", "--backward-ms is needed")
        self.refused("buckets --bandwidth 3", "which gradients?")
        self.refused(self.EQUAL + " --ranks 1", "--ranks 1")
        self.refused(self.EQUAL + " --ranks-per-node 3", "do not fill nodes of 3")
        self.refused(self.EQUAL + " --bandwidth 0", "--bandwidth")
        self.refused(self.EQUAL + " --bandwidth nan", "--bandwidth")
        self.refused(self.EQUAL + " --latency-us -1", "--latency-us")
        self.refused(self.EQUAL + " --ranks 99999999999", "1073741824")
        self.refused("buckets --profile /no/such/file", "/no/such/file")
        self.refused("buckets --profile " + self.write("{}"), "no result of gradsync_train")
        self.refused("buckets --profile " + self.write("not json"), "no result of gradsync_train")
        for ready, size, fixed in (-1, 8, 0), (1e300, 8, 0), (0, -8, 0), (0, 1e300, 0), (0, 8.5, 0), (0, 2 ** 63, 0), (0, 8, -1), (0, 8, 1e300), (0, 8, "1"):
            profile = {"fixed": fixed, "per_byte": 1e-9, "gradients": [{"ready": ready, "bytes": size}]}
            self.refused("buckets --profile " + self.write(json.dumps({"profile": profile})), "from 0 to 1e+15")
        self.refused("buckets --d-model 4000000000 --blocks 2 --vocabulary 4000000000 --backward-ms 1 --bandwidth 1", "64 bits")


class Scale(PlanTest):
    MODEL = ("scale --d-model 64 --blocks 2 --vocabulary 256 --forward-ms 1 --backward-ms 2 --optimizer-ms 0.5 --ranks-per-node 8 "
             "--latency-us 10 --bandwidth 1 --node-latency-us 2 --node-bandwidth 20 --worlds 8,32,128")

    def test_simulated_reducers_take_what_the_model_says(self):
        simulated, model = self.ask(self.MODEL + " --simulate"), self.ask(self.MODEL)
        self.assertEqual([c["policy"] for c in simulated["curves"]],
                         ["naive", "flat", "overlapped", "capped at 25 MiB", "optimal", "optimal, hierarchical"])
        for one, other in zip(simulated["curves"], model["curves"]):
            self.assertEqual([p["ranks"] for p in one["points"]], [8, 32, 128])
            for a, b in zip(one["points"], other["points"]):
                self.assertAlmostEqual(a["step_seconds"] / b["step_seconds"], 1, delta=0.005)
                self.assertLessEqual(b["efficiency"], 1)
        for point, *others in zip(*(c["points"] for c in reversed(model["curves"][:-1]))):
            for other in others:
                self.assertLessEqual(point["step_seconds"], other["step_seconds"] * (1 + 1e-9))

    def test_where_communication_dominates(self):
        answer = self.ask(self.MODEL)
        self.assertLess(answer["communication_bound"]["strong"]["data_parallel"], answer["communication_bound"]["weak"]["data_parallel"])
        self.assertAlmostEqual(answer["ring_latency_wall_25_mib"], (25 << 20) * 1e-9 / 10e-6)

    def test_the_wall_at_512(self):
        answer = self.ask("scale --gradients 10 --bytes 1000000 --backward-ms 1 --latency-us 5.12 --bandwidth 10 --worlds 8")
        self.assertAlmostEqual(answer["ring_latency_wall_25_mib"], 512)
        self.assertNotIn("fsdp_forward", answer["communication_bound"]["weak"])  # of a forward that takes no time

    def test_refused(self):
        self.refused("scale --gradients 10 --bytes 100 --backward-ms 3", "--bandwidth")
        self.refused("scale --gradients 10 --bytes 100 --backward-ms 3 --bandwidth 1 --latency-us 1e300", "--latency-us", "1e300", "1e+15")
        self.refused(self.MODEL + " --worlds 1", "--worlds")
        self.refused(self.MODEL + " --worlds 9", "do not fill nodes of 8")
        self.refused(self.MODEL + " --worlds 65536 --simulate", "16384")
        self.refused(self.MODEL + " --jitter 0.1", "--simulate")


class Docs(PlanTest):
    def test_answers_in_the_documentation(self):
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/guides/planning.md").read_text()
        blocks = re.findall(r"```console\n\$ gradsync_plan (.*)\n((?:.*\n)*?)```", page)
        self.assertGreater(len(blocks), 3)
        for line, expected in blocks:
            answer = "\n".join(row.rstrip() for row in call(line).stdout.splitlines())
            self.assertEqual(answer.strip(), expected.strip(), line)

    def test_the_command_of_the_chart(self):
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/guides/planning.md").read_text()
        line = re.search(r"gradsync_plan (scale .*) --simulate --plot", page.replace("\\\n", "")).group(1)
        curves = self.ask(line)["curves"]  # the model has the curves of the simulation, in no time
        self.assertEqual([p["ranks"] for p in curves[0]["points"]], [2 ** k for k in range(3, 13)])
        self.assertGreater(curves[-1]["points"][-1]["efficiency"], curves[-2]["points"][-1]["efficiency"])


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    if len(sys.argv) > 1: TRAINER = sys.argv.pop(1)
    unittest.main()
