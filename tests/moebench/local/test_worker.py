"""The process that measures, in this one: what becomes of a case whose step fails while it is timed."""

from dataclasses import replace

from moebench.cases.case import Case
from moebench.local.worker import Request, measure
from moebench.systems.scratch import VARIABLE
from moebench.workloads.part import workload_of

SIZES = {"tokens": 8, "d_model": 8, "d_ffn": 4, "experts": 4, "top_k": 2, "layers": 2, "accumulated": 4}


def test_a_shard_that_is_damaged_while_states_are_timed_is_named(tmp_path, monkeypatch):
    """Its case fails, with the file; what is timed beside it goes on to its end."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    workload = workload_of("stored-step", SIZES, routing="zipf-1", dtype="fp32")
    reading = Case("s", "e", "none+cache_percent=0+slots=1", workload, "1x1-this-machine", "1x1", "local")
    resting = replace(reading, system="none+cache_percent=100")
    messages, folders = [], []

    def send(**message):
        messages.append(message)
        if message.get("case") == reading.hash and "warm_up_steps" in message:
            folders.extend(tmp_path.glob("*/states"))  # those of the other case are not there yet
        if message.get("case") == reading.hash and "time_s" in message:
            for path in folders[0].glob("layer0001-*.shard"):
                path.unlink()

    measure(Request(((reading, resting),), "cpu", 0, 1, True), send)
    failed, done = ([one for one in messages if one.get("case") == case.hash] for case in (reading, resting))
    assert [one["status"] for one in failed if "status" in one] == ["failed"]
    assert f"{folders[0]}/layer0001-expert0000" in failed[-1]["reason"]
    assert failed[-1]["reason"].endswith("missing; the states of step 0 need it; nothing else was changed")
    assert sum("time_s" in one for one in done) == 2
    assert "detail" in done[-1]
    assert {"block_done": 0} in messages
