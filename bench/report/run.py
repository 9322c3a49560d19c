# SPDX-License-Identifier: BSL-1.0
"""Runs what is planned, in rounds, until they are done or the time is up."""
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

from . import machine

# One thread of compute a rank. Open MPI asks for the others to run as root in a container, and with more ranks than cores.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
NOT_HERE = 77  # exit code: the program needs what this machine does not have, a GPU for instance; nothing has failed
TIME_IS_UP = 124  # of `timeout`
FLAGS = {"google": ["--benchmark_out={}", "--benchmark_out_format=json"], "torch": ["--out={}"], "memory": ["--json", "{}"]}
OF_MEMORY = ("transport", "parameters", "peak_rss_bytes", "bytes_parameters", "bytes_gradients", "bytes_optimizer", "bytes_activations")


def say(text):
    print(text, file=sys.stderr, flush=True)


class Runner:
    def __init__(self, plan, results, folder, rounds, minutes):
        self.plan, self.results, self.folder, self.rounds, self.limit = plan, results, folder, rounds, 60 * minutes
        self.begun = time.monotonic()
        self.took = {}  # by label: seconds, the last time
        self.log = open(folder / "log.txt", "w")

    def run(self):
        for done in range(self.rounds):
            tasks = [task for task in self.plan.tasks if done < task.rounds]
            if done > 0 and self.spent() + sum(self.took.get(task.label, 0) for task in tasks) > self.limit:
                say(f"no more rounds: another would end after {self.limit / 60:g} minutes")
                break
            state = machine.Round()
            first = done * len(tasks) // self.rounds  # each task comes early in one round and late in another
            for place, task in enumerate(tasks[first:] + tasks[:first], 1):
                if self.limit - self.spent() < 1: break
                minutes = f"{self.spent() / 60:.1f} of {self.limit / 60:g} at most"
                say(f"round {done + 1}/{self.rounds}, {place}/{len(tasks)}, minutes {minutes}: {task.label}")
                self.do(task)
            self.results.errors.update((task.label, "no time was left for it; see --minutes") for task in tasks if task.label not in self.took)
            self.results.run.update(rounds=done + 1, minutes=round(self.spent() / 60, 1))
            self.results.run.setdefault("states", []).append(state.state())
            self.results.save(self.folder / "results.json")

    def spent(self):
        return time.monotonic() - self.begun

    def do(self, task):
        answer = self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        written = " ".join(shlex.quote(word.replace(f"{self.plan.root}/", "")) for word in task.command)
        commands = self.results.run.setdefault("commands", {}).setdefault(task.part, [])
        if written not in commands: commands.append(written)
        print(f"\n$ {written}", file=self.log, flush=True)
        begun, others = self.spent(), machine.Others()
        code = self.call([*task.command, *(flag.format(answer) for flag in FLAGS[task.kind])], self.limit - begun)
        self.took[task.label] = self.spent() - begun
        self.results.run.setdefault("others", {}).setdefault(task.label, []).append(round(others.cores(), 2))
        # Exit code 1 of our own programs: some benchmark of many has failed, and the answer says which.
        if (code == 0 or (code == 1 and task.kind == "google")) and self.take(task, answer): return
        if code == NOT_HERE: return self.plan.tasks.remove(task)
        why = {0: "measured nothing", TIME_IS_UP: "was ended when the time was up"}.get(code, f"failed with exit code {code}")
        self.results.errors[task.label] = f"{why}; see log.txt"
        say(f"  {task.label}: {self.results.errors[task.label]}")

    def call(self, command, limit):
        """Runs it, in a process group of its own; returns its exit code."""
        process = subprocess.Popen(["timeout", "--kill-after=5", f"{limit:.0f}", *command], stdin=subprocess.DEVNULL, stdout=self.log,
                                   stderr=subprocess.STDOUT, env={**ENVIRONMENT, **os.environ})
        try:
            return process.wait()
        finally:
            process.terminate()  # after an interrupt, and `timeout` all that it has started
            process.wait()

    def take(self, task, answer):
        """Its answer into the results; returns whether there was any."""
        try:
            content = json.loads(answer.read_text())
        except (OSError, ValueError):
            return False
        if task.kind == "memory": self.results.memory.append({**task.about, **{key: content[key] for key in OF_MEMORY}})
        program = pathlib.Path(task.command[task.kind == "torch"]).stem
        return task.kind == "memory" or self.results.add_google_benchmark(program, content) > 0
