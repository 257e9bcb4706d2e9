"""What a process did when, as it is noted."""

import json
import time

from vla_common import timeline


def test_spans_are_noted_while_they_are_asked_for(tmp_path):
    file = tmp_path / "timeline" / "process_00000.jsonl"
    with timeline.span("before"):
        pass
    timeline.begin(file)
    with timeline.span("policy", stage=1):
        time.sleep(0.01)
    timeline.note("env", 1.0, 2.5)
    timeline.end()
    with timeline.span("after"):
        pass
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["what"], first["stage"]) == ("policy", 1)
    assert 0.01 <= first["end"] - first["start"] < 1
    assert second == {"what": "env", "start": 1.0, "end": 2.5}


def test_what_was_noted_before_is_kept(tmp_path):
    for what in ("first", "second"):
        timeline.begin(tmp_path / "times.jsonl")
        timeline.note(what, 0.0, 1.0)
    timeline.end()
    assert [json.loads(line)["what"] for line in (tmp_path / "times.jsonl").read_text().splitlines()] == [
        "first",
        "second",
    ]
