"""Groups as arrays and JSON, and back, bit for bit."""

import json
import math

import numpy as np

from rlcli.checkpoint.groups import pack_groups, pack_prompts, unpack_groups, unpack_prompts
from rlcli.types import Group, Prompt, Sample, Verdict


def test_round_trip_keeps_every_bit():
    prompt = Prompt(5, np.array([1, 2, 3], np.int32), "7½", {"source": "x", "level": 2})
    odd = np.array([-0.1, -math.inf, np.float32(1e-45), -0.0], np.float32)
    samples = [Sample(np.array([9, 8, 7, 6], np.int32), odd, "stop", 3), Sample(np.empty(0, np.int32), np.empty(0, np.float32), "length", 2)]
    groups = [Group(prompt, samples, [Verdict(0.1 + 0.2, True, "7", "correct"), Verdict(-1.0, False, None, "no_answer")]), Group(prompt, samples[:1])]
    records, arrays = pack_groups(groups)
    back = unpack_groups(json.loads(json.dumps(records)), arrays)
    for old, new in zip(groups, back, strict=True):
        assert (new.prompt.id, new.prompt.answer, new.prompt.extra) == (5, "7½", {"source": "x", "level": 2})
        assert new.prompt.token_ids.tobytes() == prompt.token_ids.tobytes()
        assert new.verdicts == old.verdicts
        for a, b in zip(old.samples, new.samples, strict=True):
            assert (a.finish_reason, a.policy_version) == (b.finish_reason, b.policy_version)
            assert a.token_ids.tobytes() == b.token_ids.tobytes()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
    arrays["response_ids"][:] = 0
    assert back[0].samples[0].token_ids.tolist() == [9, 8, 7, 6]  # no view of the checkpoint's arrays


def test_nothing_at_all():
    assert unpack_groups(*pack_groups([])) == []
    assert unpack_prompts(*pack_prompts([])) == []
    assert pack_groups([])[1]["logprobs"].dtype == np.float32
