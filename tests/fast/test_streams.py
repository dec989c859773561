"""Streams of a device meet that device's current stream, whichever device is current."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

from negchain.fast import streams


def test_streams_meet_on_their_own_device() -> None:
    meeting = SimpleNamespace(device="cuda:1", wait_stream=lambda other: None)
    with (
        mock.patch("torch.cuda.current_stream", return_value=meeting) as current,
        mock.patch("torch.cuda.stream", lambda stream: contextlib.nullcontext()),
    ):
        with streams.forked(meeting):  # type: ignore[arg-type]
            pass
        streams.join(meeting)  # type: ignore[arg-type]
    assert [call.args for call in current.call_args_list] == [("cuda:1",)] * 2
