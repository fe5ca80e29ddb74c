"""Profile of a few steps, as a trace for Chrome and Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from fastfold.errors import OutputError
from fastfold.utils.atomic_files import prepare_output_directory, replacing

_BEFORE = 2  #: Steps to skip before profiling, because the first ones load libraries


class StepProfiler:
    """Context manager that profiles some steps of a run with ``torch.profiler``, and writes a trace into a folder.

    ``report`` is called with one sentence when it is written, or cannot be.
    """

    def __init__(self, folder: Path, steps: int, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._profile: profile | None = None
        self._last = 0
        if steps:
            wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
            self._profile = profile(
                activities=wanted & supported_activities(),
                schedule=schedule(wait=_BEFORE - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
            )

    def __enter__(self) -> StepProfiler:
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._profile.stop()

    def step(self, number: int) -> None:
        """Record that step ``number`` has finished."""
        self._last = number
        if self._profile is not None:
            self._profile.step()

    def _write(self, profiled: profile) -> None:
        path = self._folder / f"until_step_{self._last:08d}.json"
        try:
            prepare_output_directory(self._folder)
            with replacing(path) as temporary:
                profiled.export_chrome_trace(str(temporary))
        except OutputError as error:
            self._report(f"no profile: {error}")
            return
        self._report(f"profile in {path}; open it at https://ui.perfetto.dev or chrome://tracing")
