#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""A link that takes time and loses frames, for scripts/emulated-cluster: many kernels have no netem.

    delay_line.py HERE THERE MILLISECONDS PERCENT

Makes two TAP devices, HERE and THERE, says "ready", and carries frames between them until it is ended. What comes from THERE arrives so much later, and some
of it is lost; what comes from HERE arrives at once. While nothing is lost, the system hands over many segments of TCP as one frame, which saves work; what
is lost is one frame of Ethernet's size."""
import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUM, TSO4, TSO6 = 1, 2, 4
LARGEST = 10 + 14 + 65536  # with the header that says what is left to do for a frame


def device(name, merged):
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(file, TUNSETOFFLOAD, CHECKSUM | (TSO4 | TSO6) * merged)
    return file


def frames(file):
    """All that wait there."""
    try:
        while True: yield os.read(file, LARGEST)
    except BlockingIOError:
        return


def write(file, frame):
    try:
        os.write(file, frame)
    except OSError:
        pass  # the device is down or full: a network loses frames


def carry(here, there, delay, lost):
    due = collections.deque()  # (when, frame)
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select([here, there], [], [], wait)
        if there in ready:
            now = time.monotonic()
            due.extend((now + delay, frame) for frame in frames(there) if random.random() >= lost)
        while due and due[0][0] <= time.monotonic(): write(here, due.popleft()[1])
        if here in ready:
            for frame in frames(here): write(there, frame)


def main():
    here, there, milliseconds, percent = sys.argv[1:]
    lost = float(percent) / 100
    files = [device(name, merged=lost == 0) for name in (here, there)]
    print("ready", flush=True)
    carry(*files, float(milliseconds) / 1000, lost)


if __name__ == "__main__":
    main()
