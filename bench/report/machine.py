# SPDX-License-Identifier: BSL-1.0
"""On what was measured: the machine, the compiler, the sources, what else was going on."""
import json
import os
import pathlib
import platform
import re
import subprocess
import time
import timeit

import numpy


def answer(*command, folder=None):
    """What a command prints; empty where it is missing or fails."""
    try:
        return subprocess.run(command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, timeout=20,
                              check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cmake_cache(build):
    file = build / "CMakeCache.txt"
    return dict(re.findall(r"^(\w+):\w+=(.*)$", file.read_text(), re.MULTILINE)) if file.exists() else {}


def installed_peers(root):
    """What bench/peers/install has found: empty if it found nothing."""
    file = root / "build/peers/peers.json"
    return json.loads(file.read_text()) if file.exists() else {}


def peers(cache, installed):
    """By name and version: the build's MPI and Gloo, and what bench/peers/install has found."""
    gloo = answer("dpkg-query", "--show", "--showformat=Gloo ${Version}", "libgloo-dev") if cache.get("Gloo_DIR", "").startswith("/") else ""
    mpi = re.search(r"\((?:Open MPI|OpenRTE)\)\s*([\w.]+)", answer(cache.get("MPIEXEC_EXECUTABLE", ""), "--version"))
    return [peer for peer in (f"Open MPI {mpi.group(1)}" if mpi else "", gloo, *installed.get("versions", [])) if peer]


def cores():
    """That this process was given, as the programs count them: what taskset leaves of the machine's."""
    return len(os.sched_getaffinity(0))


def seconds_of_cores(root="/"):
    """Of the cores that this process was given, since the system began: what they did not idle, what a hypervisor gave to others included, and that
    alone. The load average is no measure of now: it remembers minutes."""
    found = re.findall(r"^cpu(\d+) +(.*)", pathlib.Path(root, "proc/stat").read_text(), re.MULTILINE)
    ticks = [list(map(int, ticks.split()[:8])) for core, ticks in found if int(core) in os.sched_getaffinity(0)]
    busy, stolen = sum(sum(of_core) - of_core[3] - of_core[4] for of_core in ticks), sum(of_core[7] for of_core in ticks)
    return busy / os.sysconf("SC_CLK_TCK"), stolen / os.sysconf("SC_CLK_TCK")


class Round:
    """The state of the machine in a round, from now on."""

    def __init__(self):
        source = numpy.ones(2 ** 25)
        target = numpy.zeros_like(source)
        self.copied = source.nbytes / min(timeit.repeat(lambda: numpy.copyto(target, source), number=1, repeat=5))
        self.begun, self.stolen = time.monotonic(), seconds_of_cores()[1]

    def state(self):
        """Bytes a second of a copy on one core, and the share of the cores that a hypervisor gave to others."""
        stolen = seconds_of_cores()[1] - self.stolen
        return {"copy": float(f"{self.copied:.3g}"), "steal": round(stolen / cores() / (time.monotonic() - self.begun), 4)}


class Others:
    """What others use of this process's cores from now on: all that was busy, less this process and what it has started and waited for."""

    def __init__(self):
        self.then = self.state()

    def state(self):
        return seconds_of_cores()[0] - sum(os.times()[:4]), time.monotonic()

    def cores(self):
        """On average."""
        (busy, now), (busy_then, then) = self.state(), self.then
        return max(0.0, (busy - busy_then) / (now - then))


def describe(root, build, installed):
    said = dict(re.findall(r"^(.*?)\s*: +(.*)$", answer("lscpu"), re.MULTILINE))
    cache = cmake_cache(build)
    return {
        "cpu": said.get("Model name", platform.machine()),
        "cores": cores(),
        "virtual": " hypervisor" in said.get("Flags", ""),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {platform.system()} {platform.release()}",
        "compiler": answer(cache.get("CMAKE_CXX_COMPILER", "c++"), "--version").partition("\n")[0],
        "build": " ".join([cache.get("CMAKE_BUILD_TYPE", ""), cache.get("CMAKE_CXX_FLAGS_RELEASE", ""),
                           "-march=native" if cache.get("GRADSYNC_NATIVE") == "ON" else ""]).strip(),
        "peers": peers(cache, installed),
        "commit": answer("git", "rev-parse", "HEAD", folder=root),
        "clean": answer("git", "status", "--porcelain", folder=root) == "",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
