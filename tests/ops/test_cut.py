"""A growing log is cut for audits and recordings: a cut that contradicts itself would accuse a sound run."""

from __future__ import annotations

from bus.port import StreamInfo
from bus.table import BATCHES, CONTROL, PROMPTS, Stream
from ops.recording.cut import cut_of


class Growing:
    """A log in which a last batch and then the end are stored while it is measured for the first time."""

    def __init__(self) -> None:
        self.last = {BATCHES.name: 3, CONTROL.name: 1, PROMPTS.name: 8}
        self.asked = 0

    async def info(self, stream: Stream) -> StreamInfo:
        self.asked += 1
        last = self.last.get(stream.name, 0)
        if self.asked == 6:
            self.last |= {BATCHES.name: 4, CONTROL.name: 2}
        return StreamInfo(1, last, last, 100 * last)


async def test_a_cut_does_not_hold_the_end_of_a_run_without_its_last_batch() -> None:
    """Found by simulation: the audit of a run that was just ending told of lost samples."""
    cut = await cut_of(Growing())
    assert (cut.of(BATCHES).last_seq, cut.of(CONTROL).last_seq, cut.gated_seq) == (4, 2, 8)
