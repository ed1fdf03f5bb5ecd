"""Values that are secret are in no error, whatever is wrong with the call that holds them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.subprocess
SECRET = "canary-8c1f-do-not-show"


@pytest.mark.parametrize(
    "call",
    [
        ["job", "run", "--env", f"KEY={SECRET}", "--bogus"],
        ["job", "run", "--env", f"KEY={SECRET}", "--timeout", "soon", "--", "true"],
        ["job", "run", "--env", SECRET, "--", "true"],
        ["job", "run", "--env", f"A KEY={SECRET}", "--", "true"],
        ["job", "run", "--copies", "x", "--env", f"KEY={SECRET}", "--", "true"],
        ["job", "status", "J-000001", SECRET],
        ["login", "hf", SECRET],
    ],
)
def test_a_wrong_call_does_not_repeat_the_secret_in_it(gpu, call):
    assert gpu("init", "--jobs").exit_code == 0
    for args in (call, [call[0], call[1], "--json", *call[2:]]):
        result = gpu(*args)
        assert result.exit_code in (2, 125)
        assert SECRET not in result.stdout + result.stderr
