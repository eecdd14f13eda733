"""Jobs of RQ and arq, beside which `deploy/load/work.py` measures workers.

    PYTHON job_queues.py post rq|arq URL COUNT      put so many jobs into the queue
    PYTHON job_queues.py work KIND URL              work until there are none, or until it is killed

KIND is of KINDS. It runs by a Python that has rq and arq, and nothing of ours: arq needs an older redis-py.
"""

from __future__ import annotations

import asyncio
import logging
import sys

KINDS = ("rq", "rq-simple", "arq", "arq-32")
QUEUE = "jobs"
TEXT = "hello " * 30


def job(text: str) -> int:
    """What a job of RQ does: its result is stored, as the field that a turn sets is."""
    return len(text)


async def ajob(_: object, text: str) -> int:
    """The same for arq."""
    return len(text)


def post(kind: str, url: str, count: int) -> None:
    """Put jobs into the queue."""
    if kind == "rq":
        import redis
        import rq

        queue = rq.Queue(QUEUE, connection=redis.Redis.from_url(url))
        for _ in range(count):
            queue.enqueue("job_queues.job", TEXT)
    else:
        asyncio.run(_post_arq(url, count))


async def _post_arq(url: str, count: int) -> None:
    from arq.connections import RedisSettings, create_pool

    pool = await create_pool(RedisSettings.from_dsn(url))
    for _ in range(count):
        await pool.enqueue_job("ajob", TEXT)


def work(kind: str, url: str) -> None:
    """Work on jobs, one process."""
    if kind.startswith("rq"):
        import redis
        import rq

        made = rq.SimpleWorker if kind == "rq-simple" else rq.Worker
        made([QUEUE], connection=redis.Redis.from_url(url)).work(burst=True, logging_level="ERROR")
    else:
        from arq.connections import RedisSettings
        from arq.worker import Worker

        # By default it looks twice a second, and begins ten jobs at once.
        quick = {"max_jobs": 32, "poll_delay": 0.01} if kind == "arq-32" else {}
        logging.disable(logging.WARNING)
        asyncio.set_event_loop(asyncio.new_event_loop())
        Worker([ajob], redis_settings=RedisSettings.from_dsn(url), burst=True, **quick).run()


if __name__ == "__main__":
    order, kind, url, *count = sys.argv[1:]
    if order == "post":
        post(kind, url, int(*count))
    else:
        work(kind, url)
