"""Waiting until something is seen, or failing."""

import asyncio
import time
from collections.abc import Callable


def wait_until(seen: Callable[[], object], what: str = "what the test waits for", seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, f"{what} did not come within {seconds:g} s"
        time.sleep(0.02)


async def until(seen: Callable[[], object], seconds: float = 100.0) -> None:
    async with asyncio.timeout(seconds):
        while not seen():
            await asyncio.sleep(0.02)
