# SPDX-License-Identifier: BSL-1.0
"""The store of a job, as chaos.py sees it: where it is, and what it holds. Both forms have the same functions."""
import base64
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time


class FolderStore:
    """A folder in another one."""

    def __init__(self, folder):
        self.address = folder + "/store"
        os.mkdir(self.address, 0o700)

    def read(self, name):
        """The bytes of a name, and when they came; nothing if it is absent."""
        path = self.address + "/" + name.replace("/", "+/")
        with contextlib.suppress(OSError): return open(path, "rb").read()[24:], os.stat(path).st_mtime

    def names(self, prefix):
        """The names that begin with a prefix, which ends with a '/'."""
        with contextlib.suppress(OSError): return [prefix + name for name in os.listdir(self.address + "/" + prefix.replace("/", "+"))]
        return []

    def end(self): pass


class EtcdStore:
    """Three members of etcd, one of which is killed, and away for half of the time."""

    def __init__(self, host="127.0.0.1", enter=()):
        """`host`: of the members, as the job sees it. `enter`: words before each command, which enter a network."""
        self.enter, self.folder = ["setpriv", "--pdeathsig", "KILL", "--", *enter], tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.clients, self.peers = ([f"{host}:{free_port()}" for _ in range(3)] for _ in range(2))
        self.address = f"etcd://{','.join(self.clients)}/job"
        self.found, self.kills, self.answers, self.ends = {}, 0, threading.Event(), threading.Event()
        self.members = [self.start(m) for m in range(3)]
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self.follow, self.disturb)]
        for thread in self.threads: thread.start()
        if not self.answers.wait(30): raise RuntimeError("etcd does not answer; are etcd-server and curl installed?")

    def start(self, m):
        client, peer = f"http://{self.clients[m]}", f"http://{self.peers[m]}"
        return subprocess.Popen([*self.enter, "etcd", "--name", f"m{m}", "--data-dir", f"{self.folder.name}/m{m}", "--listen-client-urls", client, "--advertise-client-urls", client,
                                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                                 "--initial-cluster", ",".join(f"m{i}=http://{at}" for i, at in enumerate(self.peers))],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def disturb(self):
        m = 0
        while not self.ends.wait(3):
            self.members[m].kill(), self.members[m].wait()
            self.kills += 1
            self.ends.wait(3)
            self.members[m] = self.start(m)
            m = (m + 1) % 3

    def follow(self):
        """Lets a member tell all names from the first one, and then each new one, until it is killed."""
        name = base64.b64encode(b"/job/").decode(), base64.b64encode(b"/job0").decode()
        asks = json.dumps({"create_request": {"key": name[0], "range_end": name[1], "start_revision": 1}})
        while not self.ends.is_set():
            for client in self.clients:
                with subprocess.Popen([*self.enter, "curl", "--silent", "--no-buffer", "--noproxy", "*", "--data", asks, f"http://{client}/v3/watch"],
                                      stdout=subprocess.PIPE, text=True) as watch:
                    with contextlib.suppress(ValueError):  # the member was killed while it wrote a line
                        for line in watch.stdout: self.see(json.loads(line))
            self.ends.wait(0.01)

    def see(self, answer):
        self.answers.set()
        for event in answer.get("result", {}).get("events", ()):
            name, value = (base64.b64decode(event["kv"].get(part, "")) for part in ("key", "value"))
            self.found.setdefault(name.decode().removeprefix("/job/"), (value, time.time()))

    def read(self, name): return self.found.get(name)

    def names(self, prefix): return [name for name in list(self.found) if name.startswith(prefix)]

    def end(self):
        self.ends.set()
        self.threads[1].join()  # it starts members
        for member in self.members: member.kill(), member.wait()
        self.threads[0].join()
        self.folder.cleanup()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
