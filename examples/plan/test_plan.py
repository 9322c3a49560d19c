#!/usr/bin/env python3
"""Tests of gradsync_plan as its users meet it. usage: test_plan.py PROGRAM"""
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = None


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

    def test_refused(self):
        self.refused("memory", "--d-model is needed")
        self.refused("memory --ffn-only --d-model 4 --blocks 2", "--d-ff is needed")
        self.refused("memory --d-model 4 --blocks 2", "--vocabulary is needed")
        self.refused("memory --ffn-only --d-model 4000000000 --d-ff 4000000000 --blocks 3", "64 bits")
        self.refused("memory --ffn-only --d-model 0 --d-ff 4 --blocks 3", "--d-model", "whole number")
        self.refused("memory --mlp 5", "two widths")
        self.refused("memory --mlp 5,5 --d-model 3", "excludes")
        self.refused("memory --mlp 5,5 --precision f8", "f8")

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


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
