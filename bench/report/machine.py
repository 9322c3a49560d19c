# SPDX-License-Identifier: BSL-1.0
"""On what was measured: the machine, the compiler, the sources, what else was going on."""
import os
import pathlib
import platform
import re
import subprocess
import time

QUIET = 0.2  # cores, on average: what a system does by itself is less
WAIT_AT_MOST = 180  # seconds


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


def mpi_library(mpiexec):
    """Open MPI and MPICH name themselves in different ways."""
    said = answer(mpiexec, "--version")
    version = re.search(r"(?:\((?:Open MPI|OpenRTE)\)|Version:)\s*([\w.]+)", said)
    return f"{'MPICH' if 'HYDRA' in said else 'Open MPI'} {version.group(1)}" if version else ""


def peers(cache, python):
    gloo = answer("dpkg-query", "--show", "--showformat=Gloo ${Version}", "libgloo-dev") if cache.get("Gloo_DIR", "").startswith("/") else ""
    found = [mpi_library(cache.get("MPIEXEC_EXECUTABLE", "")), gloo, mpi_library("mpiexec.mpich"),
             answer(python, "-c", "import torch; print('PyTorch', torch.__version__)")]
    return [peer for peer in dict.fromkeys(found) if peer]


def cores():
    """That this process was given, as the programs count them: what taskset leaves of the machine's."""
    return len(os.sched_getaffinity(0))


def free_memory():
    """Bytes."""
    return int(re.search(r"MemAvailable:\s*(\d+) kB", pathlib.Path("/proc/meminfo").read_text()).group(1)) * 1024


def busy_seconds(root="/"):
    """Of the cores that this process was given, since the system began: what they did not idle, what a hypervisor gave to others included. The
    load average is no measure of now: it remembers minutes."""
    found = re.findall(r"^cpu(\d+) +(.*)", pathlib.Path(root, "proc/stat").read_text(), re.MULTILINE)
    ticks = [list(map(int, ticks.split()[:8])) for core, ticks in found if int(core) in os.sched_getaffinity(0)]
    return sum(sum(of_core) - of_core[3] - of_core[4] for of_core in ticks) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    return sum(os.times()[:4])


class Others:
    """What others use of this process's cores from now on: all that was busy, less this process and what it has started and waited for."""

    def __init__(self, busy=busy_seconds, own=own_seconds, clock=time.monotonic):
        self.state = lambda: (busy() - own(), clock())
        self.then = self.state()

    def cores(self):
        """On average."""
        busy, now = self.state()
        return max(0.0, (busy - self.then[0]) / (now - self.then[1]))


def busy_cores(seconds=3):
    others = Others()
    time.sleep(seconds)
    return others.cores()


def wait_until_quiet(say, measure=busy_cores, clock=time.monotonic):
    """Until at most QUIET cores are busy, or for WAIT_AT_MOST seconds; returns how many were in the end."""
    begun, told = clock(), False
    while (now := measure()) > QUIET and clock() - begun < WAIT_AT_MOST:
        if not told: say(f"others use the machine ({now:.1f} of {cores()} cores): waiting until they do not, at most {WAIT_AT_MOST // 60} minutes")
        told = True
    if told: say("it is quiet" if now <= QUIET else f"others use it still ({now:.1f} cores): the figures will say little")
    return now


def describe(root, build, python):
    said = dict(re.findall(r"^(.*?)\s*: +(.*)$", answer("lscpu"), re.MULTILINE))
    cache = cmake_cache(build)
    return {
        "cpu": said.get("Model name", platform.machine()),
        "cores": cores(),
        "virtual": " hypervisor" in said.get("Flags", ""),
        "caches": [f"{name.removesuffix(' cache')} {size}" for name, size in said.items() if re.fullmatch(r"L\d\w? cache", name)],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "kernel": platform.release(),
        "compiler": answer(cache.get("CMAKE_CXX_COMPILER", "c++"), "--version").partition("\n")[0],
        "build": " ".join([cache.get("CMAKE_BUILD_TYPE", ""), cache.get("CMAKE_CXX_FLAGS_RELEASE", ""),
                           "-march=native" if cache.get("GRADSYNC_NATIVE") == "ON" else ""]).strip(),
        "peers": peers(cache, python),
        "commit": answer("git", "rev-parse", "HEAD", folder=root),
        "clean": answer("git", "status", "--porcelain", folder=root) == "",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
