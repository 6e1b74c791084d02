"""The process behind `large.py`: bodies on standard input, jobs and errors on standard output."""

import asyncio
import gc
import logging
import os
import sys

import psutil

from moeyard_router.api.intake import Intake
from moeyard_router.api.large import pack_crash, pack_error, pack_job, read_config, read_request
from moeyard_router.api.surfaces import COUNTED, SURFACES
from moeyard_router.errors import ApiError
from moeyard_router.text.chat import open_codec

_NICENESS = 5  # streams go first where cores are few
_MOST_MEMORY = 512 * 1024 * 1024  # bytes: a process that has kept more gives them back by ending


def main() -> None:
    """Answer until standard input ends."""
    if (config := read_config(sys.stdin.buffer)) is None:
        return
    # Whatever prints writes to standard error, so that nothing stands between answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(_NICENESS)
    intake = Intake(config, open_codec(config.model_path, config.chat_template, killable=True))
    gc.disable()  # a body is one tree of JSON without cycles; nothing to find, and much to look through
    with asyncio.Runner() as runner:
        while (request := read_request(sys.stdin.buffer)) is not None:
            answer, last = runner.run(_answer(intake, *request))
            try:
                answers.write(answer)
                answers.flush()
            except BrokenPipeError:
                return
            if last:
                return
            del request, answer
            gc.collect()


async def _answer(intake: Intake, api: str, body: bytes) -> tuple[bytes, bool]:
    """The answer, and whether it is the last of this process."""
    try:
        read = COUNTED.get(api) or SURFACES[api].read
        job = await read(intake, body)
        last = _has_grown()
        return pack_job(job, last=last), last
    except ApiError as error:
        last = _has_grown()
        return pack_error(error, last=last), last
    except Exception as error:  # boundary: a bug is the router's to answer for
        logging.getLogger(__name__).exception("a large request could not be read")
        return pack_crash(error), True


def _has_grown() -> bool:
    return psutil.Process().memory_info().rss > _MOST_MEMORY
