# SPDX-License-Identifier: BSL-1.0
"""Runs what is planned, in rounds, until they are done or the time is up."""
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from . import machine

# One thread of compute a rank. Open MPI asks for the others to run as root in a container, and with more ranks than cores.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
FAILED_WITH = "failed with exit code {}"
NOT_HERE = "needs what this machine does not have"  # exit code 77: no GPU, for instance; nothing has failed


class Runner:
    def __init__(self, plan, results, folder, rounds, minutes):
        self.plan, self.results, self.folder, self.rounds = plan, results, folder, rounds
        self.begun = time.monotonic()
        self.limit = 60 * minutes
        self.took = {}  # by label: seconds, the last time
        self.log = open(folder / "log.txt", "w")

    def run(self):
        """Returns how many rounds were made, whole ones."""
        for done in range(self.rounds):
            tasks = [task for task in self.plan.tasks if done < task.rounds]
            if not tasks: return done
            if done > 0 and self.spent() + sum(map(self.estimate, tasks)) > self.limit:
                self.say(f"no more rounds: another would end after {self.limit / 60:g} minutes")
                return done
            whole = self.round(done, tasks)
            if whole or done == 0: self.results.run["rounds"] = done + 1
            self.results.save(self.folder / "results.json")
        return self.rounds

    def round(self, done, tasks):
        first = done * len(tasks) // self.rounds  # each task comes early in one round and late in another
        tasks = tasks[first:] + tasks[:first]
        later = sum(self.estimate(task) * max(0, min(self.rounds, task.rounds) - done - 1) for task in tasks)
        for place, task in enumerate(tasks):
            if self.limit - self.spent() < 1:
                for each in tasks[place:]:
                    if each.label not in self.took: self.results.errors[each.label] = "no time was left for it; see --minutes"
                self.say(f"{len(tasks) - place} of {len(tasks)} are left out: the time is up")
                return False
            left = min(sum(map(self.estimate, tasks[place:])) + later, self.limit - self.spent())
            self.say(f"round {done + 1}/{self.rounds}, {place + 1}/{len(tasks)}, {minutes_of(self.spent())} spent, about {minutes_of(left)} left: {task.label}")
            self.do(task)
        return True

    def spent(self):
        return time.monotonic() - self.begun

    def estimate(self, task):
        """What it took the last time; before that, the plan's estimate times how wrong the plan was so far."""
        if task.label in self.took: return self.took[task.label]
        known = [t for t in self.plan.tasks if t.label in self.took]
        return task.seconds * (sum(self.took[t.label] for t in known) / sum(t.seconds for t in known) if known else 1)

    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    def do(self, task):
        answer = self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        flags = {"google": [f"--benchmark_out={answer}", "--benchmark_out_format=json"], "torch": [f"--out={answer}"], "memory": ["--json", str(answer)]}
        written = " ".join(shlex.quote(self.shown(word)) for word in task.command)
        commands = self.results.run.setdefault("commands", {}).setdefault(task.part, [])
        if written not in commands: commands.append(written)
        begun, others = time.monotonic(), machine.Others()
        failure = self.call([*task.command, *flags[task.kind]], self.limit - self.spent(), written)
        self.took[task.label] = time.monotonic() - begun
        if (used := others.cores()) is not None: self.results.run.setdefault("others", {}).setdefault(task.label, []).append(round(used, 2))
        # Exit code 1 of our own programs: some benchmark of many has failed, and the answer says which.
        if not failure or (failure == FAILED_WITH.format(1) and task.kind == "google"): failure = self.take(task, answer) and (failure or "measured nothing")
        if failure == NOT_HERE: self.plan.tasks = [t for t in self.plan.tasks if t is not task]
        elif failure: self.fail(task, failure)

    def shown(self, word):
        """A command as it stands in the results: from the root of the sources."""
        return word.replace(f"{self.plan.root}/", "")

    def call(self, command, limit, written):
        """Runs it, in a process group of its own; returns why it failed."""
        self.log.write(f"\n$ {written}\n")
        self.log.flush()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
                                       env={**os.environ, **{k: v for k, v in ENVIRONMENT.items() if k not in os.environ}})
        except OSError as e:
            return f"cannot be started: {e.strerror}"
        try:
            code = process.wait(limit)
        except BaseException as e:  # whoever started programs ends them
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if isinstance(e, subprocess.TimeoutExpired): return f"was ended after {limit:.0f} s, when the time was up"
            raise
        return NOT_HERE if code == 77 else FAILED_WITH.format(code) if code != 0 else ""

    def take(self, task, answer):
        """Its answer into the results; returns why not."""
        try:
            content = json.loads(answer.read_text())
        except (OSError, ValueError):
            return "measured nothing"
        if task.kind == "memory":
            kept = ("transport", "parameters", "peak_rss_bytes", "bytes_parameters", "bytes_gradients", "bytes_optimizer", "bytes_activations")
            self.results.memory.append({**task.about, **{key: content[key] for key in kept}})
            return ""
        program = pathlib.Path(task.command[0] if task.kind == "google" else task.command[1]).stem
        return "" if self.results.add_google_benchmark(program, content, task.series_only) else "measured nothing"

    def fail(self, task, why):
        self.results.errors[task.label] = f"{why}; see log.txt"
        self.say(f"  {task.label}: {self.results.errors[task.label]}")


def minutes_of(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
