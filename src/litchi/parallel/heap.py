"""The most memory a process holds on a CPU: what it takes and gives back, done over again by the C library itself.

What is taken and freed, in its order, in; resident bytes out. malloc gives back less than it is given: above all the
small objects that autograd keeps of each operation until its backward lie between large pieces, and holes around them
do not become one. So glibc replays the order, in processes of their own whose heaps are empty; nothing is written to
what is taken, which costs address space alone. Where the C library is another one, only the pieces are counted.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from array import array
from collections.abc import Hashable, Iterable
from statistics import median
from typing import Any

NODE = -1  # instead of a size: what autograd keeps of an operation
# bytes of the objects that come with a piece, as malloc is asked for them by torch 2: a storage; a tensor and its
# version; a node with its lists of inputs, outputs and edges
BEFORE, BEHIND, OF_NODE = (96,), (176, 24), (488, 16, 32, 24)
# the largest piece that was freed before: smaller ones are not mapped on their own. It is not known, and it matters
STARTS = (2**17, 2**20, 2**22, 2**23, 31 * 2**20)
ALIGNED = 64
SEEN = 2**14  # bytes of a piece, from which on the heap is looked at


def measure_held(events: Iterable[tuple[Hashable, int]]) -> int:
    """The most bytes a process holds that takes (key, size) and frees (key, 0) in this order."""
    slots: dict[Hashable, tuple[int, int]] = {}
    flat, live, most = array("q"), 0, 0
    for number, (key, size) in enumerate(events):
        if size:
            slots[key] = number, max(size, 0)
            flat.extend((number, size))
            live += max(size, 0)
            most = max(most, live)
        else:
            number, size = slots.pop(key)
            flat.extend((number, 0))
            live -= size
    held = [found for start in STARTS if (found := _replay_apart(flat, start))]
    return round(median(held)) if held else most


def _replay_apart(flat: array[int], start: int) -> int:
    """`replay` in a new process; 0: this C library or this machine's memory does not do it."""
    command = [sys.executable, "-I", __file__, str(start)]
    done = subprocess.run(command, input=flat.tobytes(), capture_output=True)
    return int(done.stdout) if done.returncode == 0 else 0


class Info(ctypes.Structure):
    """`struct mallinfo2`."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def load_malloc() -> Any:
    """The C library of this process. AttributeError: it is not glibc of 2021 or later."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Info
    libc.malloc.restype = libc.memalign.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.memalign.argtypes = [ctypes.c_size_t], [ctypes.c_size_t] * 2
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


def replay(flat: array[int], start: int) -> int:
    """Take and give back in this process; the most bytes it held of that.

    Args:
        flat: slot and size of each event: bytes, `NODE`, or 0 where the slot is freed.
        start: bytes of a piece that was taken and freed before.
    """
    libc = load_malloc()

    def held() -> int:
        info = libc.mallinfo2()
        return info.arena + info.hblkhd

    libc.free(libc.malloc(start))
    nothing, most = held(), 0
    pieces: dict[int, list[int]] = {}
    for slot, size in zip(flat[::2], flat[1::2], strict=True):
        if size == 0:
            for piece in pieces.pop(slot):
                libc.free(piece)
        elif size == NODE:
            pieces[slot] = [libc.malloc(n) for n in OF_NODE]
        else:
            before = [libc.malloc(n) for n in BEFORE]
            piece = libc.memalign(ALIGNED, size)
            if piece is None:
                raise MemoryError
            pieces[slot] = [*before, piece, *(libc.malloc(n) for n in BEHIND)]
            if size >= SEEN:
                most = max(most, held() - nothing)
    return most


if __name__ == "__main__":
    given = array("q")
    given.frombytes(sys.stdin.buffer.read())
    print(replay(given, int(sys.argv[1])))
