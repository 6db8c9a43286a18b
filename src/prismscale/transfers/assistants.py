"""The process of all assistants: ``python -m prismscale.transfers.assistants SPEC``.

It stands in for the absent neighbours of live ranks in every group: it receives what a live rank
sends to them, and sends what a live rank expects from them. Each channel of each live rank has a
thread, which serves the communications that the rank announces, in order. No assistant waits for
another, so only a live rank can block one. Each thread needs memory for one message, and recordings
are read ahead: memory does not depend on the world size.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prismscale.payload.recordings.known import KnownCommunication
from prismscale.payload.recordings.recorded_job import RecordedJob
from prismscale.processes.children import die_with_parent, end_now
from prismscale.processes.failure import save_failure
from prismscale.transfers.absent_neighbours import AbsentNeighbours
from prismscale.transfers.gloo_links import GlooLinks, join
from prismscale.transfers.told import Told, heard
from prismscale.typed_files import load_json, save_json

MOST_WAITING = 1024
"""Maximum number of announced communications that wait on one channel."""

GRACE_S = 5.0
"""Longest time between the end of a live rank's gloo link and that of its socket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantSpec:
    """Specification of the assistants' process."""

    live: tuple[int, ...]
    folder: str
    """Folder through which live ranks and assistants rendezvous."""
    address: str
    """Address of the socket on which live ranks announce communications."""
    recordings: str
    """Folder of recorded communications; it may hold none."""
    error: str
    """File to which a failure is written."""
    seen: str
    """File to which :class:`AssistantsSeen` is written."""
    namespace: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantsSeen:
    """Resources that the assistants used."""

    peak_bytes: int
    """Peak memory of the process; 0 where the system does not report it."""
    channels: int


@dataclass(kw_only=True)
class Assistants:
    """Serves all live ranks in the place of their absent neighbours."""

    spec: AssistantSpec
    context: Any
    recording: RecordedJob | None
    _channels: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: threading.Event = field(default_factory=threading.Event)
    """Set once some live rank has ended."""

    def seen(self) -> AssistantsSeen:
        """Return the resources used so far."""
        return AssistantsSeen(peak_bytes=_peak_bytes(), channels=len(self._channels))

    def serve(self, listener: socket.socket) -> None:
        """Serve live ranks until all of them have ended."""
        threads = []
        for _ in self.spec.live:
            end, _ = listener.accept()
            thread = threading.Thread(target=_guarded, args=(self.spec, self._hear, end))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def _hear(self, end: socket.socket) -> None:
        workers: dict[int, queue.Queue[Told]] = {}
        place = 0
        with end, end.makefile("rb") as lines:
            for message in heard(lines):
                if isinstance(message, Told):
                    if message.channel not in workers:
                        workers[message.channel] = self._worker(place)
                    workers[message.channel].put(message)
                elif "rank" in message:
                    place = self.spec.live.index(int(message["rank"]))
                else:
                    end.sendall(f"{self._number(str(message['channel']))}\n".encode())
        self._left.set()

    def _worker(self, place: int) -> queue.Queue[Told]:
        in_order: queue.Queue[Told] = queue.Queue(MOST_WAITING)
        arguments = (self.spec, self._work, in_order, place)
        threading.Thread(target=_guarded, args=arguments, daemon=True).start()
        return in_order

    def _number(self, channel: str) -> int:
        with self._lock:
            return self._channels.setdefault(channel, len(self._channels))

    def _work(self, in_order: queue.Queue[Told], place: int) -> None:
        try:
            while True:
                self._take_part(in_order.get(), place)
        except RuntimeError:
            # gloo raises it when the other end is gone. The end of a live rank is no failure here.
            if not self._left.wait(GRACE_S):
                raise

    def _take_part(self, told: Told, place: int) -> None:
        links = GlooLinks(self.context, lambda peer: place, told.channel)
        stand_in = AbsentNeighbours(
            shape=told.shape,
            receiver=told.receiver,
            live=told.live,
            dtype=told.torch_dtype,
            kind=told.kind,
            values=self._values(told),
        )
        for step in stand_in.rounds():
            sent = None
            if step.receive:
                sent = links.send(step.receive.peer, stand_in.message(step.receive).contiguous())
            if step.send:
                room = torch.empty(step.send.numel, dtype=stand_in.dtype)
                links.receive(step.send.peer, room).wait()
            if sent is not None:
                sent.wait()

    def _values(self, told: Told) -> KnownCommunication | None:
        if not told.ranks or self.recording is None:
            return None
        return KnownCommunication(
            recording=self.recording,
            name=told.name,
            op=told.shape.op,
            ranks=told.ranks,
            receiver=told.receiver,
            root=told.root,
            kind=told.kind,
            index=told.index,
            count=told.count,
        )


def _peak_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return next((int(line[1]) << 10 for line in lines if line[0] == "VmHWM:"), 0)


def _guarded(spec: AssistantSpec, call: Any, *arguments: Any) -> None:
    """Body of a thread. A failing ``call`` ends the process, so that no live rank waits for it."""
    try:
        call(*arguments)
    except BaseException as error:
        save_failure(Path(spec.error), -1, error)
        end_now(1)


def main(arguments: list[str]) -> int:
    """Entry point of the process. Returns the exit code."""
    die_with_parent()
    torch.set_num_threads(1)
    spec = load_json(AssistantSpec, Path(arguments[0]), "assistants")
    try:
        recording = RecordedJob.load(Path(spec.recordings))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(spec.address)
            listener.listen(len(spec.live))
            place, size = len(spec.live), len(spec.live) + 1
            context = join(Path(spec.folder), place, size, spec.namespace)
            assistants = Assistants(spec=spec, context=context, recording=recording)
            assistants.serve(listener)
            save_json(assistants.seen(), Path(spec.seen))
    except BaseException as error:
        return save_failure(Path(spec.error), -1, error)
    # Threads that still wait for an ended live rank must not delay the exit.
    end_now(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
