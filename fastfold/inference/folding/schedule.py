"""Run the steps of several targets: predictions here, other work in the background."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from fastfold.inference.folding.background import Background, BackgroundWork
from fastfold.inference.folding.batch import BatchFolder, Request

K = TypeVar("K", bound=Hashable)
Result = TypeVar("Result")


class Start(NamedTuple):
    """Work in the background that is started and not awaited; the answer is its future, to be awaited later."""

    work: BackgroundWork


Awaited = Request | BackgroundWork | Start | Future[Any]
Steps = Generator[Awaited, Any, Result]
"""Steps of a target, which wait for predictions and for work in the background."""


class Schedule(Generic[K, Result]):
    """Started targets that wait for predictions, or for work in a background process, if there is one."""

    def __init__(self, batches: BatchFolder, background: Background | None) -> None:
        self._batches, self._background = batches, background
        self._started: dict[K, tuple[int, Steps[Result]]] = {}
        self._numbers = count()
        self._requests: dict[K, Request] = {}
        self._futures: dict[Future[Any], K] = {}

    def fold(self, group: Sequence[tuple[K, Steps[Result]]]) -> Iterator[tuple[K, Result | Exception]]:
        """Start targets, and fold until none waits for a prediction; yield each that ends with result or error."""
        number = next(self._numbers)
        for work, steps in group:
            self._started[work] = number, steps
            yield from self._advance(work, None)
        while self._requests:
            first, request = next(iter(self._requests.items()))
            together = {
                work: one
                for work, one in self._requests.items()
                if one.model is request.model and self._started[work][0] == self._started[first][0]
            }
            for work in together:
                del self._requests[work]
            answers = self._batches.predict(list(together.values()))
            yield from self._take_finished()  # these began earlier
            for work, answer in zip(together, answers, strict=True):
                yield from self._advance(work, answer)

    def wait(self, limit: int) -> Iterator[tuple[K, Result | Exception]]:
        """Wait until fewer than ``limit`` targets are in the background; yields as :meth:`fold` does."""
        yield from self._take_finished()
        while len(self._futures) >= limit:
            wait(self._futures, return_when=FIRST_COMPLETED)
            yield from self._take_finished()
            yield from self.fold([])

    def close(self) -> None:
        """Stop all targets."""
        for _, steps in self._started.values():
            steps.close()

    def _take_finished(self) -> Iterator[tuple[K, Result | Exception]]:
        for future in [future for future in self._futures if future.done()]:
            yield from self._advance(self._futures.pop(future), future.exception() or future.result())

    def _advance(self, work: K, answer: Any) -> Iterator[tuple[K, Result | Exception]]:
        """Run a target until it waits or ends; ``answer`` is the awaited result, or an exception."""
        _, steps = self._started[work]
        while True:
            try:
                awaited = steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
            except Exception as error:
                del self._started[work]
                yield work, error.value if isinstance(error, StopIteration) else error
                return
            if isinstance(awaited, Request):
                self._requests[work] = awaited
                return
            if isinstance(awaited, Start):
                answer = self._start(awaited.work)
                continue
            future = self._start(awaited) if isinstance(awaited, BackgroundWork) else awaited
            if not future.done():
                self._futures[future] = work
                return
            answer = future.exception() or future.result()

    def _start(self, work: BackgroundWork) -> Future[Any]:
        """Return the future result of work, which is done here without a background."""
        if self._background is not None:
            return self._background.submit(work)
        done: Future[Any] = Future()
        try:
            done.set_result(work.run())
        except Exception as error:
            done.set_exception(error)
        return done
