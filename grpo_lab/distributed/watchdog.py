"""Ends a wait on the GPU for a rank that has failed.

On the CPU such a wait ends by itself, with an error, when the other process is gone. On GPUs the main thread waits in
CUDA for a kernel of NCCL that never ends: no error comes, and Python hears no signal. So another thread looks.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from grpo_lab.tracking import interrupt

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0  # for what ends by itself; torchrun kills what is left 30 seconds after its signal
STEP_SECONDS = 15.0  # from the first signal, for the step that a run finishes
_ENDS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}  # the signals by which a run ends


def free_main(store: Store, reason: str, ended: threading.Event, abort: Callable[[], None]) -> None:
    """Start to watch; call it in the main thread. `abort` makes what the main thread waits for return.

    It is called, and the main thread interrupted, if `ended` is not yet set some seconds after the key `reason` was set
    in the store, a second signal came, a first one and no second (unless the step may take its time), or the store was
    gone.
    """
    reading, tells = os.pipe()  # open until the process ends
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)  # Python writes there even while the main thread waits
    # The main thread may wait in its own; torch's stubs lack the method.
    own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]

    def signalled(seconds: float) -> bool:
        return bool(select.select([reading], [], [], seconds)[0] and _ENDS & set(os.read(reading, 64)))

    def look() -> None:
        first, twice, late = math.inf, False, False
        with contextlib.suppress(RuntimeError, OSError):  # torchrun, which keeps the store, is gone
            while not twice and not late and not own.check([reason]):
                if ended.is_set():
                    return
                came, now = signalled(LOOK_SECONDS), time.monotonic()
                twice = came and now > first + interrupt.TOGETHER_SECONDS
                late = now > first + STEP_SECONDS and not interrupt.may_take_time()
                first = min(first, now) if came else first
        if ended.wait(GRACE_SECONDS):
            return
        if not twice:  # a further interrupt would come while the second signal is dealt with
            interrupt.insist()
            _thread.interrupt_main()
        abort()

    threading.Thread(target=look, name="hung-watch", daemon=True).start()
